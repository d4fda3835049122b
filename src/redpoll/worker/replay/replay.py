"""What of a channel's past one socket is told, and how far that has come: bookkeeping and frames, no Redis, no loop.

A socket that is told of the past is not among those who hear events yet: what is published meanwhile it gets from the
history too, and joins the others in the moment in which it has got as far as they. Who decides when is rewinds.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.cluster.history import Page
from redpoll.protocol import frames
from redpoll.protocol.history import Rewind

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.connection import Connection
    from redpoll.worker.hub import Channel

__all__ = [
    "ASKING",
    "GONE",
    "NOWHERE",
    "PARKED",
    "READY",
    "Past",
    "Replay",
    "Sheet",
    "Wants",
    "past_of",
    "position_of",
    "tidy",
]

# Where it begins isn't known yet; the next page is for it; it waits for a while; it is over.
ASKING: Final = 0
READY: Final = 1
PARKED: Final = 2
GONE: Final = 3

# Behind every offset.
NOWHERE: Final = 2**63

# Of events that no history keeps, per channel: they wait for the end of the replays, but not any number of them.
_MOST_LATE_BYTES: Final = 256 * 1024


class Wants(NamedTuple):
    """What a subscribe asks for beside the channel: the past, and to be told where it is (`Ticket.wants`)."""

    rewind: Rewind | None
    recovers: bool


class Replay:
    """One socket's, in one channel. `at`: it has everything up to this offset, which is one that was given to a message
    if `exact`. `told`: it has its success frame. `since`: it named the place from which it goes on.

    `upto` None: live events wait until this has caught up with them. Else the socket hears them as well, and this fills
    in what lies before that offset.
    """

    __slots__ = (
        "at",
        "begun",
        "cached",
        "connection",
        "due",
        "epoch",
        "exact",
        "last",
        "late",
        "local_channel",
        "pending",
        "recovers",
        "rows",
        "since",
        "state",
        "success",
        "told",
        "total",
        "upto",
    )

    def __init__(self, local_channel: LocalChannel, connection: Connection, begun: float) -> None:
        self.local_channel = local_channel
        self.connection = connection
        self.begun = begun
        kept = local_channel.history
        self.epoch = kept.epoch if kept is not None else ""
        self.state = ASKING
        # Where the others are now: until this is one of them it goes by pages, from there at the latest.
        self.at = kept.last if kept is not None else 0
        self.exact = False
        self.since = False
        self.recovers = False
        self.told = False
        self.upto: int | None = None
        # What is to be asked before it can begin: the rule's or the client's number of messages, or of seconds; and
        # how many answers are awaited.
        self.last: tuple[int, int] = (0, 0)
        self.pending = 0
        # The success frame of those who don't recover, until it is sent; and what goes with it: the cached event until
        # that was sent, b"" for none, and how many subscribers there are.
        self.success = b""
        self.cached: bytes | None = None
        self.total: int | None = None
        # Messages sent, the next of the late events, and when it is looked at again.
        self.rows = 0
        self.late = 0
        self.due = 0.0


class Late(NamedTuple):
    """An event that isn't kept, which came when the channel was at the offset `after`."""

    after: int
    frame: bytes
    skip: tuple[int, int]


