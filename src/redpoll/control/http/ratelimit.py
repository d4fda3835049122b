"""The rate limit: how many triggers per minute an address may send.

A window of 60 s begins with the first trigger of an address (protocol/README.md "Limits"). A single node counts in this
process' memory. Of several nodes, each takes a hundredth of an address's limit from Redis at a time and counts it down
here (cluster/shared_rate.py). A restart resets the windows of a single node. That is acceptable, because this limit
only protects the server from a busy address. daily_limit.py has the daily limits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from redpoll.cluster.shared_rate import SharedRate
from redpoll.config.proxies import network_of
from redpoll.control.http.response import header_line
from redpoll.protocol.limits import BoundedTable

__all__ = ["WINDOW_S", "RateLimit", "Window", "limit_lines"]

WINDOW_S: Final = 60.0
# 100,000 windows take about 30 MB. A limit per address doesn't stop a client with that many addresses anyway.
_MAX_ADDRESSES: Final = 100_000
# With several nodes, each takes a limit in so many parts. What a node has taken and not used when the limit is reached
# is lost to the address until the window ends.
_PARTS: Final = 100


def limit_lines(policy: str, limit: int, reset_s: int) -> bytes:
    """The header lines of a limit, except X-RateLimit-Remaining. `reset_s` is in Unix seconds."""
    return (
        header_line("X-RateLimit-Policy", policy)
        + header_line("X-RateLimit-Limit", str(limit))
        + header_line("X-RateLimit-Reset", str(reset_s))
    )


class Window:
    """The current window of one address. `ends` is a time of RateLimit's `clock`.

    `room` triggers may be accepted here: all of the limit, or what was taken from Redis so far. `elsewhere` is what
    other nodes have taken. `full`: nothing is left in Redis.
    """

    __slots__ = ("_lines", "elsewhere", "ends", "full", "room", "used")

    def __init__(self, ends: float, room: int, lines: bytes) -> None:
        self.ends = ends
        self.room = room
        self.used = 0
        self.elsewhere = 0
        self.full = False
        self._lines = lines

    @property
    def passed(self) -> bool:
        """The limit is exceeded by the last trigger."""
        return self.used > self.room

    def headers(self, limit: int) -> bytes:
        """The current X-RateLimit header lines."""
        left = max(0, limit - self.elsewhere - self.used)
        return b"%bX-RateLimit-Remaining: %d\r\n" % (self._lines, left)


class RateLimit:
    """`per_minute` triggers per address. `shared` is needed for several nodes. `clock()` returns monotonic seconds,
    `wall_clock()` Unix seconds for headers.

    `is_shared`: several nodes are alive, and `take_shared` counts instead of `take`.
    """

    def __init__(
        self,
        per_minute: int,
        shared: SharedRate | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_addresses: int = _MAX_ADDRESSES,
    ) -> None:
        self.per_minute = per_minute
        self.is_shared = False
        self._shared = shared
        # The part that each waiting address takes from Redis.
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._wall_clock = wall_clock
        # Sorted by their end, because all are equally long.
        self._windows: BoundedTable[str, Window] = BoundedTable(max_addresses)

    def __len__(self) -> int:
        """The number of addresses in memory."""
        return len(self._windows)

    def share(self, is_shared: bool) -> None:
        """Several nodes are alive, or only this one. Windows begin again when that changes."""
        if self._shared is not None and is_shared != self.is_shared:
            self.is_shared = is_shared
            self._windows.clear()

    async def take_shared(self, address: str) -> Window:
        """As `take`, with several nodes. Raises Unavailable."""
        address = network_of(address)
        while self.is_shared:
            window = self._windows.get(address)
            if window is not None and window.ends > self._clock() and (window.used < window.room or window.full):
                window.used += 1
                return window
            taking = self._taking.get(address)
            if taking is None:
                taking = asyncio.get_running_loop().create_task(self._take_part(address))
                self._taking[address] = taking
                taking.add_done_callback(lambda _: self._taking.pop(address))
            await asyncio.shield(taking)
        return self.take(address)

    async def _take_part(self, address: str) -> None:
        assert self._shared is not None
        part = await self._shared.take(address, max(1, self.per_minute // _PARTS), self.per_minute, WINDOW_S)
        if not self.is_shared:
            return
        window = self._windows.get(address)
        if window is None or window.ends <= self._clock():
            window = self._begin(address, 0, part.left_s)
        window.room += part.granted
        window.elsewhere = max(0, part.taken - window.room)
        window.full = part.granted == 0

    def take(self, address: str) -> Window:
        """Counts one trigger of `address` and returns its window. The trigger must be refused if `passed` is true.

        Of an IPv6 address the /64 counts: a client usually has a whole one.
        """
        address = network_of(address)
        window = self._windows.get(address)
        if window is None or window.ends <= self._clock():
            window = self._begin(address, self.per_minute, WINDOW_S)
        window.used += 1
        return window

    def take_room(self, address: str) -> bytes | None:
        """As `take`, but counts nothing and returns None if the limit is reached or Redis must be asked; otherwise
        returns the X-RateLimit header lines."""
        window = self._windows.get(network_of(address))
        if window is not None and window.ends > self._clock():
            if window.used >= window.room:
                return None
        elif self.is_shared:
            return None
        return self.take(address).headers(self.per_minute)

    def left_s(self, window: Window) -> int:
        """Whole seconds until the window ends, at least 1."""
        return max(1, math.ceil(window.ends - self._clock()))

    def _begin(self, address: str, room: int, left_s: float) -> Window:
        now = self._clock()
        lines = limit_lines("ip", self.per_minute, math.ceil(self._wall_clock() + left_s))
        window = Window(now + left_s, room, lines)
        self._windows.put(address, window, lambda old: old.ends <= now)
        return window
