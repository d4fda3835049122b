"""Closes many connections at a pace, so that other clients are served in between and those who reconnect don't all come
at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final

from redpoll import _engine
from redpoll.loop.slices import SLICE_S

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["PacedClose"]

_INTERVAL_S: Final = 0.01
# A few connections don't take as long as many.
_MIN_RATE: Final = 1_000


class _Batch:
    """Connections that are closed with the same code, evenly from `begun` on. `taken` of them were looked at."""

    __slots__ = ("begun", "code", "connections", "message", "rate", "taken")

    def __init__(self, connections: Iterable[Connection], rate: float, code: int, message: str) -> None:
        self.connections = iter(connections)
        self.code = code
        self.message = message
        self.rate = rate
        self.begun: float | None = None
        self.taken = 0


class PacedClose:
    """Batches are closed one after the other. Each pass of the loop closes for a slice at most, however late it is."""

    def __init__(self) -> None:
        self.clock = monotonic
        self._batches: deque[_Batch] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def close(
        self,
        connections: Iterable[Connection],
        count: int,
        code: int,
        message: str,
        within_s: float,
        *,
        min_rate: float = _MIN_RATE,
    ) -> None:
        """Close these connections, about `count`, spread over `within_s` seconds, and at least `min_rate` a second.
        Those that were closed meanwhile are skipped."""
        self._batches.append(_Batch(connections, max(min_rate, count / within_s), code, message))
        if len(self._batches) == 1:
            self._close_some()

    def cancel(self) -> None:
        """Leave the connections open that aren't closed yet."""
        self._batches.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _close_some(self) -> None:
        now = self.clock()
        until = now + SLICE_S
        batch = self._batches[0]
        if batch.begun is None:
            batch.begun = now
        # One interval's share at once.
        due = max(1, round((now - batch.begun + _INTERVAL_S) * batch.rate))
        while batch.taken < due and now < until:
            wanted = min(10, due - batch.taken)
            part = list(islice(batch.connections, wanted))
            batch.taken += len(part)
            for connection in part:
                if connection.state == _engine.OPEN:
                    connection.shut(batch.code, batch.message)
            if len(part) < wanted:
                self._batches.popleft()
                break
            now = self.clock()
        if self._batches:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._close_some)
