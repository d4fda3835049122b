"""The link to a real Redis Cluster: order, several masters, moved slots."""

import asyncio
import signal
from functools import partial

import hiredis
import pytest

from helpers.bus_publishing import Outgoing, call_of
from helpers.proxy import Proxy
from helpers.sentinel import redis_cluster
from helpers.unkeyed import shard
from redpoll import _frame
from redpoll.cluster.canary import Canary
from redpoll.cluster.redis.cluster_link import ClusterLink, open_link
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import REGISTER
from redpoll.cluster.redis.slot_map import SlotMap
from redpoll.protocol.apps import App

APP = "7"


@pytest.fixture(scope="module")
def cluster():
    # A node that stops for a moment isn't replaced.
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _patient_with_nodes(monkeypatch):
    monkeypatch.setitem(SlotMap.__init__.__kwdefaults__, "answer_within_s", 60.0)
    monkeypatch.setitem(ClusterLink.__init__.__kwdefaults__, "repeat_for_s", 60.0)
    monkeypatch.setitem(ClusterLink.__init__.__kwdefaults__, "max_unanswered_looks", 100_000)


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "look_every_s", 0.02)
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "max_unanswered_looks", 100_000)


@pytest.fixture
async def link(cluster):
    link = open_link(cluster.url)
    link.start()
    await link.wait_up()
    yield link
    await link.close()


def keys() -> Keys:
    return Keys("rp", sharded=True)


def channels(count: int) -> list[str]:
    """Channels that are all in other shards."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < count:
        found.setdefault(shard(APP, f"c{number}"), f"c{number}")
        number += 1
    return list(found.values())


class Replies(dict):
    """`done` of several publishes: the reply to each by its place."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, reply):
        raise AssertionError("masters answer in any order")

    def of_each(self):
        return [partial(self.__setitem__, place) for place in range(self.count)]


def publishes(names, on):
    """The commands that publish an event on each of these channels."""
    call = call_of(App(id=APP, name="test", keys=()), [Outgoing(channel, "e", "d") for channel in on])
    return call.pack(names.publish, names.shards)


async def test_all_connections_are_answered_last_if_the_link_is(cluster):
    link = open_link(cluster.url, is_answered_last=True)
    link.start()
    await link.wait_up()
    for connection in (one.connection for one in link.links.values()):
        queued = connection.queued
        connection.send(hiredis.pack_command((b"ECHO", b"x")), lambda reply: None)
        connection.flush()
        # The other one is the command that publishes nothing.
        assert connection.queued == queued + 2
    await link.close()


async def test_only_a_cluster_gets_this_link(cluster, redis):
    assert type(open_link(cluster.url)) is ClusterLink
    assert type(open_link(redis.url)) is Link


async def test_commands_scripts_and_topics_reach_the_master_of_their_shard(link):
    names, seen = keys(), []
    link.on_push = lambda topic, payload: seen.append((topic, payload))
    topics = [names.topic(APP, channel) for channel in channels(SHARDS)]
    confirmed = asyncio.get_running_loop().create_future()
    link.subscribe(topics, confirmed.set_result)
    assert await confirmed is None
    for at in range(SHARDS):
        assert (await link.execute(REGISTER, (names.worker(at, "w"),), (1, 1)))[0] == b"OK"
    for topic in topics:
        assert await link.ask(b"SPUBLISH", topic, b"m") == 1
    assert sorted(topic for topic, _ in seen) == sorted(topics)
    assert await link.ask(b"MGET", names.stats("a"), names.stats("b")) == [None, None]
    for at in range(SHARDS):
        await link.ask(b"DEL", names.worker(at, "w"))


