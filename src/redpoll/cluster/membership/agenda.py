"""What Sync has to do, and in which order: for which channels something is due, what can wait, and what Redis has to
get again."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Final

from redpoll.cluster.membership.hold_call import Flag
from redpoll.cluster.membership.join import Stage
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.redis.keys import SHARDS
from redpoll.loop.slices import Cursor, Queue

__all__ = ["Agenda", "CountDelay", "Reassertion"]

# Replies that may be big wait for their turn: Redis closes a subscribed connection that leaves 32 MB unread. A roster
# has at most 512 KiB, a cached event 256 KiB.
_MAX_AWAITED: Final = {Flag.ROSTER: 32, Flag.CACHED: 64}

# Channels whose topics are subscribed in one step after a break, about; those with history also ask for a page.
_MAX_RESUBSCRIBED: Final = 250

_CLEAN: Final = Stage.CLEAN
_SUBSCRIBING: Final = Stage.SUBSCRIBING
_LOST: Final = Stage.LOST
_DIRTY: Final = Stage.DIRTY
_ROSTER: Final = Stage.ROSTER
_FOR_JOINS: Final = Stage.CACHED_FOR_JOINS
_FIRST_BUSY: Final = Stage.SENDING


class Agenda:
    """Each channel is in one stage, and in the queue of that stage if it has one, first in first out. `awaited` counts
    the big replies on their way, by what they carry (`HoldCall.big_reply`). `unsubscribing` has the topics that no
    channel needs any more."""

    def __init__(self) -> None:
        self.subscribing: Queue[LocalChannel] = Queue()
        self.lost: Queue[LocalChannel] = Queue()
        self.calling: Queue[LocalChannel] = Queue()
        self.dirty: Queue[LocalChannel] = Queue()
        self.asserting: Queue[LocalChannel] = Queue()
        self.unsubscribing: Queue[bytes] = Queue()
        self.awaited = {Flag.ROSTER: 0, Flag.CACHED: 0}
        rosters_for_joins, cached_for_joins, rosters = (
            Queue[LocalChannel](),
            Queue[LocalChannel](),
            Queue[LocalChannel](),
        )
        # Those with joins first.
        self._big_replies = {Flag.ROSTER: (rosters_for_joins, rosters), Flag.CACHED: (cached_for_joins,)}
        # By stage.
        self._queues: list[Queue[LocalChannel] | None] = [None] * len(Stage)
        self._queues[Stage.SUBSCRIBING] = self.subscribing
        self._queues[Stage.LOST] = self.lost
        self._queues[Stage.CALLING] = self.calling
        self._queues[Stage.ROSTER_FOR_JOINS] = rosters_for_joins
        self._queues[Stage.CACHED_FOR_JOINS] = cached_for_joins
        self._queues[Stage.DIRTY] = self.dirty
        self._queues[Stage.ASSERTING] = self.asserting
        self._queues[Stage.ROSTER] = rosters

    @property
    def due(self) -> bool:
        """Something can be done without waiting for an answer."""
        return bool(self.calling or self.subscribing or self.dirty or self.asserting)

    def move(self, local_channel: LocalChannel, stage: Stage) -> None:
        """Puts the channel at the end of another stage; where it is already, it keeps its turn."""
        before = local_channel.stage
        if before is stage:
            return
        queue = self._queues[before]
        if queue is not None:
            queue.discard(local_channel)
        local_channel.stage = stage
        queue = self._queues[stage]
        if queue is not None:
            queue.add(local_channel)

    def queue_joins(self, local_channel: LocalChannel) -> None:
        """Joins wait for this channel, which isn't busy."""
        if not _CLEAN < local_channel.stage <= _FOR_JOINS:
            self.move(local_channel, _SUBSCRIBING)

    def queue_change(self, local_channel: LocalChannel) -> None:
        """Something changed in this channel, which isn't busy and has no joins. The call for which it waits to read the
        roster will say it, too."""
        if local_channel.stage is not _ROSTER:
            self.move(local_channel, _DIRTY)

    def take(self, queue: Queue[LocalChannel]) -> LocalChannel:
        """The first channel of a queue; something is done for it now."""
        local_channel = queue.pop()
        local_channel.stage = _CLEAN
        return local_channel

    def wait_for_reply(self, local_channel: LocalChannel) -> bool:
        """Whether the channel's next reply may be big and others are awaited: then it waits for its turn."""
        kind = local_channel.big_reply
        if not kind or self.awaited[kind] < _MAX_AWAITED[kind]:
            return False
        if kind == Flag.CACHED:
            stage = Stage.CACHED_FOR_JOINS
        else:
            stage = Stage.ROSTER_FOR_JOINS if local_channel.queued else Stage.ROSTER
        self.move(local_channel, stage)
        return True

    def next_for_reply(self, kind: str) -> LocalChannel | None:
        """A channel that waited for a reply of this kind, and whose call may be made now."""
        if self.awaited[kind] < _MAX_AWAITED[kind]:
            for queue in self._big_replies[kind]:
                if queue:
                    return self.take(queue)
        return None

    def forget(self, local_channel: LocalChannel) -> None:
        """The channel's shard is lost, and with it its topic. Its joins wait; the rest is found again afterwards."""
        stage = local_channel.stage
        if stage < _FIRST_BUSY and stage is not _SUBSCRIBING and stage is not _LOST:
            self.move(local_channel, _SUBSCRIBING if _LOST < stage <= _FOR_JOINS else _CLEAN)

    def shards_are_back(self) -> None:
        """Joins of lost shards are tried again; those of shards that are still lost return."""
        while self.lost:
            self.move(self.take(self.lost), _SUBSCRIBING)


