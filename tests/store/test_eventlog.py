"""The event log in a real file: writing, searching by every field."""

import sqlite3
from contextlib import closing

import pytest

from redpoll.store.call_batch import CallBatch
from redpoll.store.eventlog import EventLog, Query
from store.logged import DAY_S, batch, call, numbers, span_of, steps_of, tid


async def test_call_is_read_back_as_written(log):
    row = call(1, correlation_id="order-7", channels=["a", "private-b;c"], status=429, sampled=True)
    await log.write(batch(row), [])
    assert (await log.find("1", Query(), 10)).calls == [row]


async def test_trace_returns_the_call_and_its_spans_sorted_by_time(log):
    late = span_of(tid(1), "1", 30, "written", {"worker": "r.1.0", "channel": "room", "sockets": 7})
    early = span_of(tid(1), "1", 20, "accepted", {})
    await log.write(batch(call(1), call(2)), [late, early, span_of(tid(2), "1", 10, "accepted", {})])
    found = await log.trace("1", tid(1))
    assert found is not None
    assert found[0] == call(1)
    assert found[1] == [early, late]


async def test_spans_within_a_millisecond_are_sorted_by_microsecond(log):
    late, early = span_of(tid(1), "1", 20, "written", {}, us=900), span_of(tid(1), "1", 20, "received", {}, us=150)
    await log.write(batch(call(1)), [late, early])
    assert (await log.trace("1", tid(1)))[1] == [early, late]


async def test_spans_may_be_written_before_their_call(log):
    span = span_of(tid(1), "1", 20, "received", {"worker": "r.1.0"})
    await log.write([], [span])
    assert (await log.trace("1", tid(1)))[0] is None
    await log.write(batch(call(1)), [])
    assert await log.trace("1", tid(1)) == (call(1), [span])


async def test_calls_of_another_app_are_not_found(log):
    await log.write(batch(call(1, app_id="2", correlation_id="c")), [])
    assert (await log.trace("1", tid(1)))[0] is None
    assert await numbers(log) == []
    assert await numbers(log, Query(correlation_id="c")) == []


async def test_trace_id_used_by_two_apps_shows_each_app_its_own_call(log):
    trace_id = "a" * 32
    ours, theirs = (span_of(trace_id, app_id, 5, "accepted", {}) for app_id in "12")
    await log.write(batch(call(1, trace_id=trace_id), call(2, trace_id=trace_id, app_id="2", size=9)), [ours, theirs])
    assert (await log.trace("1", trace_id))[1] == [ours]
    assert await log.trace("2", trace_id) == (call(2, trace_id=trace_id, app_id="2", size=9), [theirs])


async def test_calls_are_found_by_trace_id_correlation_id_channel_name_and_time(log):
    await log.write(
        batch(
            call(1, correlation_id="one"),
            call(2, channels=["room", "room-2"]),
            call(3, name="news, weather"),
            call(4, channels=["roo"], name="new"),
        ),
        [],
    )
    assert await numbers(log, Query(trace_id=tid(2))) == [2]
    assert await numbers(log, Query(correlation_id="one")) == [1]
    assert await numbers(log, Query(channel="room-2")) == [2]
    assert await numbers(log, Query(channel="room")) == [3, 2, 1]
    assert await numbers(log, Query(name="news")) == [3, 2, 1]
    assert await numbers(log, Query(name="weather")) == [3]
    assert await numbers(log, Query(since_ms=1_000_002, until_ms=1_000_003)) == [3, 2]
    assert await numbers(log, Query(channel="room", name="weather")) == [3]


async def test_search_continues_at_the_returned_position(log):
    for start in (0, 3, 17):
        await log.write(batch(*[call(number) for number in range(start, {0: 3, 3: 17, 17: 25}[start])]), [])
    seen, query = [], Query()
    while True:
        found = await log.find("1", query, 10)
        seen += [int(row.trace_id[12:], 16) for row in found.calls]
        if found.next is None:
            break
        query = Query(before=found.next)
    assert seen == list(range(24, -1, -1))


async def test_names_and_channels_are_not_used_as_patterns(log):
    await log.write(batch(call(1, name="100%"), call(2, name="1000"), call(3, name='a"b', channels=["x_y"])), [])
    assert await numbers(log, Query(name="100%")) == [1]
    assert await numbers(log, Query(name='a"b')) == [3]
    assert await numbers(log, Query(channel="xzy")) == []


