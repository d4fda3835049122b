"""Counts, members and channels, read from a real Redis."""

import asyncio

import pytest
from redis.asyncio import Redis

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.keys import Keys, shard
from redpoll.cluster.link import Link
from redpoll.control.occupancy import Occupancy


@pytest.fixture
async def link(redis):
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    yield link
    await link.close()


@pytest.fixture
async def occupancy(link):
    return Occupancy(link, Keys("rp"))


async def test_count_is_the_sum_over_all_workers(occupancy, occupy):
    await occupy("a", {"w1": 2, "w2": 40})
    assert await occupancy.subscription_counts("3", ["a", "none"]) == [42, 0]


async def test_users_are_distinct_and_sorted(occupancy, occupy):
    await occupy("presence-a", {"w1": 3}, users=["b", "a", "ü"])
    assert await occupancy.user_counts("3", ["presence-a", "presence-none"]) == [3, 0]
    assert await occupancy.user_ids("3", "presence-a") == ["a", "b", "ü"]


async def test_channels_are_listed_from_every_shard_of_this_app_only(occupancy, occupy):
    names = [f"c{number}" for number in range(200)]
    for name in names:
        await occupy(name, {"w": 1})
    assert await occupancy.channels("3", "") == sorted(names)
    assert await occupancy.channels("3", "c19") == ["c19", *(f"c19{digit}" for digit in range(10))]
    assert await occupancy.channels("4", "") == []


async def test_prefix_is_not_used_as_a_pattern(occupancy, occupy):
    await occupy("abc", {"w": 1})
    assert await occupancy.channels("3", "a*") == []


async def test_occupancy_without_redis_is_unavailable(redis, link, occupancy):
    await link.close()
    with pytest.raises(Unavailable):
        await occupancy.user_counts("3", ["presence-a"])


async def test_occupancy_with_a_hanging_redis_is_unavailable_within_the_limit(own_redis):
    link = Link(own_redis.url)
    link.start()
    await link.wait_up()
    own_redis.pause()
    try:
        with pytest.raises(Unavailable, match=r"within 0\.1 s"):
            await Occupancy(link, Keys("rp"), answer_s=0.1).channels("3", "")
    finally:
        own_redis.resume()
    await link.close()


async def test_error_of_redis_is_unavailable(link, occupancy):
    await link.ask(b"SET", Keys("rp").counts("3", "a"), b"no hash")
    with pytest.raises(Unavailable, match="WRONGTYPE"):
        await occupancy.subscription_counts("3", ["a"])


async def test_long_list_does_not_block_other_commands(link, occupancy, occupy):
    for number in range(1_100):
        await occupy(f"c{number}", {"w": 1})
    names = await occupancy.channels("3", "")
    counting = asyncio.create_task(occupancy.subscription_counts("3", names))
    await asyncio.sleep(0)
    # This command is sent after the first part of the list, and answered before the last part.
    await link.ask(b"PING")
    assert not counting.done()
    assert sum(await counting) == 1_100


async def test_members_are_listed_with_user_info_up_to_a_limit(redis, plane):
    occupancy = Occupancy(plane.plane.link, Keys("rp"))
    async with Redis(unix_socket_path=redis.path) as client:
        await client.hset(Keys("rp").members("3", "presence-m"), mapping={"b": "w\n{}", "a": "w v\n", "c": 'w\n"\n"'})
    assert await occupancy.members("3", "presence-m") == [("a", b""), ("b", b"{}"), ("c", b'"\n"')]
    assert len(await occupancy.members("3", "presence-m", 2)) == 2
    assert await occupancy.members("3", "presence-none") == []


async def test_channels_with_history_are_listed_from_every_shard(redis, plane):
    occupancy = Occupancy(plane.plane.link, Keys("rp"))
    names = [f"kept-{at:02}" for at in range(30)]
    async with Redis(unix_socket_path=redis.path) as client:
        for name in names:
            await client.zadd(Keys("rp").histories(shard("3", name), "3"), {name: 1})
    assert await occupancy.with_history("3") == names
    assert len(await occupancy.with_history("3", 10)) == 10
