"""The control process: puts its rooms together, serves, and ends in order.

WebSocket traffic goes on while it restarts. It keeps no state of its own: what must not be lost is in the record
store, the rest in Redis.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

import hiredis
import structlog
import uvloop

from redpoll import logs
from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.fitness import examine
from redpoll.cluster.idempotency import Idempotency
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.questions import Questions
from redpoll.cluster.quota import Quota
from redpoll.cluster.reaper import Reaper
from redpoll.cluster.stats import Stats
from redpoll.control import commands
from redpoll.control.addresses import routes_of
from redpoll.control.api import Api
from redpoll.control.connections import Connections
from redpoll.control.daily import Daily
from redpoll.control.handover import Handover
from redpoll.control.health import Health
from redpoll.control.janitor import Janitor
from redpoll.control.metrics import Metrics
from redpoll.control.middleware import Front
from redpoll.control.occupancy import Occupancy
from redpoll.control.publisher import Publisher
from redpoll.control.ratelimit import RateLimit
from redpoll.control.records import RecordError, Records
from redpoll.leash import Leash, Start
from redpoll.proxies import TrustedProxies
from redpoll.store.store import Store, StoreError, database_url

__all__ = ["ControlPlane", "main"]

log = structlog.get_logger(__name__)

# Requests under way at the end get this long; their clients have 2 s deadlines on everything that waits here.
_FINISH_WITHIN_S: Final = 5.0
_BACKLOG: Final = 1024


class ControlPlane:
    """The rooms of the control plane and how they are tied: `start()`, then `finish()`.

    `records` are loaded; who made them closes their store. `tell` goes to the supervisor. The handler table serves
    the control port (`listener`) and what workers hand over (`handover_path`) alike.
    """

    def __init__(
        self,
        start: Start,
        records: Records,
        listener: socket.socket,
        tell: Callable[[dict[str, Any]], None],
        *,
        body_timeout_s: float = 15.0,
    ) -> None:
        settings = start.settings
        self.loop = asyncio.get_running_loop()
        self.finished = asyncio.Event()
        self._listener = listener
        self._tell = tell
        self._records = records
        self._keys = Keys(settings.redis_prefix)
        self._workers_alive = 0
        self._loop_exceptions_total = 0
        self._server: asyncio.Server | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[None] | None = None

        self.link = Link(start.redis_url)
        self.link.on_up, self.link.on_down = self._link_up, self._link_down
        self.bus = Bus(self.link, self._keys)
        self.publisher = Publisher(self.bus, self.link, lambda: self._workers_alive)
        self.daily = Daily(Quota(self.link, self._keys), records)
        self.reaper = Reaper(self.link, self._keys, start.run)
        self.health = Health(lambda: self.janitor.redis_answers())
        self.metrics = Metrics(lambda: self.routes, self._read_workers, self._own_counters)
        api = Api(
            self.publisher,
            Occupancy(self.link, self._keys),
            self.daily,
            Idempotency(self.link, self._keys),
            Questions(self.link, self._keys),
            settings.master_key(),
        )
        self.routes = routes_of(api, self.health, self.metrics)
        per_minute = settings.trigger_rate_per_minute
        rate = RateLimit(per_minute) if per_minute else None
        self.front = Front(self.routes, records, rate=rate, body_timeout_s=body_timeout_s)
        self.connections = Connections(
            self.front.handle,
            self.front.error_page,
            head_timeout_s=settings.head_timeout_s,
            trusted=TrustedProxies(settings.trusted_proxies),
        )
        self.handover = Handover(start.handover_path, self.connections)
        writer = DirectoryWriter(self.link, self._keys)
        self.janitor = Janitor(self.link, writer, records, self.connections, self.health)
        records.on_change = self.janitor.record_changed

    async def start(self) -> None:
        """Serve. Doesn't wait for Redis: `/healthz` is answered from the first moment, `/readyz` says the rest."""
        self.loop.set_exception_handler(self._loop_exception)
        self.link.start()
        self.janitor.start()
        self.daily.start()
        self._reaping = self.loop.create_task(self.reaper.run(), name="reaper")
        self._server = await self.loop.create_server(self.connections, sock=self._listener, backlog=_BACKLOG)
        self.handover.start()
        self._tell({"ready": True})

    def told(self, message: Mapping[str, Any]) -> None:
        """A message of the supervisor."""
        if "alive" in message:
            self._workers_alive = len(message["alive"])
            self.reaper.set_alive(set(message["alive"]), message["greatest"])
        if message.get("workers_ready"):
            self.health.workers_ready = True
        if message.get("draining"):
            self.health.draining = True
        if message.get("drain"):
            self.stop()

    def stop(self) -> None:
        """Begin the end; `finish` does it."""
        self.health.draining = True
        self.finished.set()

    async def finish(self) -> None:
        """Take nothing more, let what is under way be answered, and let go of Redis.

        A worker that still has a connection to hand over finds nobody, and answers 503 itself.
        """
        if self._server is not None:
            self._server.close()
        self.handover.close()
        await self.connections.finish(_FINISH_WITHIN_S)
        for task in (self._reaping, self._examining):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.janitor.stop()
        self.publisher.close()
        await self.daily.finish()
        await self.link.close()

    def _link_up(self) -> None:
        self.publisher.link_up()
        self.daily.link_up()
        self.janitor.link_up()
        self._examining = self.loop.create_task(self._examine(), name="redis examined")

    async def _examine(self) -> None:
        """What this Redis lacks is said once per connection; at a start, a fault ends it with that sentence."""
        try:
            faults, warnings = await examine(self.link, self._keys)
        except LinkDown:
            return
        for warning in warnings:
            log.warning("redis", what=warning)
        for fault in faults:
            log.error("redis", what=fault)
        if faults:
            self._tell({"fatal": "; ".join(faults)})

    def _link_down(self, reason: str) -> None:
        self.publisher.link_down()
        self.daily.link_down()

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_exceptions_total += 1
        log.error("loop exception", what=context.get("message"), exc_info=context.get("exception"))

    async def _read_workers(self) -> Mapping[str, Mapping[str, float]]:
        try:
            async with asyncio.timeout(2.0):
                return await Stats(self.link, self._keys).read_all()
        except (LinkDown, hiredis.ReplyError, TimeoutError):
            return {}

    def _own_counters(self) -> Mapping[str, float]:
        return {
            "apps": len(self._records.apps),
            "http_connections": len(self.connections.connections),
            "handed_over_total": self.handover.received_total,
            "events_published_total": self.publisher.events_published,
            "events_unconfirmed_total": self.publisher.unconfirmed,
            "workers_reaped_total": self.reaper.reaped,
            "loop_lag_seconds": self.janitor.take_loop_lag_s(),
            "loop_exceptions_total": self._loop_exceptions_total,
            "callback_errors_total": self.link.handler_errors,
            "redis_reconnects_total": self.link.reconnects,
            "redis_errors_total": self.link.errors,
        }


