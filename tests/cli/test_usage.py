"""`redpoll usage`, on the file of a server that doesn't run."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import structlog

from redpoll.cli.usage import _COLUMNS
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


def test_nodes_that_did_not_answer_are_named(typed, monkeypatch):
    day = {"app_id": "3", "day": "2023-11-14", "peak_connections": 1, "published": 2, "client_events": 3, "sent": 4}
    answer = {"days": [day], "unanswered": ["one", "t\x1bwo"], "next": None}
    monkeypatch.setattr("redpoll.cli.usage.run", lambda settings, verb, args: answer)
    for words in ([], ["--json"], ["--csv"]):
        result = typed("usage", *words)
        assert "2023-11-14" in result.stdout
        assert "one, t\\x1bwo: what it counted is missing" in result.stderr


def test_all_pages_are_printed_and_a_node_that_missed_some_is_named_once(typed, monkeypatch):
    def answer(settings, verb, args):
        number = 0 if args["after"] is None else int(args["after"][0])
        day = {"app_id": str(number + 1), "day": "2023-11-14"} | dict.fromkeys(_COLUMNS[2:], 1)
        return {"days": [day], "unanswered": ["one"], "next": [str(number + 1), "2023-11-14"] if number < 2 else None}

    monkeypatch.setattr("redpoll.cli.usage.run", answer)
    assert [row["app_id"] for row in json.loads(typed("usage", "--json").stdout)] == ["1", "2", "3"]
    for words in ([], ["--csv"]):
        result = typed("usage", *words)
        assert result.stdout.count("2023-11-14") == 3
        assert result.stderr.count("one: what it counted is missing") == 1


def test_all_pages_are_printed_without_a_server(typed, app_id, tmp_path, monkeypatch):
    monkeypatch.setattr("redpoll.control.commands.commands._MAX_DAYS_HERE", 2)
    now = datetime.now(UTC)
    days = [(now - timedelta(days=ago)).strftime("%Y-%m-%d") for ago in range(5)]
    used(tmp_path / "data", *(Day(app_id, day, 1, 1, 1, 1) for day in days))
    assert [row["day"] for row in json.loads(typed("usage", "--json").stdout)] == sorted(days)


def test_unknown_app_is_an_error(typed, app_id):
    result = typed("usage", "nobody")
    assert (result.exit_code, result.stderr) == (1, "redpoll: there is no app with the id nobody\n")


def test_damaged_file_is_set_aside_with_a_warning_that_is_no_part_of_the_answer(typed, app_id, tmp_path):
    (tmp_path / "data" / "charts.sqlite").write_text("not a database" * 100)
    # As in a new process: earlier tests may have set it up.
    structlog.reset_defaults()
    result = typed("usage", "--json")
    assert json.loads(result.stdout) == []
    assert "charts.sqlite.old" in result.stderr
