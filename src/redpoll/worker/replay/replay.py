"""One replay: which stored messages a connection still has to get in one channel, and how far it has come.

A connection that replays doesn't hear live events of the channel. It gets them from the history as well, and joins the
live subscribers at the moment it has caught up with them. This module holds the state and makes the frames; it does
no I/O. `replayer.py` decides what happens next.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.protocol import frames
from redpoll.protocol.history import Rewind
from redpoll.worker.replay.gathering import Gathering, Located
from redpoll.worker.replay.pacing import ChannelPacing
from redpoll.worker.replay.page_frames import PageFrames

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.hub.connection import Connection

__all__ = [
    "MAX_OFFSET",
    "Answer",
    "HistoryReaders",
    "Kind",
    "Replay",
    "State",
    "Wants",
    "position_frame",
]

# Greater than every offset.
MAX_OFFSET: Final = 2**63

# Per channel: events that aren't stored wait for the replays to catch up, up to this size.
_MAX_UNSTORED_BYTES: Final = 256 * 1024


class Wants(NamedTuple):
    """What a subscribe asks for besides the channel: earlier messages, and offsets in its frames (`Join.wants`)."""

    rewind: Rewind | None
    recovers: bool


class Kind(Enum):
    """What the connection gets, and when it gets its success frame."""

    # The success frame at once, then messages without offsets. On cache channels it may wait (cached_events.py).
    STOCK = "stock"
    # Messages with offsets. The success frame names the offset after which they begin.
    RECOVERING = "recovering"
    # As RECOVERING, from an offset that the client named. The success frame says whether messages are missing.
    CONTINUING = "continuing"
    # The connection hears live events already. It gets only the messages up to `stop_at`.
    FILL = "fill"


class State(Enum):
    """What the replay waits for."""

    # To learn at which offset it begins.
    LOCATING = "locating its first offset"
    WAITING_FOR_PAGE = "waiting for a page"
    # The client reads slowly; pages are not read for it meanwhile.
    WAITING_FOR_DRAIN = "waiting for the client to read"
    # Later pages are searched for a cache channel's last event (cached_events.py).
    SEARCHING = "searching for the cached event"
    # Redis failed, or the channel itself has to catch up first.
    WAITING_TO_RETRY = "waiting to retry"
    # Over: the connection is among the live subscribers.
    LIVE = "live"
    # Over: the connection left the channel or closed.
    LEFT = "left"


class Answer(NamedTuple):
    """The answer to the subscribe, until it is sent. `success` is the frame for STOCK, one for all who join together;
    the others' depends on where they begin, and one that is sent later is made then, for the roster of that time.
    `total`: the number of subscribers, None in apps that don't send it."""

    success: bytes
    total: int | None


