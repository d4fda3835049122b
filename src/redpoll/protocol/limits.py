"""Rate limits of one connection: a token bucket and a window. Times are seconds of any monotonic clock."""

import msgspec

__all__ = ["Limits", "Refusals", "TokenBucket", "Window"]

# Absorbs rounding when intervals are added, so that a burst of exactly the allowed size passes.
_ROUNDING_S = 1e-6


class Refusals(msgspec.Struct, gc=False):
    """How often sessions refused something because of a limit; for /metrics."""

    subscribes: int = 0


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Limits per connection that are settings of the server, not of an app. All sessions share one.

    `max_channels` counts subscriptions, pending ones included. `client_events_per_s` is rate and burst.
    `subscribes_per_s` is the rate of subscribes to further channels after unsubscribes; its burst is `max_channels`.
    Rates: 0 is no limit. Sessions count in `refusals`.
    """

    max_channels: int = 1000
    client_events_per_s: float = 10.0
    subscribes_per_s: float = 50.0
    refusals: Refusals = msgspec.field(default_factory=Refusals)


class TokenBucket:
    """Allows `burst` at once and `rate` per second over time. Its only state is the time at which it is full again."""

    __slots__ = ("_full_at_s", "_interval_s", "_slack_s")

    def __init__(self, rate: float, burst: float) -> None:
        self._interval_s = 1.0 / rate
        self._slack_s = (max(burst, 1.0) - 1.0) / rate + _ROUNDING_S
        self._full_at_s = float("-inf")

    def take(self, now: float) -> bool:
        """Takes a token if there is one at `now`; False if not."""
        full_at_s = self._full_at_s
        if full_at_s <= now:
            self._full_at_s = now + self._interval_s
            return True
        if full_at_s - now > self._slack_s:
            return False
        self._full_at_s = full_at_s + self._interval_s
        return True

    def charge(self, now: float) -> None:
        """Takes a token even if there is none: the bucket then fills up later."""
        self._full_at_s = max(self._full_at_s, now) + self._interval_s

    def is_empty(self, now: float) -> bool:
        """Whether `take` would fail."""
        return self._full_at_s - now > self._slack_s


class Window:
    """Adds up weights within `length_s` seconds of the first one, then starts again from 0."""

    __slots__ = ("_began_at_s", "_length_s", "_limit", "_weight")

    def __init__(self, limit: int, length_s: float) -> None:
        self._limit = limit
        self._length_s = length_s
        self._began_at_s = float("-inf")
        self._weight = 0

    def add(self, weight: int, now: float) -> bool:
        """True if the window has reached `limit`."""
        if now - self._began_at_s >= self._length_s:
            self._began_at_s = now
            self._weight = 0
        self._weight += weight
        return self._weight >= self._limit