async def test_packed_commands_go_to_several_masters_and_are_answered(link):
    names = keys()
    commands = publishes(names, channels(SHARDS))
    replies = Replies(SHARDS)
    seen = []
    link.on_push = lambda topic, payload: seen.append(topic)
    link.subscribe([names.topic(APP, channel) for channel in channels(SHARDS)])
    link.publish(commands, replies)
    published = asyncio.get_running_loop().create_future()
    packed = _frame.pack_publish(b"SPUBLISH", names.shards, APP, "a{b}", "e", "d", None, None, None)
    link.call_packed(packed, published.set_result)
    assert await published == 0
    while len(replies) < SHARDS:
        await link.ask(b"PING")
    assert replies == dict.fromkeys(range(SHARDS), 1)
    assert sorted(seen) == sorted(names.topic(APP, channel) for channel in channels(SHARDS))
    for channel in channels(SHARDS):
        await link.ask(b"SET", names.cached(APP, channel), b"1")
    asked = [(b"ECHO", b"x"), *((b"SET", names.cached(APP, name), name, b"GET") for name in channels(SHARDS))]
    assert await link.ask_all(asked) == [b"x"] + [b"1"] * SHARDS
    asked = [(b"GET", names.cached(APP, name)) for name in channels(SHARDS)]
    assert await link.ask_all(asked) == [name.encode() for name in channels(SHARDS)]


async def test_silent_master_holds_up_no_answer_of_the_others_and_gets_no_more_publishes(
    looks_often, link, cluster, wait_until
):
    names = keys()
    silent = next(node for node in cluster.masters() if node.port == link.masters[0][1])
    in_order = sorted(channels(SHARDS), key=lambda one: shard(APP, one))
    topics = [names.topic(APP, channel) for channel in in_order]
    held_up = {at for at in range(SHARDS) if link.masters[at] == link.masters[0]}
    commands = publishes(names, in_order)
    before, after = Replies(SHARDS), Replies(SHARDS)
    # Looks are so frequent here that a master which is only slow may seem silent for a moment.
    await wait_until(lambda: not any(map(link.refusal_of, topics)))
    silent.signal(signal.SIGSTOP)
    try:
        link.publish(commands, before)
        await wait_until(lambda: len(before) == SHARDS - len(held_up))
        await wait_until(lambda: {at for at in range(SHARDS) if link.refusal_of(topics[at])} == held_up)
        link.publish(commands, after)
        await wait_until(lambda: len(after) == SHARDS)
        assert set(before) == set(range(SHARDS)) - held_up
        assert {at for at in after if isinstance(after[at], LinkDown)} == held_up
        assert str(after[0]) == "Redis doesn't answer"
    finally:
        silent.signal(signal.SIGCONT)
    await wait_until(lambda: len(before) == SHARDS and not link.refusal_of(topics[0]))
    assert set(before.values()) == {0}


async def test_topics_that_are_subscribed_last_are_confirmed_last_at_every_master(link, cluster):
    names = keys()
    here = [names.here_of(at, "run.1") for at in range(SHARDS)]
    assert await link.subscribers(here) == [0] * SHARDS
    other = open_link(cluster.url)
    other.start()
    await other.wait_up()
    done = []
    other.subscribe([names.topic(APP, channel) for channel in channels(SHARDS)], lambda _: done.append("topics"))
    confirmed = asyncio.get_running_loop().create_future()
    other.subscribe([names.sys, *here], lambda _: (done.append("last"), confirmed.set_result(None)))
    await confirmed
    assert done == ["topics", "last"]
    assert await link.subscribers([names.sys, *here]) == [1] * (SHARDS + 1)
    assert await link.subscribers([names.records, names.sys]) == [0, 1]
    await other.close()


