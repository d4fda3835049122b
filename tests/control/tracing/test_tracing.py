"""Calls and spans become rows of a real event log. Spans of workers come from a real Redis stream."""

import asyncio

import pytest

from redpoll._publish import Call
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.traces import Span, TraceReader, TraceWriter, Triggered
from redpoll.control.tracing import tracing
from redpoll.control.tracing.tracing import RENEW_EVERY_S, Tracer, describe_call
from redpoll.protocol.apps import App
from redpoll.protocol.messages import limits_of
from redpoll.store.call_batch import CallBatch, CallRow
from redpoll.store.eventlog import EventLog, Query

NOW_S = 1_700_000_000.0
RUN = "0123456789ab"


class FakeRequest:
    """The part of `control.request.Request` that the tracer uses."""

    def __init__(self, number: int, decoded: Call | None = None, body: bytes = b"") -> None:
        self.trace_id = self.found_trace_id = f"{int(NOW_S * 1000):012x}{number:020x}"
        self.app = type("App", (), {"id": "3"})
        self.decoded = decoded
        self.body = body
        self.token = None
        self.key = self.found_key = "k"
        self.remote = "192.0.2.1"
        self.sampled = False
        self.began = 0.0


def call(*events: tuple[str, tuple[str, ...], str], correlation_id: str | None = None) -> Call:
    made = Call(limits_of(App(id="3", name="test", keys=())), len(events) > 1)
    for name, channels, data in events:
        made.add(channels, name, data, None)
    made.correlation_id = correlation_id
    return made


def event(
    name: str = "news", channels: tuple[str, ...] = ("room",), data: str = "{}", correlation_id: str | None = None
) -> Call:
    return call((name, channels, data), correlation_id=correlation_id)


@pytest.fixture
async def event_log(tmp_path):
    log = await EventLog.open(tmp_path / "events.sqlite", 1_000, 3_600)
    yield log
    await log.close()


@pytest.fixture
def tracer(link, event_log):
    return Tracer(event_log, TraceReader(link, Keys(), RUN), 10, clock=lambda: NOW_S)


async def rows(log: EventLog) -> list[CallRow]:
    return (await log.find("3", Query(), 1_000)).calls


async def test_stages_of_a_call_stay_in_order_when_the_wall_clock_is_changed(link, event_log):
    now_s, elapsed_s = NOW_S, 0.0
    tracer = Tracer(event_log, TraceReader(link, Keys(), RUN), 10, clock=lambda: now_s, timer=lambda: elapsed_s)
    call = FakeRequest(1, event())
    elapsed_s = 0.002
    tracer.sample(call)
    # The clock goes back an hour while Redis confirms.
    now_s, elapsed_s = NOW_S - 3_600, 0.005
    tracer.accepted(call)
    tracer.ended(call, 200, 0.006)
    await tracer.flush()
    (row,) = await rows(event_log)
    _, spans = await event_log.trace("3", call.trace_id)
    assert [span.time_us - row.time_us for span in spans] == [2_000, 5_000]


async def test_control_processes_that_follow_each_other_use_different_numbers(link, event_log):
    """Spans of calls of the process before are left out, because their numbers are unknown."""
    count = 2_000
    reader = TraceReader(link, Keys(), RUN)
    tracers = [Tracer(event_log, reader, 10, clock=lambda: NOW_S) for _ in range(count)]
    assert len({tracer.sample(FakeRequest(1)) for tracer in tracers}) == count


async def test_the_stream_lives_on_when_the_wall_clock_is_set_back(link, event_log):
    now_s, elapsed_s = NOW_S, 0.0
    tracer = Tracer(event_log, TraceReader(link, Keys(), RUN), 10, clock=lambda: now_s, timer=lambda: elapsed_s)
    tracer.link_up()
    key = Keys().traces(RUN)
    await link.ask(b"EXPIRE", key, 5)
    now_s, elapsed_s = NOW_S - 3_600, RENEW_EVERY_S
    await tracer.flush()
    assert await link.ask(b"TTL", key) > 5


async def test_a_flush_beside_another_returns_after_it(tracer, event_log, monkeypatch):
    written, began, go_on = [], asyncio.Event(), asyncio.Event()
    write = event_log.write

    async def slow(*batch):
        began.set()
        await go_on.wait()
        await write(*batch)
        written.append(batch)

    monkeypatch.setattr(event_log, "write", slow)
    tracer.ended(FakeRequest(1, event()), 200, 0.25)
    first = asyncio.create_task(tracer.flush())
    await began.wait()
    second = asyncio.create_task(tracer.flush())
    # A second flush that didn't wait would have nothing to write.
    for _ in range(100):
        await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    await second
    assert len(written) == 1
    await first


async def test_call_becomes_a_row_with_its_time_of_arrival(tracer, event_log):
    tracer.ended(FakeRequest(1, event(data="ü", correlation_id="order-1")), 200, 0.25)
    await tracer.flush()
    assert await rows(event_log) == [
        CallRow(
            FakeRequest(1).trace_id,
            "3",
            "order-1",
            1_699_999_999_750,
            "news",
            ["room"],
            2,
            "key k from 192.0.2.1",
            200,
            False,
            1_699_999_999_750_000,
        )
    ]


