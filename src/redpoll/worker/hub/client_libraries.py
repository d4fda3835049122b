"""When connections came, and with which client library, for the dashboard.

It must cost next to nothing: all connections of one second with the same library share one object, so a connection
pays a pointer. A removal of a user (removed.py) begins a new object, too: what came before it is then told from what
came after it, whatever the clock does.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from redpoll.worker.hub.removed import REMOVALS, RemovalCount

__all__ = ["UNKNOWN", "ClientLibraries", "ClientSeen"]

_MAX_CHARS: Final = 40
# Clients choose these names, so their number is bounded.
_MAX_LIBRARIES: Final = 100
# Enough for Unix time; the number of removals lies above it in one number.
_TIME_BITS: Final = 40
_TIME_MASK: Final = (1 << _TIME_BITS) - 1


class ClientSeen(NamedTuple):
    """`library` is name and version as the client says, "" if it doesn't. `stamp` is `at_s` and `removals` in one
    number, because a field of its own would make each connection behind a proxy bigger. `address` is the client's if
    a trusted proxy named it in a header; such a connection has an object of its own."""

    library: str
    stamp: int
    address: str = ""

    @property
    def at_s(self) -> int:
        """Unix time at which the connection came, for people; the clock may have been set since."""
        return self.stamp & _TIME_MASK

    @property
    def removals(self) -> int:
        """How many removals of users the worker had noted when the connection came."""
        return self.stamp >> _TIME_BITS


UNKNOWN: Final = ClientSeen("", 0)


class ClientLibraries:
    """Makes `ClientSeen`. `clock` is Unix time, `removals` counts the removals of users."""

    def __init__(self, clock: Callable[[], float] = time.time, removals: RemovalCount = REMOVALS) -> None:
        self._clock = clock
        self._removals = removals
        # By what the client says, cut to a bounded length.
        self._last: dict[tuple[str, str], ClientSeen] = {}
        self._query: Mapping[str, str] | None = None
        self._last_seen = UNKNOWN

    def note(self, query: Mapping[str, str]) -> ClientSeen:
        """For a connection with this query (`client`, `version`: protocol/README.md "Connecting")."""
        stamp = self._removals.value << _TIME_BITS | int(self._clock())
        if query is self._query and self._last_seen.stamp == stamp:
            # The gate remembers the queries of clients, and most have the same.
            return self._last_seen
        said = query.get("client", "")[:_MAX_CHARS], query.get("version", "")[:_MAX_CHARS]
        last = self._last.get(said)
        if last is None:
            if len(self._last) >= _MAX_LIBRARIES:
                self._last.clear()
            library = "".join(char for char in " ".join(said) if char.isprintable()).strip()
            last = self._last[said] = ClientSeen(library, stamp)
        elif last.stamp != stamp:
            last = self._last[said] = ClientSeen(last.library, stamp)
        self._query, self._last_seen = query, last
        return last
