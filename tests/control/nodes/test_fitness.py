"""Reports of a control plane that can reach Redis, the record store, or not."""

import asyncio

import pytest
from structlog.testing import capture_logs

from redpoll.cluster.nodes import Fitness
from redpoll.control.nodes.fitness import FitnessReports
from redpoll.ipc.messages import FitnessReport
from redpoll.store.leadership import stored_term
from redpoll.store.store import Store

TIMES = {"every_s": 0.01, "ask_every_s": 0.01, "answer_within_s": 0.1}


@pytest.fixture
async def store(postgres_url):
    store = await Store.open(postgres_url)
    yield store
    await store.close()


@pytest.fixture
async def reports(store):
    """(FitnessReports, what it told, what Redis does)."""
    told, redis = [], {"answers": True}
    made = FitnessReports(told.append, lambda: redis["answers"], store, **TIMES)
    yield made, told, redis
    await made.finish()


def last(told: list[FitnessReport]) -> int | None:
    return told[-1].fitness if told else None


async def test_report_says_what_answers(reports, store, postgres_server, wait_until):
    made, told, redis = reports
    made.start()
    await wait_until(lambda: last(told) == Fitness.FIT)
    redis["answers"] = False
    await wait_until(lambda: last(told) == Fitness.UNFIT)
    redis["answers"] = True
    await wait_until(lambda: last(told) == Fitness.FIT)
    # Reports go on without a change.
    count = len(told)
    await wait_until(lambda: len(told) > count + 2)


async def test_store_that_hangs_or_fails_is_not_reached(reports, own_postgres, wait_until):
    _, told, _ = reports
    store = await Store.open(own_postgres.url(await asyncio.to_thread(own_postgres.create_database)))
    made = FitnessReports(told.append, lambda: True, store, **TIMES)
    made.start()
    try:
        await wait_until(lambda: last(told) == Fitness.FIT)
        own_postgres.pause()
        await wait_until(lambda: last(told) == Fitness.WITHOUT_STORE)
        own_postgres.resume()
        await wait_until(lambda: last(told) == Fitness.FIT)
        await asyncio.to_thread(own_postgres.kill)
        await wait_until(lambda: last(told) == Fitness.WITHOUT_STORE)
        await asyncio.to_thread(own_postgres.start)
        await wait_until(lambda: last(told) == Fitness.FIT)
    finally:
        await made.finish()
        await store.close()


async def test_store_that_has_become_a_standby_cannot_do_the_leaders_work(own_postgres, wait_until):
    """It answers reads, as a primary does that a fail-over has demoted."""
    database = await asyncio.to_thread(own_postgres.create_database)
    store = await Store.open(own_postgres.url(database))
    told: list[FitnessReport] = []
    # Only an answer says that it is a standby: one that is late would say WITHOUT_STORE as well.
    made = FitnessReports(told.append, lambda: True, store, **{**TIMES, "answer_within_s": 60.0})
    await asyncio.to_thread(own_postgres.kill)
    own_postgres.make_standby()
    await asyncio.to_thread(own_postgres.start)
    made.start()
    try:
        with capture_logs() as logs:
            await wait_until(lambda: last(told) == Fitness.WITHOUT_STORE)
            async with store.reading() as connection:
                assert await stored_term(connection) == 0
            await asyncio.to_thread(own_postgres.execute, database, "SELECT pg_promote()")
            await wait_until(lambda: last(told) == Fitness.FIT)
    finally:
        await made.finish()
        await store.close()
    assert [line["event"] for line in logs] == ["record store is a standby, it takes no changes"]


async def test_store_of_this_server_alone_is_not_asked(tmp_path, wait_until):
    store = await Store.open(f"sqlite:{tmp_path / 'records'}")
    told: list[FitnessReport] = []
    made = FitnessReports(told.append, lambda: True, store, **TIMES)
    made.start()
    await store.close()
    await wait_until(lambda: len(told) > 2)
    assert {report.fitness for report in told} == {Fitness.FIT}
    await made.finish()
