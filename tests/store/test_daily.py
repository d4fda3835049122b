"""Copies of the daily counters: they never decrease."""

import pytest

from redpoll.protocol.apps import App
from redpoll.store import apps as app_rows
from redpoll.store import daily
from redpoll.store.store import Store


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    async with opened.change() as connection:
        for app_id in ("7", "8"):
            await app_rows.add(connection, App(id=app_id, name="x", keys=()))
    yield opened
    await opened.close()


async def put(store: Store, day: str, **used: int) -> None:
    async with store.change() as connection:
        await daily.put(connection, day, {name.removeprefix("app"): count for name, count in used.items()})


async def read(store: Store, day: str) -> dict[str, int]:
    async with store.reading() as connection:
        return await daily.read(connection, day)


async def test_counters_are_separate_per_app_and_day(store):
    await put(store, "20261120", app7=5)
    await put(store, "20261121", app7=1, app8=2)
    assert await read(store, "20261120") == {"7": 5}
    assert await read(store, "20261121") == {"7": 1, "8": 2}
    assert await read(store, "20261122") == {}


async def test_smaller_count_does_not_replace_a_larger_one(store):
    await put(store, "20261121", app7=10, app8=10)
    await put(store, "20261121", app7=9, app8=11)
    assert await read(store, "20261121") == {"7": 10, "8": 11}


async def test_count_may_exceed_32_bits(store):
    await put(store, "20261121", app7=1 << 40)
    assert await read(store, "20261121") == {"7": 1 << 40}


async def test_writing_no_counters_changes_nothing(store):
    await put(store, "20261121")
    assert await read(store, "20261121") == {}


async def test_counters_of_old_days_are_removed(store):
    for day in ("20251231", "20261120", "20261121"):
        await put(store, day, app7=1)
    async with store.change() as connection:
        await daily.remove_before(connection, "20261120")
    assert [bool(await read(store, day)) for day in ("20251231", "20261120", "20261121")] == [False, True, True]
