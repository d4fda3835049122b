"""Calls of several apps in batches: their order, their times, and the marks by which they are found."""

import msgspec

from redpoll.store.call_batch import CallBatch, CallRow, trace_time_ms


def call(number: int, app_id: str = "1", **fields) -> CallRow:
    trace_id = f"{1_000_000 + number:012x}{number:020x}"
    values = {"correlation_id": None, "name": "n", "channels": ["c"], "size": 2, "caller": "key", "status": 200}
    values |= {"trace_id": trace_id, "time_ms": 1_000_000 + number, "sampled": False}
    return CallRow(app_id=app_id, **{**values, **fields})


def test_generated_trace_id_begins_with_its_time():
    assert trace_time_ms(call(5).trace_id) == 1_000_005
    assert trace_time_ms("x" * 32) == 0


def test_batches_are_by_app_and_in_the_order_of_the_calls():
    calls = CallBatch([call(2, "a"), call(1, "b"), call(1, "a")])
    earlier = CallBatch([call(9, "b")])
    calls.insert_before(earlier)
    assert calls.count == 4
    found = [(app, msgspec.json.decode(batch.json[:-1] + b"]")) for app, batch in calls.by_app()]
    assert [(app, [row[3] - 1_000_000 for row in rows]) for app, rows in found] == [
        ("a", [2, 1]),
        ("b", [9]),
        ("b", [1]),
    ]


def test_batch_of_long_calls_ends_early():
    calls = CallBatch(call(number, channels=["c" * 200] * 100) for number in range(100))
    batches = [batch for _, batch in calls.by_app()]
    assert sum(batch.count for batch in batches) == calls.count == 100
    assert max(len(batch.json) for batch in batches) < 300_000
    # But for the brackets.
    assert sum(len(batch.json) - 1 for batch in batches) == calls.size
    other = CallBatch()
    for _ in range(3):
        other.add_encoded("1", b"x" * 300_000, 1, 1_000_001, 1_000_001)
    assert [batch.count for _, batch in other.by_app()] == [1, 1, 1]
    other.insert_before(calls)
    assert (other.count, other.size) == (103, calls.size + 900_000)


def test_correlation_ids_and_foreign_trace_ids_are_marks():
    ((_, batch),) = CallBatch([call(1), call(2, correlation_id="one"), call(3, trace_id="ab" * 16)]).by_app()
    assert batch.marks == {"one", "ab" * 16}
    assert (batch.first_ms, batch.last_ms, batch.count) == (1_000_001, 1_000_003, 3)
