"""The control process: creates its parts, serves, and shuts down in order.

WebSocket traffic continues while it restarts. It has no state of its own: durable data is in the record store, the
rest in Redis.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import hiredis
import structlog
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from redpoll import logs
from redpoll.child_pipe import ChildPipe, Start
from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.history import History
from redpoll.cluster.idempotency import Idempotency
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.membership.reaper import Reaper, Run
from redpoll.cluster.outbox import Outbox, Transition
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis_check import examine
from redpoll.cluster.stats import Stats
from redpoll.cluster.survey import Survey
from redpoll.cluster.traces import TraceReader
from redpoll.control import commands
from redpoll.control.api import Api
from redpoll.control.auth_failures import AuthFailures
from redpoll.control.browser_module import BrowserModule
from redpoll.control.connections import Connections
from redpoll.control.context import Cluster, Context
from redpoll.control.daily_limit import DailyLimit
from redpoll.control.dashboard.accounts import Accounts
from redpoll.control.dashboard.dashboard import Dashboard, Dependencies
from redpoll.control.eventlog import EventTrace
from redpoll.control.fast_publish import FastPath
from redpoll.control.health import Health
from redpoll.control.history import ChannelHistory
from redpoll.control.host_names import HostNames
from redpoll.control.janitor import Janitor
from redpoll.control.leadership import Leadership, LeaderStore, introduce
from redpoll.control.metrics import Metrics
from redpoll.control.middleware import Front
from redpoll.control.nodes import NodeList
from redpoll.control.occupancy import Occupancy
from redpoll.control.publisher import Publisher
from redpoll.control.ratelimit import RateLimit
from redpoll.control.record_sync import RecordSync
from redpoll.control.records import RecordError, Records
from redpoll.control.routes import routes_of
from redpoll.control.tracing import Tracer
from redpoll.control.usage import Usage
from redpoll.control.webhooks.verify import Verify
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.control.worker_requests import WorkerRequests
from redpoll.proxies import TrustedProxies
from redpoll.settings import Settings
from redpoll.store.charts import Charts
from redpoll.store.errors import StoreError, StoreUnavailable, reason_of
from redpoll.store.eventlog import EventLog
from redpoll.store.store import Store, database_url

__all__ = ["ControlPlane", "main"]

log = structlog.get_logger(__name__)

# Open requests get this long at shutdown. Each waits for Redis for at most 2 s.
_FINISH_WITHIN_S: Final = 5.0
_BACKLOG: Final = 1024
# While PostgreSQL is away at the start: the pause between two attempts, and how often the log says so.
_CONNECT_AGAIN_AFTER_S: Final = 0.5
_LOG_WAITING_EVERY_S: Final = 10.0


class ControlPlane:
    """Creates and connects the parts of the control plane: call `start()`, later `finish()`.

    `records` and `webhooks` are already loaded; the caller closes their store. `tell` sends a message to the
    supervisor. One table of routes serves the control port (`listener`) and the requests that workers forward over a
    Unix socket (`start.requests_path`).
    """

    def __init__(
        self,
        start: Start,
        records: Records,
        webhooks: Webhooks,
        listener: socket.socket,
        tell: Callable[[dict[str, Any]], None],
        *,
        accounts: Accounts,
        event_log: EventLog | None = None,
        charts: Charts | None = None,
        body_timeout_s: float = 15.0,
    ) -> None:
        settings = start.settings
        self.loop = asyncio.get_running_loop()
        self.finished = asyncio.Event()
        self._listener = listener
        self._tell = tell
        self._settings = settings
        self._reloads: list[asyncio.Future[dict[str, Any]]] = []
        self._store = accounts.store
        self._records = records
        self._webhooks = webhooks
        self._keys = Keys(settings.redis_prefix)
        self._run = start.run
        # Living workers of this node, and of the others.
        self._workers_alive = 0
        self._workers_elsewhere = 0
        self._loop_exceptions_total = 0
        self._server: asyncio.Server | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[None] | None = None

        self.link = Link(start.redis_url)
        self.link.on_up, self.link.on_down = self._link_up, self._link_down
        self.bus = Bus(self.link, self._keys)
        self.leadership = Leadership(accounts.store, tell, self._begin_leading, self._end_leading)
        self.publisher = Publisher(self.bus, self.link, lambda: self._workers_alive + self._workers_elsewhere)
        self.daily = DailyLimit(Quota(self.link, self._keys), records, leads=self._leads)
        self.reaper = Reaper(
            self.link,
            self._keys,
            start.run,
            hooks_of=lambda app_id: records.apps[app_id].hooks if app_id in records.apps else "",
            has_history=lambda app_id, channel: (
                app_id in records.apps and records.apps[app_id].history_rule(channel) is not None
            ),
            debounced=settings.webhook_debounce_s > 0,
        )
        self.outbox = Outbox(self.link, self._keys, settings.webhook_debounce_s)
        self.health = Health(lambda: self.janitor.redis_answers(), lambda request: self.dashboard.enter(request))
        self.tracer = None
        if event_log is not None:
            reader = TraceReader(self.link, self._keys)
            self.tracer = Tracer(
                event_log, reader, settings.trace_calls_per_second, trims=lambda: not self._workers_elsewhere
            )
        self.metrics = Metrics(
            lambda: self.routes,
            self._read_workers,
            self._own_counters,
            lambda: self.publisher.by_app,
            self.tracer.latency if self.tracer else None,
        )
        api = Api(
            self.publisher,
            Occupancy(self.link, self._keys),
            self.daily,
            Idempotency(self.link, self._keys),
            Survey(self.link, self._keys),
            settings.master_key(),
            self.tracer,
        )
        self.history = History(self.link, self._keys)
        self.usage = Usage(charts)
        self.nodes = NodeList(self._read_workers)
        self.dashboard = Dashboard(
            Dependencies(
                settings,
                Path(start.data_dir),
                accounts,
                records,
                webhooks,
                self.link,
                self._keys,
                self.publisher,
                api,
                ChannelHistory(self.history),
                self.health,
                self._read_workers,
                self.nodes,
                event_log,
                self.tracer,
                charts,
                self.usage,
            )
        )
        self.routes = routes_of(
            api,
            ChannelHistory(self.history),
            EventTrace(event_log),
            BrowserModule(),
            self.usage,
            Verify(webhooks.secrets_of),
            self.health,
            self.metrics,
            self.dashboard.routes(),
        )
        per_minute = settings.trigger_rate_per_minute
        rate = RateLimit(per_minute) if per_minute else None
        self.auth_failures = _auth_failures(settings)
        self.front = Front(
            self.routes,
            records,
            host_names=HostNames.of(settings),
            rate=rate,
            failures=self.auth_failures,
            tracer=self.tracer,
            body_timeout_s=body_timeout_s,
            path_prefix=settings.path_prefix,
        )
        self.front.fault_page = self.dashboard.fault
        api.conclude = self.front.conclude
        self.connections = Connections(
            self.front.handle,
            self.front.error_page,
            head_timeout_s=settings.head_timeout_s,
            trusted=TrustedProxies(settings.trusted_proxies),
        )
        fast = FastPath(self.front, self.routes, records, self.publisher, self._keys, rate, self.tracer)
        self.link.on_handed_out = fast.finish
        self.worker_requests = WorkerRequests(start.requests_path, self.front.received, fast.take)
        self.record_sync: RecordSync | None = None
        if accounts.store.shared:
            self.record_sync = RecordSync(self.link, self._keys, records, accounts.store.name)
            self.record_sync.on_synced = self.dashboard.check_sessions
            self.link.on_push = self.record_sync.received
            accounts.store.on_version = self.record_sync.committed
        writer = DirectoryWriter(self.link, self._keys)
        self.janitor = Janitor(self.link, writer, records, self.connections, self.health, leads=self._leads)
        records.on_change = self.janitor.record_changed

    @property
    def cluster(self) -> Cluster:
        """The Redis connection and stores that operators' commands use."""
        return Cluster(self.link, self._keys, self.history, self.nodes)

    async def start(self) -> None:
        """Serve. Doesn't wait for Redis: `/healthz` works at once, `/readyz` reports when the server is ready."""
        self.loop.set_exception_handler(self._loop_exception)
        self._webhooks.prepare()
        self.link.start()
        self.janitor.start()
        self.dashboard.start((route for route in self.routes.all if route.limited), self.front.times_by_app)
        self.daily.start()
        if self.record_sync is not None:
            self.record_sync.start()
        if self.tracer is not None:
            self.tracer.start()
        self.leadership.start()
        self._server = await self.loop.create_server(self.connections, sock=self._listener, backlog=_BACKLOG)
        await self.worker_requests.start()
        self._tell({"ready": True})

    def receive(self, message: Mapping[str, Any]) -> None:
        """Handle a message from the supervisor."""
        if "alive" in message:
            self._workers_alive = len(message["alive"])
            self.reaper.set_alive(set(message["alive"]), message["greatest"])
        if "nodes" in message:
            self.nodes.take(message)
            self._take_nodes(message["nodes"])
        if "lead" in message:
            self.leadership.set_term(message["lead"])
        if message.get("workers_ready"):
            self.health.workers_ready = True
        if "evacuate" in message:
            self.health.evacuating = message["evacuate"] is not None
        if message.get("draining"):
            self.health.draining = True
        if message.get("drain"):
            self.stop()
        if "settings" in message:
            self._settings_changed(message["settings"])
        if "reloaded" in message:
            for waiting in self._reloads:
                if not waiting.done():
                    waiting.set_result(message["reloaded"])
            self._reloads.clear()

    async def reload(self) -> dict[str, Any]:
        """Makes the supervisor read the settings and the certificate again. Returns its report (Supervisor._reload)."""
        waiting: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._reloads.append(waiting)
        self._tell({"reload": True})
        return await waiting

    def _settings_changed(self, changes: dict[str, Any]) -> None:
        """A reload changed these settings (Setting.is_live)."""
        self._settings = settings = self._settings.changed_by(changes)
        if "log_level" in changes:
            logs.configure(settings, "control")
        if "auth_failures_per_minute" in changes:
            self.auth_failures = _auth_failures(settings)
        self.front.settings_changed(HostNames.of(settings), self.auth_failures, settings.path_prefix)

    def _take_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        others = {
            node["run"]: Run(node["alive"], frozenset(node["workers"]), node["greatest"])
            for node in nodes
            if node["run"] != self._run
        }
        self._workers_elsewhere = sum(len(node.workers) for node in others.values() if node.alive)
        self.reaper.set_nodes(others)

    # -- leading

    def _leads(self) -> bool:
        return self.leadership.term is not None

    def _begin_leading(self) -> None:
        store = LeaderStore(self._store, self.leadership)
        self._webhooks.start(self.outbox, self._webhook_traced, store)
        self._reaping = self.loop.create_task(self.reaper.run(), name="reaper")
        self.janitor.check_now()

    async def _end_leading(self) -> None:
        """Another node leads: stops at once, because that node does the same work again."""
        await self._end(self._reaping)
        await self._webhooks.stop(0.0)

    async def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def stop(self) -> None:
        """Begin the shutdown: `finished` is set, and the process then calls `finish`."""
        self.health.draining = True
        self.finished.set()

    async def finish(self) -> None:
        """Accept no more requests, finish the open ones, and close the connection to Redis.

        If a worker still has a request, it finds no socket and responds with 503 itself.
        """
        if self._server is not None:
            self._server.close()
        await asyncio.gather(self.worker_requests.finish(_FINISH_WITHIN_S), self.connections.finish(_FINISH_WITHIN_S))
        await self.leadership.finish()
        await self._end(self._reaping)
        await self._end(self._examining)
        self.janitor.stop()
        if self.record_sync is not None:
            await self.record_sync.finish()
        # First, because its tasks use the parts below.
        await self.dashboard.finish()
        await self._webhooks.finish()
        self.publisher.close()
        await self.daily.finish()
        if self.tracer is not None:
            await self.tracer.finish()
        await self.link.close()

    def _link_up(self) -> None:
        self.publisher.link_up()
        self.daily.link_up()
        self.janitor.link_up()
        if self.record_sync is not None:
            self.record_sync.link_up()
        self._examining = self.loop.create_task(self._examine(), name="redis examined")

    async def _examine(self) -> None:
        """Check this Redis and log what it lacks. During the start, a fault ends the process with that text."""
        try:
            faults, warnings = await examine(self.link, self._keys)
        except LinkDown:
            return
        for warning in warnings:
            log.warning("redis setting unsuitable", what=warning)
        for fault in faults:
            log.error("redis not usable", what=fault)
        if faults:
            self._tell({"fatal": "; ".join(faults)})

    def _link_down(self, reason: str) -> None:
        self.publisher.link_down()
        self.daily.link_down()

    def _webhook_traced(self, row: Transition, delivery_id: str, endpoint_id: str) -> None:
        if self.tracer is not None and row.trace is not None:
            detail = {"delivery": delivery_id, "endpoint": endpoint_id, "event": row.event}
            self.tracer.span(row.trace, row.app_id, "webhook", **detail)

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_exceptions_total += 1
        log.error("unhandled exception", what=context.get("message"), exc_info=context.get("exception"))

    async def _read_workers(self) -> Mapping[str, Mapping[str, float]]:
        try:
            async with asyncio.timeout(2.0):
                return await Stats(self.link, self._keys).read_all()
        except (LinkDown, hiredis.ReplyError, TimeoutError):
            return {}

    def _own_counters(self) -> Mapping[str, float]:
        return {
            "apps": len(self._records.apps),
            "record_store_up": self.record_sync.store_up if self.record_sync else 1,
            "http_connections": len(self.connections.connections),
            "http_refused_connections_total": self.connections.refused,
            "auth_failures_limited_total": self.auth_failures.limited_total if self.auth_failures else 0,
            "events_published_total": self.publisher.events_published,
            "events_unconfirmed_total": self.publisher.unconfirmed,
            "events_unkept_total": self.bus.unkept,
            "webhook_rows_waiting": self.outbox.waiting,
            "webhook_rows_lost_total": self.outbox.lost,
            **self._webhooks.counters(),
            "workers_reaped_total": self.reaper.reaped,
            "loop_lag_seconds": self.janitor.loop_lag.take_s(),
            "loop_exceptions_total": self._loop_exceptions_total,
            "callback_errors_total": self.link.handler_errors,
            "redis_reconnects_total": self.link.reconnects,
            "redis_errors_total": self.link.errors,
            "calls_unlogged_total": self.tracer.unlogged if self.tracer else 0,
            "calls_untraced_total": self.tracer.sampled_out if self.tracer else 0,
        }


