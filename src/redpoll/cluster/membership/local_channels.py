"""The table of everything this worker holds, by name and by topic."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from redpoll.cluster.membership.hold_call import CHANNEL, PRESENCE, TOPIC
from redpoll.cluster.membership.local_channel import LocalChannel, TopicSubscription
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.redis.keys import CONSOLE_TOPIC, Keys
from redpoll.loop.parted_dict import PartedDict
from redpoll.protocol.channels import CONSOLE, Kind, kind_of

__all__ = ["LocalChannels"]

_KINDS: Final = {Kind.PRESENCE: PRESENCE, Kind.USER: TOPIC}


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
