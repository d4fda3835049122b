import asyncio

import pytest

from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.scripts import REGISTER


@pytest.fixture
def seen():
    """How often the worker was fenced, and the directory's versions that beats brought."""
    return {"fenced": 0, "versions": []}


class Versions:
    """Stands in for the directory."""

    def __init__(self, seen):
        self.check_version = seen["versions"].append


@pytest.fixture
def make(link, keys, seen):
    incarnations = []

    def make(**times):
        def fenced():
            seen["fenced"] += 1

        timings = Timings(**({"beat_s": 0.02, "unanswered_s": 60} | times))
        incarnation = Incarnation(link, keys, "0123456789ab", 3, Versions(seen), timings, fenced)
        incarnations.append(incarnation)
        return incarnation

    yield make
    for incarnation in incarnations:
        incarnation.close()


def held(shards):
    return {
        field: value
        for fields in shards
        for field, value in zip(fields[::2], fields[1::2], strict=True)
        if field != b"gen"
    }


async def test_first_registration_writes_the_name_in_every_shard(make, link, keys):
    one = make()
    assert held(await one.register()) == {}
    assert (one.worker_id, one.name, one.generations[5]) == ("0123456789ab.3.0", b"0123456789ab.3.0", 1)
    for at in range(SHARDS):
        assert await link.ask(b"HGETALL", keys.worker(at, one.worker_id)) == {b"gen": b"1"}
    assert await link.ask(b"HEXISTS", keys.beat, one.worker_id) == 1


async def test_later_connection_keeps_the_name_and_returns_what_it_holds(make, link, keys):
    one = make()
    await one.register()
    await link.ask(b"HSET", keys.worker(5, one.worker_id), "7:news", "c3")
    await link.ask(b"HSET", keys.worker(6, one.worker_id), "7:presence-a:b", "p1")
    one.connection_lost()
    assert held(await one.register()) == {b"7:news": b"c3", b"7:presence-a:b": b"p1"}
    assert (one.worker_id, one.generations[63]) == ("0123456789ab.3.0", 2)


async def test_reaped_worker_takes_the_next_name(make, link, keys):
    one = make()
    await one.register()
    await Reaper(link, keys, "ffffffffffff").reap(one.worker_id)
    await one.register()
    assert (one.worker_id, one.generations[63]) == ("0123456789ab.3.1", 1)
    assert await link.ask(b"HKEYS", keys.beat) == [b"0123456789ab.3.1"]


async def test_registration_against_a_greater_gen_takes_the_next_name(make, link, keys):
    one = make()
    await one.register()
    await link.execute(REGISTER, (keys.worker(9, one.worker_id),), (7, 0))
    await one.register()
    assert one.worker_id == "0123456789ab.3.1"


async def test_worker_that_is_reaped_while_it_registers_leaves_no_name(make, link, keys):
    one = make()
    run = link.run
    reaped = []

    def reap_first(script, names, args, done):
        # Just before the first registration, control finds nothing to fence and removes the heartbeat.
        if script is REGISTER and not reaped:
            reaped.append(one.worker_id)
            link.call(b"HDEL", keys.beat, one.worker_id)
        run(script, names, args, done)

    link.run = reap_first
    await one.register()
    assert reaped == ["0123456789ab.3.0"]
    assert one.worker_id == "0123456789ab.3.1"
    assert await link.ask(b"KEYS", b"*:w:0123456789ab.3.0") == []


async def test_beats_go_on_and_return_the_version_of_the_directory(make, link, keys, seen, wait_until):
    one = make()
    await one.register()
    await link.ask(b"SET", keys.directory_version, 4)
    one.start()
    await wait_until(lambda: len(seen["versions"]) > 3)
    assert seen["versions"][0] is None
    assert seen["versions"][-1] == b"4"
    assert int(await link.ask(b"HGET", keys.beat, one.worker_id)) > 3


async def test_beat_of_a_worker_that_was_given_up_reports_it(make, link, keys, seen, wait_until):
    one = make()
    await one.register()
    one.start()
    await link.ask(b"HSET", keys.beat, one.worker_id, -1)
    await wait_until(lambda: seen["fenced"])


async def test_unanswered_beat_closes_the_connection(make, link, redis, wait_until):
    one = make()
    await one.register()
    # Of the beats only: the registration may take longer.
    one._unanswered_s = 1.0
    downs = []
    link.on_down = lambda reason: (downs.append(reason), one.connection_lost())
    one.start()
    redis.pause()
    try:
        await wait_until(lambda: downs)
    finally:
        redis.resume()
    assert "unanswered" in downs[0]
    await wait_until(lambda: link.up)


async def test_unanswered_registration_ends(make, link, redis):
    one = make(unanswered_s=0.1)
    redis.pause()
    try:
        with pytest.raises(LinkDown):
            await one.register()
    finally:
        redis.resume()


async def test_failed_registration_is_repeated(make, link, keys, wait_until):
    one = make()
    blocked = keys.worker(11, one.worker_id)
    await link.ask(b"SET", blocked, b"no hash")
    registering = asyncio.create_task(one.register())
    await wait_until(lambda: one.errors)
    await link.ask(b"DEL", blocked)
    await registering
    assert one.worker_id == "0123456789ab.3.0"
    assert await link.ask(b"HGET", blocked, b"gen") == b"1"


async def test_clean_end_removes_the_name(make, link, keys):
    one = make()
    await one.register()
    assert await one.bury()
    assert await link.ask(b"KEYS", b"*:w:*") == []
    assert await link.ask(b"EXISTS", keys.beat) == 0


async def test_end_with_held_channels_leaves_the_name_to_the_reaper(make, link, keys):
    one = make()
    await one.register()
    await link.ask(b"HSET", keys.worker(5, one.worker_id), "7:news", "c1")
    assert not await one.bury()
    assert await link.ask(b"HEXISTS", keys.beat, one.worker_id) == 1
    assert await link.ask(b"EXISTS", keys.worker(5, one.worker_id)) == 1
