"""What limits are made of: a rate with a burst, a window, and a table that clients can't make grow without end.

Times are seconds of any monotonic clock.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

__all__ = ["BoundedTable", "Limits", "Rate", "Refusals", "TokenBucket", "Window", "rate_of"]

# Absorbs rounding when intervals are added, so that a burst of exactly the allowed size passes.
_ROUNDING_S: Final = 1e-6
_REMOVED_AT_ONCE: Final = 2
_Key = TypeVar("_Key")
_Row = TypeVar("_Row")


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


class Rate:
    """A rate that is limited: `burst` at once, and `per_s` per second over time (the generic cell rate algorithm).

    The only state of who is limited is the time at which the burst is whole again. Callers keep it, at first any time
    in the past.
    """

    __slots__ = ("interval_s", "slack_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self.interval_s = 1.0 / per_s
        self.slack_s = (max(burst, 1.0) - 1.0) / per_s + _ROUNDING_S

    def taken(self, full_at_s: float, now: float) -> float | None:
        """The new state after one more at `now`; None if that is too much."""
        if full_at_s <= now:
            return now + self.interval_s
        return None if full_at_s - now > self.slack_s else full_at_s + self.interval_s

    def charged(self, full_at_s: float, now: float) -> float:
        """The new state after one more at `now`, even if it is too much: the burst is then whole later."""
        return max(full_at_s, now) + self.interval_s

    def wait_s(self, full_at_s: float, now: float) -> float:
        """Seconds until there may be one more; 0 if there may be one now."""
        return max(0.0, full_at_s - now - self.slack_s)


@lru_cache(maxsize=64)
def rate_of(per_s: float, burst: float) -> Rate:
    """The Rate that all with this limit share."""
    return Rate(per_s, burst)


class TokenBucket:
    """A Rate with the state of one connection. Each subscribe uses `charge` and `is_empty`: no further calls."""

    __slots__ = ("_full_at_s", "_rate")

    def __init__(self, per_s: float, burst: float) -> None:
        self._rate = rate_of(per_s, burst)
        self._full_at_s = float("-inf")

    def take(self, now: float) -> bool:
        """Takes a token if there is one at `now`; False if not."""
        full_at_s = self._rate.taken(self._full_at_s, now)
        if full_at_s is None:
            return False
        self._full_at_s = full_at_s
        return True

    def charge(self, now: float) -> None:
        """Takes a token even if there is none: the bucket then fills up later."""
        self._full_at_s = max(self._full_at_s, now) + self._rate.interval_s

    def is_empty(self, now: float) -> bool:
        """Whether `take` would fail."""
        return self._full_at_s - now > self._rate.slack_s


class BoundedTable(dict[_Key, _Row]):
    """At most `max_rows` rows, which clients cause. The row that was put last is last."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows

    def put(self, key: _Key, row: _Row, is_over: Callable[[_Row], bool]) -> None:
        """Adds or replaces a row. Removes the oldest ones if they are over or the table is full, but never more than
        two: enough for the table to shrink after a flood."""
        self.pop(key, None)
        for _ in range(_REMOVED_AT_ONCE):
            oldest = next(iter(self), None)
            if oldest is None or (len(self) < self._max_rows and not is_over(self[oldest])):
                break
            del self[oldest]
        self[key] = row


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
