"""What this worker holds: its channels and pseudo-channels, found by name and by topic.

The table only. When one can be forgotten commits.py says, and what Redis is told of each held.py.
"""

import asyncio
from typing import Final

from redpoll.cluster.calls import CHANNEL, PRESENCE, TOPIC
from redpoll.cluster.held import Held
from redpoll.cluster.keys import WATCHED, Keys
from redpoll.cluster.listener import Listener
from redpoll.protocol.channels import CONSOLE, Kind, kind_of

__all__ = ["Holdings"]

_KINDS: Final = {Kind.PRESENCE: PRESENCE, Kind.USER: TOPIC}


class Holdings:
    """`by_name` has everything, by app id and channel; `by_topic` what listens. The listener hears of the latter only:
    a pseudo-channel is no business of the sockets."""

    def __init__(self, keys: Keys, listener: Listener) -> None:
        self.by_name: dict[tuple[str, str], Held] = {}
        self.by_topic: dict[bytes, Held] = {}
        self._keys = keys
        self._listener = listener
        self._emptied = asyncio.Event()

    def channel(self, app_id: str, channel: str) -> Held:
        """A channel, of the kind that its name says; opened if it isn't held yet."""
        held = self.by_name.get((app_id, channel))
        if held is not None:
            return held
        # The console hears what is copied to it; who watches is nobody's to count.
        kind = TOPIC if channel == CONSOLE else _KINDS.get(kind_of(channel), CHANNEL)
        return self._open(app_id, channel, kind)

    def hold(self, app_id: str, channel: str, kind: str) -> Held:
        """The same where the kind is known: a pseudo-channel, or what Redis lists."""
        return self.by_name.get((app_id, channel)) or self._open(app_id, channel, kind)

    def drop(self, held: Held) -> None:
        """It is held no longer."""
        held.dropped = True
        del self.by_name[(held.app_id, held.channel)]
        if held.listens:
            del self.by_topic[held.topic]
            self._listener.dropped(held)
        if not self.by_name:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Returns when nothing is held."""
        while self.by_name:
            self._emptied.clear()
            await self._emptied.wait()

    def _open(self, app_id: str, channel: str, kind: str) -> Held:
        held = Held(app_id, channel, kind, self._keys.topic(app_id, WATCHED if channel == CONSOLE else channel))
        self.by_name[(app_id, channel)] = held
        if held.listens:
            self.by_topic[held.topic] = held
            self._listener.opened(held)
        return held
