"""A worker process: connects its parts, serves clients, and drains when the supervisor asks for it.

A worker holds connections and nothing that must survive it. The supervisor controls it over the child pipe.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, assert_never

import msgspec
import structlog

from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import Directory
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.cluster.mailbox import Mailbox
from redpoll.cluster.membership.registry import Registry, Timings
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.revoked_grants import RevokedInRedis
from redpoll.cluster.stats import Stats
from redpoll.cluster.survey import Answerers
from redpoll.cluster.traces import TraceWriter
from redpoll.config.settings import Settings
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import (
    TO_WORKER,
    BeginStop,
    CertificateChanged,
    Deaf,
    DirectoryVersion,
    EndService,
    Evacuate,
    ListenersClosed,
    ReachChanged,
    Ready,
    ReturnToService,
    Serve,
    SettingsChanged,
    ShardKey,
    Start,
    Stop,
    TellReach,
    TicketKeys,
    ToWorker,
)
from redpoll.loop.slices import walk
from redpoll.protocol.errors import ApiError, Code
from redpoll.protocol.grants import Grant
from redpoll.protocol.handshake import Refusal
from redpoll.text import logs
from redpoll.worker.answers import answer_questions
from redpoll.worker.app_changes import AppChanges
from redpoll.worker.aside import Aside
from redpoll.worker.fallback.fallback import Fallback
from redpoll.worker.flushing import Flushing
from redpoll.worker.hub.connection import Connection
from redpoll.worker.hub.debugging import Debugging
from redpoll.worker.hub.hub import Hub
from redpoll.worker.hub.revocations import Revocations
from redpoll.worker.hub.tracing import Tracing
from redpoll.worker.ingress.gate import Gate
from redpoll.worker.ingress.listeners import Listeners
from redpoll.worker.ingress.tls import use_ticket_keys
from redpoll.worker.replay.user_resume import UserResume
from redpoll.worker.statistics import Statistics
from redpoll.worker.timers.backpressure import Backpressure
from redpoll.worker.timers.collector import Collector
from redpoll.worker.timers.drain import Drain
from redpoll.worker.timers.janitor import Janitor

__all__ = ["Worker", "main"]

log = structlog.get_logger()

# Descriptors that stay free for Redis, the control plane and logs (deploy/failures.md "Out of
# descriptors").
_RESERVED_DESCRIPTORS = 64
# The part of the grace over which connections are closed; the rest is for the answers to our Close frames.
_SHARE_OF_GRACE = 0.7
_RESTARTING = "the server is restarting; connect again"
_DRAINING = "the server is draining; connect again"


class Worker:
    """One worker. `run()` returns when everything is closed.

    `ready` is set once Redis knows this worker and the directory is read; clients are admitted from then on, as `life`
    says. `timings` are those of its registry. `collector` starts when the worker is ready; None if the process has
    more to collect than this worker, as in tests.
    """

    def __init__(
        self,
        start: Start,
        child_pipe: ChildPipe,
        timings: Timings | None = None,
        collector: Collector | None = None,
    ) -> None:
        self.start_message = start
        self.child_pipe = child_pipe
        settings = start.settings
        loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.life = Life()
        # The order to close all connections and end, with its `max_per_s`.
        self._stop: asyncio.Future[float | None] = loop.create_future()
        self.collector = collector
        self.flushing = Flushing(loop, settings.max_unsent_bytes)
        self.hub = Hub(self.flushing.flusher)
        self.link = open_link(start.redis_url)
        self._keys = keys = Keys(settings.redis_prefix, sharded=self.link.sharded, shard_key=None)
        self._has_shard_key = asyncio.Event()
        self.backpressure = Backpressure(self.hub.open_connections, lambda: self.link.congested)
        self.janitor = self._create_janitor(settings)
        self._drain = Drain(self.hub.open_connections, self.janitor.spawn)
        self.directory = Directory(self.link, keys, on_change=lambda *change: self._app_changes.changed(*change))
        self.directory.require(None)
        self.answerers = Answerers(self.link, keys, lambda: self.registry.worker_id)
        mailbox = Mailbox(self.link, keys, start.run, start.process)
        revocations = Revocations(self.hub, self.hub.revoked_grants, self._end_granted)
        self._revoked = RevokedInRedis(self.link, keys, self.hub.revoked_grants, revocations.read)
        self.registry = self._create_registry(mailbox, timings)
        self.tracing = self._open_tracing(keys)
        self.aside = Aside(
            self.hub,
            self.registry,
            self.janitor.spawn,
            lambda within_s: self.gate.streams.drain(within_s),
            child_pipe.send,
            lambda: child_pipe.pings,
        )
        # A circle: the replayer asks it whether a user returned, and it has what was missed replayed.
        replay_missed = lambda *missed: self.hub.replayer.replay_missed(*missed)  # noqa: E731
        resume = UserResume(self.registry, self.link, keys, self.janitor, replay_missed)
        debugging = Debugging(self.hub.open_connections, self.link, keys, settings.node_name, f"worker {start.number}")
        # Late: the registry and the janitor need the hub's tables, and the hub's calls need them.
        self.hub.attach(self.registry, Bus(self.link, keys), Quota(self.link, keys), resume, self.tracing, debugging)
        self._answer_questions(revocations)
        self._app_changes = AppChanges(self.hub, self.registry, self.janitor, self._end_readers)
        self.fallback = Fallback(self.link, keys, mailbox, self.directory, loop)
        self.gate = Gate(
            settings,
            self.flushing.flusher,
            self.hub,
            self.janitor,
            self.directory,
            self.life,
            start.requests_path,
            self._admits,
            _max_connections(),
            self.fallback,
        )
        self.fallback.begin(self.gate)
        self.listeners = Listeners(start, self.gate)
        self.statistics = Statistics(
            self.link,
            Stats(self.link, keys),
            self.registry,
            self.gate,
            self.listeners,
            self.backpressure,
            self.fallback,
            self.directory.by_id,
        )

    def _create_registry(self, mailbox: Mailbox, timings: Timings | None) -> Registry:
        start, child_pipe = self.start_message, self.child_pipe
        return Registry(
            self.link,
            self._keys,
            self.hub,
            self.directory,
            start.run,
            start.process,
            self.answerers,
            timings=timings,
            debounce_s=start.settings.webhook_debounce_s,
            mailbox=mailbox,
            # /readyz says which worker it is.
            on_deaf=lambda broken: child_pipe.send(Deaf(broken)),
            on_reach=lambda reach: child_pipe.send(ReachChanged(reach)),
            on_revoked_grant=self._revoked.check,
        )

    @property
    def _serves(self) -> bool:
        """Whether clients may be admitted: Redis answers, and what was revoked is known."""
        return self.registry.ready and self._revoked.was_read

    def _admits(self) -> bool:
        return not self.backpressure.on and not self.aside.on and self._serves

    def _answer_questions(self, revocations: Revocations) -> None:
        answer_questions(
            self.answerers,
            self.hub,
            self.directory,
            revocations,
            self.life,
            self._drain,
            lambda: self.registry.worker_id,
            lambda app_id, channel: self.gate.streams.count(app_id, channel),
        )

    # Late: the gate has the readers, and is made after those that end them.

    async def _end_granted(self, app_id: str, is_over: Callable[[str, Grant], bool]) -> int:
        return await self.gate.streams.end_granted(app_id, is_over)

    def _end_readers(self, app_id: str, error: ApiError) -> None:
        self.gate.streams.end_app(app_id, error)

    @property
    def port(self) -> int:
        """The public port as bound."""
        return self.listeners.port

    def _create_janitor(self, settings: Settings) -> Janitor:
        # A circle: the gate gives deadlines to the janitor, which tells it what is late.
        return Janitor(
            settings,
            lambda: self.statistics.write(),
            self.backpressure,
            self._on_tick,
            head_late=lambda connection: self.gate.head_late(connection),
            http_late=lambda connection: self.gate.http.late(connection),
        )

    def _open_tracing(self, keys: Keys) -> Tracing:
        start = self.start_message
        return Tracing(
            TraceWriter(self.link, keys, start.run),
            lambda: self.registry.worker_id,
            start.settings.trace_calls_per_second,
            when_sent=self.flushing.when_sent,
        )

    async def run(self) -> None:
        """Serve until drained."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.statistics.loop_exception)
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        self.child_pipe.attach(loop, TO_WORKER, self._supervisor_message, _supervisor_died)
        # Said also if it never changes: publishes wait for this worker until it is subscribed, or out of service.
        self.child_pipe.send(ReachChanged(self.registry.reach))
        # Before Redis is there: /healthz works and upgrades get 503 instead of a refused connection.
        await self.listeners.open()
        self.janitor.start()
        self.aside.start()
        beginning = loop.create_task(self._begin())
        max_per_s = await self._stop
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await self._leave(max_per_s)

    async def _begin(self) -> None:
        await self._has_shard_key.wait()
        await self.registry.start()
        while not self._serves:
            await asyncio.sleep(0.02)
        self.statistics.write()
        if self.collector is not None:
            self.collector.start()
        self.ready.set()
        self.child_pipe.send(Ready())
        log.info("worker ready", worker=self.start_message.number, w=self.registry.worker_id)

    # -- draining ------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """Close the port, before any connection is closed (worker/timers/README.md "Draining")."""
        if self.life.become(Lifecycle.DRAINING):
            self.listeners.close()
            self.child_pipe.send(ListenersClosed())

    def drain(self, max_per_s: float | None = None) -> None:
        """Close all connections with 4200, remove this worker from Redis, and end. `max_per_s` as in Stop."""
        self.stop_listening()
        if not self._stop.done():
            self._stop.set_result(max_per_s)

    def evacuate(self, within_s: float, max_per_s: float | None = None) -> None:
        """Close all connections with 4200 within this time and admit no more; everything else goes on. `max_per_s` as
        in Evacuate."""
        if self.life.ends:
            return
        self.life.become(Lifecycle.EVACUATING)
        self.hub.admission.dismiss(Refusal(Code.RECONNECT, _DRAINING))
        self._drain.begin(_DRAINING, within_s, max_per_s=max_per_s)
        self.janitor.spawn(self.gate.streams.drain(within_s))

    def serve(self) -> None:
        """Admit clients again, and keep those that are still connected."""
        if self.life.become(Lifecycle.SERVING):
            self._drain.cancel()
            self.gate.streams.keep()

    async def _leave(self, max_per_s: float | None) -> None:
        grace_s = self.start_message.settings.shutdown_grace_s
        try:
            async with asyncio.timeout(grace_s):
                self.hub.admission.dismiss(Refusal(Code.RECONNECT, _RESTARTING))
                # Spread over the grace, because all of them connect elsewhere at once.
                self._drain.begin(_RESTARTING, _SHARE_OF_GRACE * grace_s, max_per_s=max_per_s)
                self.janitor.spawn(self.gate.streams.drain(_SHARE_OF_GRACE * grace_s))
                # Sessions of the HTTP fallback have no connection of this worker while they wait for a poll.
                while self.gate.connections or len(self.hub.open_connections):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await walk(self.hub.open_connections.each(), Connection.abort)
            log.warning("connections aborted", count=self.gate.connections, grace_s=grace_s)
        self.janitor.stop()
        self.aside.stop()
        self.listeners.finish()
        self.gate.http.close()
        self.gate.streams.close()
        await self.answerers.finish()
        await self.hub.user_resume.finish()
        self._revoked.close()
        # Control counts for the apps' usage what was sent until now.
        self.statistics.write()
        await self.registry.finish()
        await self.link.close()
        self.flushing.close()
        if self.collector is not None:
            self.collector.stop()
        self.child_pipe.close()
        self.life.become(Lifecycle.STOPPED)

    # -- what others say -----------------------------------------------------------------------------------

    def _supervisor_message(self, message: ToWorker) -> None:
        match message:
            case BeginStop():
                self.stop_listening()
            case ShardKey():
                self._keys.shards.use(bytes.fromhex(message.key))
                self._has_shard_key.set()
            case DirectoryVersion():
                # Stale app records, left in Redis by an earlier run, must not admit clients.
                self.directory.require(message.version)
            case SettingsChanged():
                self._settings_changed(message.changes)
            case CertificateChanged():
                self.listeners.reload()
            case TicketKeys():
                use_ticket_keys(message.keys)
            case Evacuate():
                self.evacuate(message.within_s, message.max_per_s)
            case Serve():
                self.serve()
            case TellReach():
                self.child_pipe.send(ReachChanged(self.registry.reach))
            case EndService():
                self.aside.set(True)
            case ReturnToService():
                self.aside.set(False)
            case Stop():
                self.drain(message.max_per_s)
            case _:
                assert_never(message)

    def _settings_changed(self, changes: dict[str, Any]) -> None:
        """`redpoll reload` changed these settings (Setting.is_live)."""
        settings = self.start_message.settings.changed_by(changes)
        self.start_message = msgspec.structs.replace(self.start_message, settings=settings)
        if "log_level" in changes:
            logs.configure(settings, f"worker {self.start_message.number}")
        self.gate.settings_changed(settings)

    def _on_tick(self) -> None:
        self.statistics.unsent.advance()
        self.tracing.flush()
        self.gate.http.beat()
        self.fallback.beat()


def _max_connections() -> int:
    """95 % of the limit of open files, less a reserve (deploy/failures.md "Out of descriptors")."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, int(limit * 0.95) - _RESERVED_DESCRIPTORS)


def _supervisor_died() -> None:
    # Without a supervisor nothing would restart, drain or reap this worker. Clients reconnect elsewhere.
    os._exit(1)


def main(child_pipe: ChildPipe) -> None:
    """Run the process `redpoll worker` until it is drained. Its settings come over the child pipe."""
    start = child_pipe.read_start()
    logs.configure(start.settings, f"worker {start.number}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def serve() -> None:
        await Worker(start, child_pipe, collector=Collector(asyncio.get_running_loop())).run()

    try:
        import uvloop
    except ImportError as error:
        # It needs Python's module ssl, without which a Python may be built.
        log.warning("asyncio's loop instead of uvloop's, which is slower", reason=str(error))
        asyncio.run(serve())
    else:
        uvloop.run(serve())