def _auth_failures(settings: Settings) -> AuthFailures | None:
    return AuthFailures(settings.auth_failures_per_minute) if settings.auth_failures_per_minute else None


class _Inbox:
    """Messages of the supervisor that arrive before the control plane exists. It answers pings from the start on,
    because the record store may be away for long."""

    def __init__(self) -> None:
        self._messages: list[Mapping[str, Any]] = []
        self._receive: Callable[[Mapping[str, Any]], None] | None = None

    def __call__(self, message: Mapping[str, Any]) -> None:
        if self._receive is not None:
            self._receive(message)
        elif message.get("drain"):
            # The server stops before it has started, and there is nothing to close.
            os._exit(0)
        else:
            self._messages.append(message)

    def pass_to(self, receive: Callable[[Mapping[str, Any]], None]) -> None:
        self._receive = receive
        for message in self._messages:
            receive(message)


async def _open_store(url: str) -> Store:
    """Opens the record store, and waits while PostgreSQL is away. Raises StoreError."""
    clock = asyncio.get_running_loop().time
    log_at = waiting_since = clock()
    while True:
        try:
            store = await Store.open(url)
        except StoreUnavailable as error:
            if clock() >= log_at:
                log.warning("record store not available, the start waits for it", reason=str(error))
                log_at = clock() + _LOG_WAITING_EVERY_S
            await asyncio.sleep(_CONNECT_AGAIN_AFTER_S)
        else:
            if log_at > waiting_since:
                log.info("record store available", waited_s=round(clock() - waiting_since, 1))
            return store


