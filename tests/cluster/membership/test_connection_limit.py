"""Connections of apps with and without `max_connections`, over several workers on a real Redis."""

import asyncio
import random
from dataclasses import replace

import pytest

from cluster.sums import counted
from redpoll.cluster.membership.join import JoinState
from redpoll.cluster.membership.reaper import Reaper


@pytest.fixture
async def a(start_worker, make_app):
    worker = await start_worker(1)
    worker.app = make_app(max_connections=3)
    return worker


@pytest.fixture
async def b(start_worker, make_app):
    worker = await start_worker(2)
    worker.app = make_app(max_connections=3)
    return worker


def answered(*workers_and_joins):
    return lambda: all(join in worker.sockets.connections for worker, join in workers_and_joins)


def codes(worker):
    return list(worker.sockets.connections.values())


async def in_redis(link, keys):
    return await counted(link, keys, "%conn")


async def until_in_redis(link, keys, n):
    while await in_redis(link, keys) != n:
        await link.ask(b"PING")


async def test_app_without_a_limit_admits_at_once_and_costs_redis_nothing(a, make_app):
    a.app = make_app()
    before = a.link.commands
    joins = [a.connect() for _ in range(10)]
    assert [a.sockets.connections[join] for join in joins] == [200] * 10
    for _ in joins:
        a.registry.connection_limit.depart("7")
    assert a.link.commands == before
    assert not [*a.registry.local_channels()]


async def test_connection_beyond_the_limit_is_turned_away_for_good_once_all_workers_beat(a, b, wait_until):
    admitted = [(worker, worker.connect()) for worker in (a, b, a)]
    await wait_until(answered(*admitted))
    refused = b.connect()
    await wait_until(answered((b, refused)))
    assert codes(a) == [200, 200]
    assert codes(b) == [200, 4004]


async def test_connection_that_leaves_when_its_place_is_found_takes_only_its_own(
    a, link, keys, wait_until, monkeypatch
):
    """Those of the same answer that were counted after it were missing in Redis, so the app could have too many."""
    admitted = a.sockets.admitted

    def admitted_and_gone(join):
        admitted(join)
        if join is first:
            a.registry.connection_limit.depart("7")

    monkeypatch.setattr(a.sockets, "admitted", admitted_and_gone)
    first, *others = [a.connect() for _ in range(3)]
    await wait_until(answered(*((a, join) for join in (first, *others))))
    await until_in_redis(link, keys, 2)


async def test_place_that_becomes_free_is_given_to_a_waiting_connection(start_worker, make_app, wait_until):
    a = await start_worker(1)
    # It beats once: no later beat of it can decide that the app is full.
    b = await start_worker(2, beat_s=60)
    for worker in (a, b):
        worker.app = make_app(max_connections=1)
    first = b.connect()
    await wait_until(answered((b, first)))
    second = a.connect()
    await asyncio.sleep(0.2)
    assert codes(a) == []
    b.registry.connection_limit.depart("7")
    await wait_until(answered((a, second)))
    assert codes(a) == [200]


async def test_places_of_a_killed_worker_are_free_when_it_is_reaped(a, start_worker, make_app, link, keys, wait_until):
    b = await start_worker(2)
    b.app = a.app
    local_channel = [b.connect() for _ in range(3)]
    await wait_until(answered(*((b, join) for join in local_channel)))
    await b.kill()
    waiting = [a.connect() for _ in range(3)]
    await asyncio.sleep(0.1)
    assert codes(a) == []
    await Reaper(link, keys, "ffffffffffff").reap(b.registry.worker_id)
    await wait_until(answered(*((a, join) for join in waiting)))
    assert codes(a) == [200] * 3
    late = a.connect()
    await wait_until(answered((a, late)))
    assert codes(a)[-1] == 4004


async def test_worker_that_may_be_dead_means_4100(start_worker, make_app, b, wait_until):
    a = await start_worker(1, max_admit_s=0.35)
    a.app = make_app(max_connections=3)
    local_channel = [b.connect() for _ in range(3)]
    await wait_until(answered(*((b, join) for join in local_channel)))
    await b.kill()
    waiting = a.connect()
    await wait_until(answered((a, waiting)))
    assert codes(a) == [4100]


async def test_without_redis_a_connection_gets_4100(own_redis, start_worker, make_app, wait_until):
    worker = await start_worker(server=own_redis, away_s=0.25)
    worker.app = make_app(max_connections=3)
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    waiting = worker.connect()
    await wait_until(answered((worker, waiting)))
    assert codes(worker) == [4100]
    assert not [*worker.registry.local_channels()]
    own_redis.start()
    # However long the worker takes to connect and register, this connection waits.
    limit = worker.registry.connection_limit
    limit.timings = replace(limit.timings, away_s=60.0)
    late = worker.connect()
    await wait_until(answered((worker, late)))
    assert codes(worker) == [4100, 200]


async def test_connection_waits_for_a_redis_that_returns_in_time(own_redis, start_worker, make_app, wait_until):
    worker = await start_worker(server=own_redis)
    worker.app = make_app(max_connections=3)
    own_redis.kill()
    waiting = worker.connect()
    own_redis.start()
    await wait_until(answered((worker, waiting)))
    assert codes(worker) == [200]