class Past:
    """Those in a channel who are told more than the others, or later.

    `recovering` hear what all hear, with offsets. `replaying` have their success frame and a replay that isn't over:
    they hear of members and counts. `replays` are these and those whose success waits for its first page; `fills` are
    the replays of sockets that hear everything else already.
    """

    __slots__ = ("fills", "late", "late_bytes", "page_from", "recovering", "replaying", "replays", "round")

    def __init__(self, flusher: Flusher) -> None:
        self.recovering = Audience(flusher)
        self.replaying = Audience(flusher)
        self.replays: dict[Connection, Replay] = {}
        self.fills: dict[Connection, Replay] = {}
        # Those who share pages now, and where the page that was asked for begins.
        self.round: list[Replay] = []
        self.page_from: int | None = None
        self.late: list[Late] = []
        self.late_bytes = 0

    @property
    def empty(self) -> bool:
        return not (self.replays or self.fills or len(self.recovering))

    def tell(self, frame: bytes) -> None:
        """A frame that isn't an event waits for none of these."""
        self.recovering.post(frame)
        self.replaying.post(frame)

    def discard(self, connection: Connection) -> bool:
        """Whether it was here, and nowhere else in the channel."""
        fill = self.fills.pop(connection, None)
        if fill is not None:
            fill.state = GONE
        replay = self.replays.pop(connection, None)
        if replay is None:
            return self.recovering.discard(connection)
        replay.state = GONE
        self.replaying.discard(connection)
        self._forget_late()
        return True

    def put_behind(self, payload: bytes, name: bytes, after: int) -> None:
        """An event that no page will have: for those who replay it comes behind what was there before it. Where it
        would be too much to keep, what waits goes out now, and is out of its order."""
        frame, *skip = _frame.frame_of(payload, name)
        self.late.append(Late(after, frame, (skip[0], skip[1])))
        self.late_bytes += len(frame)
        if self.late_bytes > _MOST_LATE_BYTES:
            for replay in self.replays.values():
                frames = self.take_late(replay, NOWHERE)
                if replay.told and frames:
                    replay.connection.send(b"".join(frames))
            self.late.clear()
            self.late_bytes = 0
            for replay in self.replays.values():
                replay.late = 0

    def take_late(self, replay: Replay, before: int) -> list[bytes]:
        """The frames of late events that go ahead of the message `before`."""
        frames: list[bytes] = []
        if replay.upto is not None:
            return frames
        connection = replay.connection
        while replay.late < len(self.late) and self.late[replay.late].after < before:
            late = self.late[replay.late]
            replay.late += 1
            if late.skip != (connection.sid_hi, connection.sid_lo):
                frames.append(late.frame)
        return frames

    def finish(self, replay: Replay) -> None:
        """It is over, the socket is somewhere else by now."""
        replay.state = GONE
        if replay.upto is not None:
            self.fills.pop(replay.connection, None)
            return
        self.replays.pop(replay.connection, None)
        self.replaying.discard(replay.connection)
        self._forget_late()

    def _forget_late(self) -> None:
        if self.late and not self.replays:
            self.late.clear()
            self.late_bytes = 0


def past_of(channel: Channel) -> Past:
    """The channel's, made if it has none."""
    if channel.past is None:
        channel.past = Past(channel.flusher)
    return channel.past


def tidy(channel: Channel) -> None:
    """Most channels have nobody of that kind, and theirs is the quick way of an event."""
    past = channel.past
    if past is not None and past.empty and past.page_from is None:
        channel.past = None


def position_of(local_channel: LocalChannel) -> bytes:
    """The frame that tells those who recover where the channel is, and that something is missing before that."""
    assert local_channel.history is not None
    return _frame.text(
        frames.position(local_channel.channel, local_channel.history.epoch, local_channel.history.last, False)
    )


class Sheet:
    """A page's messages as frames of one channel, each made once for however many sockets, when the first wants it."""

    def __init__(self, page: Page, name: bytes) -> None:
        self.page = page
        self.offsets = [row.offset for row in page.rows]
        self._name = name
        self._frames: tuple[list[tuple[bytes, int, int]], ...] = ([], [])
        self._joined: dict[tuple[int, int, bool], bytes] = {}
        self._skips: set[tuple[int, int]] = set()

    def start(self, at: int) -> int:
        """The first message behind an offset."""
        return bisect_right(self.offsets, at)

    def unbroken(self, at: int) -> bool | None:
        """Whether nothing is missing between that offset, which is one of a message, and the first message behind it;
        None: this page doesn't reach so far."""
        start = self.start(at)
        if start < len(self.offsets):
            return self.page.rows[start].prev == at
        return None if self.page.more else self.page.top == at

    def has_server_event(self, start: int, stop: int) -> bool:
        return any(not row.event.startswith("client-") for row in self.page.rows[start:stop])

    def frames(self, connection: Connection, start: int, stop: int, with_offset: bool) -> Sequence[bytes]:
        """Messages `start` to `stop` for this socket, without those that it was left out of."""
        made = self._made(with_offset)
        sid = (connection.sid_hi, connection.sid_lo)
        if sid in self._skips:
            return [frame for frame, *skip in made[start:stop] if tuple(skip) != sid]
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
