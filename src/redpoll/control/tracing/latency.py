"""How long traced events take from the request to the sockets: the histogram `redpoll_publish_to_socket_seconds`.

The event log has the time of each traced call and of each worker's write, so this module only subtracts the two. Events
that aren't traced cost nothing and aren't measured (`trace_calls_per_second`). On several machines their clocks
must agree, because one machine takes the first time and another the second.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from redpoll.control.http.router import no_times, time_slot

__all__ = ["PublishLatency"]

# A worker's spans are in the log within two seconds, unless Redis is away.
_KEEP_US: Final = 10_000_000
# At 10 s and 1,000 traced calls a second.
_MAX_OPEN: Final = 10_000


class PublishLatency:
    """One observation for each traced event, channel and worker. `times` and `microseconds` are as in router.Route, by
    source: `http` or `client`."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {"http": no_times(), "client": no_times()}
        self.microseconds = {"http": 0, "client": 0}
        # By event: when it came, and its source. Oldest first.
        self._began: dict[Hashable, tuple[int, str]] = {}

    def began(self, event: Hashable, at_us: int, source: str) -> None:
        """A traced event came at this Unix time. `event` stands for it alone: calls may share a trace id."""
        if len(self._began) < _MAX_OPEN:
            self._began[event] = (at_us, source)

    def written(self, event: Hashable, at_us: int) -> None:
        """A worker wrote the event to its sockets. Ignored if it isn't known when the event came."""
        began = self._began.get(event)
        if began is None:
            return
        began_us, source = began
        microseconds = max(0, at_us - began_us)
        self.times[source][time_slot(microseconds)] += 1
        self.microseconds[source] += microseconds

    def forget(self, now_us: int) -> None:
        """Forgets events that came more than 10 s ago, or that lie ahead because the clock was set back."""
        for event, (at_us, _) in list(self._began.items()):
            if abs(now_us - at_us) <= _KEEP_US:
                break
            del self._began[event]
