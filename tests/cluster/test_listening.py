"""Topics that a worker hears without holding their channels, beside a registry that holds some."""

import pytest

from redpoll.cluster.listening import Listening
from redpoll.cluster.redis.keys import SHARDS, Keys, shard_of_name


class Link:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[bytes]]] = []
        self.usable = True

    def is_usable(self, shard) -> bool:
        return self.usable

    def subscribe(self, topics, done) -> None:
        self.calls.append(("subscribe", list(topics)))

    def unsubscribe(self, topics, done) -> None:
        self.calls.append(("unsubscribe", list(topics)))


class Hears:
    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.told: list[str] = []

    def subscribed(self) -> None:
        self.told.append("subscribed")

    def lost(self) -> None:
        self.told.append("lost")

    def pushed(self, payload: bytes) -> None:
        self.told.append(payload.decode())


class Table:
    def __init__(self) -> None:
        self.keys = Keys()
        self.link = Link()
        self.sending: set[int] = set(range(SHARDS))
        self.held: set[bytes] = set()
        self.withdrawn: list[bytes] = []
        self.listening = Listening(
            self.link,
            self.keys,
            self.sending.__contains__,
            self.held.__contains__,
            self.withdrawn.append,
        )

    def add(self, channel: str) -> Hears:
        listener = Hears(self.listening.topic("1", channel))
        self.listening.add(listener)
        return listener


@pytest.fixture
async def table() -> Table:
    return Table()


async def test_topic_is_subscribed_while_somebody_listens(table):
    listener = table.add("a")
    assert listener.told == ["subscribed"]
    # An UNSUBSCRIBE of a channel that was left a moment ago must not follow.
    assert table.withdrawn == [listener.topic]
    table.listening.remove(listener)
    assert table.link.calls == [("subscribe", [listener.topic]), ("unsubscribe", [listener.topic])]


async def test_topic_of_a_channel_that_is_held_stays_subscribed(table):
    listener = table.add("a")
    table.held.add(listener.topic)
    table.listening.remove(listener)
    assert table.link.calls == [("subscribe", [listener.topic])]


async def test_topic_that_nobody_hears_any_more_is_unsubscribed_also_by_a_fenced_worker(table):
    """It got every event of the topic until the connection broke."""
    listener = table.add("a")
    table.sending.clear()
    table.listening.remove(listener)
    assert table.link.calls == [("subscribe", [listener.topic]), ("unsubscribe", [listener.topic])]


async def test_nothing_is_sent_while_redis_is_away(table, wait_until):
    shards = set(table.sending)
    table.sending.clear()
    table.link.usable = False
    listener, gone = table.add("a"), table.add("b")
    assert listener.told == []
    table.listening.remove(gone)
    table.sending.update(shards)
    table.link.usable = True
    table.listening.connected(shards)
    await wait_until(lambda: listener.told == ["subscribed"])
    assert table.link.calls == [("subscribe", [listener.topic])]


async def test_break_concerns_the_shards_that_were_lost(table, wait_until):
    listeners = [table.add(f"c{n}") for n in range(20)]
    lost = {shard_of_name(listeners[0].topic)}
    table.listening.connection_lost(lost)
    table.listening.connected(lost)
    await wait_until(lambda: listeners[0].told[-1] == "subscribed" and len(listeners[0].told) > 1)
    for listener in listeners:
        hit = shard_of_name(listener.topic) in lost
        assert listener.told == (["subscribed", "lost", "subscribed"] if hit else ["subscribed"])
