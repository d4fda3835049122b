"""Joins the stored messages of a channel with a rate, so that a replay sends a text as one event.

A replay reads its pages as without a rate. What they contain waits here until the last page is read, or until an event
has as many bytes as it may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from redpoll.protocol.joining import Joined, Joiner, Pace, Part
from redpoll.worker.replay.pacing import frame_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from redpoll.worker.hub.connection import Connection

__all__ = ["Gathering", "Located"]


class Located(NamedTuple):
    """The events begin after the offset `since`. Of the messages up to `mixed_until`, only those with a key in `keys`
    belong to them."""

    since: int
    keys: frozenset[object]
    mixed_until: int


class Gathering:
    """What one replay has read and not sent. `channel` is its name on the wire. `located` says which messages are left
    out, None: none are."""

    __slots__ = ("_channel", "_joiner", "_socket_id", "_with_offset", "located", "pace")

    def __init__(self, pace: Pace, channel: bytes, connection: Connection, with_offset: bool) -> None:
        self.pace = pace
        self.located: Located | None = None
        self._channel = channel
        self._socket_id = (connection.sid_hi, connection.sid_lo)
        self._with_offset = with_offset
        self._joiner = Joiner(pace, with_offset)

    def add(self, part: Part) -> None:
        """Take the next message, unless it is left out."""
        if self.takes(part):
            self._joiner.add(part)

    def takes(self, part: Part) -> bool:
        """Whether this message isn't left out."""
        located = self.located
        return located is None or part.offset > located.mixed_until or part.key in located.keys

    def add_all(self, joined: Sequence[tuple[Joined, Sequence[Part]]]) -> None:
        """Take the messages of a page, joined as far as they can be, and each with its parts. There are none that are
        left out."""
        for one, parts in joined:
            self._joiner.add_joined(one, parts)

    def leaves_out(self, offset: int) -> bool:
        """Whether messages from this offset on may be left out."""
        return self.located is not None and offset <= self.located.mixed_until

    def finished(self) -> list[bytes]:
        """The frames that nothing can be joined to any more."""
        return self._frames(self._joiner.take_finished())

    def take(self) -> list[bytes]:
        """The frames of all messages that were added."""
        return self._frames(self._joiner.take())

    def _frames(self, taken: Iterable[Joined]) -> list[bytes]:
        return [
            frame_of(joined, self.pace, self._channel, self._with_offset)
            for joined in taken
            if joined.last.skip != self._socket_id
        ]
