import json
import math

from redpoll.cluster.redis.scripts import BEAT
from redpoll.cluster.stats import Stats


async def test_counters_of_workers_that_beat_are_read(link, keys):
    stats = Stats(link, keys)
    assert await stats.read_all() == {}
    for k in range(3):
        await link.execute(BEAT, (keys.beat, keys.directory_version, keys.revoked_grants), (f"0123456789ab.{k}.0", 1))
    stats.write("0123456789ab.0.0", {"connections": 3}, {})
    stats.write("0123456789ab.2.0", {"connections": 4}, {})
    stats.write("0123456789ab.9.0", {"connections": 5}, {})
    assert await stats.read_all() == {
        "0123456789ab.0.0": {"connections": 3, "by_app": {}},
        "0123456789ab.2.0": {"connections": 4, "by_app": {}},
    }


async def test_counters_of_a_node_are_read_by_its_processes_alone(link, keys):
    stats = Stats(link, keys)
    assert await stats.read([]) == {}
    stats.write("0123456789ab.1.0", {"connections": 3}, {})
    # The worker was fenced and took another name.
    stats.write("0123456789ab.1.1", {"connections": 4}, {})
    stats.write("ba9876543210.1.0", {"connections": 5}, {})
    assert await stats.read(["0123456789ab.1", "0123456789ab.2"]) == {
        "0123456789ab.1.1": {"connections": 4, "by_app": {}}
    }


async def test_nodes_read_all_apps_of_their_own_workers_and_the_largest_of_others(link, keys):
    stats, own, other = Stats(link, keys), "0123456789ab.1.0", "ba9876543210.1.0"
    by_app = {str(number): [number, 1, 2] for number in range(300)}
    for w in (own, other):
        await link.execute(BEAT, (keys.beat, keys.directory_version, keys.revoked_grants), (w, 1))
        stats.write(w, {}, by_app)
    largest = {str(number): [number, 1, 2] for number in range(200, 300)}
    assert await stats.read_all(["0123456789ab.1"]) == {own: {"by_app": by_app}, other: {"by_app": largest}}
    assert await stats.read(["0123456789ab.1"]) == {own: {"by_app": by_app}}


async def test_apps_are_in_parts_that_are_decoded_one_by_one(link, keys):
    stats, w = Stats(link, keys), "0123456789ab.1.0"
    by_app = {str(number): [number, 1, 2] for number in range(1_234)}
    stats.write(w, {}, by_app)
    _, parts = json.loads(await link.ask(b"GET", keys.stats_by_app("0123456789ab.1")))
    assert (len(parts), max(map(len, parts))) == (13, 100)
    assert (await stats.read(["0123456789ab.1"]))[w]["by_app"] == by_app


async def test_worker_that_wrote_lately_worked_then_and_another_may_have_hung_until_it_was_killed(link, keys):
    stats, w = Stats(link, keys), "0123456789ab.0.1"
    stats.write(w, {}, {})
    # Sent with what asks for it, so that no stall comes between.
    link.call(b"EXPIRE", keys.stats("0123456789ab.0"), 11)
    assert 4 <= await stats.silent_s(w) <= 15
    await link.ask(b"DEL", keys.stats("0123456789ab.0"))
    assert await stats.silent_s(w) == math.inf


async def test_counters_live_for_15_seconds(link, keys):
    Stats(link, keys).write("0123456789ab.0.0", {}, {})
    assert await link.ask(b"TTL", keys.stats("0123456789ab.0")) in (14, 15)
