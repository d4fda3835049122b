"""Sends the events of a channel at most so many times a second to each subscriber (`protocol/joining.py`).

Plain subscribers and those that recover are two lanes of a channel. All subscribers of a lane have the same events,
so a frame is made once. Two kinds of them don't, and have events of their own that wait:

- Newcomers came while events waited that were published before they came. They join the others at the next sending.
- Lagging connections have a full kernel buffer. They get everything that came meanwhile, joined, when it is empty.

Nothing here is stored. What waits for a lagging connection in all channels counts like unsent bytes: with more than
`max_unsent_bytes` it is closed with 4100.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from redpoll import _frame
from redpoll._fanout import Audience, Flusher
from redpoll.loop.writable import WRITABLE_BELOW_BYTES, WritableSignal
from redpoll.protocol.joining import Joined, Joiner, Pace, Pacer, Part

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.hub.connection import Connection

__all__ = ["ChannelPacing", "Pacing", "frame_of", "part_of"]

# Groups of newcomers in one lane: each event is added to each group. With more, everything is sent earlier.
_MAX_GROUPS: Final = 64
# Subscribers of a lane whose kernel buffers are looked at before a sending. Of larger lanes, others the next time.
_LOOKED_AT: Final = 20_000


def part_of(pace: Pace, payload: bytes) -> Part:
    """An EVENT envelope as a part."""
    offset, prev, skip_hi, skip_lo, trace, user, event, data = _frame.envelope(payload)
    return Part(pace, event, data, user=user, skip=(skip_hi, skip_lo), offset=offset, prev=prev, trace=trace)


def frame_of(joined: Joined, pace: Pace, channel: bytes, with_offset: bool) -> bytes:
    """The frame of what was joined. Its offset is that of its last part."""
    last = joined.last
    if last.frame is not None:
        return last.frame
    user = last.user or b""
    sizes = joined.offset, joined.prev, len(user), len(last.event)
    envelope = b"e %d %d - - %d %d\n%b%b%b" % (*sizes, user, last.event, joined.data(pace))
    return _frame.frame_of(envelope, channel, with_offset)[0]


class Pacing:
    """What the paced channels of a worker share. `passed` counts events that a rule should join and can't; `lagged`
    counts connections that began to lag. `on_sent(local_channel, joined, sockets)` is called for each frame."""

    def __init__(
        self, flusher: Flusher, writable: WritableSignal, on_sent: Callable[[LocalChannel, Joined, int], None]
    ) -> None:
        self.passed = 0
        self.lagged = 0
        self.flusher = flusher
        self.writable = writable
        self.on_sent = on_sent
        # By lagging connection: the bytes that wait for it, in all channels.
        self._held: dict[Connection, int] = {}

    def hold(self, connection: Connection, lag: _Lag) -> int:
        """Note what waits for a connection in one channel. Returns the bytes that wait for it in all."""
        size = lag.size
        total = self._held.get(connection, 0) + size - lag.noted
        lag.noted = size
        if total:
            self._held[connection] = total
        else:
            self._held.pop(connection, None)
        return total

    def forget(self, connection: Connection, lag: _Lag) -> None:
        """Nothing waits for a connection in one channel any more."""
        lag.joiner.take()
        lag.leaving.clear()
        self.hold(connection, lag)


class _Newcomers:
    """Subscribers that came at one moment, while others waited for events from before it."""

    __slots__ = ("audience", "joiner")

    def __init__(self, flusher: Flusher, joiner: Joiner) -> None:
        self.audience = Audience(flusher)
        self.joiner = joiner


class _Lag:
    """What a connection is behind. `ready`: nothing is unsent. `leaving` is what is taken from the joiner and yet to be
    sent. `since` is the loop's time. `noted` is the size that `Pacing.hold` knows."""

    __slots__ = ("joiner", "leaving", "noted", "ready", "since")

    def __init__(self, joiner: Joiner, since: float) -> None:
        self.joiner = joiner
        self.leaving: deque[Joined] = deque()
        self.noted = 0
        self.ready = False
        self.since = since

    @property
    def size(self) -> int:
        return self.joiner.size + sum(joined.weight for joined in self.leaving)


