"""The deliveries that stand ready for one endpoint, in the order in which they may go (failures.md row 37).

While nothing fails, what is told of one channel arrives as it happened: an occupied or vacated waits for everything
before it and holds up everything behind it, a member's comings and goings wait for each other. Different channels, and
different members of one, go side by side. Client events, which carry their `seq`, wait only for the former. Retries
break the order, and so may a restart.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from redpoll.store.deliveries import Waiting

__all__ = ["ReadyDeliveries"]

_WHOLE_CHANNEL: Final = ("channel.occupied", "channel.vacated", "subscription.count")


class _Channel:
    """`items` stand ready; `users` are under way, `others` are under way beside them, or `alone` is."""

    __slots__ = ("alone", "items", "listed", "others", "users")

    def __init__(self) -> None:
        self.items: deque[Waiting] = deque()
        self.users: set[str | None] = set()
        self.others = 0
        self.alone = False
        self.listed = False

    def may_go(self, item: Waiting) -> bool:
        if self.alone:
            return False
        if item.event in _WHOLE_CHANNEL:
            return not self.users and not self.others
        return item.event == "client_event" or item.user not in self.users

    def goes(self, item: Waiting) -> None:
        if item.event in _WHOLE_CHANNEL:
            self.alone = True
        elif item.event == "client_event":
            self.others += 1
        else:
            self.users.add(item.user)

    def comes_back(self, item: Waiting) -> None:
        if item.event in _WHOLE_CHANNEL:
            self.alone = False
        elif item.event == "client_event":
            self.others -= 1
        else:
            self.users.discard(item.user)

    def idle(self) -> bool:
        return not (self.items or self.users or self.others or self.alone)


class ReadyDeliveries:
    """`len()` of it is how many stand ready. What `take` gave is ended with `done`. No clock, no waiting."""

    def __init__(self) -> None:
        self._length = 0
        self._channels: dict[str, _Channel] = {}
        # Those whose first item may be able to go; each once.
        self._open: deque[_Channel] = deque()

    def __len__(self) -> int:
        return self._length

    def add(self, item: Waiting) -> None:
        channel = self._channels.get(item.channel)
        if channel is None:
            channel = self._channels[item.channel] = _Channel()
        channel.items.append(item)
        self._length += 1
        self._list(channel)

    def take(self) -> Waiting | None:
        """The next that may go, one of each channel in turn; None: all that stand here wait for those under way."""
        while self._open:
            channel = self._open.popleft()
            if channel.items and channel.may_go(channel.items[0]):
                item = channel.items.popleft()
                channel.goes(item)
                self._length -= 1
                # Behind the others: one busy channel is no reason for the rest to wait.
                self._open.append(channel)
                return item
            channel.listed = False
        return None

    def done(self, item: Waiting) -> None:
        """It came back, or was given up."""
        channel = self._channels[item.channel]
        channel.comes_back(item)
        if channel.idle():
            # May be listed still: its turn finds it empty.
            del self._channels[item.channel]
        elif channel.items:
            self._list(channel)

    def clear(self) -> list[Waiting]:
        """Empties it of all that stand ready; those under way stay under way."""
        gone = [item for channel in self._channels.values() for item in channel.items]
        for name, channel in list(self._channels.items()):
            channel.items.clear()
            if channel.idle():
                del self._channels[name]
        self._length = 0
        return gone

    def _list(self, channel: _Channel) -> None:
        if not channel.listed:
            channel.listed = True
            self._open.append(channel)
