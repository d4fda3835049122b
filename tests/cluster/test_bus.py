import asyncio
import random

import pytest

from redpoll.cluster.bus import Bus, Outgoing, Unavailable, read_cached
from redpoll.cluster.link import Link, LinkDown
from redpoll.protocol.apps import App

APP = App(id="7", name="test", keys=())


async def test_events_of_one_call_arrive_in_their_order_with_their_envelopes(link, keys):
    seen = []
    link.on_push = lambda topic, payload: seen.append((topic, payload))
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "b")])
    items = [Outgoing("a", "e1", "1"), ("b", "e2", "2", "1.2", None), ("a", "e3", "3", None, "u")]
    assert await Bus(link, keys).publish_all(APP, items, "ab" * 16) == [1, 1, 1]
    trace = b"ab" * 16
    assert seen == [
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 0 2\ne11"),
        (keys.topic("7", "b"), b"e 0 0 1.2 " + trace + b" 0 2\ne22"),
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 1 2\nue33"),
    ]


async def test_event_that_nobody_subscribed_is_confirmed_too(link, keys):
    assert await Bus(link, keys).publish_all(APP, [Outgoing("a", "e", "")]) == [0]
    assert await Bus(link, keys).publish_all(APP, []) == []


async def test_publish_without_waiting_tells_its_callback(link, keys, wait_until):
    outcomes = []
    Bus(link, keys).publish(APP, "a", "e", "d", done=outcomes.append)
    assert outcomes == []
    await wait_until(lambda: outcomes)
    assert outcomes == [0]


async def test_publish_while_redis_is_away_fails_at_once_for_those_who_do_not_wait(keys, wait_until):
    bus = Bus(Link("unix:///nowhere/redis.sock"), keys)
    outcomes = []
    bus.publish(APP, "a", "e", "d", done=outcomes.append)
    await wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], LinkDown)


async def test_publish_is_unavailable_when_redis_stays_away(keys):
    link = Link("unix:///nowhere/redis.sock", first_delay_s=0.01, greatest_delay_s=0.05)
    link.start()
    bus = Bus(link, keys, confirm_s=0.05)
    with pytest.raises(Unavailable):
        await bus.publish_all(APP, [Outgoing("a", "e", "d")])
    assert bus.unconfirmed == 1
    await link.close()


async def test_publish_waits_for_a_redis_that_is_about_to_be_back(link, keys):
    link.drop("for the test")
    assert await Bus(link, keys, confirm_s=10).publish_all(APP, [Outgoing("a", "e", "d")]) == [0]


async def test_publish_to_a_redis_that_hangs_is_not_confirmed(link, keys, redis):
    bus = Bus(link, keys, confirm_s=0.1)
    redis.pause()
    try:
        with pytest.raises(Unavailable, match="not confirmed"):
            await bus.publish_all(APP, [Outgoing("a", "e", "d"), Outgoing("b", "e", "d")])
    finally:
        redis.resume()
    assert bus.unconfirmed == 2
    assert await bus.publish_all(APP, [Outgoing("a", "e", "d")]) == [0]


async def test_publish_whose_connection_breaks_is_not_repeated(link, keys):
    bus = Bus(link, keys)
    publishing = asyncio.ensure_future(bus.publish_all(APP, [Outgoing("a", "e", "d")]))
    await asyncio.sleep(0)
    link.flush()
    link.drop("for the test")
    with pytest.raises(Unavailable, match="went away before it answered"):
        await publishing


async def test_workers_that_listen_are_counted(link, keys, start_worker, wait_until):
    bus = Bus(link, keys)
    assert await bus.workers_listening() == 0
    workers = [await start_worker(k) for k in range(3)]
    assert await bus.workers_listening() == 3
    await wait_until(lambda: all(worker.sys == [{}] for worker in workers))


# Cache channels


async def test_cached_event_is_what_is_told_for_as_long_as_the_app_says(link, keys):
    bus, app = Bus(link, keys), App(id="7", name="test", keys=(), cache_ttl_s=60)
    assert await read_cached(link, keys, "7", "cache-a") is None
    await bus.publish_all(app, [("cache-a", "e", "1", "1.2", None), ("cache-a", "é", '"2"', "1.2", None)], "ab" * 16)
    found = await read_cached(link, keys, "7", "cache-a")
    assert (found.event, found.data) == ("é", '"2"')
    assert 50 < found.ttl_s <= 60
    assert await read_cached(link, keys, "8", "cache-a") is None


async def test_clients_events_and_other_channels_are_not_cached(link, keys, wait_until):
    bus, outcomes = Bus(link, keys), []
    bus.publish(APP, "private-cache-a", "client-e", "1", done=outcomes.append)
    await bus.publish_all(APP, [Outgoing("my-cache-a", "e", "1")])
    await wait_until(lambda: outcomes)
    assert await link.ask(b"KEYS", b"*:k:*") == []


@pytest.mark.parametrize("prefix", ["cache-", "private-cache-", "presence-cache-", "private-encrypted-cache-"])
async def test_joiner_is_told_the_cached_event_or_that_there_is_none(prefix, link, keys, start_worker, wait_until):
    worker = await start_worker(1)
    bus, channel = Bus(link, keys), prefix + "a"
    user = "u" if prefix.startswith("presence") else None
    first = worker.join(channel, user)
    await wait_until(lambda: first.state == "attached")
    assert first.cached == b""
    await bus.publish_all(APP, [Outgoing(channel, "e", "1", "1.2")])
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
                publishing = asyncio.ensure_future(bus.publish_all(APP, [Outgoing(channel, "e", "1")]))
            sockets.append(rng.choice(workers).join(channel))
            if rng.random() < 0.7:
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                await worker.link.ask(b"PING")
        assert publishing is not None
        await publishing
        await asyncio.gather(*(each.link.ask(b"PING") for each in workers))
        everybody = early + sockets
        await wait_until(lambda everybody=everybody: all(socket.state == "attached" for socket in everybody))
        for socket in everybody:
            cached = int(bool(socket.cached))
            assert cached + len(socket.events) == 1
            seen["cached"] += cached
            seen["live"] += len(socket.events)
        for each in workers:
            each.leave_all()
    assert min(seen.values()) > 50


# Published once


async def test_event_of_the_same_place_in_the_same_request_is_published_once(link, keys, wait_until):
    seen = []
    link.on_push = lambda topic, payload: seen.append(payload[-1:])
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "cache-a")])
    bus = Bus(link, keys)
    items = [Outgoing("a", "e", "1"), Outgoing("cache-a", "e", "2"), Outgoing("a", "e", "3")]
    for once in ("x", "x", "y"):
        assert await bus.publish_all(APP, items, once=once) == [1, 1, 1]
    assert seen == [b"1", b"2", b"3"] * 2
    assert 100 < await link.ask(b"TTL", keys.published("7", "a", "x", 2)) <= 120


async def test_repeated_event_does_not_come_back_into_the_cache(link, keys):
    bus = Bus(link, keys)
    await bus.publish_all(APP, [Outgoing("cache-a", "e", "old")], once="x")
    await bus.publish_all(APP, [Outgoing("cache-a", "e", "new")])
    await bus.publish_all(APP, [Outgoing("cache-a", "e", "old")], once="x")
    assert (await read_cached(link, keys, "7", "cache-a")).data == "new"
