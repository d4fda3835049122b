"""The deliveries of one endpoint that are ready to be sent, and the order in which they may start.

While no attempt fails, the deliveries of one channel arrive in the order of the transitions. `channel.occupied`,
`channel.vacated` and `subscription.count` start only when everything before them has ended, and hold back everything
after them. Deliveries about the same member wait for each other. Client events wait only for the former; they carry
`seq`. Different channels, and different members of one channel, are sent in parallel. Retries and restarts may break
the order; receivers restore it by `seq` (control/webhooks/README.md "Webhooks"). Deliveries of an endpoint with `batch`
don't wait for each other: they go in their order in one request, and no two requests run at a time (batches.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

from redpoll.store.deliveries import Waiting

__all__ = ["ReadyDeliveries"]

# Events about the whole channel: no other delivery of the channel runs at the same time.
_WHOLE_CHANNEL: Final = ("channel.occupied", "channel.vacated", "subscription.count")
_number_of: Final = attrgetter("number")


class _Channel:
    """One channel: `items` are ready. Running are those of the members `running_users`, `running_client_events` client
    events, or, if `running_alone`, one event about the whole channel."""

    __slots__ = ("has_turn", "items", "running_alone", "running_client_events", "running_users")

    def __init__(self) -> None:
        self.items: deque[Waiting] = deque()
        self.running_users: set[str | None] = set()
        self.running_client_events = 0
        self.running_alone = False
        # It is in ReadyDeliveries._turns.
        self.has_turn = False

    def may_start(self, item: Waiting) -> bool:
        if self.running_alone:
            return False
        if item.event in _WHOLE_CHANNEL:
            return not self.running_users and not self.running_client_events
        return item.event == "client_event" or item.user not in self.running_users

    def start(self, item: Waiting) -> None:
        if item.event in _WHOLE_CHANNEL:
            self.running_alone = True
        elif item.event == "client_event":
            self.running_client_events += 1
        else:
            self.running_users.add(item.user)

    def end(self, item: Waiting) -> None:
        if item.event in _WHOLE_CHANNEL:
            self.running_alone = False
        elif item.event == "client_event":
            self.running_client_events -= 1
        else:
            self.running_users.discard(item.user)

    def empty(self) -> bool:
        return not (self.items or self.running_users or self.running_client_events or self.running_alone)


class ReadyDeliveries:
    """`len()` is the number of ready deliveries. Each delivery that `take` returned must be ended with `done`."""

    def __init__(self) -> None:
        self._length = 0
        self._channels: dict[str, _Channel] = {}
        # The channels whose first delivery may be able to start, each at most once.
        self._turns: deque[_Channel] = deque()

    def __len__(self) -> int:
        return self._length

    def add(self, item: Waiting) -> None:
        channel = self._channels.get(item.channel)
        if channel is None:
            channel = self._channels[item.channel] = _Channel()
        channel.items.append(item)
        self._length += 1
        self._give_turn(channel)

    def take(self) -> Waiting | None:
        """The next delivery that may start, from each channel in turn. None if all of them wait for running ones."""
        while self._turns:
            channel = self._turns.popleft()
            if channel.items and channel.may_start(channel.items[0]):
                item = channel.items.popleft()
                channel.start(item)
                self._length -= 1
                # To the end, so that a busy channel doesn't delay the others.
                self._turns.append(channel)
                return item
            channel.has_turn = False
        return None

    def in_order(self) -> list[Waiting]:
        """All ready deliveries, in the order in which they were stored."""
        items = [item for channel in self._channels.values() for item in channel.items]
        return sorted(items, key=_number_of)

    def take_these(self, items: Sequence[Waiting]) -> None:
        """Takes ready deliveries that run together, in one request; several may be of one channel. No other may run."""
        numbers = {item.number for item in items}
        for name in {item.channel for item in items}:
            channel = self._channels[name]
            channel.items = deque(item for item in channel.items if item.number not in numbers)
        for item in items:
            self._channels[item.channel].start(item)
        self._length -= len(items)
        # `take` removes turns one by one; without it they would pile up.
        for channel in self._turns:
            channel.has_turn = bool(channel.items)
        self._turns = deque(channel for channel in self._turns if channel.has_turn)

    def remove(self, numbers: Collection[int]) -> list[Waiting]:
        """Removes and returns the ready ones of these deliveries. None may run."""
        removed = [item for channel in self._channels.values() for item in channel.items if item.number in numbers]
        if removed:
            self.take_these(removed)
            self.done(*removed)
        return removed

    def done(self, *items: Waiting) -> None:
        """The attempt at these deliveries ended, or they were discarded."""
        for item in items:
            self._channels[item.channel].end(item)
        for item in items:
            channel = self._channels.get(item.channel)
            if channel is None:
                continue
            if channel.empty():
                # It may still be in `_turns`; `take` skips an empty channel.
                del self._channels[item.channel]
            elif channel.items:
                self._give_turn(channel)

    def clear(self) -> list[Waiting]:
        """Removes and returns all ready deliveries. Running ones are not affected."""
        removed = [item for channel in self._channels.values() for item in channel.items]
        for name, channel in list(self._channels.items()):
            channel.items.clear()
            if channel.empty():
                del self._channels[name]
        self._length = 0
        return removed

    def _give_turn(self, channel: _Channel) -> None:
        if not channel.has_turn:
            channel.has_turn = True
            self._turns.append(channel)
