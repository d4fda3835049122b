"""Closes many connections at a pace, so that other clients are served in between and those who reconnect don't all come
at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from redpoll import _engine
from redpoll.cluster.membership.slices import SLICE_S

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["PacedClose"]

_INTERVAL_S: Final = 0.01
# A few connections don't take as long as many.
_MIN_RATE: Final = 1_000


class _Batch:
    """Connections that are closed with the same code, evenly from `begun` on."""

    __slots__ = ("at", "begun", "code", "connections", "message", "rate")

    def __init__(self, connections: Sequence[Connection], code: int, message: str, within_s: float) -> None:
        self.connections = connections
        self.code = code
        self.message = message
        self.rate = max(_MIN_RATE, len(connections) / within_s)
        self.begun: float | None = None
        self.at = 0


class PacedClose:
    """Batches are closed one after the other. Each pass of the loop closes for a slice at most, however late it is."""

    def __init__(self) -> None:
        self.clock = monotonic
        self._batches: deque[_Batch] = deque()

    def close(self, connections: Sequence[Connection], code: int, message: str, within_s: float) -> None:
        """Close these connections, spread over `within_s` seconds, and at least 1,000 a second. Those that were closed
        meanwhile are skipped."""
        if connections:
            self._batches.append(_Batch(connections, code, message, within_s))
            if len(self._batches) == 1:
                self._close_some()

    def _close_some(self) -> None:
        now = self.clock()
        until = now + SLICE_S
        batch = self._batches[0]
        if batch.begun is None:
            batch.begun = now
        # One interval's share at once.
        due = min(len(batch.connections), round((now - batch.begun + _INTERVAL_S) * batch.rate))
        while batch.at < due and now < until:
            for connection in batch.connections[batch.at : min(batch.at + 10, due)]:
                batch.at += 1
                if connection.state == _engine.OPEN:
                    connection.shut(batch.code, batch.message)
            now = self.clock()
        if batch.at == len(batch.connections):
            self._batches.popleft()
        if self._batches:
            asyncio.get_running_loop().call_later(_INTERVAL_S, self._close_some)
