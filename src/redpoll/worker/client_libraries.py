"""When connections came, and with which client library, for the dashboard.

It must cost next to nothing: all connections of one second with the same library share one object, so a connection
pays a pointer.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

__all__ = ["UNKNOWN", "Arrival", "ClientLibraries"]

_MAX_CHARS: Final = 40
# Clients choose these names, so their number is bounded.
_MAX_LIBRARIES: Final = 100


class Arrival(NamedTuple):
    """`library` is name and version as the client says, "" if it doesn't. `at_s` is Unix time."""

    library: str
    at_s: int


UNKNOWN: Final = Arrival("", 0)


class ClientLibraries:
    """Makes arrivals. `clock` is Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: dict[str, Arrival] = {}

    def note(self, query: Mapping[str, str]) -> Arrival:
        """The arrival of a connection with this query (`client`, `version`: protocol/README.md "Connecting")."""
        words = (query.get(name, "")[:_MAX_CHARS] for name in ("client", "version"))
        library = "".join(char for char in " ".join(words) if char.isprintable()).strip()
        now_s = int(self._clock())
        last = self._last.get(library)
        if last is None or last.at_s != now_s:
            if last is None and len(self._last) >= _MAX_LIBRARIES:
                self._last.clear()
            last = self._last[library] = Arrival(library, now_s)
        return last