async def test_moved_slot_takes_the_link_down_and_up_again_with_the_new_map(link, cluster, wait_until):
    names = keys()
    channel = channels(1)[0]
    at = shard(APP, channel)
    await link.ask(b"SET", names.cached(APP, channel), b"kept")
    downs, outcomes = [], []
    link.on_down = downs.append
    # In this thread, so that no map is read before the call.
    cluster.move_slot(slot_of(names.cached(APP, channel)))
    # The former master says so: only this shard is lost, and the gate of publishes stays open for the others.
    assert isinstance((await asyncio.gather(link.ask(b"GET", names.clock(at)), return_exceptions=True))[0], LinkDown)
    await wait_until(lambda: downs and link.up)
    assert link.kept_shards == set(range(SHARDS)) - {at}
    assert await link.ask(b"GET", names.cached(APP, channel)) == b"kept"
    # Calls without a connection end at once.
    link.drop("for the test")
    link.call(b"PING", done=outcomes.append)
    link.call_packed(hiredis.pack_command((b"GET", names.clock(at))), outcomes.append)
    link.subscribe([names.sys], outcomes.append)
    link.run(REGISTER, (names.worker(at, "w"),), (1, 1), outcomes.append)
    await wait_until(lambda: len(outcomes) == 4)
    assert all(isinstance(outcome, LinkDown) and not outcome.sent for outcome in outcomes)
    await link.wait_up()


async def test_topics_that_are_left_while_their_slot_moves_mix_up_no_answers(link, cluster, wait_until):
    """Redis takes the subscription away, which looks like the answer, and then answers with MOVED."""
    names = keys()
    at, channel = shard(APP, channels(4)[3]), channels(4)[3]
    topic, outcomes, answers = names.topic(APP, channel), [], {}
    same_master = [one for one in range(SHARDS) if link.masters[one] == link.masters[at] and one != at]
    confirmed = asyncio.get_running_loop().create_future()
    link.subscribe([topic], confirmed.set_result)
    await confirmed
    for one in same_master:
        await link.ask(b"SET", names.clock(one), b"%d" % one)
    link.unsubscribe([topic], outcomes.append)
    for one in same_master:
        link.call(b"GET", names.clock(one), done=partial(answers.__setitem__, one))
    # The commands are written when this tick is over.
    cluster.move_slot(slot_of(topic))
    await wait_until(lambda: len(answers) == len(same_master) and outcomes and link.up)
    for one in same_master:
        assert answers[one] == b"%d" % one or isinstance(answers[one], LinkDown)
    # What is asked later gets its own answers.
    assert await link.ask_all([(b"ECHO", b"x")]) == [b"x"]
    for one in same_master:
        assert await link.ask(b"GETDEL", names.clock(one)) == b"%d" % one


async def test_calls_that_meet_a_moving_slot_are_repeated_in_order(link, monkeypatch):
    names = keys()
    channel = channels(2)[1]
    key = names.cached(APP, channel)
    part, refusals, replies = link.links[link.masters[shard(APP, channel)]], [3], []
    call = part.call

    def refusing(*command, done):
        # As Redis does while the keys of a slot are in two nodes.
        if refusals[0] and command[0] == b"APPEND":
            refusals[0] -= 1
            asyncio.get_running_loop().call_soon(done, hiredis.ReplyError("TRYAGAIN Multiple keys request"))
        else:
            call(*command, done=done)

    monkeypatch.setattr(part, "call", refusing)
    await link.ask(b"DEL", key)
    for number in range(5):
        link.call(b"APPEND", key, b"%d" % number, done=replies.append)
        await asyncio.sleep(0)
    await link.ask(b"GET", key)
    while len(replies) < 5:
        await link.ask(b"GET", key)
    assert refusals == [0]
    assert sorted(replies) == [1, 2, 3, 4, 5]
    assert sorted(await link.ask(b"GET", key)) == sorted(b"01234")


