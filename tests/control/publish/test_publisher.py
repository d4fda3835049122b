"""Publishing to Redis while the gate is open. A fake bus and a fake gate answer when the test says so."""

import asyncio

import pytest

from helpers.bus_publishing import Outgoing, call_of
from helpers.unkeyed import shard
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.publish_call import ChannelEnded
from redpoll.cluster.redis.keys import SHARDS
from redpoll.cluster.redis.link import LinkDown
from redpoll.control.publish.publisher import Publisher
from redpoll.protocol.apps import App

APP = App(id="1", name="one", keys=())


def event(name, channel="c", skip=None):
    return Outgoing(channel, name, "d", skip)


def call(*items):
    return call_of(APP, items)


class FakeBus:
    """Records what is published."""

    def __init__(self):
        self.sent = []
        self.waiting = []
        self.answers = False

    def post(self, call, trace, *, once=None, done):
        for event, data, channels, skip in call.events_of():
            for channel in channels:
                self.sent.append((call.app.id, channel, event, data, skip, trace, once))
                self.done = done
                self.waiting.append(done)
                if self.answers:
                    done(1)

    refusal = ""
    checks = False
    shard = staticmethod(shard)


class FakeGate:
    """`wait` returns while `subscribed` is set. `asked` counts its calls."""

    def __init__(self):
        self.subscribed = asyncio.Event()
        self.asked = 0

    async def wait(self):
        self.asked += 1
        await self.subscribed.wait()


@pytest.fixture
async def bus():
    return FakeBus()


@pytest.fixture
async def gate():
    return FakeGate()


@pytest.fixture
async def publisher(bus, gate):
    made = []

    def make(*, subscribed=True, confirm_s=60.0):
        if subscribed:
            gate.subscribed.set()
        made.append(Publisher(bus, gate.wait, confirm_s=confirm_s))
        return made[-1]

    yield make
    for opened_publisher in made:
        opened_publisher.close()


class Answers(list):
    """The callback of `publish`: collects None for success, or the error."""

    def __call__(self, fault):
        self.append(fault)


async def opened(publisher, wait_until):
    publisher.link_up()
    await wait_until(lambda: publisher.open)
    return publisher