class _Lane:
    """The subscribers of a channel that get frames with offsets, or those that get them without."""

    def __init__(self, channel: ChannelPacing, audience: Audience, with_offset: bool) -> None:
        self._channel = channel
        self._pace = channel.pace
        self._audience = audience
        self._with_offset = with_offset
        self._newcomers: list[_Newcomers] = []
        self._lagging: dict[Connection, _Lag] = {}
        self._looked_at = 0
        self.pacer = Pacer(channel.pace, with_offset)
        # When the oldest of the waiting events came.
        self._since: float | None = None

    def __contains__(self, connection: object) -> bool:
        return connection in self._lagging or any(connection in group.audience for group in self._newcomers)

    @property
    def is_empty(self) -> bool:
        return not (len(self._audience) or self._newcomers or self._lagging)

    @property
    def due(self) -> float | None:
        """When the next sending is; None if there is none."""
        if any(lag.ready for lag in self._lagging.values()):
            return self.pacer.free_at
        return self.pacer.due

    # -- events

    def event(self, part: Part, now: float) -> None:
        if self.is_empty:
            return
        taken = self.pacer.add(part, now)
        for group in self._newcomers:
            group.joiner.add(part)
        if taken:
            self._send(taken, now)
        elif self._since is None:
            self._since = now

    def flush(self, now: float) -> None:
        """Send all that waits, and what ready connections are behind."""
        self._send(self.pacer.take(now), now)

    def post(self, frame: bytes) -> None:
        """A frame that isn't an event, to those that aren't in the audience."""
        for group in self._newcomers:
            group.audience.post(frame)
        for connection in self._lagging:
            connection.send(frame)

    def post_in_order(self, frame: bytes, now: float) -> int:
        """A frame that isn't an event, to everybody, after all events before it. Returns to how many."""
        self.flush(now)
        posted = self._audience.post(frame)
        for lag in self._lagging.values():
            lag.joiner.add(Part(self._pace, b"", b"", frame=frame))
        return posted + len(self._lagging)

    def _send(self, taken: list[Joined], now: float) -> None:
        self._since = None
        if taken:
            self._find_lagging(now)
        newcomers, self._newcomers = self._newcomers, []
        apart = 0
        for group in newcomers:
            for joined in group.joiner.take():
                group.audience.post(self._frame(joined), *joined.last.skip)
            group.audience.finish_posts()
            apart += len(group.audience)
        for joined in taken:
            count = self._audience.post(self._frame(joined), *joined.last.skip)
            for lag in self._lagging.values():
                lag.joiner.add_joined(joined)
            self._channel.sent(joined, count + apart)
        for group in newcomers:
            for connection in group.audience:
                self._audience.add(connection)
        self._serve_lagging()

    def _frame(self, joined: Joined) -> bytes:
        return frame_of(joined, self._pace, self._channel.name, self._with_offset)

    # -- subscribers

    def admit(self, connection: Connection) -> None:
        """A subscriber that has all events up to now, or doesn't want them."""
        if self.pacer.due is None:
            self._audience.add(connection)
            return
        if not self._newcomers or len(self._newcomers[-1].joiner):
            if len(self._newcomers) == _MAX_GROUPS:
                self.flush(asyncio.get_running_loop().time())
                self._audience.add(connection)
                return
            joiner = Joiner(self._pace, self._with_offset)
            self._newcomers.append(_Newcomers(self._channel.shared.flusher, joiner))
        self._newcomers[-1].audience.add(connection)

    def discard(self, connection: Connection) -> bool:
        """Remove a subscriber that isn't in the audience. False: it isn't here."""
        lag = self._lagging.pop(connection, None)
        if lag is not None:
            self._channel.shared.forget(connection, lag)
            return True
        return any(group.audience.discard(connection) for group in self._newcomers)

    def waits_since(self, connection: Connection) -> float | None:
        """When the oldest event came that this connection hasn't got; None if it has all."""
        lag = self._lagging.get(connection)
        if lag is not None and (len(lag.joiner) or lag.leaving):
            return lag.since
        return self._since if lag is not None or connection in self._audience or connection in self else None

    def settle(self, connection: Connection, now: float) -> None:
        """Send this connection all that it is behind, whether it reads or not."""
        self.flush(now)
        lag = self._lagging.get(connection)
        if lag is not None:
            self._join_others(connection)
            lag.leaving.extend(lag.joiner.take())
            self._hand_over(connection, lag, 2**63)
            self._channel.shared.forget(connection, lag)

    def close(self, now: float) -> None:
        """The channel is no longer paced."""
        self.flush(now)
        for connection in list(self._lagging):
            self.settle(connection, now)

    # -- lagging connections

    def _find_lagging(self, now: float) -> None:
        audience = self._audience
        for connection in audience.take_paused(self._looked_at, _LOOKED_AT):
            lag = self._lagging[connection] = _Lag(Joiner(self._pace, self._with_offset), now)
            self._channel.shared.lagged += 1
            self._await_drained(connection, lag)
        self._looked_at += _LOOKED_AT
        if self._looked_at >= len(audience):
            self._looked_at = 0

    def _await_drained(self, connection: Connection, lag: _Lag) -> None:
        lag.ready = False
        self._channel.shared.writable.wait_drained(connection, partial(self._drained, connection, lag))

    def _drained(self, connection: Connection, lag: _Lag) -> None:
        if self._lagging.get(connection) is not lag:
            return
        lag.ready = True
        if self.pacer.due is None and asyncio.get_running_loop().time() >= self.pacer.free_at:
            self._serve(connection, lag)
        self._channel.arm()

    def _serve_lagging(self) -> None:
        shared = self._channel.shared
        for connection, lag in list(self._lagging.items()):
            if lag.ready:
                self._serve(connection, lag)
            elif shared.hold(connection, lag) + connection.unsent_bytes > shared.flusher.max_unsent_bytes:
                # Among the others, it is one that lost the event.
                self._join_others(connection)
                shared.forget(connection, lag)
                connection.overrun_now()

    def _serve(self, connection: Connection, lag: _Lag) -> None:
        """A connection that has read everything gets what it is behind. With much of it, it has to read in between."""
        lag.leaving.extend(lag.joiner.take())
        if connection.unsent_bytes < WRITABLE_BELOW_BYTES:
            self._hand_over(connection, lag, WRITABLE_BELOW_BYTES)
        if lag.leaving:
            self._await_drained(connection, lag)
        else:
            self._join_others(connection)
        self._channel.shared.hold(connection, lag)

    def _join_others(self, connection: Connection) -> None:
        """The connection gets the next events as all others do."""
        del self._lagging[connection]
        self._audience.add(connection)

    def _hand_over(self, connection: Connection, lag: _Lag, at_most: int) -> None:
        socket_id = (connection.sid_hi, connection.sid_lo)
        while lag.leaving and at_most > 0:
            joined = lag.leaving.popleft()
            if joined.last.skip != socket_id:
                frame = self._frame(joined)
                at_most -= len(frame)
                connection.send(frame)