async def _serve(start: Start, child_pipe: ChildPipe) -> None:
    inbox = _Inbox()
    # At end of file the supervisor is dead. All durable data is committed, so the process can exit at once.
    child_pipe.attach(asyncio.get_running_loop(), inbox, lambda: os._exit(1))
    store = await _open_store(database_url(start.data_dir, start.settings.database_url))
    event_log = await _open_event_log(start)
    charts = await _open_charts(start)
    try:
        records = Records(store, max_owed_bytes=start.settings.max_owed_bytes)
        await records.load()
        webhooks = Webhooks(store, records, start.settings)
        await webhooks.load()
        first_app = await records.first_app(start.settings)
        accounts = Accounts(store)
        first_password = await accounts.first_admin(start.settings.admin_password)
        # Redis may have app records of an earlier run. Workers must not admit clients by older ones: after a wrong
        # 4001 a client never reconnects.
        child_pipe.send({"directory": records.version, **await introduce(store)})
        listener = socket.socket(fileno=start.listen_fd)
        plane = ControlPlane(
            start, records, webhooks, listener, child_pipe.send, accounts=accounts, event_log=event_log, charts=charts
        )
        inbox.pass_to(plane.receive)
        plane.loop.add_signal_handler(signal.SIGTERM, plane.stop)
        context = Context(store, records, start.settings, webhooks, plane.cluster, plane.usage, plane.reload)
        _warn_of_exposure(start.settings.control_host)
        operators = await commands.serve_commands(context, commands.socket_path(start.data_dir))
        if first_password is not None:
            child_pipe.send({"created_admin": first_password})
        if first_app is not None:
            child_pipe.send({"created_app": commands.app_shape(first_app)})
        await plane.start()
        # These objects live as long as the process. Otherwise each full collection would walk all of SQLAlchemy.
        gc.freeze()
        await plane.finished.wait()
        operators.close()
        await plane.finish()
        await records.finish()
    finally:
        await store.close()
        if event_log is not None:
            await event_log.close()
        if charts is not None:
            await charts.close()


