"""What this worker holds: its channels and pseudo-channels, found by name and by topic.

The table only. When one can be forgotten commits.py says, and what Redis is told of each held.py.
"""

import asyncio
from typing import Final

from redpoll.cluster.keys import WATCHED, Keys
from redpoll.cluster.membership.hold_call import CHANNEL, PRESENCE, TOPIC
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.protocol.channels import CONSOLE, Kind, kind_of

__all__ = ["LocalChannels"]

_KINDS: Final = {Kind.PRESENCE: PRESENCE, Kind.USER: TOPIC}


class LocalChannels:
    """`by_name` has everything, by app id and channel; `by_topic` what listens. The listener hears of the latter only:
    a pseudo-channel is no business of the sockets."""

    def __init__(self, keys: Keys, listener: MembershipEvents) -> None:
        self.by_name: dict[tuple[str, str], LocalChannel] = {}
        self.by_topic: dict[bytes, LocalChannel] = {}
        self._keys = keys
        self._listener = listener
        self._emptied = asyncio.Event()

    def channel(self, app_id: str, channel: str) -> LocalChannel:
        """A channel, of the kind that its name says; opened if it isn't held yet."""
        local_channel = self.by_name.get((app_id, channel))
        if local_channel is not None:
            return local_channel
        # The console hears what is copied to it; who watches is nobody's to count.
        kind = TOPIC if channel == CONSOLE else _KINDS.get(kind_of(channel), CHANNEL)
        return self._open(app_id, channel, kind)

    def hold(self, app_id: str, channel: str, kind: str) -> LocalChannel:
        """The same where the kind is known: a pseudo-channel, or what Redis lists."""
        return self.by_name.get((app_id, channel)) or self._open(app_id, channel, kind)

    def drop(self, local_channel: LocalChannel) -> None:
        """It is held no longer."""
        local_channel.dropped = True
        del self.by_name[(local_channel.app_id, local_channel.channel)]
        if local_channel.listens:
            del self.by_topic[local_channel.topic]
            self._listener.dropped(local_channel)
        if not self.by_name:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Returns when nothing is held."""
        while self.by_name:
            self._emptied.clear()
            await self._emptied.wait()

    def _open(self, app_id: str, channel: str, kind: str) -> LocalChannel:
        local_channel = LocalChannel(
            app_id, channel, kind, self._keys.topic(app_id, WATCHED if channel == CONSOLE else channel)
        )
        self.by_name[(app_id, channel)] = local_channel
        if local_channel.listens:
            self.by_topic[local_channel.topic] = local_channel
            self._listener.opened(local_channel)
        return local_channel