class ChannelPacing:
    """One channel with a pace. `plain` are the channel's subscribers, `recovering` those that get offsets."""

    def __init__(self, local_channel: LocalChannel, pace: Pace, shared: Pacing, recovering: Audience) -> None:
        self.pace = pace
        self.shared = shared
        self.name: bytes = local_channel.audience.name
        self._local_channel = local_channel
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.plain = _Lane(self, local_channel.audience, False)
        self.recovering = _Lane(self, recovering, True)

    def __contains__(self, connection: object) -> bool:
        """Whether the connection subscribes, and is in none of the audiences."""
        return connection in self.plain or connection in self.recovering

    def event(self, payload: bytes) -> None:
        """Take an EVENT envelope, and send it when it is due."""
        part = part_of(self.pace, payload)
        if part.key is None:
            self.shared.passed += 1
        now = self._loop.time()
        self.plain.event(part, now)
        self.recovering.event(part, now)
        self.arm()

    def post(self, frame: bytes) -> None:
        """Send a frame that isn't an event to the subscribers that are in none of the audiences."""
        self.plain.post(frame)
        self.recovering.post(frame)

    def discard(self, connection: Connection) -> bool:
        """Remove a subscriber that is in none of the audiences. False: it isn't here."""
        return self.plain.discard(connection) or self.recovering.discard(connection)

    def waits_since(self, connection: Connection) -> float | None:
        """When the oldest event came that this connection hasn't got; None if it has all. The loop's time."""
        since = self.plain.waits_since(connection)
        return since if since is not None else self.recovering.waits_since(connection)

    def settle(self, connection: Connection) -> None:
        """Send a connection that recovers everything up to now."""
        self.recovering.settle(connection, self._loop.time())

    def post_position(self, frame: bytes) -> int:
        """Send a frame about the position to those that recover, after all events before it. Returns to how many."""
        return self.recovering.post_in_order(frame, self._loop.time())

    def end(self) -> None:
        """Send all that waits: the channel has another pace, or none."""
        now = self._loop.time()
        self.plain.close(now)
        self.recovering.close(now)
        self.cancel()

    def cancel(self) -> None:
        """Send nothing by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sent(self, joined: Joined, sockets: int) -> None:
        self.shared.on_sent(self._local_channel, joined, sockets)

    def arm(self) -> None:
        """Be called when the next sending is due."""
        due = min((due for due in (self.plain.due, self.recovering.due) if due is not None), default=None)
        if due is not None and (self._timer is None or due < self._timer_at):
            self.cancel()
            self._timer, self._timer_at = self._loop.call_at(due, self._due), due

    def _due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for lane in (self.plain, self.recovering):
            due = lane.due
            # The loop's timers have the resolution of its clock, and may come early.
            if due is not None and due <= now + 0.0005:
                lane.flush(now)
        self.arm()