class Replay:
    """One connection's replay in one channel. `begun` is the loop's time.

    The connection has everything up to the offset `at`. Until `exact`, that is an upper bound: the replay begins there
    or earlier.
    """

    __slots__ = (
        "answer",
        "at",
        "awaited",
        "begun",
        "cached",
        "cached_is_older",
        "connection",
        "epoch",
        "exact",
        "gathering",
        "kind",
        "local_channel",
        "look_back",
        "next_unstored",
        "sent",
        "state",
        "stop_at",
        "whole",
    )

    def __init__(
        self,
        local_channel: LocalChannel,
        connection: Connection,
        begun: float,
        kind: Kind = Kind.STOCK,
        answer: Answer | None = None,
    ) -> None:
        self.local_channel = local_channel
        self.connection = connection
        self.begun = begun
        self.kind = kind
        self.state = State.LOCATING
        self.answer = answer
        history = local_channel.history
        self.epoch = history.epoch if history is not None else ""
        self.at = history.last if history is not None else 0
        self.exact = False
        # FILL only.
        self.stop_at: int | None = None
        # How many messages, or seconds of messages, the rule or the client asks for; and how many answers about the
        # first offset are still to come.
        self.look_back: tuple[int, int] = (0, 0)
        self.awaited = 0
        # A cache channel's last event, b"" for none, while it is to be sent with the answer; None on other channels.
        self.cached: bytes | None = None
        # Whether it was searched for among the messages, and isn't there.
        self.cached_is_older = False
        # Messages that were read and wait to be joined, on channels with a rate.
        self.gathering: Gathering | None = None
        self.whole = False
        # Messages sent so far, and the index of the next unstored event.
        self.sent = 0
        self.next_unstored = 0

    def take_answer(self, offset: int, recovered: bool) -> bytes:
        """The success frame, the cached event or its miss, and the subscription count, as one piece."""
        answer, cached, channel = self.answer, self.cached, self.local_channel.channel
        assert answer is not None
        self.answer = self.cached = None
        frame = self._success(offset, recovered) if self.recovers or not answer.success else answer.success
        if cached:
            frame += _frame.frame_of(cached, channel.encode())[0]
        elif cached is not None:
            frame += _frame.text(frames.cache_miss(channel))
        if answer.total is not None:
            frame += _frame.text(frames.subscription_count(channel, answer.total))
        return frame

    def _success(self, offset: int, recovered: bool) -> bytes:
        """The frame that answers the subscribe, with the present roster."""
        history, roster = self.local_channel.history if self.recovers else None, self.local_channel.roster
        return _frame.text(
            frames.subscription_succeeded(
                self.local_channel.channel,
                roster.snapshot() if roster is not None else None,
                epoch=history.epoch if history is not None else None,
                offset=offset if history is not None else None,
                recovered=recovered if self.kind is Kind.CONTINUING else None,
            )
        )

    def miss_since(self, offset: int) -> None:
        """The user missed what came after this offset: begin there, or earlier, and leave nothing out."""
        self.at = min(self.at, offset)
        self.whole = True
        self.cached_is_older = False
        if self.gathering is not None:
            self.gathering.located = None

    def locate(self, located: Located, pacing: ChannelPacing) -> None:
        """Leave out what doesn't belong to the events that were located."""
        if not self.whole:
            self.gather(pacing).located = located

    def gather(self, pacing: ChannelPacing) -> Gathering:
        """Where messages wait to be joined."""
        if self.gathering is not None and self.gathering.pace != pacing.pace:
            # The rule has changed since the last page. Parts of two paths can't be joined.
            self.send_gathered()
            self.gathering = None
        if self.gathering is None:
            self.gathering = Gathering(pacing.pace, pacing.name, self.connection, self.recovers)
        return self.gathering

    def send_gathered(self) -> None:
        """Send the messages that wait to be joined: `at` is where the connection is then."""
        if self.gathering is not None:
            frames = self.gathering.take()
            if frames:
                self.connection.send(b"".join(frames))

    def __repr__(self) -> str:
        channel, connection = self.local_channel.channel, self.connection
        socket_id = f"{connection.sid_hi}.{connection.sid_lo}"
        at = f"{'' if self.exact else '≤ '}{self.at}"
        return f"<Replay of {channel} to {socket_id}: {self.kind.value}, {self.state.value}, at {at}>"

    @property
    def over(self) -> bool:
        return self.state in (State.LIVE, State.LEFT)

    @property
    def recovers(self) -> bool:
        """Whether the connection gets offsets."""
        return self.kind in (Kind.RECOVERING, Kind.CONTINUING)


class Unstored(NamedTuple):
    """An event that isn't in the history. It came when the channel was at the offset `after`."""

    after: int
    frame: bytes
    skip: tuple[int, int]


