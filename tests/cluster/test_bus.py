import asyncio
import json
import random
import time

import pytest
from msgspec import structs

from helpers.bus_publishing import Outgoing, publish_all
from helpers.unkeyed import shard
from redpoll import _frame
from redpoll.cluster.bus import Bus, Unavailable, read_cached
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.channels import CONSOLE

APP = App(id="7", name="test", keys=())


async def test_events_of_one_call_arrive_in_their_order_with_their_envelopes(link, keys):
    seen = []
    link.on_push = lambda topic, payload: seen.append((topic, payload))
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "b")])
    items = [Outgoing("a", "e1", "1"), Outgoing("b", "e2", "2", "1.2"), Outgoing("a", "e3", "3")]
    assert await publish_all(Bus(link, keys), APP, items, "ab" * 16) == [1, 1, 1]
    trace = b"ab" * 16
    assert seen == [
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 0 2\ne11"),
        (keys.topic("7", "b"), b"e 0 0 1.2 " + trace + b" 0 2\ne22"),
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 0 2\ne33"),
    ]


async def test_event_without_subscribers_is_confirmed(link, keys):
    assert await publish_all(Bus(link, keys), APP, [Outgoing("a", "e", "")]) == [0]
    assert await publish_all(Bus(link, keys), APP, []) == []


async def test_publish_without_waiting_calls_its_callback(link, keys, wait_until):
    outcomes = []
    Bus(link, keys).publish(APP, "a", "e", "d", done=outcomes.append)
    assert outcomes == []
    await wait_until(lambda: outcomes)
    assert outcomes == [0]


async def test_client_event_fails_at_once_while_redis_is_disconnected(keys, wait_until):
    bus = Bus(Link("unix:///nowhere/redis.sock"), keys)
    outcomes = []
    bus.publish(APP, "a", "e", "d", done=outcomes.append)
    await wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], LinkDown)


async def test_publish_whose_connection_breaks_is_not_repeated(link, keys):
    bus = Bus(link, keys)
    publishing = asyncio.ensure_future(publish_all(bus, APP, [Outgoing("a", "e", "d")]))
    await asyncio.sleep(0)
    link.flush()
    link.drop("for the test")
    with pytest.raises(Unavailable, match="connection to Redis broke before the answer"):
        await publishing


# Cache channels


async def test_cached_event_is_sent_until_its_ttl_ends(link, keys):
    bus, app = Bus(link, keys), App(id="7", name="test", keys=(), cache_ttl_s=60)
    assert await read_cached(link, keys, "7", "cache-a") is None
    began = time.monotonic()
    await publish_all(bus, app, [("cache-a", "e", "1", "1.2"), ("cache-a", "é", '"2"', "1.2")], "ab" * 16)
    found = await read_cached(link, keys, "7", "cache-a")
    assert (found.event, found.data) == ("é", '"2"')
    assert 59 - (time.monotonic() - began) < found.ttl_s <= 60
    assert await read_cached(link, keys, "8", "cache-a") is None


async def test_cached_event_beyond_the_apps_cap_is_sent_and_counted(link, keys):
    bus, app = Bus(link, keys), App(id="7", name="test", keys=(), max_cached_channels=1)
    other = next(f"cache-{n}" for n in range(10_000) if shard("7", f"cache-{n}") == shard("7", "cache-a"))
    await publish_all(bus, app, [Outgoing(other, "e", "1"), Outgoing("cache-a", "e", "2")])
    assert (bus.published, bus.uncached) == (2, 1)
    assert await read_cached(link, keys, "7", "cache-a") is None
    # Twice an even share of the shards.
    await publish_all(bus, structs.replace(app, max_cached_channels=64), [Outgoing("cache-a", "e", "3")])
    assert (await read_cached(link, keys, "7", "cache-a")).data == "3"
    assert bus.uncached == 1


async def test_event_that_is_not_cached_is_stored_in_its_history(link, keys, pushes):
    bus, app = Bus(link, keys), keeping(rule("cache-", prefix=True), max_cached_channels=1)
    other = next(f"cache-{n}" for n in range(10_000) if shard("7", f"cache-{n}") == shard("7", "cache-a"))
    await publish_all(bus, app, [Outgoing(other, "e", "1"), Outgoing("cache-a", "e", "2")])
    assert (bus.uncached, bus.unkept) == (1, 0)
    ((_, offset, _, _),) = pushes
    assert offset > 0