async def test_batch_is_one_row_with_all_its_names_and_channels(tracer, event_log):
    batch = call(("a", ("x",), "12"), ("b", ("y",), "345"), ("a", ("y",), ""))
    tracer.ended(FakeRequest(1, batch), 200, 0)
    await tracer.flush()
    (row,) = await rows(event_log)
    assert (row.name, row.channels, row.size) == ("a, b", ["x", "y"], 5)


async def test_log_contains_the_spans_of_workers(tracer, event_log, link):
    await tracer.flush()
    request = FakeRequest(1, event())
    carried = tracer.sample(request)
    assert carried.startswith(RUN)
    assert len(carried) < len(request.trace_id)
    tracer.span(request.trace_id, "3", "accepted")
    worker = TraceWriter(link, Keys(), RUN)
    at_ms = int(NOW_S * 1000) + 7
    worker.note(
        Span(
            carried,
            "3",
            at_ms,
            "written",
            {"worker": "r.1.0", "channel": "room", "sockets": 2},
            at_ms * 1000 + 250,
        )
    )
    worker.flush()
    tracer.ended(request, 200, 0)
    await tracer.flush()
    row, spans = await event_log.trace("3", request.trace_id)
    assert row.sampled
    assert [span.time_us for span in spans] == [at_ms * 1000 - 7_000] * 2 + [at_ms * 1000 + 250]
    assert [(span.stage, span.detail) for span in spans] == [
        ("authenticated", {}),
        ("accepted", {}),
        ("written", {"worker": "r.1.0", "channel": "room", "sockets": 2}),
    ]
    await tracer.flush()
    assert len((await event_log.trace("3", request.trace_id))[1]) == 3


async def test_workers_spans_belong_to_their_own_call_of_a_trace_id(link, event_log):
    now_s = NOW_S
    tracer = Tracer(event_log, TraceReader(link, Keys(), RUN), 10, clock=lambda: now_s, timer=lambda: 0.0)
    await tracer.flush()
    worker = TraceWriter(link, Keys(), RUN)
    for sockets in (3, 7):
        now_s += 1
        request = FakeRequest(1, event())
        detail = {"worker": "r.1.0", "channel": "room", "sockets": sockets}
        worker.note(Span(tracer.sample(request), "3", 0, "written", detail, int(now_s * 1e6) + 250))
        tracer.ended(request, 200, 0)
    worker.flush()
    await tracer.flush()
    _, spans = await event_log.trace("3", request.trace_id)
    written = [(span.call_us - int(NOW_S * 1e6), span.detail["sockets"]) for span in spans if span.stage == "written"]
    assert written == [(1_000_000, 3), (2_000_000, 7)]
    assert tracer.latency.microseconds["http"] == 2 * 250


async def test_client_event_with_a_trace_id_is_logged(tracer, event_log, link):
    await tracer.flush()
    worker = TraceWriter(link, Keys(), RUN)
    worker.note_triggered(Triggered("c" * 32, "3", 1_700_000_000_000, "client-x", "private-room", 12, "1.2"))
    worker.flush()
    await tracer.flush()
    (row,) = await rows(event_log)
    assert (row.trace_id, row.name, row.channels, row.size) == ("c" * 32, "client-x", ["private-room"], 12)
    assert (row.caller, row.status, row.sampled) == ("client 1.2", 200, True)


async def test_spans_of_an_unknown_call_are_left_out(tracer, event_log, link):
    await tracer.flush()
    worker = TraceWriter(link, Keys(), RUN)
    for number in ("ffffffff", "a" * 32):
        worker.note(Span(RUN + number, "3", 1, "received", {}))
    worker.flush()
    await tracer.flush()
    await event_log.write([CallBatch([CallRow("a" * 32, "3", None, 0, "n", [], 0, "", 200, True)])], [])
    assert len((await event_log.trace("3", "a" * 32))[1]) == 1


async def test_calls_beyond_the_sampling_rate_have_a_row_but_no_spans(tracer, event_log):
    calls = [FakeRequest(number, event()) for number in range(30)]
    sampled = [tracer.sample(call) is not None for call in calls]
    assert sampled == [True] * 10 + [False] * 20
    assert tracer.sampled_out == 20
    for call in calls:
        tracer.ended(call, 200, 0)
    await tracer.flush()
    assert sum(row.sampled for row in await rows(event_log)) == 10
    assert len(await rows(event_log)) == 30
    assert tracer.sample(FakeRequest(31, event())) is not None


async def test_new_tracer_continues_where_the_last_one_stopped(link, event_log):
    worker = TraceWriter(link, Keys(), RUN)
    TraceReader(link, Keys(), RUN).renew()
    for number in range(3):
        worker.note(Span(RUN + "a" * 32, "3", number, "received", {}, 1000 * number))
        worker.flush()
        tracer = Tracer(event_log, TraceReader(link, Keys(), RUN), 10, clock=lambda: NOW_S)
        await tracer.flush()
        await tracer.flush()
    await event_log.write([CallBatch([CallRow("a" * 32, "3", None, 0, "n", [], 0, "", 200, True)])], [])
    _, spans = await event_log.trace("3", "a" * 32)
    assert [span.time_ms for span in spans] == [0, 1, 2]


