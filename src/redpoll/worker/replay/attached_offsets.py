"""From which offset each connection hears its channels. It is remembered until its user can no longer turn out to have
returned.

An entry goes when its connection leaves the channel or closes, and at the latest when its time is over. So there are
never more entries than open subscriptions. Apps have different times, and each time has a queue of its own, in which
the first entry is the first that is due.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["AttachedOffsets"]

_NONE: Final[Mapping[str, int]] = {}


class _Entry(NamedTuple):
    offset: int
    seconds: int


class AttachedOffsets:
    """Times are the loop's. False while it is empty."""

    def __init__(self) -> None:
        self._entries: dict[Connection, dict[str, _Entry]] = {}
        # By the time for which entries are remembered: when each was noted. A dict would walk over its deleted entries
        # at each look at the first one.
        self._queues: dict[int, OrderedDict[tuple[Connection, str], float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def note(self, connection: Connection, channel: str, offset: int, seconds: int, now: float) -> None:
        """The connection hears the channel from `offset` on. Takes the place of an earlier entry."""
        self.leave(connection, channel)
        self._entries.setdefault(connection, {})[channel] = _Entry(offset, seconds)
        self._queues.setdefault(seconds, OrderedDict())[connection, channel] = now

    def of(self, connection: Connection) -> Mapping[str, int]:
        """The offsets of a connection by channel."""
        entries = self._entries.get(connection)
        return _NONE if entries is None else {channel: entry.offset for channel, entry in entries.items()}

    def leave(self, connection: Connection, channel: str) -> None:
        """The connection no longer hears the channel, or not from that offset."""
        entries = self._entries.get(connection)
        entry = entries.pop(channel, None) if entries is not None else None
        if entry is None:
            return
        if not entries:
            del self._entries[connection]
        queue = self._queues[entry.seconds]
        del queue[connection, channel]
        if not queue:
            del self._queues[entry.seconds]

    def close(self, connection: Connection) -> None:
        """The connection closed, or its app has no user resume any more."""
        for channel in list(self._entries.get(connection, ())):
            self.leave(connection, channel)

    def expire(self, now: float, at_most: int) -> None:
        """Forget entries whose time is over, at most so many of each time."""
        for seconds, queue in list(self._queues.items()):
            for _ in range(at_most):
                # The last one deletes the queue, and this one is empty then.
                key = next(iter(queue), None)
                if key is None or queue[key] + seconds > now:
                    break
                self.leave(*key)
