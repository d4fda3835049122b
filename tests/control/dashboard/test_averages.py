"""Averages of samples over two minutes and a quarter of an hour."""

import pytest

from redpoll.control.dashboard.averages import Averages
from redpoll.store.charts import Charts

NAMES = ("connections", "sent", "p99_ms")
# The beginning of a quarter of an hour.
BEGAN_S = 1_699_999_200


@pytest.fixture
async def charts(tmp_path):
    charts = await Charts.open(tmp_path / "charts.sqlite")
    yield charts
    await charts.close()


def add(averages, app_id, at_s, *values):
    averages.add(app_id, at_s, dict(zip(NAMES, values, strict=True)))


async def test_rates_are_averaged_and_the_greatest_of_connections_and_latency_is_kept(charts):
    averages = Averages(charts, NAMES)
    add(averages, "", BEGAN_S, 5, None, None)
    add(averages, "", BEGAN_S + 5, 9, 10.0, 3.0)
    add(averages, "", BEGAN_S + 10, 7, 20.0, None)
    assert await averages.rows("", "day", BEGAN_S + 11) == [(BEGAN_S, 9, 15.0, 3.0)]
    assert await charts.points(120, "", 0) == []
    add(averages, "", BEGAN_S + 120, 1, 1.0, None)
    await averages.write()
    assert await averages.rows("", "day", BEGAN_S + 121) == [(BEGAN_S, 9, 15.0, 3.0), (BEGAN_S + 120, 1, 1.0, None)]
    assert await averages.rows("", "week", BEGAN_S + 121) == [(BEGAN_S, 9, pytest.approx(10.333), 3.0)]


async def test_points_survive_a_restart_and_the_time_without_a_server_is_a_gap(charts):
    before = Averages(charts, NAMES)
    add(before, "", BEGAN_S, 5, 1.0, 2.0)
    await before.finish()
    after = Averages(charts, NAMES)
    add(after, "", BEGAN_S + 1_200, 3, 1.0, 2.0)
    assert await after.rows("", "day", BEGAN_S + 1_201) == [
        (BEGAN_S, 5, 1.0, 2.0),
        (BEGAN_S + 120, None, None, None),
        (BEGAN_S + 1_200, 3, 1.0, 2.0),
    ]


async def test_step_without_traffic_of_an_app_is_not_stored_and_shown_as_none(charts):
    averages = Averages(charts, NAMES)
    for number, sent in enumerate((4.0, 0.0, 2.0)):
        add(averages, "", BEGAN_S + 120 * number, 1, 5.0, 1.0)
        add(averages, "3", BEGAN_S + 120 * number, int(sent > 0), sent, 1.0 if sent else None)
    await averages.finish()
    assert [point.time_s for point in await charts.points(120, "3", 0)] == [BEGAN_S, BEGAN_S + 240]
    assert await averages.rows("3", "day", BEGAN_S + 300) == [
        (BEGAN_S, 1, 4.0, 1.0),
        (BEGAN_S + 120, 0.0, 0.0, None),
        (BEGAN_S + 240, 1, 2.0, 1.0),
    ]


async def test_points_before_the_span_are_not_shown(charts):
    averages = Averages(charts, NAMES)
    add(averages, "", BEGAN_S, 5, 1.0, 2.0)
    add(averages, "", BEGAN_S + 7_200, 6, 1.0, 2.0)
    await averages.write()
    assert [row[0] for row in await averages.rows("", "hour", BEGAN_S + 7_200)] == [BEGAN_S + 7_200]
    assert len(await averages.rows("", "day", BEGAN_S + 7_200)) == 3