async def test_connection_to_one_master_that_delivers_no_messages_is_replaced(cluster, wait_until):
    deaf = cluster.masters()[1]
    reasons = []
    with Proxy(("127.0.0.1", deaf.port), splits_replies=True) as proxy:
        link = open_link(cluster.url)
        url_of = link.slot_map.url_of
        link.slot_map.url_of = lambda address: (
            f"redis://127.0.0.1:{proxy.port}" if address[1] == deaf.port else url_of(address)
        )
        canary = Canary(link, keys(), "0123456789ab", 1, 0.05)

        def down(reason):
            reasons.append(reason)
            canary.connection_lost()

        link.on_up, link.on_down, link.on_push = canary.connected, down, canary.push
        link.start()
        await wait_until(lambda: canary.topics and all(path.arrived for path in canary.topics.values()))
        assert len(canary.topics) == 3
        assert canary.lag_s > 0
        proxy.swallow_messages()
        await wait_until(lambda: canary.broken and proxy.accepted > 1)
        assert f"the master at 127.0.0.1:{deaf.port} is lost: 3 messages to ourselves did not arrive" in reasons[-1]
        proxy.deliver_messages()
        await wait_until(lambda: not canary.broken)
        canary.close()
        await link.close()


async def test_connection_to_any_master_that_answers_nothing_is_replaced(looks_often, cluster, wait_until):
    """Beats and canaries noticed it only of the master of shard 0. Clients missed the others' events for 15 min."""
    silent = next(node for node in cluster.masters() if node is not cluster.owner(slot_of(keys().sys)))
    reasons = []
    with Proxy(("127.0.0.1", silent.port)) as proxy:
        link = ClusterLink(cluster.url, max_unanswered_looks=50)
        url_of = link.slot_map.url_of
        link.slot_map.url_of = lambda address: (
            f"redis://127.0.0.1:{proxy.port}" if address[1] == silent.port else url_of(address)
        )
        link.on_down = reasons.append
        link.start()
        await link.wait_up()
        kept = {at for at in range(SHARDS) if link.masters[at][1] != silent.port}
        for address, part in link.links.items():
            if address[1] != silent.port:
                # Another master may be slow for a moment.
                part._max_unanswered_looks = 100_000
        proxy.stall()
        await wait_until(lambda: not link.up)
        assert link.kept_shards == kept
        assert "no answer within" in reasons[-1]
        proxy.resume()
        await link.wait_up()
        await link.close()


def slot_of(key: bytes) -> int:
    from binascii import crc_hqx

    return crc_hqx(key[key.index(b"{") + 1 : key.index(b"}")], 0) % 16384


async def test_calls_for_shards_of_other_masters_go_on_while_one_is_away(cluster, wait_until):
    """One failing master of many stopped publishing for all apps."""
    names = keys()
    away = cluster.masters()[1]
    by_shard = {shard(APP, channel): names.cached(APP, channel) for channel in channels(SHARDS)}
    with Proxy(("127.0.0.1", away.port)) as proxy:
        link = ClusterLink(cluster.url)
        url_of, read = link.slot_map.url_of, link.slot_map.read
        link.slot_map.url_of = lambda address: (
            f"redis://127.0.0.1:{proxy.port}" if address[1] == away.port else url_of(address)
        )
        link.start()
        await link.wait_up()
        kept = {at for at in range(SHARDS) if link.masters[at][1] != away.port}
        assert 0 < len(kept) < SHARDS
        # New connections to this master get no answer.
        proxy.stall()
        proxy.cut()
        await wait_until(lambda: not link.up)
        assert link.kept_shards == kept == {at for at in range(SHARDS) if link.is_usable(at)}
        asked = [link.ask(b"SET", by_shard[at], b"x") for at in range(SHARDS)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert {at for at, answer in enumerate(answers) if answer == b"OK"} == kept
        assert all(isinstance(answers[at], LinkDown) for at in set(range(SHARDS)) - kept)
        proxy.resume()
        await link.wait_up()
        # Those whose connection didn't break; the others need subscriptions again.
        assert link.kept_shards == kept

        async def no_two_agree():
            raise OSError("no two nodes agree")

        # Cut off from all but one master, which goes on taking publishes: nothing is kept.
        proxy.stall()
        proxy.cut()
        await wait_until(lambda: not link.up)
        link.slot_map.read = no_two_agree
        await wait_until(lambda: not link.kept_shards)
        link.slot_map.read = read
        proxy.resume()
        await link.wait_up()
        assert link.kept_shards == frozenset()
        await link.close()
