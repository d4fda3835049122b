"""Which workers answer when control calls them: real workers on a real Redis, and on a Redis Cluster."""

import asyncio

from cluster.links import deafen, hear, quick_link
from helpers.sentinel import redis_cluster
from redpoll.cluster.roll_call import RollCall

STRANGER = "0123456789ab.3"


def process_of(worker) -> str:
    return worker.registry.worker_id.rpartition(".")[0]


async def all_answer(called: RollCall, processes: list[str]) -> None:
    async with asyncio.timeout(60):
        while await called.absent(processes):
            await asyncio.sleep(0.001)


async def leave_calls_unanswered(called: RollCall, process: str, calls: int) -> None:
    while called.calls[process] < calls:
        assert await called.absent([process]) == {process}


async def test_subscribed_workers_answer_and_others_are_absent(link, keys, start_worker):
    names = [process_of(await start_worker(k)) for k in (1, 2)]
    called = RollCall(link, keys)
    await all_answer(called, names)
    assert called.present == set(names)
    assert await called.absent([]) == set()
    # As many connections as workers, but one of them is of a worker that ended.
    assert await called.absent([names[0], STRANGER]) == {STRANGER}


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
    called = RollCall(link, keys)
    assert await called.absent([process]) == {process}
    await leave_calls_unanswered(called, process, 3)
    again = await start_worker(1)
    assert process_of(again) == process
    await all_answer(called, [process])
    await old.close()


async def test_worker_that_does_not_read_answers_late(link, keys, start_worker):
    worker = await start_worker(1)
    process = process_of(worker)
    deafen(worker.link)
    called = RollCall(link, keys)
    assert await called.absent([process]) == {process}
    await leave_calls_unanswered(called, process, 3)
    hear(worker.link)
    await all_answer(called, [process])


async def test_subscribed_worker_that_leaves_many_calls_unanswered_counts(link, keys, start_worker):
    worker = await start_worker(1)
    process = process_of(worker)
    deafen(worker.link)
    called = RollCall(link, keys, looks_between_calls=2, max_calls=5)
    assert await called.absent([process, STRANGER]) == {process, STRANGER}
    await leave_calls_unanswered(called, process, 5)
    async with asyncio.timeout(60):
        while await called.absent([process, STRANGER]) != {STRANGER}:
            pass
    # One that isn't subscribed is never called.
    assert set(called.calls) == {process}
    hear(worker.link)


async def test_nothing_is_learned_from_a_redis_that_is_away(link, keys, start_worker):
    process = process_of(await start_worker(1))
    called = RollCall(link, keys)
    link.drop("for the test")
    assert await called.absent([process]) == {process}
    await link.wait_up()
    await all_answer(called, [process])


async def test_full_redis_takes_the_answers(link, keys, start_worker, full):
    process = process_of(await start_worker(1))
    async with full():
        await all_answer(RollCall(link, keys), [process])


async def test_in_a_cluster_the_connection_to_each_master_answers(start_worker, make_truth, wait_until):
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        worker = await start_worker(1, server=cluster)
        link, keys, process = (await make_truth(cluster)).link, worker.keys, process_of(worker)
        await wait_until(lambda: worker.registry.reach is worker.registry.reach.SUBSCRIBED)
        await all_answer(RollCall(link, keys), [process])
        connections = list(worker.link.links.values())
        connections[1].connection.transport.pause_reading()
        called = RollCall(link, keys)
        await called.absent([process])
        await leave_calls_unanswered(called, process, 3)
        connections[1].connection.transport.resume_reading()
        await all_answer(called, [process])
