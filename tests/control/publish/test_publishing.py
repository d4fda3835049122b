"""Publishing while Redis is away, hangs and is back."""

import asyncio

from helpers.sentinel import redis_cluster
from redpoll.cluster.redis.keys import SHARDS, shard_of_name


async def test_publishes_get_503_while_redis_is_killed_and_then_work_again(make_plane, own_redis, wait_until):
    plane = await make_plane(own_redis.url)
    assert (await plane.trigger()).status == 200
    own_redis.kill()
    assert (await plane.trigger()).status == 503
    own_redis.start()
    await wait_until(lambda: plane.plane.publishing.publisher.open)
    assert (await plane.trigger()).status == 200


async def test_publishes_get_503_in_time_while_redis_hangs(make_plane, own_redis):
    plane = await make_plane(own_redis.url)
    own_redis.pause()
    try:
        assert (await plane.trigger()).status == 503
    finally:
        own_redis.resume()


async def test_app_with_a_daily_limit_publishes_while_a_master_is_lost_that_it_does_not_need(make_plane):
    """All its publishes got 503, and the server wasn't ready."""
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        plane = await make_plane(cluster.url)
        await plane.records.set_app("3", {"plan": "free"})
        link, keys = plane.plane.link, plane.plane.cluster.keys
        day = shard_of_name(keys.spent("3", ""))
        needed = {link.masters[0], link.masters[day]}
        lost = next(at for at in range(SHARDS) if link.masters[at] not in needed)
        channel = next(name for name in map(str, range(1000)) if link.masters[keys.shard("3", name)] in needed)

        async def published():
            async with asyncio.timeout(60):
                while (await plane.trigger(channels=[channel])).status != 200:
                    pass

        async def no_map():
            await asyncio.Event().wait()

        # Its counter is restored then.
        await published()
        link.slot_map.read = no_map
        link.drop_connection(lost, "for the test")
        assert not link.up
        await published()
        async with asyncio.timeout(60):
            while (await plane.ask("GET", "/readyz")).status != 200:
                pass
        assert not link.up
        await plane.plane.finish()
