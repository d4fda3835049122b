"""When connections came, and with which client library, for the dashboard.

It must cost next to nothing: all connections of one second with the same library share one object, so a connection
pays a pointer.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

__all__ = ["UNKNOWN", "ClientLibraries", "ClientSeen"]

_MAX_CHARS: Final = 40
# Clients choose these names, so their number is bounded.
_MAX_LIBRARIES: Final = 100


class ClientSeen(NamedTuple):
    """`library` is name and version as the client says, "" if it doesn't. `at_s` is Unix time. `address` is the
    client's if a trusted proxy named it in a header; such a connection has an object of its own."""

    library: str
    at_s: int
    address: str = ""


UNKNOWN: Final = ClientSeen("", 0)


class ClientLibraries:
    """Makes `ClientSeen`. `clock` is Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # By what the client says, cut to a bounded length.
        self._last: dict[tuple[str, str], ClientSeen] = {}
        self._query: Mapping[str, str] | None = None
        self._last_seen = UNKNOWN

    def note(self, query: Mapping[str, str]) -> ClientSeen:
        """For a connection with this query (`client`, `version`: protocol/README.md "Connecting")."""
        now_s = int(self._clock())
        if query is self._query and self._last_seen.at_s == now_s:
            # The gate remembers the queries of clients, and most have the same.
            return self._last_seen
        said = query.get("client", "")[:_MAX_CHARS], query.get("version", "")[:_MAX_CHARS]
        last = self._last.get(said)
        if last is None:
            if len(self._last) >= _MAX_LIBRARIES:
                self._last.clear()
            library = "".join(char for char in " ".join(said) if char.isprintable()).strip()
            last = self._last[said] = ClientSeen(library, now_s)
        elif last.at_s != now_s:
            last = self._last[said] = ClientSeen(last.library, now_s)
        self._query, self._last_seen = query, last
        return last