async def test_one_of_several_names_is_found_and_a_part_of_a_name_is_not(log):
    await log.write([CallBatch([call(1, name="paid, sent, gone"), call(2, name="sent")])], [])
    for name, count in (("paid", 1), ("sent", 2), ("gone", 1), ("sen", 0), ("paid,", 0), (" sent", 0)):
        assert len((await log.find("1", Query(name=name), 10)).calls) == count, name


async def test_pruning_and_searching_read_only_what_they_need(tmp_path):
    """With 300,000 batches, each pruning read all of them, and a search without a result decoded every app's rows."""
    log = await EventLog.open(tmp_path / "events.sqlite", 1_000_000, DAY_S)
    for start in range(0, 3_000, 50):
        await log.write([CallBatch([call(number)]) for number in range(start, start + 50)], [])
    await log.write(batch(call(5_000, app_id="2", name="news")), [])
    steps = await steps_of(log, lambda: log.prune(1_010_000))
    assert steps < 200
    assert await steps_of(log, lambda: numbers(log, Query(name="other"), app_id="2")) < 200
    await log.close()


async def test_large_batches_are_split_and_searched_in_order(log):
    await log.write(batch(*[call(number) for number in range(2_500)]), [])
    assert await numbers(log, limit=2_500) == list(range(2_499, -1, -1))


async def test_call_is_found_by_a_trace_id_that_its_caller_chose(log):
    for number in range(50):
        await log.write(
            batch(call(number), call(number, trace_id=f"{number:02x}" * 16, time_ms=5_000_000 + number)), []
        )
    assert [row.time_ms for row in (await log.find("1", Query(trace_id="1f" * 16), 9)).calls] == [5_000_031]
    assert await numbers(log, Query(trace_id=tid(31))) == [31]
    assert await numbers(log, Query(trace_id="no hex at all")) == []


async def test_position_in_the_stream_is_stored_with_the_rows(tmp_path):
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    assert await log.position() == "0-0"
    await log.write([], [span_of("t", "1", 1, "received", {})], "17-3")
    await log.close()
    log = await EventLog.open(tmp_path / "events.sqlite", 10, DAY_S)
    assert await log.position() == "17-3"
    await log.close()


@pytest.mark.parametrize("page_bytes", [4096, 16_384], ids=["of before", "of now"])
async def test_a_file_keeps_its_pages(tmp_path, page_bytes):
    path = tmp_path / "events.sqlite"
    if page_bytes == 4096:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA user_version = 0")
            database.execute("VACUUM")
    for number in (1, 2):
        log = await EventLog.open(path, 100_000, DAY_S)
        await log.write(batch(call(number)), [])
        await log.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA page_size").fetchone() == (page_bytes,)
        assert database.execute("SELECT count(*) FROM batches").fetchone() == (2,)
    assert not path.with_name("events.sqlite.old").exists()


async def test_unreadable_file_is_renamed_to_old(tmp_path):
    path = tmp_path / "events.sqlite"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    log = await EventLog.open(path, 10, DAY_S)
    await log.write(batch(call(1)), [])
    assert await numbers(log) == [1]
    await log.close()
    assert (tmp_path / "events.sqlite.old").read_bytes().startswith(b"not a database")


async def test_joined_batches_keep_their_order_and_every_call_is_found_by_trace_id(log):
    foreign = "ab" * 16
    first = CallBatch([call(1, correlation_id="one"), call(2, trace_id=foreign)])
    second = CallBatch()
    second.insert_before(first)
    second.insert_before(CallBatch())
    second.add(call(200_000))
    second.add(call(3, correlation_id="three"))
    assert second.count == 4
    await log.write([second, CallBatch()], [])
    assert await numbers(log) == [3, 200_000, int(foreign[12:], 16), 1]
    for number in (1, 3, 200_000):
        assert await numbers(log, Query(trace_id=tid(number))) == [number]
    assert (await log.find("1", Query(trace_id=foreign), 10)).calls[0].time_ms == 1_000_002
    assert await numbers(log, Query(correlation_id="one")) == [1]
    assert await numbers(log, Query(correlation_id="three")) == [3]
