"""Revoked grants in Redis: a stream that several processes follow and fill."""

import time

import pytest

from redpoll.cluster import revoked_grants
from redpoll.cluster.redis.scripts import BEAT
from redpoll.cluster.revoked_grants import RevokedInRedis
from redpoll.protocol.grants import RevokedGrants

NOW_S = int(time.time())
REVOKED = [("1", f"jti {number} with spaces", NOW_S) for number in range(130)]


class Follower:
    def __init__(self, link, keys) -> None:
        self.table = RevokedGrants(lambda: float(NOW_S))
        self.news: list[set[str]] = []
        self.redis = RevokedInRedis(link, keys, self.table, self.news.append)
        self.check = self.redis.check


@pytest.fixture
def follower(link, keys):
    return Follower(link, keys)


@pytest.fixture
def other(link, keys):
    return Follower(link, keys)


async def last_id(link, keys) -> bytes | None:
    names = (keys.beat, keys.directory_version, keys.revoked_grants)
    reply = await link.execute(BEAT, names, ("w", 1))
    return reply[2]


async def test_a_beat_says_what_is_new(follower, other, link, keys, wait_until):
    assert await last_id(link, keys) is None
    assert not follower.redis.was_read
    follower.check(None)
    assert follower.redis.was_read
    await other.redis.add(REVOKED)
    follower.check(await last_id(link, keys))
    await wait_until(lambda: len(follower.table) == len(REVOKED))
    assert follower.news == [{"1"}]
    assert sorted(follower.table) == sorted(REVOKED)
    commands = link.commands
    follower.check(await last_id(link, keys))
    await link.ask(b"PING")
    assert link.commands == commands + 2
    await other.redis.add([("2", "sub a", NOW_S)])
    follower.check(await last_id(link, keys))
    await wait_until(lambda: follower.news[1:] == [{"2"}])
    follower.redis.close()


async def test_grants_are_revoked_when_redis_has_no_memory_left(follower, other, link, keys, wait_until, full):
    async with full():
        await other.redis.add(REVOKED)
        follower.check(await last_id(link, keys))
        await wait_until(lambda: sorted(follower.table) == sorted(REVOKED))
    follower.redis.close()


async def test_what_redis_lost_is_written_again_by_any_process(follower, other, link, keys):
    await follower.redis.add(REVOKED)
    await follower.redis.read()
    await link.ask(b"DEL", keys.revoked_grants)
    await other.redis.add([("2", "sub b", NOW_S)])
    await follower.redis.fill()
    assert ("2", "sub b", NOW_S) in list(follower.table)
    await other.redis.read()
    assert sorted(other.table) == sorted([*REVOKED, ("2", "sub b", NOW_S)])
    entries = await link.ask(b"XLEN", keys.revoked_grants)
    # Nothing is missing any more.
    await follower.redis.fill()
    await other.redis.fill()
    assert await link.ask(b"XLEN", keys.revoked_grants) == entries


async def test_a_later_revocation_of_the_same_user_is_written_too(follower, other, link, keys):
    await follower.redis.add([("1", "sub a", NOW_S - 60)])
    # While Redis was away.
    follower.table.put("1", "sub a", NOW_S)
    await follower.redis.fill()
    await other.redis.read()
    assert list(other.table) == [("1", "sub a", NOW_S)]


async def test_a_stream_of_repetitions_is_shortened(follower, other, link, keys, monkeypatch):
    monkeypatch.setattr(revoked_grants, "_MAX_SPARE_ENTRIES", 10)
    for number in range(30):
        await follower.redis.add([("1", "sub a", NOW_S - 30 + number)])
    await other.redis.add([("1", "sub b", NOW_S)])
    assert (follower.redis.is_long, other.redis.is_long) == (True, False)
    await follower.redis.shorten()
    assert not follower.redis.is_long
    assert await link.ask(b"XLEN", keys.revoked_grants) == 1
    await other.redis.fill()
    assert sorted(other.table) == [("1", "sub a", NOW_S - 1), ("1", "sub b", NOW_S)]
