from redpoll.cluster.redis.scripts import BEAT
from redpoll.cluster.stats import Stats


async def test_counters_of_workers_that_beat_are_read(link, keys):
    stats = Stats(link, keys)
    assert await stats.read_all() == {}
    for k in range(3):
        await link.execute(BEAT, (keys.beat, keys.directory_version, keys.revoked_grants), (f"0123456789ab.{k}.0", 1))
    stats.write("0123456789ab.0.0", {"connections": 3})
    stats.write("0123456789ab.2.0", {"connections": 4})
    stats.write("0123456789ab.9.0", {"connections": 5})
    assert await stats.read_all() == {
        "0123456789ab.0.0": {"connections": 3},
        "0123456789ab.2.0": {"connections": 4},
    }


async def test_counters_of_a_node_are_read_by_its_processes_alone(link, keys):
    stats = Stats(link, keys)
    assert await stats.read([]) == {}
    stats.write("0123456789ab.1.0", {"connections": 3})
    # The worker was fenced and took another name.
    stats.write("0123456789ab.1.1", {"connections": 4})
    stats.write("ba9876543210.1.0", {"connections": 5})
    assert await stats.read(["0123456789ab.1", "0123456789ab.2"]) == {"0123456789ab.1.1": {"connections": 4}}


async def test_worker_that_wrote_lately_worked_then_and_another_may_have_hung_until_it_was_killed(link, keys):
    stats, w = Stats(link, keys), "0123456789ab.0.1"
    stats.write(w, {})
    await link.ask(b"EXPIRE", keys.stats("0123456789ab.0"), 11)
    assert 4 <= await stats.silent_s(w, 600) <= 15
    await link.ask(b"DEL", keys.stats("0123456789ab.0"))
    assert await stats.silent_s(w, 600) == 635


async def test_counters_live_for_15_seconds(link, keys):
    Stats(link, keys).write("0123456789ab.0.0", {})
    assert await link.ask(b"TTL", keys.stats("0123456789ab.0")) in (14, 15)
