"""`redpoll usage`, on the file of a server that doesn't run."""

import asyncio
import json
from datetime import UTC, datetime

from redpoll.store.charts import Charts, Day


def used(folder, *days):
    async def write():
        charts = await Charts.open(folder / "charts.sqlite")
        await charts.add(days=days)
        await charts.close()

    asyncio.run(write())


def test_usage_is_printed_as_text_csv_and_json(typed, app_id, tmp_path):
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    used(
        tmp_path / "data",
        Day(app_id, today, 1_200, 30_000, 4, 5),
        Day(app_id, "2020-01-01", 1, 1, 1, 1),
        Day("gone", today, 1, 1, 1, 1),
    )
    line = f"{app_id}  {today}  peak 1,200 connections  30,000 published  4 client events  5 sent\n"
    assert typed("usage").stdout == line
    assert typed("usage", app_id, "--days", "7").stdout == line
    assert typed("usage", "--csv").stdout == (
        f"app_id,day,peak_connections,published,client_events,sent\n{app_id},{today},1200,30000,4,5\n"
    )
    (row,) = json.loads(typed("usage", "--json").stdout)
    assert (row["app_id"], row["day"], row["published"]) == (app_id, today, 30_000)


def test_unknown_app_is_an_error(typed, app_id):
    result = typed("usage", "nobody")
    assert (result.exit_code, result.stderr) == (1, "redpoll: there is no app with the id nobody\n")
