"""What the event log removes: what is too old, and what an app has beyond its share."""

import pytest

from redpoll.store import pruning
from redpoll.store.call_batch import CallBatch
from redpoll.store.eventlog import EventLog, Query
from redpoll.store.pruning import _share
from store.logged import DAY_S, batch, call, numbers, span_of, statements_of, tid


async def test_pruning_keeps_the_newest_calls_and_removes_spans_of_removed_calls(tmp_path):
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    for number in range(30):
        span = span_of(tid(number), "1", 1_000_000 + number, "accepted", {})
        await log.write(batch(call(number, sampled=True, correlation_id=f"c{number}")), [span])
    assert await log.prune(1_000_100) == 20
    assert await numbers(log) == list(range(29, 19, -1))
    assert await numbers(log, Query(correlation_id="c5")) == []
    assert await numbers(log, Query(correlation_id="c25")) == [25]
    await log.write(batch(call(5)), [])
    assert (await log.trace("1", tid(5)))[1] == []
    assert [span.time_ms for span in (await log.trace("1", tid(25)))[1]] == [1_000_025]
    await log.close()


async def test_pruning_removes_old_calls_even_if_there_are_few(log):
    for number in range(3):
        await log.write(batch(call(number)), [])
    assert await log.prune(1_000_001 + int(DAY_S * 1000)) == 1
    assert await numbers(log) == [2, 1]
    assert await log.prune(1_000_100 + int(DAY_S * 1000)) == 2
    assert await log.prune(1_000_100 + int(DAY_S * 1000)) == 0


async def test_call_from_while_the_clock_was_behind_takes_none_of_the_others_with_it(log):
    for number in (500, 501, 1, 502):
        await log.write(batch(call(number)), [])
    assert await log.prune(1_000_002 + int(DAY_S * 1000)) == 1
    assert await numbers(log) == [502, 501, 500]


async def test_spans_without_a_call_go_after_a_day_at_the_latest(log):
    """A leader has the spans of the webhooks of calls that other nodes have."""
    began_ms, day_ms = 100_000_000, 86_400_000
    await log.prune(began_ms)
    await log.write(batch(), [span_of(tid(1), "1", began_ms - int(DAY_S * 1000), "webhook", {})])
    await log.prune(began_ms + day_ms - 1)
    assert len((await log.trace("1", tid(1)))[1]) == 1
    await log.prune(began_ms + day_ms)
    assert (await log.trace("1", tid(1)))[1] == []


async def test_flood_of_one_app_removes_no_row_of_another(tmp_path):
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    spans = [span_of(tid(number), app, 1_000_000 + number, "accepted", {}) for number in (1, 99) for app in "12"]
    await log.write(batch(*[call(number, app_id="2", correlation_id=f"c{number}") for number in range(1, 4)]), spans)
    for number in range(100):
        await log.write(batch(call(number)), [])
        await log.prune(1_000_100)
    assert await numbers(log) == list(range(99, 92, -1))
    assert await numbers(log, app_id="2") == [3, 2, 1]
    assert await numbers(log, Query(correlation_id="c1"), app_id="2") == [1]
    assert len((await log.trace("2", tid(1)))[1]) == 1
    assert len((await log.trace("1", tid(99)))[1]) == 1
    await log.write(batch(call(1)), [])
    assert (await log.trace("1", tid(1)))[1] == []
    await log.close()


