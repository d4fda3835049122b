"""Answers `pusher:history`: a client asks for one page of a channel's stored messages.

Requests of one connection are answered one at a time, in order, and the next one only when the client has read most of
the answer. So neither a long history nor many requests delay other clients. The session has checked the permission.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from redpoll import _frame
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.history import History
from redpoll.loop.writable import WritableSignal
from redpoll.protocol import frames
from redpoll.protocol.effects import AskHistory, Effect
from redpoll.protocol.history import MAX_ANSWER_BYTES, InvalidOffset, Position, StoredMessage, UnknownEpoch, bounded

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["HistoryRequests"]

# Requests of one connection that wait: as many as a client may send at once (protocol/README.md "History and
# recovery").
_MAX_WAITING: Final = 100
# Answers that are read from Redis at a time, in steps of up to 128 KiB. The worker's events use the same connection.
_MAX_READING: Final = 8


class _Requests:
    """The requests of one connection. `writable` is set while the next one waits for the client to read."""

    __slots__ = ("waiting", "writable")

    def __init__(self, request: AskHistory) -> None:
        self.waiting = deque((request,))
        self.writable: asyncio.Event | None = None


class HistoryRequests:
    """The requests of all clients of a worker. `answered` counts answers, for /metrics.

    `perform` carries out a session's effects (`Hub.perform`).
    """

    def __init__(
        self, history: History, perform: Callable[[Connection, Sequence[Effect]], None], writable: WritableSignal
    ) -> None:
        self.answered = 0
        self._history = history
        self._perform = perform
        self._writable = writable
        self._requests: dict[Connection, _Requests] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = asyncio.Semaphore(_MAX_READING)

    def __len__(self) -> int:
        """Connections whose requests aren't all answered."""
        return len(self._requests)

    def ask(self, connection: Connection, request: AskHistory) -> None:
        """Answer `request` after the connection's earlier ones."""
        requests = self._requests.get(connection)
        if requests is None:
            self._requests[connection] = _Requests(request)
            task = asyncio.get_running_loop().create_task(self._answer_all(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif len(requests.waiting) < _MAX_WAITING:
            requests.waiting.append(request)
        else:
            self._refuse(connection, request, f"{_MAX_WAITING} earlier requests wait to be answered")

    def closed(self, connection: Connection) -> None:
        """Drop the connection's requests."""
        requests = self._requests.pop(connection, None)
        if requests is not None and requests.writable is not None:
            requests.writable.set()

    async def _answer_all(self, connection: Connection) -> None:
        while (requests := self._requests.get(connection)) is not None:
            request = requests.waiting.popleft()
            try:
                await self._answer(connection, request)
            finally:
                # Also after an error, so that the connection may ask again.
                if not requests.waiting and self._requests.get(connection) is requests:
                    del self._requests[connection]
            if connection in self._requests:
                requests.writable = asyncio.Event()
                self._writable.wait(connection, requests.writable.set)
                await requests.writable.wait()
                requests.writable = None

    async def _answer(self, connection: Connection, request: AskHistory) -> None:
        position = request.since or request.before
        try:
            async with self._reading:
                page = await self._history.read(
                    connection.session.app.id,
                    request.channel,
                    limit=request.limit,
                    before=request.before.offset if request.before is not None else None,
                    since=request.since.offset if request.since is not None else None,
                    epoch=position.epoch if position is not None else None,
                    max_bytes=MAX_ANSWER_BYTES,
                )
        except (UnknownEpoch, InvalidOffset, Unavailable) as fault:
            self._refuse(connection, request, str(fault))
            return
        if connection not in self._requests or request.channel not in connection.session.channels:
            return
        if not page.epoch:
            self._refuse(connection, request, "the channel has no history")
            return
        if position is not None and position.offset > page.top:
            self._refuse(connection, request, str(InvalidOffset(page.top)))
            return
        stored = [StoredMessage(row.offset, row.event, row.data, row.time_ms) for row in page.rows]
        messages, cut = bounded(stored, newest=request.since is None)
        next_position = None
        if (page.more or cut) and messages:
            next_position = str(Position(page.epoch, messages[0 if request.since is None else -1].offset))
        connection.send(_frame.text(frames.history(request.channel, page.epoch, messages, next_position)))
        self.answered += 1

    def _refuse(self, connection: Connection, request: AskHistory, fault: str) -> None:
        if connection in self._requests:
            self._perform(connection, connection.session.history_refused(request.channel, fault, monotonic()))