async def test_clients_events_and_other_channels_are_not_cached(link, keys, wait_until):
    bus, outcomes = Bus(link, keys), []
    bus.publish(APP, "private-cache-a", "client-e", "1", done=outcomes.append)
    await publish_all(bus, APP, [Outgoing("my-cache-a", "e", "1")])
    await wait_until(lambda: outcomes)
    assert await link.ask(b"KEYS", b"*:k:*") == []


@pytest.mark.parametrize("prefix", ["cache-", "private-cache-", "presence-cache-", "private-encrypted-cache-"])
async def test_joiner_gets_the_cached_event_or_a_cache_miss(prefix, link, keys, start_worker, wait_until):
    worker = await start_worker(1)
    bus, channel = Bus(link, keys), prefix + "a"
    user = "u" if prefix.startswith("presence") else None
    first = worker.join(channel, user)
    await wait_until(lambda: first.state == "attached")
    assert first.cached == b""
    await publish_all(bus, APP, [Outgoing(channel, "e", "1", "1.2")])
    await wait_until(lambda: first.events)
    second = worker.join(channel, user)
    await wait_until(lambda: second.state == "attached")
    assert second.cached == b"e 0 0 - - 0 1\ne1"
    assert second.events == []
    other = worker.join("news")
    await wait_until(lambda: other.state == "attached")
    assert other.cached is None


async def test_subscriber_that_races_a_publish_gets_the_event_exactly_once(link, keys, start_worker, wait_until):
    workers = [await start_worker(k) for k in (1, 2)]
    bus, rng = Bus(link, keys), random.Random(7)
    seen = {"cached": 0, "live": 0}
    for round_ in range(400):
        channel, worker = f"cache-{round_}", rng.choice(workers)
        early = [worker.join(channel)] if rng.random() < 0.3 else []
        ahead = rng.randrange(4)
        publishing = None
        sockets = []
        for step in range(4):
            if step == ahead:
                publishing = asyncio.ensure_future(publish_all(bus, APP, [Outgoing(channel, "e", "1")]))
            sockets.append(rng.choice(workers).join(channel))
            if rng.random() < 0.7:
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                await worker.link.ask(b"PING")
        assert publishing is not None
        await publishing
        await asyncio.gather(*(worker.link.ask(b"PING") for worker in workers))
        everybody = early + sockets
        await wait_until(lambda everybody=everybody: all(socket.state == "attached" for socket in everybody))
        for socket in everybody:
            cached = int(bool(socket.cached))
            assert cached + len(socket.events) == 1
            seen["cached"] += cached
            seen["live"] += len(socket.events)
        for worker in workers:
            worker.leave_all()
    assert min(seen.values()) > 50


# Published once


async def test_event_at_the_same_index_of_the_same_request_is_published_once(link, keys, wait_until):
    seen = []
    link.on_push = lambda topic, payload: seen.append(payload[-1:])
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "cache-a")])
    bus = Bus(link, keys)
    items = [Outgoing("a", "e", "1"), Outgoing("cache-a", "e", "2"), Outgoing("a", "e", "3")]
    began = time.monotonic()
    for once in ("x", "x", "y"):
        assert await publish_all(bus, APP, items, once=once) == [1, 1, 1]
    assert seen == [b"1", b"2", b"3"] * 2
    kept_s = await link.ask(b"TTL", keys.published("7", "a", "x", 2))
    assert 129 - (time.monotonic() - began) < kept_s <= 130


async def test_repeated_event_is_not_cached_again(link, keys):
    bus = Bus(link, keys)
    await publish_all(bus, APP, [Outgoing("cache-a", "e", "old")], once="x")
    await publish_all(bus, APP, [Outgoing("cache-a", "e", "new")])
    await publish_all(bus, APP, [Outgoing("cache-a", "e", "old")], once="x")
    assert (await read_cached(link, keys, "7", "cache-a")).data == "new"


# Stored events, and webhook rows


def keeping(*rules: HistoryRule, **more) -> App:
    return App(id="7", name="test", keys=(), history=rules, **more)


def rule(name: str, **more) -> HistoryRule:
    return HistoryRule(**{"id": "abcdef", "name": name, "keep": 9, "seconds": 60} | more)


