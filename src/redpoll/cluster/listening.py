"""Topics that a worker hears although it doesn't hold their channels: those that clients read over HTTP.

A listener isn't a subscriber: the channel isn't occupied by it, and nothing about it is in Redis but the subscription
of the topic. If the worker holds the channel as well, both share the subscription, and the one that leaves first leaves
it to the other. After a break the topics are subscribed again, a slice at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import hiredis

from redpoll.cluster.redis.keys import Keys, shard_of_name
from redpoll.cluster.redis.link import Link
from redpoll.loop.slices import Slices

__all__ = ["Listener", "Listening"]


class Listener(Protocol):
    """Who hears a topic."""

    @property
    def topic(self) -> bytes: ...

    def subscribed(self) -> None:
        """The topic is subscribed on the present connection: what Redis publishes after the reply to the next command
        comes as a push."""

    def pushed(self, payload: bytes) -> None:
        """An envelope came (envelopes.py)."""

    def lost(self) -> None:
        """The connection broke: pushes are missed until `subscribed`."""


class Listening:
    """The listeners of a worker, at most one for each topic.

    `sends(shard)`: commands for this shard may be sent now. `holds(topic)`: the worker has subscribed the topic for a
    channel that it holds. `withdraw(topic)`: the topic mustn't be unsubscribed, as was planned.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        sends: Callable[[int], bool],
        holds: Callable[[bytes], bool],
        withdraw: Callable[[bytes], None],
    ) -> None:
        self.by_topic: dict[bytes, Listener] = {}
        self._link = link
        self._keys = keys
        self._sends = sends
        self._holds = holds
        self._withdraw = withdraw
        self._returning: deque[Listener] = deque()
        self._slices = Slices(self._return_one)

    def topic(self, app_id: str, channel: str) -> bytes:
        """The topic of a channel."""
        return self._keys.topic(app_id, channel)

    def add(self, listener: Listener) -> None:
        """Hear its topic. `subscribed` is called in this call if Redis is connected, else when it is."""
        self.by_topic[listener.topic] = listener
        self._subscribe(listener)

    def remove(self, listener: Listener) -> None:
        """Hear its topic no longer."""
        topic = listener.topic
        del self.by_topic[topic]
        # Also while the worker is fenced, when it sends nothing else: the subscription stays.
        if self._link.is_usable(shard_of_name(topic)) and not self._holds(topic):
            self._link.unsubscribe([topic], self._answered)

    def connection_lost(self, shards: Collection[int]) -> None:
        for listener in list(self.by_topic.values()):
            if shard_of_name(listener.topic) in shards:
                listener.lost()

    def connected(self, shards: Collection[int]) -> None:
        """Redis takes commands for these shards again."""
        self._returning.extend(
            listener for listener in self.by_topic.values() if shard_of_name(listener.topic) in shards
        )
        self._slices.start()

    def _return_one(self) -> bool:
        if self._returning:
            listener = self._returning.popleft()
            if self.by_topic.get(listener.topic) is listener:
                self._subscribe(listener)
        return bool(self._returning)

    def _subscribe(self, listener: Listener) -> None:
        topic = listener.topic
        if self._sends(shard_of_name(topic)):
            self._withdraw(topic)
            self._link.subscribe([topic], self._answered)
            listener.subscribed()

    def _answered(self, outcome: Any) -> None:
        # Refused by an ACL: the replies to what was asked since then can't be relied on.
        if isinstance(outcome, hiredis.ReplyError):
            self._link.drop(f"SUBSCRIBE refused: {outcome}")
