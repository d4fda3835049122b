"""Points of charts and days of usage in a real file."""

import sqlite3

import pytest
from structlog.testing import capture_logs

from redpoll.store.charts import KEEP_S, Charts, Day, Point
from redpoll.store.errors import StoreUnavailable


@pytest.fixture
async def charts(tmp_path):
    charts = await Charts.open(tmp_path / "charts.sqlite")
    yield charts
    await charts.close()


async def test_points_are_read_back_by_step_app_and_time(charts):
    first, second = Point(120, "1", 1_200, [1.5, None]), Point(120, "1", 1_320, [2.0, 3.0])
    await charts.add([second, first, Point(120, "2", 1_200, [9.0]), Point(900, "1", 900, [8.0])])
    assert await charts.points(120, "1", 0) == [first, second]
    assert await charts.points(120, "1", 1_201) == [second]
    assert await charts.points(900, "2", 0) == []


async def test_point_that_is_written_again_replaces_the_first(charts):
    await charts.add([Point(120, "", 1_200, [1.0])])
    await charts.add([Point(120, "", 1_200, [2.0])])
    assert [point.row for point in await charts.points(120, "", 0)] == [[2.0]]


async def test_counts_of_a_day_are_added_and_its_peak_is_the_greatest(charts):
    await charts.add(days=[Day("1", "2026-01-01", 7, 100, 10, 1_000)])
    await charts.add(days=[Day("1", "2026-01-01", 3, 1, 2, 3), Day("2", "2026-01-01", 1, 0, 0, 0)])
    assert await charts.days("2026-01-01", "1") == [Day("1", "2026-01-01", 7, 101, 12, 1_003)]
    assert [day.app_id for day in await charts.days("2026-01-01")] == ["1", "2"]
    assert await charts.days("2026-01-02") == []


async def test_days_are_read_in_pages(charts):
    days = [Day(app, f"2026-01-0{day}", 1, 1, 1, 1) for app in ("1", "2", "3") for day in (1, 2, 3)]
    await charts.add(days=days)
    assert await charts.days("2026-01-02", limit=3) == [days[1], days[2], days[4]]
    assert await charts.days("2026-01-02", after=("2", "2026-01-02"), limit=3) == [days[5], days[7], days[8]]
    assert await charts.days("", "2", after=("2", "2026-01-01"), limit=1) == [days[4]]


async def test_old_points_and_days_are_removed(charts):
    now_s = 10_000_000.0
    for step_s, keep_s in KEEP_S.items():
        await charts.add([Point(step_s, "", int(now_s - keep_s) + offset, [1.0]) for offset in (-1, 1)])
    await charts.add(days=[Day("1", "2025-12-31", 1, 1, 1, 1), Day("1", "2026-01-01", 1, 1, 1, 1)])
    await charts.prune(now_s, "2026-01-01")
    for step_s in KEEP_S:
        assert len(await charts.points(step_s, "", 0)) == 1
    assert [day.day for day in await charts.days("")] == ["2026-01-01"]


async def test_rows_are_there_after_a_restart(tmp_path):
    for count in (1, 2):
        charts = await Charts.open(tmp_path / "charts.sqlite")
        await charts.add([Point(120, "", 120 * count, [1.0])])
        assert len(await charts.points(120, "", 0)) == count
        await charts.close()


@pytest.mark.parametrize("damage", ["text", "version"])
async def test_unreadable_file_is_renamed_and_a_new_one_is_made(tmp_path, damage):
    path = tmp_path / "charts.sqlite"
    if damage == "text":
        path.write_text("not a database" * 100)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
    with capture_logs() as logged:
        charts = await Charts.open(path)
    await charts.add([Point(120, "", 120, [1.0])])
    await charts.close()
    assert (tmp_path / "charts.sqlite.old").exists()
    assert [line["kept"] for line in logged] == [f"{path}.old"]


async def test_file_that_cant_be_opened_at_present_stays(tmp_path):
    path = tmp_path / "charts.sqlite"
    charts = await Charts.open(path)
    await charts.add([Point(120, "", 120, [1.0])])
    await charts.close()
    # As on a full disk, there can be no -wal.
    wal = tmp_path / "charts.sqlite-wal"
    wal.mkdir()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="unable to open database file"):
            await Charts.open(path)
    wal.rmdir()
    charts = await Charts.open(path)
    assert len(await charts.points(120, "", 0)) == 1
    await charts.close()
    assert not (tmp_path / "charts.sqlite.old").exists()
