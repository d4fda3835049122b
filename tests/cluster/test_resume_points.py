"""Points are times of Redis, and expire."""

import pytest

from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.resume_points import ResumePoint, ResumePoints


async def redis_time_us(link) -> int:
    seconds, micros = await link.ask(b"TIME")
    return int(seconds) * 1_000_000 + int(micros)


async def test_point_is_so_long_ago_by_the_clock_of_redis(link, keys):
    points = ResumePoints(link, keys)
    before = await redis_time_us(link)
    await points.write([ResumePoint("7", "u", 2.5, 600), ResumePoint("7", "v", 0.0, 60)])
    after = await redis_time_us(link)
    point, left_s = await points.read("7", "u")
    assert before - 2_500_000 <= point <= after - 2_500_000
    assert 0 < left_s <= 600
    assert before <= (await points.read("7", "v"))[0] <= after


async def test_there_is_none_of_other_users_and_apps(link, keys):
    points = ResumePoints(link, keys)
    await points.write([ResumePoint("7", "u", 1.0, 60)])
    assert await points.read("7", "v") is None
    assert await points.read("8", "u") is None


async def test_the_last_one_counts(link, keys):
    points = ResumePoints(link, keys)
    await points.write([ResumePoint("7", "u", 100.0, 60)])
    await points.write([ResumePoint("7", "u", 1.0, 60)])
    assert (await points.read("7", "u"))[0] > await redis_time_us(link) - 50_000_000


async def test_lost_redis_is_raised(link, keys):
    points = ResumePoints(link, keys)
    written = points.write([ResumePoint("7", "u", 1.0, 60), ResumePoint("7", "v", 1.0, 60)])
    link.drop("for the test")
    with pytest.raises(LinkDown):
        await written
