"""Closes many connections at a pace, so that other clients are served in between and those who reconnect don't all come
at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final

from redpoll import _engine
from redpoll.loop.slices import SLICE_S

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["Batch", "PacedClose"]

_INTERVAL_S: Final = 0.01
# A few connections don't take as long as many.
_MIN_RATE: Final = 1_000
# Connections of one batch that are closed before the next batch has its turn.
_PART: Final = 10


class Batch:
    """Connections that are closed with the same code, evenly from `begun` on. `taken` of them were looked at. `over`:
    none is left."""

    __slots__ = ("_connections", "_wanted", "begun", "code", "ended", "message", "over", "rate", "taken")

    def __init__(
        self,
        connections: Iterable[Connection],
        rate: float,
        code: int,
        message: str,
        begun: float,
        wanted: Callable[[Connection], bool],
        ended: Callable[[], None],
    ) -> None:
        self._connections = iter(connections)
        self._wanted = wanted
        self.ended = ended
        self.code = code
        self.message = message
        self.rate = rate
        self.begun = begun
        self.taken = 0
        self.over = False

    def cancel(self) -> None:
        """Leave the connections open that aren't closed yet. `ended` isn't called."""
        self._connections = iter(())
        self.over = True
        self.ended = _nothing

    def close_part(self, now: float) -> bool:
        """Close the next few that are due at `now`. False: none is due, or none is left."""
        # One interval's share at once.
        due = max(1, round((now - self.begun + _INTERVAL_S) * self.rate))
        count = min(_PART, due - self.taken)
        if self.over or count <= 0:
            return False
        left = count
        for connection in islice(self._connections, count):
            left -= 1
            self.taken += 1
            if connection.state == _engine.OPEN and self._wanted(connection):
                connection.shut(self.code, self.message)
        if left:
            self.over = True
        return not self.over


def _nothing() -> None:
    pass


def _any(connection: Connection) -> bool:
    return True


class PacedClose:
    """Closes batches beside each other, each at its own pace. Each pass of the loop closes for a slice at most, however
    late it is; the batches have their turns in it."""

    def __init__(self) -> None:
        self.clock = monotonic
        self._batches: deque[Batch] = deque()
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
        wanted: Callable[[Connection], bool] = _any,
        ended: Callable[[], None] = _nothing,
    ) -> Batch:
        """Close these connections, about `count`, spread over `within_s` seconds, and at least `min_rate` a second.
        Those that were closed meanwhile are skipped, and those that are not `wanted` when their turn comes. `ended` is
        called after the last one, which may be within this call."""
        rate = max(min_rate, count / within_s)
        batch = Batch(connections, rate, code, message, self.clock(), wanted, ended)
        self._batches.append(batch)
        if len(self._batches) == 1:
            self._close_some()
        return batch

    def cancel(self) -> None:
        """Leave the connections open that aren't closed yet."""
        for batch in self._batches:
            batch.cancel()
        self._batches.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _close_some(self) -> None:
        now = began = self.clock()
        # Batches in a row with nothing to close in this pass.
        settled = 0
        try:
            while settled < len(self._batches) and now < began + SLICE_S:
                batch = self._batches[0]
                if batch.close_part(began):
                    settled = 0
                    self._batches.rotate(-1)
                elif batch.over:
                    self._batches.popleft()
                    batch.ended()
                else:
                    settled += 1
                    self._batches.rotate(-1)
                now = self.clock()
        finally:
            # An exception doesn't stop the others.
            if self._batches:
                self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._close_some)
