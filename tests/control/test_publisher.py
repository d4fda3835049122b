"""Publishing to Redis, and the gate that waits for workers. A fake bus answers when the test says so."""

import asyncio

import pytest

from redpoll.cluster.bus import Bus, Outgoing, Unavailable
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.control.publisher import Publisher
from redpoll.protocol.apps import App

APP = App(id="1", name="one", keys=())


def event(name, channel="c", skip=None):
    return Outgoing(channel, name, "d", skip)


class FakeBus:
    """Records what is published. `listening` is the number of workers that listen, `named` are those of them whose
    name is known."""

    def __init__(self):
        self.sent = []
        self.listening = 0
        self.named = set()
        self.asked = 0

    def post(self, app, item, trace, *, once=None, index=0, done):
        self.sent.append((app.id, *item[:4], trace, once, index))
        self.done = done
        self.waiting.append(done)

    waiting: list
    refusal = ""

    def post_check(self, done):
        return 0

    async def workers_listening(self):
        self.asked += 1
        await asyncio.sleep(0)
        return self.listening

    async def not_listening(self, processes):
        await asyncio.sleep(0)
        return [process for process in processes if process not in self.named]


@pytest.fixture
async def bus():
    bus = FakeBus()
    bus.waiting = []
    return bus


@pytest.fixture
async def publisher(bus):
    made = []

    def make(workers=0, confirm_s=60.0):
        made.append(Publisher(bus, None, lambda: workers, confirm_s=confirm_s))
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
    it.publish(APP, [event("e", skip="1.2")], "t", answers)
    assert bus.sent == [("1", "c", "e", "d", "1.2", "t", None, 0)]
    assert not answers
    bus.done(3)
    assert answers == [None]
    assert it.events_published == 1
    assert it.by_app == {"1": 1}


async def test_error_of_redis_is_unavailable(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    it.publish(APP, [event("e"), event("f")], "t", answers)
    bus.waiting[0](1)
    bus.waiting[1](LinkDown(sent=True))
    (fault,) = answers
    assert isinstance(fault, Unavailable)
    assert str(fault).startswith("not confirmed: the connection to Redis broke")
    assert (it.unconfirmed, it.events_published) == (2, 0)


async def test_unconfirmed_publish_is_unavailable_and_a_late_answer_is_ignored(publisher, bus, wait_until):
    it = await opened(publisher(confirm_s=0.05), wait_until)
    first, second, later = Answers(), Answers(), Answers()
    it.publish(APP, [event("a")], "t", first)
    it.publish(APP, [event("b")], "t", second)
    bus.waiting[1](1)
    await wait_until(lambda: first)
    assert "within 0.05 s" in str(first[0])
    assert second == [None]
    bus.waiting[0](1)
    it.publish(APP, [event("c")], "t", later)
    await wait_until(lambda: later)
    assert isinstance(later[0], Unavailable)
    assert (len(first), len(second)) == (1, 1)


async def test_confirmed_publishes_are_not_stored_in_memory(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    answers = Answers()
    for _ in range(1000):
        it.publish(APP, [event("e")], "t", answers)
        bus.done(1)
    assert answers == [None] * 1000
    assert len(it._awaited) <= 1


async def test_events_of_a_batch_are_sent_in_a_row_and_all_awaited(publisher, bus, wait_until):
    it = await opened(publisher(), wait_until)
    items = [Outgoing("a", "e1", "d"), Outgoing("b", "e2", "d", "1.2")]
    publishing = asyncio.create_task(it.publish_all(APP, items, "t"))
    await wait_until(lambda: len(bus.waiting) == 2)
    assert [sent[1:5] for sent in bus.sent] == [("a", "e1", "d", None), ("b", "e2", "d", "1.2")]
    assert [sent[6:] for sent in bus.sent] == [(None, 0), (None, 1)]
    bus.waiting[0](1)
    await asyncio.sleep(0)
    assert not publishing.done()
    bus.waiting[1](1)
    await publishing
    assert it.events_published == 2


async def test_gate_opens_when_every_worker_listens(publisher, bus, wait_until):
    it = publisher(workers=2)
    bus.listening = 1
    it.link_up()
    waiting = asyncio.create_task(it.publish_all(APP, [Outgoing("c", "e", "d")], "t"))
    await wait_until(lambda: bus.asked > 2)
    assert not it.open
    assert bus.sent == []
    bus.listening = 2
    await wait_until(lambda: bus.waiting)
    bus.done(2)
    await waiting


async def test_gate_waits_until_the_number_of_workers_is_known(bus, wait_until):
    known = []
    it = Publisher(bus, None, lambda: known[0] if known else None)
    bus.listening = 1
    it.link_up()
    await wait_until(lambda: bus.asked > 2)
    assert not it.open
    known.append(1)
    await wait_until(lambda: it.open)
    it.close()


async def test_publishes_are_unavailable_until_a_worker_that_hangs_is_killed(publisher, bus, wait_until):
    """The gate opened after 2 s, and events that reached no client were answered with 200."""
    alive = [1, 2]
    it = Publisher(bus, None, lambda: len(alive), confirm_s=0.02)
    bus.listening = 1
    it.link_up()
    await wait_until(lambda: bus.asked > 3)
    with pytest.raises(Unavailable, match="not all workers"):
        await it.publish_all(APP, [Outgoing("c", "e", "d")], "t")
    assert bus.sent == []
    alive.pop()
    await wait_until(lambda: it.open)
    it.close()


async def test_connection_of_a_dead_worker_does_not_stand_in_for_a_living_one(bus, wait_until):
    it = Publisher(bus, None, lambda: 2, lambda: ["run.1", "run.2"])
    bus.listening, bus.named = 2, {"run.1", "dead.1"}
    it.link_up()
    await wait_until(lambda: bus.asked > 2)
    assert not it.open
    bus.named.add("run.2")
    await wait_until(lambda: it.open)
    it.close()


async def test_publish_at_a_closed_gate_is_unavailable_within_the_limit(publisher, bus):
    it = publisher(confirm_s=0.02)
    with pytest.raises(Unavailable):
        await it.publish_all(APP, [Outgoing("c", "e", "d")], "t")
    assert bus.sent == []


async def test_every_disconnect_closes_the_gate(publisher, bus, wait_until):
    it = publisher(workers=1)
    bus.listening = 1
    it.link_up()
    await wait_until(lambda: it.open)
    it.link_down()
    assert not it.open
    bus.listening = 0
    it.link_up()
    await wait_until(lambda: bus.asked > 3)
    assert not it.open
    bus.listening = 1
    await wait_until(lambda: it.open)


async def test_gate_counts_subscribed_workers_in_a_real_redis(redis, wait_until):
    keys = Keys("rp")
    ours, worker = Link(redis.url), Link(redis.url)
    it = Publisher(Bus(ours, keys), ours, lambda: 1)
    ours.on_up = it.link_up
    ours.start()
    worker.start()
    await worker.wait_up()
    await ours.wait_up()
    assert not it.open
    heard = []
    worker.on_push = lambda topic, payload: heard.append(topic)
    worker.subscribe([keys.sys, keys.topic("1", "c")])
    await wait_until(lambda: it.open)
    await it.publish_all(APP, [event("e")], "t")
    await wait_until(lambda: keys.topic("1", "c") in heard)
    it.close()
    await ours.close()
    await worker.close()
