"""`max_connections`: exactly as many over all workers, 4004 for further clients, and places that are given back."""

import asyncio
import json
from dataclasses import replace

from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.membership.timings import Timings

# A worker gives up after a fraction of a second instead of 7 s.
QUICK = Timings(admit_retry_s=0.05, max_admit_s=0.4, away_s=60.0)


async def full(bench):
    """A worker whose app is full with one client. It retries another one, and may then refuse it, when the test calls
    `retry`, or else long after all that the test does."""
    worker = await bench.start(timings=Timings(admit_retry_s=20.0, max_admit_s=120.0))
    await bench.change(max_connections=1)
    return worker, await bench.client(worker)


async def refused_once(bench, worker) -> None:
    """Wait until Redis has refused the client that waits."""
    await bench.settled(worker, lambda: worker.registry.connection_limit.refused)


async def outcome(client) -> str | int:
    """The outcome from the first frame: GREETED, or the code of the refusal."""
    frame = await client.next()
    return frame["event"] if frame["event"] != "pusher:error" else frame["data"]["code"]


GREETED = "pusher:connection_established"


async def test_a_client_of_a_full_app_is_closed_with_4004(bench):
    workers = [await bench.start(timings=QUICK) for _ in range(2)]
    await bench.change(max_connections=2)
    for worker in workers:
        await bench.client(worker)
    third = await bench.open(workers[0])
    code = (await third.next())["data"]["code"]
    # 4100 only if the other worker's heartbeat was not seen in that short time.
    assert code in (4004, 4100)
    assert len(workers[0].hub.admission) == 0


async def test_a_full_app_is_refused_with_4004_when_all_workers_live(bench):
    """The heartbeats of all other workers are seen long before the client is given up."""
    workers = [await bench.start(timings=Timings(max_admit_s=60.0)) for _ in range(2)]
    await bench.change(max_connections=1)
    await bench.client(workers[1])
    refused = await bench.open(workers[0])
    assert await refused.closed_with() == 4004


async def test_of_many_clients_at_once_exactly_max_connections_are_admitted(bench):
    workers = [await bench.start(timings=QUICK) for _ in range(2)]
    await bench.change(max_connections=7)
    clients = await asyncio.gather(*(bench.open(workers[n % 2]) for n in range(24)))
    outcomes = await asyncio.gather(*(outcome(client) for client in clients))
    assert outcomes.count(GREETED) == 7
    assert {outcome for outcome in outcomes if outcome != GREETED} <= {4004, 4100}


async def test_a_place_is_free_again_when_its_connection_ends(bench):
    workers = [await bench.start(), await bench.start()]
    await bench.change(max_connections=1)
    for n in range(4):
        first = await bench.client(workers[n % 2])
        if n % 2:
            first.socket.transport.abort()
        else:
            await first.socket.close()
        await bench.settled(workers[n % 2], lambda n=n: workers[n % 2].gate.connections == 0)


async def test_a_waiting_client_gets_the_place_that_becomes_free(bench):
    worker, first = await full(bench)
    second = asyncio.create_task(bench.client(worker))
    await refused_once(bench, worker)
    await first.socket.close()
    worker.registry.connection_limit.retry()
    await (await asyncio.wait_for(second, 60)).nothing_more()


async def test_a_client_that_closes_while_waiting_keeps_no_place(bench):
    worker, first = await full(bench)
    waiting = asyncio.create_task(bench.open(worker))
    await refused_once(bench, worker)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await first.socket.close()
    async with asyncio.timeout(60):
        await (await bench.client(worker)).nothing_more()
    assert worker.statistics.loop_exceptions_total == 0


async def test_a_new_limit_counts_open_connections_and_closes_none(bench):
    workers = [await bench.start(timings=QUICK) for _ in range(2)]
    there = [await bench.client(worker) for worker in workers]
    await bench.change(max_connections=1)
    assert await outcome(await bench.open(workers[0])) in (4004, 4100)
    for client in there:
        await client.nothing_more()
    await there[0].socket.close()
    assert await outcome(await bench.open(workers[0])) in (4004, 4100)


async def test_waiting_clients_are_admitted_when_the_limit_is_removed(bench):
    worker, _ = await full(bench)
    second = asyncio.create_task(bench.client(worker))
    await bench.settled(worker, lambda: len(worker.hub.admission) == 1)
    await bench.change(max_connections=0)
    await (await asyncio.wait_for(second, 60)).nothing_more()


async def test_a_waiting_client_is_refused_when_its_app_is_disabled(bench):
    worker, first = await full(bench)
    second = asyncio.create_task(bench.open(worker))
    await refused_once(bench, worker)
    await bench.change(enabled=False)
    assert await first.closed_with() == 4003
    worker.registry.connection_limit.retry()
    assert await outcome(await asyncio.wait_for(second, 60)) == 4003
    await bench.change(enabled=True)
    await (await bench.client(worker)).nothing_more()


async def test_a_waiting_client_whose_key_moves_to_another_app_is_told_to_connect_again(bench):
    """It was counted in one app and opened in the other."""
    worker, first = await full(bench)
    second = asyncio.create_task(bench.open(worker))
    await refused_once(bench, worker)
    await bench.exchange_keys(worker, max_connections=2)
    worker.registry.connection_limit.retry()
    assert await outcome(await asyncio.wait_for(second, 60)) == 4200
    await first.nothing_more()
    assert worker.statistics.loop_exceptions_total == 0


async def test_without_redis_clients_are_closed_with_4100_and_not_4004(own_redis, bench_on):
    bench = await bench_on(own_redis)
    worker = await bench.start()
    # Not for the whole worker, which admits no client when Redis is silent for so long.
    worker.registry.connection_limit.timings = replace(QUICK, away_s=0.4)
    await bench.change(max_connections=5)
    own_redis.kill()
    await bench.settled(worker, lambda: not worker.link.up)
    assert await outcome(await bench.open(worker)) == 4100
    own_redis.start()


async def test_a_drained_worker_refuses_waiting_clients_with_4200(bench):
    worker, _ = await full(bench)
    second = asyncio.create_task(bench.open(worker))
    await bench.settled(worker, lambda: len(worker.hub.admission) == 1)
    worker.drain()
    frame = await (await asyncio.wait_for(second, 60)).next()
    assert frame["data"]["code"] == 4200
    await asyncio.wait_for(worker.life.until(Lifecycle.STOPPED), 60)


async def test_messages_sent_before_the_greeting_are_handled_after_it(bench):
    worker = await bench.start()
    await bench.change(max_connections=1)
    client = await bench.open(worker)
    await client.send("pusher:subscribe", {"channel": "news"})
    assert (await client.next())["event"] == GREETED
    assert json.loads((await client.until("pusher_internal:subscription_succeeded"))["data"]) == {}


async def test_connections_of_an_app_without_a_limit_are_counted_without_a_join(bench, monkeypatch):
    def fail(*_):
        raise AssertionError("what is off costs nothing")

    worker = await bench.start()
    monkeypatch.setattr("redpoll.worker.hub.admission.Join", fail)
    clients = [await bench.client(worker) for _ in range(3)]
    monkeypatch.undo()
    await bench.change(max_connections=3)
    refused = await bench.open(worker)
    assert (await refused.next())["data"]["code"] in (4004, 4100)
    await clients[0].socket.close()
    await bench.settled(worker, lambda: worker.gate.connections == 2)
    await bench.client(worker)
