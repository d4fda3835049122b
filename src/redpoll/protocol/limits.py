"""Counting against limits in time and number, for one connection. Time is an argument, in seconds of any
monotonic clock."""

import msgspec

__all__ = ["Limits", "TokenBucket", "Window"]

# Absorbs the rounding of sums of intervals, so that a burst of exactly the size allowed passes.
_ROUNDING_S = 1e-6


class Limits(msgspec.Struct, frozen=True, gc=False):
    """What one connection may, as far as the operator decides it and not the app. One for all sessions.

    `max_channels` counts channels joined or being joined. `client_events_per_s` is rate and burst; 0 is no
    limit.
    """

    max_channels: int = 1000
    client_events_per_s: float = 10.0


class TokenBucket:
    """At most `burst` at once and `rate` a second over time. The state is one float: when it is full."""

    __slots__ = ("_full_at_s", "_interval_s", "_slack_s")

    def __init__(self, rate: float, burst: float) -> None:
        self._interval_s = 1.0 / rate
        self._slack_s = (max(burst, 1.0) - 1.0) / rate + _ROUNDING_S
        self._full_at_s = float("-inf")

    def take(self, now: float) -> bool:
        """One token, if there is one at `now`."""
        full_at_s = self._full_at_s
        if full_at_s <= now:
            self._full_at_s = now + self._interval_s
            return True
        if full_at_s - now > self._slack_s:
            return False
        self._full_at_s = full_at_s + self._interval_s
        return True


class Window:
    """Weighs what happens within `length_s` of the first thing that happened; then begins anew."""

    __slots__ = ("_began_at_s", "_length_s", "_most", "_weight")

    def __init__(self, most: int, length_s: float) -> None:
        self._most = most
        self._length_s = length_s
        self._began_at_s = float("-inf")
        self._weight = 0

    def add(self, weight: int, now: float) -> bool:
        """True when the window has `most` or more."""
        if now - self._began_at_s >= self._length_s:
            self._began_at_s = now
            self._weight = 0
        self._weight += weight
        return self._weight >= self._most