@pytest.fixture
def pushes(link, keys):
    """What comes over the topics of `a` and `cache-a`: channel, offset, offset before, data."""
    seen = []

    def push(topic: bytes, payload: bytes) -> None:
        offset, prev, *_, data = _frame.envelope(payload)
        seen.append((topic.rpartition(b":")[2].decode(), offset, prev, data.decode()))

    link.on_push = push
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "cache-a")])
    return seen


async def test_event_is_stored_by_rule_and_its_publisher_gets_the_usual_answer(link, keys, pushes):
    bus, app = Bus(link, keys), keeping(rule("a"))
    assert await publish_all(bus, app, [("a", "e", "1", None), ("b", "e", "1", None)]) == [1, 0]
    assert await publish_all(bus, app, [Outgoing("a", "e", "2")]) == [1]
    (_, first, _, _), (_, second, before, _) = pushes
    assert (before, first > 0) == (first, True)
    assert await link.ask(b"XLEN", keys.history("7", "a")) == 2
    assert await link.ask(b"EXISTS", keys.history("7", "b")) == 0
    assert int(await link.ask(b"HGET", keys.history_meta("7", "a"), b"s")) == second


async def test_event_of_a_cache_channel_is_cached_and_stored_once(link, keys, pushes):
    bus, app = Bus(link, keys), keeping(rule("cache-", prefix=True))
    await link.ask(b"SET", keys.cache_miss("7", "cache-a"), b"1")
    for _ in range(2):
        assert await publish_all(bus, app, [Outgoing("cache-a", "e", "1")], once="x") == [1]
    assert await link.ask(b"XLEN", keys.history("7", "cache-a")) == 1
    assert [(channel, data) for channel, _, _, data in pushes] == [("cache-a", "1")]
    assert (await read_cached(link, keys, "7", "cache-a")).data == "1"
    assert await link.ask(b"EXISTS", keys.cache_miss("7", "cache-a")) == 0


async def test_each_history_has_an_epoch_of_its_own(link, keys):
    bus, app = Bus(link, keys), keeping(rule("", prefix=True))
    await publish_all(bus, app, [Outgoing(f"a{n}", "e", "1") for n in range(20)])
    epochs = [await link.ask(b"HGET", keys.history_meta("7", f"a{n}"), b"e") for n in range(20)]
    assert len(set(epochs)) == 20
    await link.ask(b"DEL", keys.history_meta("7", "a0"))
    await publish_all(bus, app, [Outgoing("a0", "e", "1")])
    assert await link.ask(b"HGET", keys.history_meta("7", "a0"), b"e") not in epochs


async def test_event_beyond_the_apps_cap_is_sent_and_counted(link, keys, pushes):
    bus = Bus(link, keys)
    other = next(f"a{n}" for n in range(10_000) if shard("7", f"a{n}") == shard("7", "a"))
    app = keeping(rule("a", prefix=True), max_history_channels=1)
    await publish_all(bus, app, [Outgoing(other, "e", "1"), Outgoing("a", "e", "2")])
    assert pushes == [("a", 0, 0, "2")]
    assert (bus.published, bus.unkept) == (2, 1)
    # Twice an even share of the shards.
    app = keeping(rule("a", prefix=True), max_history_channels=64)
    await publish_all(bus, app, [Outgoing("a", "e", "3")])
    assert pushes[1][1] > 0
    assert bus.unkept == 1


async def test_history_that_falls_beyond_the_cap_does_not_come_back_with_a_later_epoch(link, keys):
    bus = Bus(link, keys)
    other = next(f"a{n}" for n in range(10_000) if shard("7", f"a{n}") == shard("7", "a"))
    one, two = (keeping(rule("a", prefix=True), max_history_channels=cap) for cap in (1, 64))
    await publish_all(bus, two, [Outgoing("a", "e", "old")])
    # As when its last message is about to expire: the channel doesn't count any more, its messages are still there.
    await link.ask(b"ZREM", keys.histories(shard("7", "a"), "7"), b"a")
    await link.ask(b"HDEL", keys.history_meta("7", "a"), b"x")
    await publish_all(bus, one, [Outgoing(other, "e", "1"), Outgoing("a", "e", "not stored")])
    assert bus.unkept == 1
    assert await link.ask(b"EXISTS", keys.history("7", "a"), keys.history_meta("7", "a")) == 0
    await publish_all(bus, two, [Outgoing("a", "e", "new")])
    assert await link.ask(b"XLEN", keys.history("7", "a")) == 1


