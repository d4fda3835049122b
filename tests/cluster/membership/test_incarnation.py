import pytest

from redpoll.cluster.keys import SHARDS
from redpoll.cluster.link import LinkDown
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.scripts import REGISTER


@pytest.fixture
def heard():
    return {"fenced": 0, "versions": []}


@pytest.fixture
def make(link, keys, heard):
    made = []

    def make(**times):
        def fenced():
            heard["fenced"] += 1

        times = {"beat_s": 0.02, "unanswered_s": 10} | times
        one = Incarnation(link, keys, "0123456789ab", 3, on_fenced=fenced, on_beat=heard["versions"].append, **times)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


async def test_first_rise_registers_the_name_in_every_shard(make, link, keys):
    one = make()
    assert await one.rise() == {}
    assert (one.w, one.name, one.gen) == ("0123456789ab.3.0", b"0123456789ab.3.0", 1)
    for at in range(SHARDS):
        assert await link.ask(b"HGETALL", keys.worker(at, one.w)) == {b"gen": b"1"}
    assert await link.ask(b"HEXISTS", keys.beat, one.w) == 1


async def test_rise_on_a_later_connection_keeps_the_name_and_tells_what_it_holds(make, link, keys):
    one = make()
    await one.rise()
    await link.ask(b"HSET", keys.worker(5, one.w), "7:news", "c3")
    await link.ask(b"HSET", keys.worker(6, one.w), "7:presence-a:b", "p1")
    one.down()
    assert await one.rise() == {"7:news": "c3", "7:presence-a:b": "p1"}
    assert (one.w, one.gen) == ("0123456789ab.3.0", 2)


async def test_rise_of_a_reaped_worker_takes_the_next_name(make, link, keys):
    one = make()
    await one.rise()
    await Reaper(link, keys, "ffffffffffff").reap(one.w)
    await one.rise()
    assert (one.w, one.gen) == ("0123456789ab.3.1", 1)
    assert await link.ask(b"HKEYS", keys.beat) == [b"0123456789ab.3.1"]


async def test_rise_against_a_greater_gen_takes_the_next_name(make, link, keys):
    one = make()
    await one.rise()
    await link.execute(REGISTER, (keys.worker(9, one.w),), (7, 0))
    await one.rise()
    assert one.w == "0123456789ab.3.1"


async def test_rise_that_was_reaped_while_it_registered_leaves_no_hidden_name(make, link, keys):
    one = make()
    run = link.run
    reaped = []

    def reap_first(script, names, args, done):
        # Control finds nothing to fence, and takes the beat away, just before the first registration.
        if script is REGISTER and not reaped:
            reaped.append(one.w)
            link.call(b"HDEL", keys.beat, one.w)
        run(script, names, args, done)

    link.run = reap_first
    await one.rise()
    assert reaped == ["0123456789ab.3.0"]
    assert one.w == "0123456789ab.3.1"
    assert await link.ask(b"KEYS", b"*:w:0123456789ab.3.0") == []


async def test_beats_go_on_and_tell_the_version_of_the_directory(make, link, keys, heard, wait_until):
    one = make()
    await one.rise()
    await link.ask(b"SET", keys.directory_version, 4)
    one.start()
    await wait_until(lambda: len(heard["versions"]) > 3)
    assert heard["versions"][0] is None
    assert heard["versions"][-1] == b"4"
    assert int(await link.ask(b"HGET", keys.beat, one.w)) > 3


async def test_beat_of_one_that_was_given_up_says_so(make, link, keys, heard, wait_until):
    one = make()
    await one.rise()
    one.start()
    await link.ask(b"HSET", keys.beat, one.w, -1)
    await wait_until(lambda: heard["fenced"])


async def test_unanswered_beat_gives_the_connection_up(make, link, redis, wait_until):
    one = make(unanswered_s=1)
    await one.rise()
    downs = []
    link.on_down = lambda reason: (downs.append(reason), one.down())
    one.start()
    redis.pause()
    try:
        await wait_until(lambda: downs)
    finally:
        redis.resume()
    assert "unanswered" in downs[0]
    await wait_until(lambda: link.up)


async def test_rise_that_is_not_answered_ends(make, link, redis):
    one = make(unanswered_s=0.1)
    redis.pause()
    try:
        with pytest.raises(LinkDown):
            await one.rise()
    finally:
        redis.resume()


async def test_registration_that_redis_fails_is_made_again(make, link, keys, wait_until):
    one = make()
    blocked = keys.worker(11, one.w)
    await link.ask(b"SET", blocked, b"no hash", b"PX", 60)
    await one.rise()
    assert one.errors >= 1
    assert one.w == "0123456789ab.3.0"
    assert await link.ask(b"HGET", blocked, b"gen") == b"1"


async def test_clean_end_takes_the_name_out(make, link, keys):
    one = make()
    await one.rise()
    assert await one.bury()
    assert await link.ask(b"KEYS", b"*:w:*") == []
    assert await link.ask(b"EXISTS", keys.beat) == 0


async def test_end_with_something_held_leaves_the_name_to_the_reaper(make, link, keys):
    one = make()
    await one.rise()
    await link.ask(b"HSET", keys.worker(5, one.w), "7:news", "c1")
    assert not await one.bury()
    assert await link.ask(b"HEXISTS", keys.beat, one.w) == 1
    assert await link.ask(b"EXISTS", keys.worker(5, one.w)) == 1
