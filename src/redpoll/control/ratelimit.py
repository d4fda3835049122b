"""How many triggers an address may send a minute (spec section 8), counted in this process' memory.

A window of 60 s begins with an address' first trigger (decisions.md). A restart of the control plane forgets all of
it: the limit protects the server from one busy address, and counts nobody's money. Daily limits are daily.py's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from redpoll.control.response import header_line

__all__ = ["WINDOW_S", "RateLimit", "Window", "limit_lines"]

WINDOW_S: Final = 60.0
# 100,000 windows are about 30 MB. Who has that many addresses isn't held by a limit per address anyway.
_MAX_ADDRESSES: Final = 100_000
# Ended windows that each new one clears away: more than one, so the table shrinks after a flood.
_CLEARED_AT_ONCE: Final = 2


def limit_lines(policy: str, limit: int, reset_s: int) -> bytes:
    """The header lines of a limit but for what remains (protocol.md 14.12). `reset_s` is Unix time."""
    return (
        header_line("X-RateLimit-Policy", policy)
        + header_line("X-RateLimit-Limit", str(limit))
        + header_line("X-RateLimit-Reset", str(reset_s))
    )


class Window:
    """One address' running window. `ends` is on the limit's clock."""

    __slots__ = ("_lines", "ends", "limit", "used")

    def __init__(self, ends: float, limit: int, lines: bytes) -> None:
        self.ends = ends
        self.limit = limit
        self.used = 0
        self._lines = lines

    @property
    def passed(self) -> bool:
        """This trigger is beyond the limit."""
        return self.used > self.limit

    def headers(self) -> bytes:
        """The X-RateLimit lines as of now."""
        return b"%bX-RateLimit-Remaining: %d\r\n" % (self._lines, max(0, self.limit - self.used))


class RateLimit:
    """`per_minute` triggers by address. `clock` measures windows and may not be set back; `wall_clock` is told."""

    def __init__(
        self,
        per_minute: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_addresses: int = _MAX_ADDRESSES,
    ) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_addresses = max_addresses
        # In the order in which they end, since all are equally long.
        self._windows: dict[str, Window] = {}

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._windows)

    def take(self, address: str) -> Window:
        """Counts one trigger of `address`, also one that is refused for it: `passed` says which."""
        window = self._windows.get(address)
        if window is None or window.ends <= self._clock():
            window = self._begin(address)
        window.used += 1
        return window

    def left_s(self, window: Window) -> int:
        """Whole seconds until the window has ended, at least 1."""
        return max(1, math.ceil(window.ends - self._clock()))

    def _begin(self, address: str) -> Window:
        now, windows = self._clock(), self._windows
        windows.pop(address, None)
        for _ in range(_CLEARED_AT_ONCE):
            oldest = next(iter(windows), None)
            if oldest is None or (windows[oldest].ends > now and len(windows) < self._max_addresses):
                break
            del windows[oldest]
        lines = limit_lines("ip", self.per_minute, math.ceil(self._wall_clock() + WINDOW_S))
        windows[address] = window = Window(now + WINDOW_S, self.per_minute, lines)
        return window
