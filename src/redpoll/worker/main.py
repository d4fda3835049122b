"""A worker process: puts the rooms together, lets connections in, and leaves in order.

Holds sockets and nothing that must survive it. What it does when is told by the supervisor over the leash.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections import deque
from typing import Any

import structlog
import uvloop

from redpoll import _engine, logs
from redpoll._fanout import Flusher
from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import Directory
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.cluster.registry import Registry
from redpoll.cluster.stats import Stats
from redpoll.leash import Leash, Start
from redpoll.protocol.apps import App
from redpoll.worker.connection import Connection
from redpoll.worker.gate import Gate
from redpoll.worker.hub import Hub
from redpoll.worker.janitor import Janitor

__all__ = ["Worker", "main"]

log = structlog.get_logger()

# Descriptors that stay free for Redis, the control plane, logs and the hand-over (failures.md row 14).
_RESERVED_DESCRIPTORS = 64
_BACKLOG = 4096
# Closes of a drain, or of an app that was switched off, come in slices: others are served in between.
_CLOSES_A_SLICE = 100
_SLICE_S = 0.01


class Worker:
    """The rooms of one worker and how they are tied. `run()` returns when everything is closed.

    `port` is the public one, as it is bound. `ready` is set once Redis knows this worker and the directory was
    read: clients are let in from then on. `ended`: nothing is left to do.
    """

    def __init__(self, start: Start, leash: Leash) -> None:
        self.start_message = start
        self.leash = leash
        settings = start.settings
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.loop_exceptions_total = 0
        self._draining = asyncio.Event()
        self._listening = socket.socket(fileno=start.listen_fd)
        self.port: int = self._listening.getsockname()[1]
        self._server: asyncio.AbstractServer | None = None
        self._to_close: deque[tuple[Connection, int, str]] = deque()

        self.flusher = Flusher(self._schedule_flush, settings.max_owed_bytes)
        self.hub = Hub(self.flusher)
        self.janitor = Janitor(settings, self._tell_stats)
        keys = Keys(settings.redis_prefix)
        self.link = Link(start.redis_url)
        self.directory = Directory(self.link, keys, on_change=self._app_changed)
        self.registry = Registry(self.link, keys, self.hub, self.directory, start.run, start.k)
        self.hub.attach(self.registry, Bus(self.link, keys))
        self.stats = Stats(self.link, keys)
        self.gate = Gate(
            settings,
            self.flusher,
            self.hub,
            self.janitor,
            self.directory,
            start.handover_path,
            lambda: self.registry.ready,
            _max_connections(),
        )
        self.janitor.head_late = self.gate.head_late

    async def run(self) -> None:
        """Serve until drained."""
        self.loop.set_exception_handler(self._loop_exception)
        self.loop.add_signal_handler(signal.SIGTERM, self.drain)
        self.leash.attach(self.loop, self._told, _supervisor_died)
        # From the first moment: /healthz is answered and upgrades are 503, not refused connections.
        self._server = await self.loop.create_server(
            lambda: Connection(self.gate), sock=self._listening, backlog=_BACKLOG
        )
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
        self.leash.tell({"ready": True})
        log.info("worker ready", worker=self.start_message.number, w=self.registry.w)

    # -- the end -------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """No new connections: the port is closed before anybody is sent away (decisions.md)."""
        self.gate.draining = True
        if self._server is not None:
            self._server.close()
            self._server = None
            self.leash.tell({"listening": False})

    def drain(self) -> None:
        """Send everybody away with 4200, tell Redis that nothing is held here, and end."""
        self.stop_listening()
        self._draining.set()

    async def _leave(self) -> None:
        grace_s = self.start_message.settings.shutdown_grace_s
        try:
            async with asyncio.timeout(grace_s):
                self._close_all(self.hub.everyone, 4200, "the server is restarting; connect again")
                while self.gate.connections:
                    await asyncio.sleep(_SLICE_S)
        except TimeoutError:
            for connection in list(self.hub.everyone):
                connection.abort()
            log.warning("connections cut", count=self.gate.connections, grace_s=grace_s)
        self.janitor.stop()
        self.gate.close()
        await self.registry.finish()
        await self.link.close()
        self.leash.close()
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
        if "drain" in message:
            self.drain()

    def _app_changed(self, app_id: str, old: App | None, new: App | None) -> None:
        code, message = (4001, "the app was deleted") if new is None else (4003, "the app is disabled")
        if old is not None:
            self._close_all(self.hub.app_changed(app_id, new), code, message)

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
                "bytes_owed": sum(connection.bytes_owed for connection in self.hub.everyone),
                "slow_consumers_closed_total": flusher.overruns,
                "send_errors_total": flusher.sinks_closed_on_error,
                "callback_errors_total": engine["callback_errors"],
                "protocol_faults_total": engine["protocol_faults"],
                "loop_exceptions_total": self.loop_exceptions_total,
                "loop_lag_seconds": self.janitor.loop_lag_s,
                "redis_reconnects_total": self.link.reconnects,
                "redis_errors_total": self.link.errors,
                "channels": self.registry.channels,
                "subscriptions": self.hub.subscriptions(),
                "upgrades_refused_total": gate.upgrades_refused_total,
                "handed_over_total": gate.handed_over_total,
            },
        )


def _max_connections() -> int:
    """What the limit of open files leaves for clients: 95 % of it, less a reserve (failures.md row 14)."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, int(limit * 0.95) - _RESERVED_DESCRIPTORS)


def _supervisor_died() -> None:
    # Nobody would restart, drain or reap us: clients are better served elsewhere at once.
    os._exit(1)


def main(leash: Leash) -> None:
    """The process `redpoll worker`: reads who it is from the leash, runs until drained."""
    start = leash.read_start()
    logs.configure(start.settings, f"worker {start.number}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def serve() -> None:
        await Worker(start, leash).run()

    uvloop.run(serve())