async def test_clients_event_is_stored_only_if_the_rule_says_so(link, keys, pushes, wait_until):
    bus = Bus(link, keys)
    for wanted in (False, True):
        bus.publish(keeping(rule("a", client_events=wanted)), "a", "client-e", str(wanted), done=lambda reply: None)
    await wait_until(lambda: len(pushes) == 2)
    assert [(offset > 0, data) for _, offset, _, data in pushes] == [(False, "False"), (True, "True")]


async def test_clients_event_that_a_webhook_wants_makes_a_row(link, keys, pushes, wait_until):
    bus, app, receivers = Bus(link, keys), keeping(rule("a", client_events=True), hooks="oc"), []
    traces = {"trace": "run" + "ab" * 16, "row_trace_id": "ab" * 16}
    bus.publish(app, "a", "client-é", '{"n":1}', skip="1.2", user="ü", done=receivers.append, **traces)
    bus.publish(app, "b", "client-e", "", skip="1.2", done=receivers.append)
    bus.publish(keeping(hooks="om"), "a", "client-e", "", done=receivers.append)
    await wait_until(lambda: len(receivers) == 3)
    assert receivers == [1, 0, 1]
    rows = []
    for channel in ("a", "b"):
        for id_, flat in await link.ask(b"XRANGE", keys.outbox(shard("7", channel)), b"-", b"+"):
            rows.append((int(id_.split(b"-")[0]), dict(zip(flat[::2], flat[1::2], strict=True))))
    (stamp, first), (_, second) = rows
    # The message and the row have one stamp.
    assert stamp == pushes[0][1]
    assert json.loads(first.pop(b"x")) == {"event": "client-é", "data": '{"n":1}', "socket_id": "1.2"}
    assert abs(int(first.pop(b"t")) - stamp // 1000) <= 1
    assert first == {
        b"k": b"client_event",
        b"a": b"7",
        b"c": b"a",
        b"u": "ü".encode(),
        b"i": b"ab" * 16,
    }
    assert sorted(second) == [b"a", b"c", b"k", b"t", b"x"]


async def test_clients_event_that_finds_no_room_for_its_row_is_sent_and_counted(link, keys, pushes, wait_until):
    lua = "for n = 1, 10000 do redis.call('XADD', KEYS[1], n .. '-0', 'k', 'x') end"
    await link.ask(b"EVAL", lua, 1, keys.outbox(shard("7", "a")))
    bus = Bus(link, keys)
    bus.publish(keeping(hooks="c"), "a", "client-e", "1", done=lambda reply: None)
    await wait_until(lambda: bus.unhooked)
    assert (bus.unhooked, pushes) == (1, [("a", 0, 0, "1")])


async def test_servers_event_makes_no_row(link, keys):
    await publish_all(Bus(link, keys), keeping(rule("a"), hooks="omcxs"), [Outgoing("a", "e", "1")])
    assert await link.ask(b"EXISTS", keys.outbox(shard("7", "a"))) == 0


async def test_events_are_copied_to_the_console_only_while_somebody_watches(link, keys, start_worker, wait_until):
    worker = await start_worker(1)
    watched = structs.replace(APP, console_until=time.time() + 60)
    worker.app = watched
    watching = worker.join(CONSOLE)
    await wait_until(lambda: watching.state == "attached")
    bus = Bus(link, keys)
    done = []
    await publish_all(bus, watched, [("a", "e", "1", "1.2")])
    bus.publish(watched, "private-b", "client-x", "2", user="u", done=done.append)
    await wait_until(lambda: len(worker.sockets.console_copies) == 2)
    await publish_all(bus, APP, [Outgoing("a", "e", "3")])
    await publish_all(bus, structs.replace(APP, console_until=time.time() - 1), [Outgoing("a", "e", "4")])
    await publish_all(bus, watched, [Outgoing("a", "e", "5")])
    await wait_until(lambda: len(worker.sockets.console_copies) == 3)
    assert worker.sockets.console_copies == [
        b"c a\ne 0 0 1.2 - 0 1\ne1",
        b"c private-b\ne 0 0 - - 1 8\nuclient-x2",
        b"c a\ne 0 0 - - 0 1\ne5",
    ]
    # The console is not counted.
    assert await link.ask(b"KEYS", b"*:a:7") == []
    assert await link.ask(b"KEYS", b"*console*") == []
