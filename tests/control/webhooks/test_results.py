"""Results of attempts are written in batches and never dropped."""

import asyncio

import pytest
import sqlalchemy as sa

from control.webhooks.transitions import APP
from redpoll.control.webhooks.results import Results
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import AttemptRow, Result
from redpoll.store.store import versions
from redpoll.store.webhooks import Endpoint


@pytest.fixture
async def numbers(store, records):
    """The numbers of 2,500 waiting deliveries to the endpoint e1."""
    fields = {"url": "https://e.com", "secret": "s", "events": ("all",), "channels": (), "format": "service"}
    row = {"endpoint_id": "e1", "event": "cache.miss", "channel": "c", "user": None, "stamp": 1, "time_ms": 1}
    row |= {"trace": None, "body": b"{}", "at": 0.0, "created_at": 0.0}
    async with store.change() as connection:
        await endpoint_rows.add(connection, Endpoint(id="e1", app_id=APP, created_at=0.0, **fields))
        written = await delivery_rows.add(connection, [{**row, "id": f"d{number}"} for number in range(2_500)])
    return [delivery.number for delivery in written]


def delivered(number):
    # `numbers` begin with 1.
    return Result(number, f"d{number - 1}", "delivered", 5.0, AttemptRow(1, 4.0, 200, 9, "delivered", "200 OK", b""))


async def count(store, state):
    async with store.reading() as connection:
        return len(await delivery_rows.find(connection, ("e1",), (state,), 9_999))


async def test_results_are_written_in_batches_and_reported_after_the_commit(store, numbers, wait_until):
    reported = []

    def on_written(results):
        reported.append(len(results))

    results = Results(store, on_written)
    writing = asyncio.create_task(results.run())
    for number in numbers:
        results.put(delivered(number))
    assert (results.unwritten, reported) == (2_500, [])
    await wait_until(lambda: not results.unwritten)
    assert reported == [1_000, 1_000, 500]
    assert await count(store, "delivered") == 2_500
    results.stop()
    await writing


async def test_results_are_kept_while_the_store_fails(store, numbers, monkeypatch):
    reported = []
    results = Results(store, reported.extend)
    for number in numbers[:3]:
        results.put(delivered(number))
    results.put_failing("e1", 7.0)
    with monkeypatch.context() as broken:

        async def put(_connection, _results):
            raise sa.exc.OperationalError("UPDATE", None, OSError("database or disk is full"))

        broken.setattr(delivery_rows, "put_results", put)
        assert not await results.write()
    assert (results.unwritten, reported) == (3, [])
    assert await results.write()
    assert (results.unwritten, len(reported)) == (0, 3)


async def test_stop_writes_all_results(store, numbers):
    results = Results(store, lambda _results: None)
    writing = asyncio.create_task(results.run())
    for number in numbers:
        results.put(delivered(number))
    results.stop()
    await writing
    assert await count(store, "delivered") == 2_500


async def test_stop_does_not_wait_for_a_failing_store(store, numbers, monkeypatch):
    async def put(_connection, _results):
        raise sa.exc.OperationalError("UPDATE", None, OSError("database or disk is full"))

    monkeypatch.setattr(delivery_rows, "put_results", put)
    results = Results(store, lambda _results: None)
    results.put(delivered(numbers[0]))
    results.stop()
    await asyncio.wait_for(results.run(), 60)
    assert results.unwritten == 1


async def failing_since(store):
    async with store.reading() as connection:
        return (await endpoint_rows.find_by_id(connection, "e1")).failing_since


async def test_stop_without_results_asks_nothing_of_the_store(store, numbers, monkeypatch):
    """A node that stopped leading waited for PostgreSQL, and logged an error."""
    results = Results(store, lambda _results: None)
    writing = asyncio.create_task(results.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(store, "change", None)
    results.stop()
    await writing


async def test_last_failing_state_of_an_endpoint_is_written(store, numbers, wait_until):
    results = Results(store, lambda _results: None)
    writing = asyncio.create_task(results.run())
    results.put_failing("e1", 7.0)
    results.put_failing("e1", None)
    results.put_failing("e1", 9.0)
    while await failing_since(store) != 9.0:
        await asyncio.sleep(0.005)
    results.stop()
    await writing


async def test_an_endpoint_that_fails_now_and_then_changes_the_version_seldom(store, numbers):
    """Intake takes nothing while others change the records: with each flip it waited."""

    async def version():
        async with store.reading() as connection:
            return (await versions(connection)).records

    results = Results(store, lambda _results: None, failing_every_s=3_600.0)
    writing = asyncio.create_task(results.run())
    before = await version()
    results.put_failing("e1", 1.0)
    while await version() == before:
        await asyncio.sleep(0.005)
    for number in range(20):
        results.put_failing("e1", None if number % 2 else float(number))
        results.put(delivered(numbers[number]))
        while results.unwritten:
            await asyncio.sleep(0.001)
    assert await version() == before + 1
    results.put_failing("e1", 99.0)
    results.stop()
    await writing
    assert (await version(), await failing_since(store)) == (before + 2, 99.0)