class CountDelay:
    """Keeps clients that come and go from costing Redis a call each: for plain channels it gets their number at once,
    and then once in each `interval_s`. Calls `mark_dirty(local_channel)` when the number may be sent."""

    def __init__(self, mark_dirty: Callable[[LocalChannel], None], interval_s: float = 0.05) -> None:
        self._mark_dirty = mark_dirty
        self._interval_s = interval_s
        # Channels of which Redis got the number in this interval, and those that changed since.
        self._sent: set[LocalChannel] = set()
        self._changed: set[LocalChannel] = set()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, local_channel: LocalChannel) -> None:
        """Only the number of its sockets changed, and nobody waits for Redis."""
        if local_channel in self._sent:
            self._changed.add(local_channel)
            return
        self._sent.add(local_channel)
        self._mark_dirty(local_channel)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.interval_over)

    def holds_back(self, local_channel: LocalChannel) -> bool:
        """Whether the next call can wait until this interval is over. While clients keep coming, each reply would
        otherwise be followed by another call."""
        if local_channel in self._sent and local_channel.lacks_at_most_count():
            self._changed.add(local_channel)
            return True
        return False

    def interval_over(self) -> None:
        """The numbers that changed in this interval may be sent, and the next one begins."""
        self._timer = None
        self._sent, self._changed = self._changed, set()
        for local_channel in self._sent:
            self._mark_dirty(local_channel)
        if self._sent:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.interval_over)


class Reassertion:
    """How far the worker has come with telling Redis again what it holds, after a start, a break or a new name. First
    the topics are subscribed, part by part; each part is asserted after that.

    `unasserted` are the channels whose topics are subscribed again, and of which Redis doesn't know everything yet.
    """

    def __init__(self) -> None:
        self.unasserted: set[LocalChannel] = set()
        # What is held in some shards, as far as its topics are not subscribed again.
        self._walks: deque[tuple[set[int], Cursor[LocalChannel]]] = deque()
        self._has_turn = False

    @property
    def subscribing(self) -> bool:
        """Topics are yet to be subscribed."""
        return bool(self._walks)

    def takes_turn(self) -> bool:
        """Whether topics are to be subscribed now: by turns with the joins, because established clients wait for
        them."""
        self._has_turn = not self._has_turn
        return self._has_turn and bool(self._walks)

    @property
    def done(self) -> bool:
        """Redis knows everything."""
        return not self._walks and not self.unasserted

    def begin(self, shards: Collection[int], held: Iterable[LocalChannel]) -> None:
        """Redis knows this connection in these shards. `held` are all channels."""
        self._walks.append((set(shards), Cursor(held)))

    def next_part(self) -> tuple[list[LocalChannel], Collection[int]]:
        """The next channels to subscribe, and the shards in which these were the last."""
        shards, cursor = self._walks[0]
        count = _MAX_RESUBSCRIBED * SHARDS // len(shards)
        part = [local_channel for local_channel in cursor.next(count) if local_channel.shard in shards]
        if not cursor.done:
            return part, ()
        self._walks.popleft()
        return part, shards

    def lose(self, shards: Collection[int]) -> None:
        """These shards are lost: `begin` follows when they are back."""
        for walk in list(self._walks):
            walk[0].difference_update(shards)
            if not walk[0]:
                self._walks.remove(walk)

    def stop(self) -> None:
        """The worker's name was given up, or all shards are lost."""
        self._walks.clear()
        self.unasserted.clear()
