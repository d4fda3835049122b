"""What an app used by day on this node: counted, and written once a minute."""

import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from redpoll.control.observe.usage import Usage, first_day
from redpoll.store.charts import Charts, Day

# 2023-11-14 22:13:20 UTC.
NOW_S = 1_700_000_000.0


class Clock:
    now = NOW_S

    def __call__(self):
        return self.now


@pytest.fixture
async def charts(tmp_path):
    charts = await Charts.open(tmp_path / "charts.sqlite")
    yield charts
    await charts.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def steady():
    return Clock()


@pytest.fixture
def usage(charts, clock, steady):
    return Usage(charts, clock=clock, steady=steady)


async def test_counts_are_summed_and_connections_are_the_most(usage):
    usage.count("1", 5, 10, 1, 100)
    usage.count("1", 3, 1, 0, 10)
    usage.count("2", 0, 0, 0, 0)
    assert await usage.days("1", 1) == [Day("1", "2023-11-14", 5, 11, 1, 110)]
    assert await usage.days("2", 1) == []
    usage.count("0", 1, 0, 0, 0)
    assert [day.app_id for day in await usage.days("", 1)] == ["0", "1"]


async def test_counts_are_written_once_a_minute(usage, charts, steady):
    usage.count("1", 1, 1, 1, 1)
    await usage.write()
    usage.count("1", 1, 1, 1, 1)
    steady.now += 59
    await usage.write()
    assert [day.published for day in await charts.days("")] == [1]
    steady.now += 1
    await usage.write()
    assert [day.published for day in await charts.days("")] == [2]


async def test_counts_are_written_once_a_minute_after_the_clock_was_set_back(usage, charts, clock, steady):
    usage.count("1", 1, 1, 0, 0)
    await usage.write()
    clock.now -= 3_600
    usage.count("1", 1, 1, 0, 0)
    steady.now += 60
    await usage.write()
    assert [day.published for day in await charts.days("")] == [2]


async def test_day_ends_at_midnight_utc(usage, clock):
    usage.count("1", 4, 1, 0, 0)
    clock.now += 2 * 3_600
    usage.count("1", 2, 5, 0, 0)
    assert [(day.day, day.peak_connections, day.published) for day in await usage.days("1", 2)] == [
        ("2023-11-14", 4, 1),
        ("2023-11-15", 2, 5),
    ]
    assert [day.day for day in await usage.days("1", 1)] == ["2023-11-15"]


async def test_counts_wait_while_the_store_cannot_be_written(usage, charts, clock, monkeypatch):
    async def fail(*args, **more):
        raise OperationalError("INSERT", None, ValueError("database is locked"))

    usage.count("1", 9, 1, 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(charts, "add", fail)
        await usage.write()
    usage.count("1", 2, 1, 1, 1)
    assert await usage.days("1", 1) == [Day("1", "2023-11-14", 9, 2, 2, 2)]


async def test_write_whose_caller_is_cancelled_goes_on(usage, charts, monkeypatch):
    """Another node's question ends after a second, and the sampler with the process."""
    add, begun, may_end = charts.add, asyncio.Event(), asyncio.Event()

    async def slow(**rows):
        begun.set()
        await may_end.wait()
        await add(**rows)

    usage.count("1", 9, 1, 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(charts, "add", slow)
        asking = asyncio.create_task(usage.days("1", 1))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    usage.count("1", 2, 1, 1, 1)
    asking = asyncio.create_task(usage.days("1", 1))
    may_end.set()
    assert await asking == [Day("1", "2023-11-14", 9, 2, 2, 2)]


async def test_questions_that_come_during_a_write_share_the_next_one(usage, charts, monkeypatch):
    add, writes = charts.add, []

    async def counting(**rows):
        writes.append(rows)
        usage.count("1", 1, 1, 0, 0)
        await add(**rows)

    usage.count("1", 1, 1, 0, 0)
    monkeypatch.setattr(charts, "add", counting)
    answers = await asyncio.gather(*(usage.days("1", 1) for _ in range(100)))
    assert [day.published for days in answers[1:] for day in days] == 99 * [2]
    assert len(writes) == 2
    monkeypatch.setattr(charts, "add", add)
    await usage.days("1", 1)
    monkeypatch.setattr(charts, "add", counting)
    await usage.days("1", 1)
    assert len(writes) == 2


async def test_days_before_those_that_are_kept_are_removed(usage, charts, clock):
    await charts.add(days=[Day("1", "2022-10-01", 1, 1, 1, 1), Day("1", first_day(NOW_S, 400), 1, 1, 1, 1)])
    await usage.write()
    assert [day.day for day in await charts.days("")] == ["2022-10-11"]


async def test_without_a_store_nothing_is_counted(clock):
    usage = Usage(None, clock=clock)
    usage.count("1", 1, 1, 1, 1)
    await usage.write(now=True)
    assert await usage.days("1", 400) == []
