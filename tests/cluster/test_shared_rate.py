"""The rate limit over several nodes: what each takes from Redis."""

import asyncio

import pytest

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.redis.link import Link
from redpoll.cluster.shared_rate import Part, SharedRate


async def test_nodes_together_take_the_limit_and_no_more(redis, keys):
    links = [Link(redis.url) for _ in range(3)]
    for link in links:
        link.start()
        await link.wait_up()
    asked = [SharedRate(link, keys).take("192.0.2.1", 4, 30, 60.0) for link in links for _ in range(9)]
    parts = await asyncio.gather(*asked)
    assert sum(part.granted for part in parts) == 30
    assert {part.granted for part in parts} == {4, 2, 0}
    assert max(part.taken for part in parts) == 30
    for link in links:
        await link.close()


async def test_window_ends_a_minute_after_its_first_trigger_and_addresses_have_their_own(link, keys):
    rate = SharedRate(link, keys)
    first = await rate.take("192.0.2.1", 2, 2, 60.0)
    assert first == Part(2, 2, 60.0)
    assert (await rate.take("192.0.2.2", 1, 2, 60.0)).granted == 1
    # What a node takes later doesn't prolong the window.
    await link.ask(b"PEXPIRE", keys.rate("192.0.2.1"), 30_000)
    refused = await rate.take("192.0.2.1", 1, 3, 60.0)
    assert (refused.granted, refused.taken) == (1, 3)
    assert 0 < refused.left_s <= 30.0
    assert 0 < await link.ask(b"PTTL", keys.rate("192.0.2.1")) <= 30_000


async def test_window_begins_again_when_the_clock_of_redis_is_set_back(link, keys):
    rate = SharedRate(link, keys)
    assert (await rate.take("192.0.2.1", 2, 2, 60.0)).granted == 2
    # Redis keeps the time at which the key expires: an hour more is left.
    await link.ask(b"PEXPIRE", keys.rate("192.0.2.1"), 3_660_000)
    assert await rate.take("192.0.2.1", 2, 2, 60.0) == Part(2, 2, 60.0)
    assert 0 < await link.ask(b"PTTL", keys.rate("192.0.2.1")) <= 60_000


async def test_without_redis_nothing_is_granted(tmp_path, keys):
    link = Link(f"unix://{tmp_path}/none.sock")
    link.start()
    with pytest.raises(Unavailable):
        await SharedRate(link, keys, confirm_s=0.05).take("192.0.2.1", 1, 1, 60.0)
    await link.close()
