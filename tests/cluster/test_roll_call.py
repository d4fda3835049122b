"""Which workers answer when control calls them: real workers on a real Redis, and on a Redis Cluster."""

import asyncio

from cluster.links import deafen, hear, quick_link
from helpers.sentinel import redis_cluster
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.roll_call import RollCall

STRANGER = "0123456789ab.3"


def process_of(worker) -> str:
    return worker.registry.worker_id.rpartition(".")[0]


def begin(link: Link, keys: Keys) -> RollCall:
    roll_call = RollCall(link, keys, looks_between_calls=2)
    link.on_push = lambda topic, answer: topic == roll_call.answers and roll_call.received(answer)
    roll_call.begin()
    return roll_call


async def all_answer(roll_call: RollCall, processes: list[str]) -> None:
    async with asyncio.timeout(60):
        while await roll_call.absent(processes):
            await asyncio.sleep(0.001)


async def leaves_calls_unanswered(roll_call: RollCall, process: str, calls: int = 5) -> None:
    async with asyncio.timeout(60):
        while roll_call.calls.get(process, 0) < calls:
            assert await roll_call.absent([process]) == {process}


async def test_subscribed_workers_answer_and_others_are_absent(link, keys, start_worker):
    names = [process_of(await start_worker(k)) for k in (1, 2)]
    roll_call = begin(link, keys)
    await all_answer(roll_call, names)
    assert await roll_call.absent([]) == set()
    # As many connections as workers, but one of them is of a worker that ended. One that isn't subscribed isn't called.
    assert await roll_call.absent([names[0], STRANGER]) == {STRANGER}
    assert set(roll_call.calls) == set(names)


async def test_old_connection_of_a_worker_does_not_answer_for_it(redis, link, keys, start_worker):
    worker = await start_worker(1)
    process = process_of(worker)
    # Redis doesn't know that it broke.
    old = quick_link(redis.url)
    old.start()
    await old.wait_up()
    subscribed = asyncio.get_running_loop().create_future()
    old.subscribe([keys.here_of(0, process)], subscribed.set_result)
    await subscribed
    await worker.kill()
    roll_call = begin(link, keys)
    await leaves_calls_unanswered(roll_call, process)
    again = await start_worker(1)
    assert process_of(again) == process
    await all_answer(roll_call, [process])
    await old.close()


async def test_worker_whose_connection_breaks_while_others_are_waited_for_is_absent_again(link, keys, start_worker):
    one, other = [await start_worker(k) for k in (1, 2)]
    names = [process_of(one), process_of(other)]
    deafen(other.link)
    roll_call = begin(link, keys)
    async with asyncio.timeout(60):
        while await roll_call.absent(names) != {names[1]}:
            pass
    await one.kill()
    hear(other.link)
    # Redis has seen the end of the connection.
    async with asyncio.timeout(60):
        while await link.subscribers([keys.here_of(0, names[0])]) != [0]:
            pass
    async with asyncio.timeout(60):
        while names[1] in await roll_call.absent(names):
            pass
    assert await roll_call.absent(names) == {names[0]}


async def test_nothing_is_learned_from_a_redis_that_is_away(link, keys, start_worker):
    process = process_of(await start_worker(1))
    roll_call = begin(link, keys)
    link.drop("for the test")
    assert await roll_call.absent([process]) == {process}
    await link.wait_up()
    roll_call = begin(link, keys)
    await all_answer(roll_call, [process])


async def test_redis_that_refuses_writes_passes_the_answers_on(link, keys, start_worker, full):
    process = process_of(await start_worker(1))
    await link.ask(b"CONFIG", b"SET", b"min-replicas-to-write", 1)
    try:
        async with full():
            await all_answer(begin(link, keys), [process])
    finally:
        await link.ask(b"CONFIG", b"SET", b"min-replicas-to-write", 0)


async def test_worker_that_does_not_read_answers_late_and_nothing_else_answers_for_it(link, keys, start_worker):
    worker = await start_worker(1)
    process = process_of(worker)
    deafen(worker.link)
    roll_call = begin(link, keys)
    await leaves_calls_unanswered(roll_call, process)
    named = process.encode()
    for answer in (b"", b"x", b" 0", b"x 0", b"\xff 0", named, named + b" ", named + b" 0 1", named + b" \xb2"):
        roll_call.received(answer)
    assert await roll_call.absent([process]) == {process}
    hear(worker.link)
    await all_answer(roll_call, [process])


async def test_refused_subscribe_of_the_answers_is_tried_again(link, keys, redis, start_worker):
    process = process_of(await start_worker(1))
    rules = [b"on", b">pw", b"~*", b"+@all", b"resetchannels"]
    await link.ask(b"ACL", b"SETUSER", b"limited", *rules, b"&*here:*")
    limited = quick_link(f"unix://limited:pw@{redis.path}")
    limited.start()
    await limited.wait_up()
    roll_call = begin(limited, keys)
    await leaves_calls_unanswered(roll_call, process)
    await link.ask(b"ACL", b"SETUSER", b"limited", b"allchannels")
    await all_answer(roll_call, [process])
    assert limited.connects == 1
    await limited.close()
    await link.ask(b"ACL", b"DELUSER", b"limited")


async def test_after_the_end_no_answers_come(link, keys):
    roll_call = begin(link, keys)
    assert await link.subscribers([roll_call.answers]) == [1]
    roll_call.end()
    assert await link.subscribers([roll_call.answers]) == [0]


async def test_in_a_cluster_the_connection_to_each_master_answers(start_worker, make_truth, wait_until):
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        worker = await start_worker(1, server=cluster)
        link, keys, process = (await make_truth(cluster)).link, worker.keys, process_of(worker)
        await wait_until(lambda: worker.registry.reach is worker.registry.reach.SUBSCRIBED)
        await all_answer(begin(link, keys), [process])
        for connected in worker.link.links.values():
            connected.connection.transport.pause_reading()
            roll_call = begin(link, keys)
            await leaves_calls_unanswered(roll_call, process)
            connected.connection.transport.resume_reading()
            await all_answer(roll_call, [process])
