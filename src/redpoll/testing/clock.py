"""The time of a fake server: real time, and what the test advanced it by.

Timers are ordered by this time, and called in the server's loop. `advance` calls those that become due, in order.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redpoll.testing.loop_thread import LoopThread

__all__ = ["Clock", "Timer"]


class Timer:
    """A call that waits for its time; `cancel` before it to prevent it."""

    __slots__ = ("call", "due")

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """`now` is monotonic, `time_s` is Unix time, both in seconds. Signatures are checked by the real time, because
    publishers sign with it."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._ahead_s = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._alarm: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def time_s(self) -> float:
        return time.time() + self._ahead_s

    @staticmethod
    def real_time_s() -> float:
        """Unix time, not advanced."""
        return time.time()

    def advance(self, seconds: float) -> None:
        """Let this much time pass at once: silence, expiries and debounces happen as if nobody sent anything meanwhile.

        To let a client answer a ping in between, advance in steps. Raises ValueError for a negative time.
        """
        if seconds < 0:
            raise ValueError(f"time can't go back by {-seconds:g} s")
        self._thread.call(self._advance, seconds)

    # -- in the server's loop

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._numbers), timer))
        self._set_alarm()
        return timer

    def stop(self) -> None:
        self._timers.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _advance(self, seconds: float) -> None:
        until = self.now() + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, timer = heapq.heappop(self._timers)
            self._ahead_s += max(0.0, due - self.now())
            self._fire(timer)
        self._ahead_s += max(0.0, until - self.now())
        self._set_alarm()

    def _ring(self) -> None:
        self._alarm = None
        while self._timers and self._timers[0][0] <= self.now():
            self._fire(heapq.heappop(self._timers)[2])
        self._set_alarm()

    @staticmethod
    def _fire(timer: Timer) -> None:
        call, timer.call = timer.call, None
        if call is not None:
            call()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._timers:
            wait_s = max(0.0, self._timers[0][0] - self.now())
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self._ring)