async def _serve(start: Start, leash: Leash) -> None:
    store = await Store.open(database_url(start.data_dir))
    try:
        records = Records(store, max_owed_bytes=start.settings.max_owed_bytes)
        await records.load()
        made_up = await records.first_app(start.settings)
        # What Redis kept of an earlier start may be older: workers let nobody in by it (a wrong 4001 is for good).
        leash.tell({"directory": records.version})
        plane = ControlPlane(start, records, socket.socket(fileno=start.listen_fd), leash.tell)
        # End of file: the supervisor is dead. What must last is committed, so there is nothing to wait for.
        leash.attach(plane.loop, plane.told, lambda: os._exit(1))
        plane.loop.add_signal_handler(signal.SIGTERM, plane.stop)
        operators = await commands.serve_commands(records, commands.socket_path(start.data_dir))
        if made_up is not None:
            leash.tell({"created_app": commands.app_shape(made_up)})
        await plane.start()
        # What is here now stays: without it each full collection would walk all of SQLAlchemy.
        gc.freeze()
        await plane.finished.wait()
        operators.close()
        await plane.finish()
        await records.finish()
    finally:
        await store.close()


def main(leash: Leash) -> None:
    """The process. Returns at its clean end; exits with 1 where the records can't be used, having said why."""
    start = leash.read_start()
    logs.configure(start.settings, "control")
    try:
        uvloop.run(_serve(start, leash))
    except (StoreError, RecordError) as error:
        log.error("control can't start", reason=str(error))
        leash.tell({"fatal": str(error)})
        raise SystemExit(1) from None
