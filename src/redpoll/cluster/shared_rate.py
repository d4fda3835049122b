"""The rate limit by address over several nodes, counted in Redis.

A node takes a part of an address's limit at a time (script `rate`), and counts it down in memory
(control/http/ratelimit.py). So a publish needs no round trip unless the limit is small, and never do all nodes together
accept more than the limit.
"""

from typing import Final, NamedTuple

from redpoll.cluster.bus import CONFIRM_S, ask_within
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import RATE

__all__ = ["Part", "SharedRate"]

_MS: Final = 1_000


class Part(NamedTuple):
    """`granted` triggers more may be accepted by this node. `taken` is what all nodes have taken, these included. The
    window ends in `left_s`."""

    granted: int
    taken: int
    left_s: float


class SharedRate:
    """`take` for each part."""

    def __init__(self, link: Link, keys: Keys, *, confirm_s: float = CONFIRM_S) -> None:
        self._link = link
        self._keys = keys
        self._confirm_s = confirm_s

    async def take(self, address: str, wanted: int, limit: int, window_s: float) -> Part:
        """At most `wanted` of what is left of `limit` in the address's window. Raises Unavailable."""
        names, args = (self._keys.rate(address),), (wanted, limit, int(window_s * _MS))
        ask = self._link.execute
        granted, taken, left_ms = await ask_within(self._link, lambda: ask(RATE, names, args), self._confirm_s)
        return Part(granted, taken, left_ms / _MS)
