"""Counts, members and channels, read from a real Redis."""

import asyncio
import itertools

import pytest
from redis.asyncio import Redis

from helpers.unkeyed import shard
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.api.occupancy import Occupancy, TooManyChannels


@pytest.fixture
async def occupancy(link):
    return Occupancy(link, Keys("rp"))


async def all_of(slices):
    return [name async for names in slices for name in names]


@pytest.fixture
async def occupy_many(redis):
    """`await occupy_many(names)`: each has one subscription of app 3."""
    async with Redis(unix_socket_path=redis.path) as client:
        keys = Keys("rp")

        async def occupy_many(names):
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.hset(keys.counts("3", name), "w", 1)
                pipeline.sadd(keys.occupied(shard("3", name), "3"), name)
            await pipeline.execute()

        yield occupy_many


async def test_count_is_the_sum_over_all_workers(occupancy, occupy):
    await occupy("a", {"w1": 2, "w2": 40})
    assert await occupancy.subscription_counts("3", ["a", "none"]) == [42, 0]


async def test_users_are_distinct_and_sorted(occupancy, occupy):
    await occupy("presence-a", {"w1": 3}, users=["b", "a", "ü"])
    assert await occupancy.user_counts("3", ["presence-a", "presence-none"]) == [3, 0]
    assert await all_of(occupancy.user_ids("3", "presence-a")) == ["a", "b", "ü"]
    assert await all_of(occupancy.user_ids("3", "presence-none")) == []


async def test_channels_are_listed_from_every_shard_of_this_app_only(occupancy, occupy):
    names = [f"c{number}" for number in range(200)]
    for name in names:
        await occupy(name, {"w": 1})
    assert await all_of(occupancy.channels("3", "")) == sorted(names)
    assert await all_of(occupancy.channels("3", "c19")) == ["c19", *(f"c19{digit}" for digit in range(10))]
    assert await all_of(occupancy.channels("4", "")) == []


async def test_prefix_is_not_used_as_a_pattern(occupancy, occupy):
    await occupy("abc", {"w": 1})
    assert await all_of(occupancy.channels("3", "a*")) == []


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
            await all_of(Occupancy(link, Keys("rp"), answer_s=0.1).channels("3", ""))
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
    names = await all_of(occupancy.channels("3", ""))
    counting = asyncio.create_task(occupancy.subscription_counts("3", names))
    await asyncio.sleep(0)
    # This command is sent after the first part of the list, and answered before the last part.
    await link.ask(b"PING")
    assert not counting.done()
    assert sum(await counting) == 1_100


async def test_a_large_presence_channel_is_listed_in_sorted_slices(occupancy, occupy):
    users = [f"user-{number:05}" for number in range(3_000)]
    await occupy("presence-a", {"w1": 3}, users=users)
    slices = [ids async for ids in occupancy.user_ids("3", "presence-a")]
    assert [user for ids in slices for user in ids] == users
    assert len(slices) > 3


async def test_too_many_channels_are_refused_before_the_first_slice(occupancy, occupy_many):
    names = [f"c{number:03}" for number in range(300)]
    await occupy_many(names)
    assert await all_of(occupancy.channels("3", "", max_count=300, max_bytes=1_200)) == names
    for bounds in ({"max_count": 299}, {"max_bytes": 1_199}):
        with pytest.raises(TooManyChannels):
            await anext(occupancy.channels("3", "", **bounds))
    assert len(await all_of(occupancy.channels("3", "c29", max_count=10))) == 10


async def pages_of(occupancy, prefix, limit):
    pages, after = [], None
    while True:
        page = await occupancy.page("3", prefix, limit, after)
        assert len(page.names) <= limit
        pages.append(page.names)
        after = page.after
        if after is None:
            return pages


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 200, 201, 1_000])
async def test_each_channel_is_in_exactly_one_page(occupancy, occupy_many, limit):
    names = [f"c{number}" for number in range(190)] + [f"ü{number}" for number in range(10)]
    await occupy_many(names)
    pages = await pages_of(occupancy, "", limit)
    assert sorted(name for page in pages for name in page) == sorted(names)
    assert all(len(page) == limit for page in pages[:-1])
    matching = [name for page in await pages_of(occupancy, "c1", limit) for name in page]
    assert sorted(matching) == sorted(name for name in names if name.startswith("c1"))


async def test_pages_of_many_channels_while_others_come_and_go(redis, occupancy, occupy_many):
    """Sets of this size are hash tables in Redis, which grow and shrink meanwhile."""
    staying = {f"stays-{number}" for number in range(10_000)}
    await occupy_many(staying)
    seen, after = [], None
    async with Redis(unix_socket_path=redis.path) as client:
        for number in itertools.count():
            page = await occupancy.page("3", "", 1_000, after)
            seen += page.names
            after = page.after
            if after is None:
                break
            passing = [f"{number}-passes-{at}" for at in range(500)]
            await occupy_many(passing)
            for name in passing if number % 2 else ():
                await client.srem(Keys("rp").occupied(shard("3", name), "3"), name)
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


async def test_a_page_ends_early_if_few_names_have_the_prefix(occupancy, occupy_many, monkeypatch):
    monkeypatch.setattr("redpoll.control.api.occupancy._MAX_READ_PER_PAGE", 50)
    await occupy_many([f"c{number}" for number in range(500)] + ["rare"])
    pages = await pages_of(occupancy, "rare", 10)
    assert [name for page in pages for name in page] == ["rare"]
    assert len(pages) > 2


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