async def test_publish_ends_with_the_answer_of_redis(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    it.publish(call(event("e", skip="1.2")), "t", answers)
    assert bus.sent == [("1", "c", "e", "d", "1.2", "t", None)]
    assert not answers
    bus.done(3)
    assert answers == [None]
    assert it.events_published == 1
    assert it.by_app == {"1": 1}


async def test_error_of_redis_is_unavailable(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    it.publish(call(event("e"), event("f")), "t", answers)
    bus.waiting[0](1)
    bus.waiting[1](LinkDown(sent=True))
    (fault,) = answers
    assert isinstance(fault, Unavailable)
    assert str(fault).startswith("not confirmed: the connection to Redis broke")
    assert (it.unconfirmed, it.events_published, it.by_app) == (2, 0, {})


async def test_publishes_that_are_refused_while_redis_is_away_are_not_counted_as_published(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    bus.refusal = "Redis is silent"
    answers = Answers()
    for _ in range(5):
        it.publish(call(event("e")), "t", answers)
    await wait_until(lambda: len(answers) == 5)
    assert (it.unconfirmed, it.events_published, it.by_app) == (5, 0, {})


async def test_of_a_call_only_the_events_that_redis_took_are_counted(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    it.publish(call(event("e"), event("e", "ended")), "t", answers)
    bus.waiting[0](1)
    bus.waiting[1](ChannelEnded())
    assert [fault.code for fault in answers] == ["channel_ended"]
    assert (it.unconfirmed, it.events_published, it.by_app) == (0, 1, {"1": 1})


async def test_unconfirmed_publish_is_unavailable_and_a_late_answer_is_ignored(publisher, bus, wait_until):
    it = await opened(publisher(confirm_s=0.05), wait_until)
    first, second, later = Answers(), Answers(), Answers()
    it.publish(call(event("a")), "t", first)
    it.publish(call(event("b")), "t", second)
    bus.waiting[1](1)
    await wait_until(lambda: first)
    assert "within 0.05 s" in str(first[0])
    assert second == [None]
    bus.waiting[0](1)
    it.publish(call(event("c")), "t", later)
    await wait_until(lambda: later)
    assert isinstance(later[0], Unavailable)
    assert (len(first), len(second)) == (1, 1)


async def test_confirmed_publishes_are_not_stored_in_memory(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    for _ in range(1000):
        it.publish(call(event("e")), "t", answers)
        bus.done(1)
    assert answers == [None] * 1000
    assert len(it._awaited) <= 1


async def test_events_of_a_batch_are_sent_in_a_row_and_all_awaited(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    items = [Outgoing("a", "e1", "d"), Outgoing("b", "e2", "d", "1.2")]
    publishing = asyncio.create_task(it.publish_all(call(*items), "t"))
    await wait_until(lambda: len(bus.waiting) == 2)
    assert [sent[1:5] for sent in bus.sent] == [("a", "e1", "d", None), ("b", "e2", "d", "1.2")]
    assert [sent[5:] for sent in bus.sent] == [("t", None)] * 2
    bus.waiting[0](1)
    await asyncio.sleep(0)
    assert not publishing.done()
    bus.waiting[1](1)
    await publishing
    assert it.events_published == 2


async def test_publishes_wait_for_the_gate(publisher, bus, gate, wait_until):
    it = publisher(subscribed=False)
    it.link_up()
    waiting = asyncio.create_task(it.publish_all(call(event("e")), "t"))
    await wait_until(lambda: gate.asked)
    assert not it.open
    assert bus.sent == []
    gate.subscribed.set()
    await wait_until(lambda: bus.waiting)
    bus.done(2)
    await waiting


async def test_publishes_are_unavailable_until_all_workers_are_subscribed(publisher, bus, gate, wait_until):
    """The gate opened after 2 s, and events that reached no client were answered with 200."""
    it = publisher(subscribed=False, confirm_s=0.02)
    it.link_up()
    await wait_until(lambda: gate.asked)
    with pytest.raises(Unavailable, match="not all workers"):
        await it.publish_all(call(event("e")), "t")
    assert bus.sent == []
    gate.subscribed.set()
    await wait_until(lambda: it.open)


async def test_publish_at_a_closed_gate_is_unavailable_within_the_limit(publisher, bus):
    it = publisher(subscribed=False, confirm_s=0.02)
    with pytest.raises(Unavailable):
        await it.publish_all(call(event("e")), "t")
    assert bus.sent == []
    assert it.unconfirmed == 1


async def test_events_whose_caller_gives_up_at_a_closed_gate_are_unconfirmed(publisher, bus, gate, wait_until):
    it = publisher(subscribed=False)
    it.link_up()
    waiting = asyncio.create_task(it.publish_all(call(event("e")), "t"))
    await wait_until(lambda: gate.asked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bus.sent == []
    assert it.unconfirmed == 1


async def test_every_disconnect_closes_the_gate(publisher, gate, wait_until):
    it = await opened(publisher(), wait_until)
    it.link_down()
    assert not it.open
    gate.subscribed.clear()
    it.link_up()
    await wait_until(lambda: gate.asked == 2)
    assert not it.open
    gate.subscribed.set()
    await wait_until(lambda: it.open)


async def test_gate_stays_open_for_shards_whose_master_is_not_away(bus, gate, wait_until):
    """In a Redis Cluster, one failing master of many closed the gate for all channels."""
    kept = frozenset(range(SHARDS))
    it = Publisher(bus, gate.wait, lambda: kept, confirm_s=0.02)
    gate.subscribed.set()
    await opened(it, wait_until)
    gate.subscribed.clear()
    kept = frozenset({shard(APP.id, "here")})
    it.link_down()

    async def publish(*channels):
        await it.publish_all(call(*(event("e", channel) for channel in channels)), "t")

    bus.answers = True
    await publish("here")
    for channels in (["away"], ["here", "away"]):
        with pytest.raises(Unavailable):
            await publish(*channels)
    # The link is up again, and workers aren't subscribed yet at the master that was away.
    it.link_up()
    await publish("here")
    with pytest.raises(Unavailable):
        await publish("away")
    # That master breaks, too.
    kept = frozenset()
    it.link_down()
    with pytest.raises(Unavailable):
        await publish("here")
    it.link_up()
    gate.subscribed.set()
    await wait_until(lambda: it.open)
    await publish("away")
    it.close()
