import asyncio

import pytest

from redpoll.cluster.bus import Bus, Outgoing, Unavailable
from redpoll.cluster.link import Link, LinkDown


async def test_events_of_one_call_arrive_in_their_order_with_their_envelopes(link, keys):
    seen = []
    link.on_push = lambda topic, payload: seen.append((topic, payload))
    link.subscribe([keys.topic("7", "a"), keys.topic("7", "b")])
    items = [Outgoing("a", "e1", "1"), ("b", "e2", "2", "1.2", None), ("a", "e3", "3", None, "u")]
    assert await Bus(link, keys).publish_all("7", items, "ab" * 16) == [1, 1, 1]
    trace = b"ab" * 16
    assert seen == [
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 0 2\ne11"),
        (keys.topic("7", "b"), b"e 0 0 1.2 " + trace + b" 0 2\ne22"),
        (keys.topic("7", "a"), b"e 0 0 - " + trace + b" 1 2\nue33"),
    ]


async def test_event_that_nobody_subscribed_is_confirmed_too(link, keys):
    assert await Bus(link, keys).publish_all("7", [Outgoing("a", "e", "")]) == [0]
    assert await Bus(link, keys).publish_all("7", []) == []


async def test_publish_without_waiting_tells_its_callback(link, keys, wait_until):
    outcomes = []
    Bus(link, keys).publish("7", "a", "e", "d", done=outcomes.append)
    assert outcomes == []
    await wait_until(lambda: outcomes)
    assert outcomes == [0]


async def test_publish_while_redis_is_away_fails_at_once_for_those_who_do_not_wait(keys, wait_until):
    bus = Bus(Link("unix:///nowhere/redis.sock"), keys)
    outcomes = []
    bus.publish("7", "a", "e", "d", done=outcomes.append)
    await wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], LinkDown)


async def test_publish_is_unavailable_when_redis_stays_away(keys):
    link = Link("unix:///nowhere/redis.sock", first_delay_s=0.01, greatest_delay_s=0.05)
    link.start()
    bus = Bus(link, keys, confirm_s=0.05)
    with pytest.raises(Unavailable):
        await bus.publish_all("7", [Outgoing("a", "e", "d")])
    assert bus.unconfirmed == 1
    await link.close()


async def test_publish_waits_for_a_redis_that_is_about_to_be_back(link, keys):
    link.drop("for the test")
    assert await Bus(link, keys, confirm_s=10).publish_all("7", [Outgoing("a", "e", "d")]) == [0]


async def test_publish_to_a_redis_that_hangs_is_not_confirmed(link, keys, redis):
    bus = Bus(link, keys, confirm_s=0.1)
    redis.pause()
    try:
        with pytest.raises(Unavailable, match="not confirmed"):
            await bus.publish_all("7", [Outgoing("a", "e", "d"), Outgoing("b", "e", "d")])
    finally:
        redis.resume()
    assert bus.unconfirmed == 2
    assert await bus.publish_all("7", [Outgoing("a", "e", "d")]) == [0]


async def test_publish_whose_connection_breaks_is_not_repeated(link, keys):
    bus = Bus(link, keys)
    publishing = asyncio.ensure_future(bus.publish_all("7", [Outgoing("a", "e", "d")]))
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
