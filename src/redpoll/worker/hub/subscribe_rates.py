"""Limits how fast the connections of one client address subscribe.

One connection has limits of its own, but a client may open thousands of connections, and may close them instead of
unsubscribing. Addresses are counted in the slots of addresses.py, so a limit is shared by the addresses of a
slot, and connections without a known address have no limit.
"""

from array import array
from typing import Final

from redpoll.protocol.limits import Rate, rate_of
from redpoll.worker.hub.addresses import SLOTS, factor_of

__all__ = ["SubscribeRates"]

# An office whose clients all reconnect subscribes to everything at once.
BURST_S: Final = 60.0


class SubscribeRates:
    """`per_s` subscribes per second for each address, and those of BURST_S at once; ten times as many for an address
    that clients may share. 0: no limit. `refused` counts those beyond it."""

    def __init__(self, per_s: float = 0.0) -> None:
        self.per_s = per_s
        self.refused = 0
        # By slot: when the address has its whole burst again, on the clock of the caller. 512 KiB, once it is needed.
        self._full_at: array[float] | None = None

    def take(self, slot: int, now: float) -> bool:
        """Counts a subscribe of a connection in `slot` at `now` (monotonic seconds). False: it is beyond the limit."""
        if not self.per_s:
            return True
        full_at = self._full_at
        if full_at is None:
            full_at = self._full_at = array("d", bytes(8 * SLOTS))
        next_full_at = self._rate(slot).taken(full_at[slot], now)
        if next_full_at is None:
            self.refused += 1
            return False
        full_at[slot] = next_full_at
        return True

    def charge(self, slot: int, count: int, now: float) -> None:
        """Counts this many more in `slot`, as far as the limit allows them: they were refused for another reason."""
        if not self.per_s or self._full_at is None:
            return
        rate = self._rate(slot)
        for _ in range(count):
            next_full_at = rate.taken(self._full_at[slot], now)
            if next_full_at is None:
                return
            self._full_at[slot] = next_full_at

    def _rate(self, slot: int) -> Rate:
        per_s = self.per_s * factor_of(slot)
        return rate_of(per_s, per_s * BURST_S + 1)
