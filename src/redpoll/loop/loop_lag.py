"""Measures how long an event loop stands still.

A timer that is due every 50 ms runs late by as much as the loop was busy, so each stall shows, less the 50 ms at most
that passed between its beginning and the next timer. Due more often, it would be most of what an idle process does.
"""

import asyncio
from time import monotonic
from typing import Final

__all__ = ["LoopLag"]

_EVERY_S: Final = 0.05


class LoopLag:
    """`start` and `stop` it on the loop that is measured."""

    def __init__(self) -> None:
        # A loop's own clock may stand still within a pass.
        self.clock = monotonic
        self._longest_s = 0.0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_at = self.clock() + _EVERY_S
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take_s(self) -> float:
        """The greatest delay since the last call, in seconds."""
        # A stall that ended a moment ago shows before its timer has run.
        longest_s = max(self._longest_s, 0.0 if self._timer is None else self.clock() - self._due_at)
        self._longest_s = 0.0
        return longest_s

    def _look(self) -> None:
        self._longest_s = max(self._longest_s, self.clock() - self._due_at)
        self.start()