async def test_file_stays_within_its_bytes_and_the_app_that_fills_it_loses_its_oldest_calls(tmp_path, monkeypatch):
    """With 100 names of channels and their spans, 500,000 calls took 25 GB."""
    monkeypatch.setattr(pruning, "_MIN_BYTES", 2_000_000)
    path = tmp_path / "events.sqlite"
    log = await EventLog.open(path, 1_000, DAY_S)
    few = [call(number, app_id="2", sampled=True) for number in range(1, 4)]
    await log.write(batch(*few), [span_of(tid(number), "2", 1_000_000 + number, "accepted", {}) for number in (1, 2)])
    channels = [f"channel-{number:042}" for number in range(100)]
    # Three times as many bytes as are kept.
    for start in range(0, 400, 20):
        calls = [call(number, channels=channels, sampled=True) for number in range(start, start + 20)]
        spans = [
            span_of(row.trace_id, "1", row.time_ms, "written", {"worker": "r.1.0", "channel": channel})
            for row in calls
            for channel in channels[:30]
        ]
        await log.write(batch(*calls), spans)
        await log.prune(1_000_100)
    first, *_, last = reversed(await numbers(log, limit=1_000))
    assert (50 < first < 380, last) == (True, 399)
    assert (await log.trace("1", tid(first)))[1]
    await log.write(batch(call(first - 1)), [])
    assert (await log.trace("1", tid(first - 1)))[1] == []
    assert await numbers(log, app_id="2") == [3, 2, 1]
    assert len((await log.trace("2", tid(1)))[1]) == 1
    await log.close()
    # And what was written between two prunings.
    assert path.stat().st_size < 2_500_000


async def test_counts_of_an_earlier_run_are_known(tmp_path):
    for number in range(20):
        log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
        await log.write(batch(call(number)), [])
        await log.prune(1_000_100)
        await log.close()
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    assert await numbers(log) == list(range(19, 9, -1))
    await log.close()


async def test_calls_of_many_apps_take_few_statements(tmp_path):
    """With statements for each app, 1,000 apps that published once a second took a core, and rows were lost."""
    apps = [str(number) for number in range(500)]
    log = await EventLog.open(tmp_path / "events.sqlite", 2 * len(apps), DAY_S)

    async def write(number: int) -> None:
        calls = [call(number, app_id=app_id, correlation_id=f"{app_id}-{number}") for app_id in apps]
        await log.write(
            batch(*calls), [span_of(tid(number), app_id, 1_000_000 + number, "accepted", {}) for app_id in apps]
        )

    await write(1)
    assert len(await statements_of(log, lambda: write(2))) < 30
    await write(3)
    assert len(await statements_of(log, lambda: log.prune(1_000_100))) < 20
    for app_id in ("0", "250", "499"):
        assert await numbers(log, app_id=app_id) == [3, 2]
        assert await numbers(log, Query(correlation_id=f"{app_id}-1"), app_id=app_id) == []
        assert await numbers(log, Query(correlation_id=f"{app_id}-2"), app_id=app_id) == [2]
        assert [len((await log.trace(app_id, tid(number)))[1]) for number in (1, 2, 3)] == [0, 1, 1]
    # All are too old.
    now_ms = 1_000_100 + int(DAY_S * 1000)
    assert len(await statements_of(log, lambda: log.prune(now_ms))) < 30
    assert [await numbers(log, app_id=app_id) for app_id in apps[::100]] == [[]] * 5
    await log.close()


async def test_pruning_in_several_transactions_removes_no_call_too_many(tmp_path):
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    counts = {"1": 1_200, "2": 700, "3": 2}
    for app_id, count in counts.items():
        await log.write([CallBatch([call(number, app_id=app_id)]) for number in range(count)], [])
    assert await log.prune(1_000_100) == 1_902 - 10
    assert [await numbers(log, app_id=app_id) for app_id in counts] == [
        [1_199, 1_198, 1_197, 1_196],
        [699, 698, 697, 696],
        [1, 0],
    ]
    await log.close()


@pytest.mark.parametrize(
    ("counts", "keep", "share"),
    [([5, 5], 10, 10), ([100, 3], 10, 7), ([100, 100, 1], 11, 5), ([100, 100], 0, 0), ([], 7, 7), ([6, 6, 6], 10, 3)],
)
def test_apps_share_the_space_evenly(counts, keep, share):
    assert _share(dict(enumerate(counts)), keep) == share
