"""Everything this worker holds: by name, by topic, and by what is due for it.

`LocalChannels` is the table. `Agenda` says for which channels Sync has something to do, and in which order.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from redpoll.cluster.membership.hold_call import CHANNEL, PRESENCE, TOPIC, Flag
from redpoll.cluster.membership.join import Stage
from redpoll.cluster.membership.local_channel import LocalChannel, TopicSubscription
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.redis.keys import CONSOLE_TOPIC, Keys
from redpoll.loop.parted_dict import PartedDict
from redpoll.loop.slices import Queue
from redpoll.protocol.channels import CONSOLE, Kind, kind_of

__all__ = ["Agenda", "CountDelay", "LocalChannels"]

_KINDS: Final = {Kind.PRESENCE: PRESENCE, Kind.USER: TOPIC}

# Replies that may be big wait for their turn: Redis closes a subscribed connection that leaves 32 MB unread. A roster
# has at most 512 KiB, a cached event 256 KiB.
_MAX_AWAITED: Final = {Flag.ROSTER: 32, Flag.CACHED: 64}

_CLEAN: Final = Stage.CLEAN
_SUBSCRIBING: Final = Stage.SUBSCRIBING
_LOST: Final = Stage.LOST
_DIRTY: Final = Stage.DIRTY
_ROSTER: Final = Stage.ROSTER
_FOR_JOINS: Final = Stage.CACHED_FOR_JOINS
_FIRST_BUSY: Final = Stage.SENDING


class LocalChannels:
    """`by_name` has every channel and pseudo-channel, by app id and name. `by_topic` has those with a topic; only these
    are reported to `events`, because pseudo-channels have no subscribers.

    `on_dirty(local_channel)` is called when something about a channel changed that Redis may have to know.
    """

    def __init__(self, keys: Keys, events: MembershipEvents, on_dirty: Callable[[LocalChannel], None]) -> None:
        # Each envelope looks into `by_topic`, so it is a plain dict. If both were, both would grow in the same pass.
        self.by_name: PartedDict[tuple[str, str], LocalChannel] = PartedDict()
        self.by_topic: dict[bytes, LocalChannel] = {}
        # Sums over the channels of `by_topic`: those with a subscriber, and their subscribers.
        self.occupied = 0
        self.subscriptions = 0
        self._on_dirty = on_dirty
        self._keys = keys
        self._events = events
        self._emptied = asyncio.Event()

    def mark_dirty(self, local_channel: LocalChannel) -> None:
        """Something about this channel changed: it is written to Redis in this tick, or after the call in flight."""
        self._on_dirty(local_channel)

    def attached_changed(self, local_channel: LocalChannel, before: int) -> None:
        """Sockets were attached or detached; `before` is how many were attached."""
        if local_channel.has_topic:
            self.subscriptions += local_channel.attached - before
            self.occupied += bool(local_channel.attached) - bool(before)

    def channel(self, app_id: str, channel: str) -> LocalChannel:
        """The channel of this name, opened if it isn't held yet. Its name says its kind."""
        local_channel = self.by_name.get((app_id, channel))
        if local_channel is not None:
            return local_channel
        # The console gets copies on a topic of its own, and is not counted.
        kind = TOPIC if channel == CONSOLE else _KINDS.get(kind_of(channel), CHANNEL)
        return self._open(app_id, channel, kind)

    def slice_by_slice(self) -> Iterator[LocalChannel]:
        """All channels and pseudo-channels, for work in slices. Those that are opened or dropped meanwhile may be
        among them, or not."""
        return self.by_name.values_in_parts()

    def has_subscribed(self, topic: bytes) -> bool:
        """Whether the topic is that of a channel held here, and subscribed for it."""
        local_channel = self.by_topic.get(topic)
        return local_channel is not None and local_channel.subscription is not TopicSubscription.NONE

    def hold(self, app_id: str, channel: str, kind: str) -> LocalChannel:
        """As `channel`, where the caller knows the kind: a pseudo-channel, or one that Redis lists."""
        return self.by_name.get((app_id, channel)) or self._open(app_id, channel, kind)

    def drop(self, local_channel: LocalChannel) -> None:
        """Removes a channel that is no longer held; its stage is DROPPED."""
        del self.by_name[(local_channel.app_id, local_channel.channel)]
        if local_channel.has_topic:
            del self.by_topic[local_channel.topic]
            self._events.dropped(local_channel)
        if not self.by_name:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Returns when nothing is held."""
        while self.by_name:
            self._emptied.clear()
            await self._emptied.wait()

    def _open(self, app_id: str, channel: str, kind: str) -> LocalChannel:
        topic = self._keys.topic(app_id, CONSOLE_TOPIC if channel == CONSOLE else channel)
        local_channel = LocalChannel(app_id, channel, kind, topic)
        self.by_name[(app_id, channel)] = local_channel
        if local_channel.has_topic:
            self.by_topic[topic] = local_channel
            self._events.opened(local_channel)
        return local_channel


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
