"""When connections came, and with which library: for the operator to look at, so it must cost next to nothing.

All that come in the same second with the same library share one object; a connection pays a pointer.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

__all__ = ["UNKNOWN", "Arrival", "ClientLibraries"]

_MOST_CHARS: Final = 40
# Libraries are few; who makes names up finds the table small.
_MOST_LIBRARIES: Final = 100


class Arrival(NamedTuple):
    """`library` is name and version as the client says, "" where it doesn't. `at_s` is Unix time."""

    library: str
    at_s: int


UNKNOWN: Final = Arrival("", 0)


class ClientLibraries:
    """Makes arrivals. `clock` is Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: dict[str, Arrival] = {}

    def note(self, query: Mapping[str, str]) -> Arrival:
        """A connection came by an upgrade with this query (`client`, `version`: protocol.md 1)."""
        words = (query.get(name, "")[:_MOST_CHARS] for name in ("client", "version"))
        library = "".join(each for each in " ".join(words) if each.isprintable()).strip()
        now_s = int(self._clock())
        last = self._last.get(library)
        if last is None or last.at_s != now_s:
            if last is None and len(self._last) >= _MOST_LIBRARIES:
                self._last.clear()
            last = self._last[library] = Arrival(library, now_s)
        return last
