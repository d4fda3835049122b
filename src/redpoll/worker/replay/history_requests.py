"""Answers to `pusher:history`: a page of what a channel keeps, for a client that asked for it (protocol.md 13).

One question of a connection at a time, in their order, and the next when the client has read most of the answer: so
neither a long history nor many questions hold up anybody else. Who may ask the session has judged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from redpoll import _frame
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.history import InvalidOffset, Page, UnknownEpoch
from redpoll.protocol import frames
from redpoll.protocol.effects import AskHistory
from redpoll.protocol.history import Position, Told

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection
    from redpoll.worker.hub import Hub

__all__ = ["HistoryRequests"]

# Of an answer, as it is sent; one message alone may have more.
_MOST_BYTES = 256 * 1024
_MOST_OWED_BYTES = 256 * 1024
_LOOK_S = 0.02
# Of one connection: as many as it may ask for at once (protocol/session.py).
_MOST_WAITING = 100
# Readings at a time, each of up to 128 KiB a step: the rest of a worker shares the connection with them.
_MOST_READING = 8

_encode = msgspec.json.Encoder().encode


class HistoryRequests:
    """All questions of a worker's clients. `answered` counts answers, for /metrics."""

    def __init__(self, hub: Hub) -> None:
        self.answered = 0
        self._hub = hub
        self._asked: dict[Connection, deque[AskHistory]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = asyncio.Semaphore(_MOST_READING)

    def ask(self, connection: Connection, asked: AskHistory) -> None:
        """Answers behind what this connection asked before."""
        waiting = self._asked.get(connection)
        if waiting is not None:
            if len(waiting) < _MOST_WAITING:
                waiting.append(asked)
            else:
                self._refuse(connection, asked, f"{_MOST_WAITING} earlier requests wait to be answered")
            return
        self._asked[connection] = deque((asked,))
        task = asyncio.get_running_loop().create_task(self._answer_all(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def closed(self, connection: Connection) -> None:
        """It isn't interested any more."""
        self._asked.pop(connection, None)

    async def _answer_all(self, connection: Connection) -> None:
        while waiting := self._asked.get(connection):
            asked = waiting.popleft()
            try:
                await self._answer(connection, asked)
            finally:
                # Whatever went wrong, it may ask again.
                if not waiting and self._asked.get(connection) is waiting:
                    del self._asked[connection]
            while connection in self._asked and connection.bytes_owed >= _MOST_OWED_BYTES:
                await asyncio.sleep(_LOOK_S)

    async def _answer(self, connection: Connection, asked: AskHistory) -> None:
        place = asked.since or asked.before
        try:
            async with self._reading:
                page = await self._hub.registry.history.read(
                    connection.session.app.id,
                    asked.channel,
                    limit=asked.limit,
                    before=asked.before.offset if asked.before is not None else None,
                    since=asked.since.offset if asked.since is not None else None,
                    epoch=place.epoch if place is not None else None,
                    max_bytes=_MOST_BYTES,
                )
        except (UnknownEpoch, InvalidOffset, Unavailable) as fault:
            self._refuse(connection, asked, str(fault))
            return
        if connection not in self._asked or asked.channel not in connection.session.channels:
            return
        if not page.epoch:
            self._refuse(connection, asked, "no history is kept of it")
            return
        if place is not None and place.offset > page.top:
            self._refuse(connection, asked, str(InvalidOffset(page.top)))
            return
        messages, more = _bounded(page, newest=asked.since is None)
        after = None
        if more and messages:
            after = str(Position(page.epoch, messages[0 if asked.since is None else -1].offset))
        connection.send(_frame.text(frames.history(asked.channel, page.epoch, messages, after)))
        self.answered += 1

    def _refuse(self, connection: Connection, asked: AskHistory, fault: str) -> None:
        if connection in self._asked:
            self._hub.perform(connection, connection.session.history_refused(asked.channel, fault, monotonic()))


def _bounded(page: Page, newest: bool) -> tuple[list[Told], bool]:
    """As many messages of a page as an answer may have, from its newer or older end, and whether there are others."""
    told: list[Told] = []
    size = 0
    for row in reversed(page.rows) if newest else page.rows:
        message = Told(row.offset, row.event, row.data, row.time_ms)
        # It is text within text: what has to be escaped once has to be again.
        size += len(_encode(_encode(message).decode()))
        if told and size > _MOST_BYTES:
            break
        told.append(message)
    if newest:
        told.reverse()
    return told, page.more or len(told) < len(page.rows)