class HistoryReaders:
    """The subscribers of one channel that don't simply hear live events.

    `recovering` hear live events with offsets. `replays` are the connections that replay, and `replaying` those of
    them that have their success frame and so get member and count frames. `fills` belong to connections that hear
    live events already. `pacing` is there on channels with a rate: it sends the live events of all subscribers.
    """

    __slots__ = (
        "fills",
        "pacing",
        "page_from",
        "recovering",
        "replaying",
        "replays",
        "sharing",
        "unstored",
        "unstored_bytes",
    )

    def __init__(self, flusher: Flusher) -> None:
        self.recovering = Audience(flusher)
        self.replaying = Audience(flusher)
        self.replays: dict[Connection, Replay] = {}
        self.fills: dict[Connection, Replay] = {}
        self.pacing: ChannelPacing | None = None
        # The replays that share the next pages, and the offset after which the page under way begins.
        self.sharing: list[Replay] = []
        self.page_from: int | None = None
        self.unstored: list[Unstored] = []
        self.unstored_bytes = 0

    def __contains__(self, connection: object) -> bool:
        """Whether the connection is here and not among the plain subscribers."""
        if self.pacing is not None and connection in self.pacing:
            return True
        return connection in self.replays or connection in self.recovering

    def recovers(self, connection: Connection) -> bool:
        """Whether the connection hears live events with offsets."""
        return connection in self.recovering or (self.pacing is not None and connection in self.pacing.recovering)

    @property
    def idle(self) -> bool:
        """The channel has no readers and no rate, and no page is under way."""
        if self.pacing is not None:
            return False
        return not (self.replays or self.fills or len(self.recovering)) and self.page_from is None

    def post(self, frame: bytes) -> None:
        """Send a frame that isn't an event; replays don't delay it."""
        self.recovering.post(frame)
        self.replaying.post(frame)
        if self.pacing is not None:
            self.pacing.post(frame)

    def post_position(self, frame: bytes) -> int:
        """Send those that hear live events with offsets a frame about the channel's position. Returns to how many."""
        if self.pacing is not None:
            return self.pacing.post_position(frame)
        return self.recovering.post(frame)

    def admit(self, connection: Connection) -> None:
        """Add a connection that has all events up to now to those that hear live events with offsets."""
        if self.pacing is not None:
            self.pacing.recovering.admit(connection)
        else:
            self.recovering.add(connection)

    def counted(self, total: int) -> None:
        """The number of subscribers changed: replays without a success frame send the new one with it."""
        for replay in self.replays.values():
            if replay.answer is not None and replay.answer.total is not None:
                replay.answer = replay.answer._replace(total=total)

    def discard(self, connection: Connection) -> bool:
        """Remove a connection. False if it is a plain subscriber, apart from a fill."""
        fill = self.fills.pop(connection, None)
        if fill is not None:
            fill.state = State.LEFT
        replay = self.replays.pop(connection, None)
        if replay is None:
            return self.recovering.discard(connection) or (self.pacing is not None and self.pacing.discard(connection))
        replay.state = State.LEFT
        self.replaying.discard(connection)
        self._forget_unstored()
        return True

    def queue_unstored(self, payload: bytes, name: bytes, after: int) -> None:
        """Queue an event that isn't stored after the earlier messages that are still being replayed.

        Beyond _MAX_UNSTORED_BYTES the queued events are sent at once, out of order.
        """
        frame, *skip = _frame.frame_of(payload, name)
        self.unstored.append(Unstored(after, frame, (skip[0], skip[1])))
        self.unstored_bytes += len(frame)
        if self.unstored_bytes > _MAX_UNSTORED_BYTES:
            for replay in self.replays.values():
                overdue = self.take_unstored(replay, MAX_OFFSET)
                if overdue and replay.answer is None:
                    replay.connection.send(b"".join(overdue))
            self.unstored.clear()
            self.unstored_bytes = 0
            for replay in self.replays.values():
                replay.next_unstored = 0

    def take_unstored(self, replay: Replay, before: int) -> list[bytes]:
        """The frames of unstored events that this replay has to send before the message with offset `before`."""
        taken: list[bytes] = []
        if replay.kind is Kind.FILL:
            return taken
        socket_id = (replay.connection.sid_hi, replay.connection.sid_lo)
        while replay.next_unstored < len(self.unstored) and self.unstored[replay.next_unstored].after < before:
            event = self.unstored[replay.next_unstored]
            replay.next_unstored += 1
            if event.skip != socket_id:
                taken.append(event.frame)
        return taken

    def frames_of(self, replay: Replay, page: PageFrames, start: int, stop: int) -> list[bytes]:
        """The messages `start` to `stop` of a page for this replay, with the unstored events between them. Some may
        wait to be joined with those of the next page."""
        if self.pacing is not None:
            return self._joined_frames(replay, page, start, stop, self.pacing)
        replay.send_gathered()
        connection, with_offset = replay.connection, replay.recovers
        frames: list[bytes] = []
        begin = start
        while replay.kind is not Kind.FILL and replay.next_unstored < len(self.unstored):
            place = page.start(self.unstored[replay.next_unstored].after)
            if place >= stop:
                break
            frames += page.frames(connection, begin, max(begin, place), with_offset)
            begin = max(begin, place)
            frames += self.take_unstored(replay, page.offsets[begin])
        frames += page.frames(connection, begin, stop, with_offset)
        return frames

    def _joined_frames(
        self, replay: Replay, page: PageFrames, start: int, stop: int, pacing: ChannelPacing
    ) -> list[bytes]:
        gathering = replay.gather(pacing)
        frames: list[bytes] = []
        whole = start == 0 and stop == len(page.offsets) > 0
        if whole and not self.unstored and not gathering.leaves_out(page.offsets[0]):
            gathering.add_all(page.joined(pacing, replay.recovers))
            return gathering.finished()
        for part in page.parts(pacing)[start:stop]:
            unstored = self.take_unstored(replay, part.offset)
            if unstored:
                frames += gathering.take() + unstored
            gathering.add(part)
        return frames + gathering.finished()

    def finish(self, replay: Replay) -> None:
        """A replay is over: its connection hears live events now."""
        replay.state = State.LIVE
        if replay.kind is Kind.FILL:
            self.fills.pop(replay.connection, None)
            return
        self.replays.pop(replay.connection, None)
        self.replaying.discard(replay.connection)
        self._forget_unstored()

    def _forget_unstored(self) -> None:
        if self.unstored and not self.replays:
            self.unstored.clear()
            self.unstored_bytes = 0


def position_frame(local_channel: LocalChannel) -> bytes:
    """`pusher:position`: tells recovering clients where the channel is now, and that messages before it are missing."""
    history = local_channel.history
    assert history is not None
    return _frame.text(frames.position(local_channel.channel, history.epoch, history.last, False))