async def test_connection_that_closes_while_it_waits_takes_no_place(start_worker, make_app, wait_until, truth):
    a = await start_worker(1, admit_retry_s=60)
    a.app = make_app(max_connections=3)
    gone = a.connect()
    a.registry.connection_limit.cancel(gone)
    # The answer isn't read before the connection closes: an admitted connection would have to depart instead.
    a.deafen()
    in_flight = a.connect()
    await wait_until(lambda: in_flight.state is JoinState.IN_FLIGHT)
    a.registry.connection_limit.cancel(in_flight)
    a.hear()
    await wait_until(lambda: not [*a.registry.local_channels()])
    local_channel = [a.connect() for _ in range(3)]
    await wait_until(answered(*((a, join) for join in local_channel)))
    refused = a.connect()
    await wait_until(lambda: refused.state is JoinState.REFUSED)
    a.registry.connection_limit.cancel(refused)
    for _ in local_channel:
        a.registry.connection_limit.depart("7")
    await wait_until(lambda: not [*a.registry.local_channels()])
    assert codes(a) == [200] * 3
    assert await truth.channel_keys() == []


async def test_limit_turned_on_counts_present_connections_and_closes_none(a, b, make_app, link, keys, wait_until):
    off, on = make_app(), make_app(max_connections=3)
    for worker in (a, b):
        worker.app = off
        for _ in range(2):
            worker.connect()
    for worker in (a, b):
        worker.registry.app_changed(off, on)
        worker.app = on
    await until_in_redis(link, keys, 4)
    refused = a.connect()
    await wait_until(answered((a, refused)))
    assert codes(a) == [200, 200, 4004]
    for _ in range(2):
        b.registry.connection_limit.depart("7")
    await until_in_redis(link, keys, 2)
    again = a.connect()
    await wait_until(answered((a, again)))
    assert codes(a)[-1] == 200


async def test_limit_turned_off_admits_waiting_connections(start_worker, make_app, wait_until, truth):
    # `b` beats once: no later beat of it can decide that the app is full, however long this test takes.
    a = await start_worker(1)
    b = await start_worker(2, beat_s=60)
    a.app = b.app = make_app(max_connections=3)
    admitted = [b.connect() for _ in range(3)]
    await wait_until(answered(*((b, join) for join in admitted)))
    waiting = [a.connect() for _ in range(2)]
    await wait_until(lambda: a.registry.connection_limit.refused == len(waiting))
    in_flight = a.connect()
    await asyncio.sleep(0)
    a.link.flush()
    off = make_app()
    for worker in (a, b):
        worker.registry.app_changed(worker.app, off)
        worker.app = off
    await wait_until(answered(*((a, join) for join in [*waiting, in_flight])))
    assert set(codes(a)) == {200}
    await wait_until(lambda: not [*a.registry.local_channels(), *b.registry.local_channels()])
    assert await truth.channel_keys() == []
    for worker, n in ((a, 3), (b, 3)):
        for _ in range(n):
            worker.registry.connection_limit.depart("7")


async def test_connection_accepted_after_the_limit_was_turned_off_is_not_counted(a, make_app, wait_until, truth):
    join = a.connect()
    await asyncio.sleep(0)
    a.link.flush()
    a.registry.app_changed(a.app, make_app())
    await wait_until(answered((a, join)))
    await wait_until(lambda: not [*a.registry.local_channels()])
    assert codes(a) == [200]
    assert await truth.channel_keys() == []
    a.registry.connection_limit.depart("7")


async def test_limit_of_100_admits_exactly_100_over_four_workers(start_worker, make_app, link, keys, wait_until):
    workers = [await start_worker(k) for k in range(4)]
    rng = random.Random(1)
    for worker in workers:
        worker.app = make_app(max_connections=100)
    for _ in range(20):
        joins = [(worker, worker.connect()) for worker in rng.choices(workers, k=130)]
        await wait_until(answered(*joins))
        outcomes = [worker.sockets.connections[join] for worker, join in joins]
        assert (outcomes.count(200), outcomes.count(4004)) == (100, 30)
        assert await in_redis(link, keys) == 100
        for worker, join in joins:
            if worker.sockets.connections[join] == 200:
                worker.registry.connection_limit.depart("7")
        await wait_until(lambda: not any([*worker.registry.local_channels()] for worker in workers))
        assert await in_redis(link, keys) == 0


@pytest.mark.parametrize("emptied", [False, True])
async def test_after_a_break_the_count_is_right(a, b, link, keys, wait_until, emptied):
    joins = [(a, a.connect()), (a, a.connect()), (b, b.connect())]
    await wait_until(answered(*joins))
    if emptied:
        await link.ask(b"FLUSHALL")
        b.link.drop("for the test")
    a.link.drop("for the test")
    a.registry.connection_limit.depart("7")
    await until_in_redis(link, keys, 2)
    await wait_until(lambda: a.link.up and b.link.up)
    late = a.connect()
    await wait_until(answered((a, late)))
    assert codes(a)[-1] == 200
    await until_in_redis(link, keys, 3)