async def test_a_new_stream_is_read_though_its_ids_are_lower_than_the_position(tracer, event_log, link):
    """The clock was an hour ahead when an earlier run stored its position."""
    await event_log.write([], [], "32503680000000-0")
    tracer.link_up()
    await tracer.flush()
    worker = TraceWriter(link, Keys(), RUN)
    for number in range(2):
        worker.note_triggered(Triggered(f"{number:032x}", "3", 1, "client-x", "private-a", 2, "1.2"))
        worker.flush()
        await tracer.flush()
    assert [int(row.trace_id, 16) for row in await rows(event_log)] == [1, 0]


async def test_rows_wait_while_the_log_cannot_be_written(tracer, event_log, monkeypatch):
    async def full(*args) -> None:
        raise sa_error()

    monkeypatch.setattr(event_log, "write", full)
    tracer.ended(FakeRequest(1, event()), 200, 0)
    await tracer.flush()
    monkeypatch.undo()
    tracer.ended(FakeRequest(2, event()), 200, 0)
    await tracer.flush()
    assert [int(row.trace_id[12:], 16) for row in await rows(event_log)] == [2, 1]


async def test_rows_that_wait_are_bounded_by_their_bytes(tracer, event_log, monkeypatch):
    monkeypatch.setattr(tracing, "_MAX_WAITING_BYTES", 1_000)
    for number in range(30):
        tracer.ended(FakeRequest(number, event()), 200, 0)
    tracer.ended_encoded("3", b"[],", 1, 1, 1)
    await tracer.flush()
    logged = len(await rows(event_log))
    assert 3 < logged < 10
    assert tracer.unlogged == 31 - logged
    tracer.ended(FakeRequest(31, event()), 200, 0)
    await tracer.flush()
    assert len(await rows(event_log)) == logged + 1


async def test_rows_are_written_while_the_log_is_pruned_and_after_a_pruning_that_failed(tracer, event_log, monkeypatch):
    """With many apps a pruning took many seconds. Rows waited for it, and were lost."""
    monkeypatch.setattr(tracing, "FLUSH_EVERY_S", 0.05)
    monkeypatch.setattr(tracing, "PRUNE_EVERY_S", 0.01)
    prunings = 0
    pruning, go_on, written = asyncio.Event(), asyncio.Event(), asyncio.Event()
    write = event_log.write

    async def prune(now_ms: int) -> None:
        nonlocal prunings
        prunings += 1
        if prunings == 1:
            raise sa_error()
        pruning.set()
        await go_on.wait()

    async def write_and_say(*batch) -> None:
        await write(*batch)
        written.set()

    monkeypatch.setattr(event_log, "prune", prune)
    monkeypatch.setattr(event_log, "write", write_and_say)
    tracer.start()
    try:
        async with asyncio.timeout(60):
            await pruning.wait()
            tracer.ended(FakeRequest(1, event()), 200, 0)
            await written.wait()
    finally:
        go_on.set()
        await tracer.finish()
    assert len(await rows(event_log)) == 1


def sa_error() -> Exception:
    from sqlalchemy.exc import OperationalError

    return OperationalError("INSERT", None, OSError("database or disk is full"))


def test_readable_fields_of_a_refused_call_are_logged():
    assert describe_call(b'{"name":"n","channels":["a","b"],"data":"123","correlation_id":"c"}') == (
        "n",
        ["a", "b"],
        3,
        "c",
    )
    assert describe_call(b'{"batch":[{"name":"n","channel":"a","data":"1"},7,{"name":"m","channel":"b"}]}') == (
        "n, m",
        ["a", "b"],
        1,
        None,
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 5_000, b'{"name":7,"channels":{},"data":[]}'])
def test_invalid_body_is_described_as_empty(body):
    name, channels, _, correlation_id = describe_call(body)
    assert (name, channels, correlation_id) == ("", [], None)


def test_fields_of_a_refused_call_are_truncated():
    name, channels, _, _ = describe_call(
        b'{"name":"%b","channels":[%b]}' % (b"n" * 10_000, b",".join([b'"c"'] * 5_000))
    )
    assert len(name) == 200
    assert channels == ["c"]


async def test_one_flush_stores_what_many_workers_appended_and_removes_it(tracer, event_log, link):
    """100 entries a second were read and none removed: from 25 workers on, rows were lost."""
    await tracer.flush()
    worker = TraceWriter(link, Keys(), RUN)
    for number in range(150):
        worker.note_triggered(Triggered(f"{number:032x}", "3", 1, "client-x", "private-a", 2, "1.2"))
        worker.flush()
    await tracer.flush()
    assert len((await event_log.find("3", Query(), 1_000)).calls) == 150
    assert await link.ask(b"XLEN", Keys().traces(RUN)) == 1
