"""A page of a channel's history, as the frames that replays send."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redpoll import _frame
from redpoll.cluster.envelopes import cached_envelope
from redpoll.cluster.history import Page, Row
from redpoll.protocol.joining import Joined, Joiner, Part
from redpoll.worker.replay.pacing import ChannelPacing, part_of

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.replay.gathering import Gathering

__all__ = ["PageFrames", "is_by_server"]


class PageFrames:
    """A page of history as frames of one channel. Each frame is made once, when the first connection needs it."""

    def __init__(self, page: Page, name: bytes) -> None:
        self.page = page
        self.offsets = [row.offset for row in page.rows]
        self._name = name
        self._frames: tuple[list[tuple[bytes, int, int]], ...] = ([], [])
        self._joined: dict[tuple[int, int, bool], bytes] = {}
        self._skips: set[tuple[int, int]] = set()
        self._parts: list[Part] = []
        self._joined_parts: dict[bool, list[tuple[Joined, list[Part]]]] = {}

    def start(self, at: int) -> int:
        """The index of the first message after the offset `at`."""
        return bisect_right(self.offsets, at)

    def unbroken(self, at: int) -> bool | None:
        """Whether no message is missing between the offset `at` and the first message after it.

        None: this page ends before `at`.
        """
        start = self.start(at)
        if start < len(self.offsets):
            return self.page.rows[start].prev == at
        return None if self.page.more else self.page.top == at

    def has_server_event(self, start: int, stop: int, cached: bytes, gathering: Gathering | None = None) -> bool:
        """Whether one of the messages `start` to `stop` is a server's, as `is_by_server` says. Those that `gathering`
        leaves out don't count."""
        by_server = (row for row in self.page.rows[start:stop] if is_by_server(row, cached))
        if gathering is None:
            return any(True for _ in by_server)
        return any(gathering.takes(part_of(gathering.pace, row.envelope())) for row in by_server)

    def parts(self, pacing: ChannelPacing) -> list[Part]:
        """All messages, to be joined."""
        if not self._parts:
            self._parts = [part_of(pacing.pace, row.envelope()) for row in self.page.rows]
        return self._parts

    def joined(self, pacing: ChannelPacing, neighbours: bool) -> list[tuple[Joined, list[Part]]]:
        """All messages, joined as far as they can be, with the parts of each. `neighbours` as in Joiner."""
        if neighbours not in self._joined_parts:
            joiner = Joiner(pacing.pace, neighbours)
            for part in self.parts(pacing):
                joiner.add(part)
            taken = joiner.take()
            parts: dict[tuple[object, ...] | None, list[Part]] = {}
            for part in self.parts(pacing):
                parts.setdefault(part.key, []).append(part)
            # The parts of several events with one key are in their order.
            self._joined_parts[neighbours] = [(one, _first(parts[one.key], one.parts)) for one in taken]
        return self._joined_parts[neighbours]

    def frames(self, connection: Connection, start: int, stop: int, with_offset: bool) -> Sequence[bytes]:
        """The messages `start` to `stop` for this connection, without those published with its socket id to skip."""
        made = self._made(with_offset)
        socket_id = (connection.sid_hi, connection.sid_lo)
        if socket_id in self._skips:
            return [frame for frame, *skip in made[start:stop] if tuple(skip) != socket_id]
        key = (start, stop, with_offset)
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = b"".join(frame for frame, _, _ in made[start:stop])
        return [joined]

    def _made(self, with_offset: bool) -> list[tuple[bytes, int, int]]:
        made = self._frames[with_offset]
        if not made and self.page.rows:
            made.extend(_frame.frame_of(row.envelope(), self._name, with_offset) for row in self.page.rows)
            self._skips.update((hi, lo) for _, hi, lo in made if hi or lo)
        return made


def is_by_server(row: Row, cached: bytes) -> bool:
    """Whether a message was published over HTTP. Others are client events. A server may publish an event with such a
    name, too; it is known by its bytes if it is the `cached` one, the last of the server's."""
    return not row.event.startswith("client-") or cached_envelope(row.tail) == cached


def _first(parts: list[Part], count: int) -> list[Part]:
    """The first `count` of the parts, which are removed."""
    taken = parts[:count]
    del parts[:count]
    return taken