def _warn_of_exposure(control_host: str) -> None:
    try:
        private = ipaddress.ip_address(control_host).is_loopback
    except ValueError:
        private = control_host == "localhost"
    if not private:
        log.warning(
            "control port open to a network",
            control_host=control_host,
            what="dashboard passwords cross the network unencrypted and anyone can read /metrics; bind the port to "
            "127.0.0.1, or put a TLS proxy in front of it",
        )


async def _open_event_log(start: Start) -> EventLog | None:
    settings = start.settings
    if not settings.event_log_calls:
        return None
    path = Path(start.data_dir) / "events.sqlite"
    try:
        return await EventLog.open(path, settings.event_log_calls, settings.event_log_keep_s)
    except (OSError, SQLAlchemyError) as error:
        raise StoreError(f"the event log {path} can't be opened: {error}") from error


async def _open_charts(start: Start) -> Charts | None:
    path = Path(start.data_dir) / "charts.sqlite"
    try:
        return await Charts.open(path)
    except (OSError, SQLAlchemyError) as error:
        log.warning("chart data and usage not kept", file=str(path), reason=reason_of(error))
        return None


def main(child_pipe: ChildPipe) -> None:
    """Run the process. Returns after a clean shutdown; if the records can't be used, logs why and exits with 1."""
    start = child_pipe.read_start()
    logs.configure(start.settings, "control")
    try:
        uvloop.run(_serve(start, child_pipe))
    except (StoreError, RecordError) as error:
        log.error("control can't start", reason=str(error))
        child_pipe.send({"fatal": str(error)})
        raise SystemExit(1) from None
