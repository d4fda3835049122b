"""The rate limit: how many triggers per minute an address may send. It is counted in this process' memory.

A window of 60 s begins with the first trigger of an address (protocol/README.md "Limits"). A restart resets all
windows. That is acceptable, because this limit only protects the server from a busy address. daily_limit.py has the
daily limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from redpoll.control.response import header_line
from redpoll.proxies import network_of

__all__ = ["WINDOW_S", "RateLimit", "Window", "limit_lines"]

WINDOW_S: Final = 60.0
# 100,000 windows take about 30 MB. A limit per address doesn't stop a client with that many addresses anyway.
_MAX_ADDRESSES: Final = 100_000
# Each new window removes up to this many ended ones: more than one, so that the table shrinks after a flood.
_CLEARED_AT_ONCE: Final = 2


def limit_lines(policy: str, limit: int, reset_s: int) -> bytes:
    """The header lines of a limit, except X-RateLimit-Remaining. `reset_s` is in Unix seconds."""
    return (
        header_line("X-RateLimit-Policy", policy)
        + header_line("X-RateLimit-Limit", str(limit))
        + header_line("X-RateLimit-Reset", str(reset_s))
    )


class Window:
    """The current window of one address. `ends` is a time of RateLimit's `clock`."""

    __slots__ = ("_lines", "ends", "limit", "used")

    def __init__(self, ends: float, limit: int, lines: bytes) -> None:
        self.ends = ends
        self.limit = limit
        self.used = 0
        self._lines = lines

    @property
    def passed(self) -> bool:
        """The limit is exceeded by the last trigger."""
        return self.used > self.limit

    def headers(self) -> bytes:
        """The current X-RateLimit header lines."""
        return b"%bX-RateLimit-Remaining: %d\r\n" % (self._lines, max(0, self.limit - self.used))


class RateLimit:
    """`per_minute` triggers per address. `clock()` returns monotonic seconds, `wall_clock()` Unix seconds for
    headers."""

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
        # Sorted by their end, because all are equally long.
        self._windows: dict[str, Window] = {}

    def __len__(self) -> int:
        """The number of addresses in memory."""
        return len(self._windows)

    def take(self, address: str) -> Window:
        """Counts one trigger of `address` and returns its window. The trigger must be refused if `passed` is true.

        Of an IPv6 address the /64 counts: a client usually has a whole one.
        """
        address = network_of(address)
        window = self._windows.get(address)
        if window is None or window.ends <= self._clock():
            window = self._begin(address)
        window.used += 1
        return window

    def take_room(self, address: str) -> bytes | None:
        """As `take`, but counts nothing and returns None if the limit is reached; otherwise returns the X-RateLimit
        header lines."""
        window = self._windows.get(network_of(address))
        if window is not None and window.used >= window.limit and window.ends > self._clock():
            return None
        return self.take(address).headers()

    def left_s(self, window: Window) -> int:
        """Whole seconds until the window ends, at least 1."""
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
