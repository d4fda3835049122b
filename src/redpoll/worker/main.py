"""A worker process: puts the rooms together, lets connections in, and leaves in order.

Holds sockets and nothing that must survive it. What it does when is told by the supervisor over its pipe.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import Counter, deque
from typing import Any

import structlog
import uvloop

from redpoll import _engine, logs
from redpoll._fanout import Flusher
from redpoll.child_pipe import ChildPipe, Start
from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import Directory
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.cluster.membership.registry import Registry
from redpoll.cluster.quota import Quota
from redpoll.cluster.stats import Stats
from redpoll.cluster.survey import Survey
from redpoll.cluster.traces import TraceWriter
from redpoll.protocol.apps import App
from redpoll.protocol.handshake import Refusal
from redpoll.worker import connection_list
from redpoll.worker.backpressure import Backpressure
from redpoll.worker.connection import Connection
from redpoll.worker.hub import Hub
from redpoll.worker.ingress.gate import Gate
from redpoll.worker.ingress.listeners import Listeners
from redpoll.worker.janitor import Janitor
from redpoll.worker.replay.user_resume import QUESTION, UserResume
from redpoll.worker.tracing import Tracing

__all__ = ["Worker", "main"]

log = structlog.get_logger()

# Descriptors that stay free for Redis, the control plane, logs and the hand-over (failures.md row 14).
_RESERVED_DESCRIPTORS = 64
# Closes of a drain, or of an app that was switched off, come in slices: others are served in between.
_CLOSES_A_SLICE = 100
_SLICE_S = 0.01
# Of this worker, by number of connections: the figures of all lie in Redis as one value.
_APPS_TOLD = 100
_RESTARTING = "the server is restarting; connect again"


class Worker:
    """The rooms of one worker and how they are tied. `run()` returns when everything is closed.

    `port` is the public one, as it is bound, `tls_port` None without TLS. `ready` is set once Redis knows this worker
    and the directory was read: clients are let in from then on. `ended`: nothing is left to do.
    """

    def __init__(self, start: Start, child_pipe: ChildPipe) -> None:
        self.start_message = start
        self.child_pipe = child_pipe
        settings = start.settings
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.loop_exceptions_total = 0
        self._draining = asyncio.Event()
        self._to_close: deque[tuple[Connection, int, str]] = deque()

        self.flusher = Flusher(self._schedule_flush, settings.max_owed_bytes)
        self.hub = Hub(self.flusher)
        keys = Keys(settings.redis_prefix)
        self.link = Link(start.redis_url)
        self.brake = Backpressure(self.hub.everyone, lambda: self.link.congested)
        self.janitor = Janitor(settings, self._tell_stats, self.brake)
        self.directory = Directory(self.link, keys, on_change=self._app_changed)
        self.directory.want(None)
        self.registry = Registry(
            self.link,
            keys,
            self.hub,
            self.directory,
            start.run,
            start.k,
            on_sys=self._asked,
            debounced=settings.webhook_debounce_s > 0,
        )
        self.tracing = Tracing(TraceWriter(self.link, keys), lambda: self.registry.w)
        self.janitor.each_beat = self.tracing.flush
        resume = UserResume(self.hub, self.link, keys, self.janitor)
        self.hub.attach(self.registry, Bus(self.link, keys), Quota(self.link, keys), resume, self.tracing)
        self.questions = Survey(self.link, keys)
        self.stats = Stats(self.link, keys)
        self.gate = Gate(
            settings,
            self.flusher,
            self.hub,
            self.janitor,
            self.directory,
            start.handover_path,
            lambda: self.registry.ready and not self.brake.on,
            _max_connections(),
        )
        self.janitor.head_late = self.gate.head_late
        self.doors = Listeners(start, self.gate)
        self.port, self.tls_port = self.doors.port, self.doors.tls_port

    async def run(self) -> None:
        """Serve until drained."""
        self.loop.set_exception_handler(self._loop_exception)
        self.loop.add_signal_handler(signal.SIGTERM, self.drain)
        self.child_pipe.attach(self.loop, self._told, _supervisor_died)
        # From the first moment: /healthz is answered and upgrades are 503, not refused connections.
        await self.doors.open()
        self.janitor.start()
        beginning = self.loop.create_task(self._begin())
        await self._draining.wait()
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await self._leave()

    async def _begin(self) -> None:
        await self.registry.start()
        while not self.registry.ready:
            await asyncio.sleep(0.02)
        self._tell_stats()
        self.ready.set()
        self.child_pipe.send({"ready": True})
        log.info("worker ready", worker=self.start_message.number, w=self.registry.w)

    # -- the end -------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """No new connections: the port is closed before anybody is sent away (decisions.md)."""
        self.gate.draining = True
        if self.doors.close():
            self.child_pipe.send({"listening": False})

    def drain(self) -> None:
        """Send everybody away with 4200, tell Redis that nothing is held here, and end."""
        self.stop_listening()
        self._draining.set()

    async def _leave(self) -> None:
        grace_s = self.start_message.settings.shutdown_grace_s
        try:
            async with asyncio.timeout(grace_s):
                self.hub.admission.dismiss(Refusal(4200, _RESTARTING))
                self._close_all(self.hub.everyone, 4200, _RESTARTING)
                while self.gate.connections:
                    await asyncio.sleep(_SLICE_S)
        except TimeoutError:
            for connection in list(self.hub.everyone):
                connection.abort()
            log.warning("connections cut", count=self.gate.connections, grace_s=grace_s)
        self.janitor.stop()
        self.doors.finish()
        self.gate.close()
        await self.hub.resume.finish()
        await self.registry.finish()
        await self.link.close()
        self.child_pipe.close()
        self.ended.set()

    def _close_all(self, connections: Any, code: int, message: str) -> None:
        idle = not self._to_close
        self._to_close.extend((connection, code, message) for connection in connections)
        if idle and self._to_close:
            self._close_some()

    def _close_some(self) -> None:
        for _ in range(min(_CLOSES_A_SLICE, len(self._to_close))):
            connection, code, message = self._to_close.popleft()
            if connection.state == _engine.OPEN:
                connection.shut(code, message)
        if self._to_close:
            self.loop.call_later(_SLICE_S, self._close_some)

    # -- what others tell ----------------------------------------------------------------------------------

    def _told(self, message: dict[str, Any]) -> None:
        if "stop_listening" in message:
            self.stop_listening()
        if "directory" in message:
            # The store's version: what Redis kept of an earlier run may be older, and is nobody's to be let in by.
            self.directory.want(message["directory"])
        if "reload" in message:
            self.doors.reload()
        if "drain" in message:
            self.drain()

    def _app_changed(self, app_id: str, old: App | None, new: App | None) -> None:
        """A record changed: in force at once, for connections that are open too (decisions.md)."""
        connections = self.hub.of_app(app_id)
        if new is not None:
            for connection in connections:
                connection.session.app = new
        self.registry.app_changed(old, new)
        if old is None:
            return
        if new is None:
            self._close_all(connections, 4001, "the app was deleted")
            return
        self.hub.users.app_changed(old, new)
        self.hub.resume.app_changed(old, new, connections)
        if new.user_authentication_timeout_s != old.user_authentication_timeout_s:
            self.janitor.proof_changed(connections, new.user_authentication_timeout_s)
        if not new.enabled:
            self._close_all(connections, 4003, "the app is disabled")

    def _asked(self, message: dict[str, Any]) -> None:
        """Control asks every worker over `sys`. The answer, how many connections were closed, comes when they are."""
        question = message.get("ask")
        if question is None:
            # Control counts who is listening.
            return
        if question == "terminate":
            closed = self.hub.users.terminate(message["app"], message["user"])
        elif question == "close":
            closed = self.hub.close_socket(message["app"], message["socket"])
        elif question == connection_list.QUESTION:
            page = connection_list.page_of(self.hub.everyone, message)
            self.questions.answer(message["id"], self.registry.w, page)
            return
        elif question == QUESTION:
            # A worker asks, and only of those whom Redis names.
            self.hub.resume.asked(message, self.registry.w, self.questions.answer)
            return
        else:
            log.warning("unknown question", ask=question)
            return
        self.questions.answer(message["id"], self.registry.w, closed)

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.loop_exceptions_total += 1
        log.error("unhandled", what=context.get("message"), exc_info=context.get("exception"))

    def _schedule_flush(self) -> None:
        self.loop.call_soon(self.flusher.flush)

    # -- what this worker tells ----------------------------------------------------------------------------

    def _tell_stats(self) -> None:
        if not self.link.up:
            return
        engine, flusher, gate = _engine.counters(), self.flusher, self.gate
        channels, subscriptions = self.hub.occupancy()
        owed, by_app = self._tell_apps()
        self.stats.write(
            self.registry.w,
            {
                "connections": gate.connections,
                "connections_total": gate.connections_total,
                "messages_received_total": engine["messages_received"],
                "bytes_received_total": engine["bytes_received"],
                "frames_posted_total": flusher.frames_posted,
                "frames_written_total": flusher.frames_written,
                "bytes_written_total": flusher.bytes_written,
                "bytes_owed": owed,
                "slow_consumers_closed_total": flusher.overruns,
                "send_errors_total": flusher.sinks_closed_on_error,
                "callback_errors_total": engine["callback_errors"],
                "protocol_faults_total": engine["protocol_faults"],
                "loop_exceptions_total": self.loop_exceptions_total,
                "loop_lag_seconds": self.janitor.loop_lag_s,
                "redis_reconnects_total": self.link.reconnects,
                "redis_errors_total": self.link.errors,
                "channels": channels,
                "subscriptions": subscriptions,
                "users": len(self.hub.users),
                "brakes_total": self.brake.times_on,
                "handshakes_failed_total": self.doors.handshakes_failed_total,
                "upgrades_refused_total": gate.upgrades_refused_total,
                "handed_over_total": gate.handed_over_total,
                "rewinds_total": self.hub.rewinds.begun,
                "replayed_total": self.hub.rewinds.replayed,
                "history_pages_total": self.hub.pages.answered,
                "catchups_total": self.registry.catchups,
                "history_lost_total": self.registry.histories_lost,
                "by_app": by_app,
                "events_unkept_total": self.hub.bus.unkept,
                "events_unhooked_total": self.hub.bus.unhooked + self.registry.unhooked,
            },
        )

    def _tell_apps(self) -> tuple[int, dict[str, list[int]]]:
        """Bytes owed to everybody, and by app its connections, its client events and the events that its clients were
        sent, for the greatest hundred."""
        owed = 0
        connections: Counter[str] = Counter()
        for connection in self.hub.everyone:
            owed += connection.bytes_owed
            connections[connection.session.app.id] += 1
        client_events, sent = self.hub.client_events, self.hub.events_sent
        told = {
            app_id: [count, client_events.get(app_id, 0), sent.get(app_id, 0)]
            for app_id, count in connections.most_common(_APPS_TOLD)
        }
        for app_id in [app_id for app_id in client_events if app_id not in connections][:_APPS_TOLD]:
            # A counter that went away and came back would look like one that began anew.
            told.setdefault(app_id, [0, client_events[app_id], sent.get(app_id, 0)])
        return owed, told


def _max_connections() -> int:
    """What the limit of open files leaves for clients: 95 % of it, less a reserve (failures.md row 14)."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, int(limit * 0.95) - _RESERVED_DESCRIPTORS)


def _supervisor_died() -> None:
    # Nobody would restart, drain or reap us: clients are better served elsewhere at once.
    os._exit(1)


def main(child_pipe: ChildPipe) -> None:
    """The process `redpoll worker`: reads who it is from its pipe, runs until drained."""
    start = child_pipe.read_start()
    logs.configure(start.settings, f"worker {start.number}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def serve() -> None:
        await Worker(start, child_pipe).run()

    uvloop.run(serve())
