"""What an app used by day: counted, written once a minute, shown over HTTP."""

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
def usage(charts, clock):
    return Usage(charts, clock=clock)


async def test_counts_are_summed_and_connections_are_the_most(usage):
    usage.count("1", 5, 10, 1, 100)
    usage.count("1", 3, 1, 0, 10)
    usage.count("2", 0, 0, 0, 0)
    assert await usage.days("1", 1) == [Day("1", "2023-11-14", 5, 11, 1, 110)]
    assert await usage.days("2", 1) == []


async def test_counts_are_written_once_a_minute(usage, charts, clock):
    usage.count("1", 1, 1, 1, 1)
    await usage.write()
    usage.count("1", 1, 1, 1, 1)
    clock.now += 59
    await usage.write()
    assert [day.published for day in await charts.days("")] == [1]
    clock.now += 1
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


async def test_days_before_those_that_are_kept_are_removed(usage, charts, clock):
    await charts.add(days=[Day("1", "2022-10-01", 1, 1, 1, 1), Day("1", first_day(NOW_S, 400), 1, 1, 1, 1)])
    await usage.write()
    assert [day.day for day in await charts.days("")] == ["2022-10-11"]


async def test_without_a_store_nothing_is_counted(clock):
    usage = Usage(None, clock=clock)
    usage.count("1", 1, 1, 1, 1)
    await usage.write(now=True)
    assert await usage.days("1", 400) == []


async def test_usage_over_http_counts_what_was_published(plane):
    sampler = plane.plane.dashboard.sampler
    # Otherwise its own timer could take a sample between the publish and ours.
    await sampler.finish()
    await plane.trigger()
    await sampler.sample()
    reply = await plane.call("GET", "/apps/3/usage")
    assert reply.status == 200
    (day,) = reply.json()["days"]
    assert (day["published"], day["peak_connections"], day["sent"]) == (1, 0, 0)
    assert set(day) == {"day", "peak_connections", "published", "client_events", "sent"}


@pytest.mark.parametrize("days", ["0", "401", "x", "-1", "", pytest.param("9" * 5_000, id="long")])
async def test_number_of_days_is_checked(plane, days):
    reply = await plane.call("GET", "/apps/3/usage", params={"days": days})
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")
