"""Spans of calls, workers and webhook attempts: their parents, times and bounds."""

from types import SimpleNamespace

from redpoll.cluster.traces import Batch, Entry, Span, Triggered
from redpoll.control.http.request import Parent
from redpoll.control.tracing.spans import Kind, Spans, trace_id_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


def call(parent: Parent | None = None) -> SimpleNamespace:
    route = SimpleNamespace(method="POST", pattern="/apps/{app_id}/events")
    app = SimpleNamespace(id="3")
    return SimpleNamespace(
        trace_id=TRACE,
        app=app,
        parent=parent,
        call=None,
        route=route,
        method="POST",
        path="/apps/3/events",
        remote="192.0.2.1",
    )


def made(per_flush: int = 2) -> tuple[Spans, list]:
    sent: list = []
    return Spans(sent.append, per_flush), sent


def worker_span(trace: str, stage: str, at_us: int, worker: str = "r.1.0", **detail) -> Span:
    return Span(trace, "3", at_us // 1000, stage, {"worker": worker, **detail}, at_us)


def entry(*spans: Span, triggered: tuple[Triggered, ...] = ()) -> Entry:
    return Entry("1-1", Batch(list(spans), list(triggered)))


def test_a_call_its_publish_and_its_deliveries_are_one_tree():
    spans, sent = made()
    request = call(Parent(CALLER, True))
    trace = spans.begin(request, 1_000)
    assert trace_id_of(trace) == TRACE
    spans.accepted(request, 3_000)
    spans.ended(request, 200, 500, 3_500, "news", ["room", "hall"], 12)
    written = {"channel": "room", "sockets": 7}
    spans.read([entry(worker_span(trace, "received", 2_000))])
    spans.read([entry(worker_span(trace, "written", 2_400, **written))])
    served, published, delivered = sent
    assert {span.trace_id for span in sent} == {TRACE}
    assert [served.parent_id, published.parent_id, delivered.parent_id] == [
        CALLER,
        served.span_id,
        published.span_id,
    ]
    assert [served.kind, published.kind, delivered.kind] == [Kind.SERVER, Kind.PRODUCER, Kind.CONSUMER]
    assert [(span.name, span.start_us, span.end_us) for span in sent] == [
        ("POST /apps/{app_id}/events", 500, 3_500),
        ("publish", 1_000, 3_000),
        ("deliver", 2_000, 2_400),
    ]
    assert served.attributes["http.response.status_code"] == 200
    assert published.attributes["messaging.destination.name"] == "room, hall"
    assert delivered.attributes["redpoll.sockets"] == 7
    assert not any(span.error for span in sent)


def test_a_call_that_redis_did_not_confirm_has_errors():
    spans, sent = made()
    request = call()
    spans.begin(request, 1_000)
    spans.ended(request, 503, 500, 3_500, "news", ["room"], 12)
    assert [(span.parent_id == "", span.error) for span in sent] == [
        (True, "status 503"),
        (False, "not confirmed by Redis"),
    ]


def test_a_caller_that_does_not_record_its_trace_gets_no_spans():
    spans, sent = made()
    request = call(Parent(CALLER, False))
    trace = spans.begin(request, 1_000)
    spans.accepted(request, 3_000)
    spans.ended(request, 200, 500, 3_500, "news", ["room"], 12)
    spans.read([entry(worker_span(trace, "written", 2_400, channel="room", sockets=7))])
    assert sent == []


def test_callers_that_record_their_trace_are_followed_up_to_the_limit():
    spans, _ = made(per_flush=2)
    recording = call(Parent(CALLER, True))
    assert [spans.follows(recording) for _ in range(3)] == [True, True, False]
    assert not spans.follows(call(Parent(CALLER, False)))
    assert not spans.follows(call())
    spans.flush()
    assert spans.follows(recording)


def test_a_client_event_is_the_parent_of_its_deliveries_and_webhooks():
    spans, sent = made()
    triggered = Triggered(TRACE, "3", 2, "client-x", "private-room", 12, "3.4", 2_000)
    spans.read([entry(worker_span(TRACE, "accepted", 2_000), triggered=(triggered,))])
    spans.read([entry(worker_span(TRACE, "dropped", 2_500, channel="private-room", socket_id="5.6"))])
    attempted = spans.begin_attempt(TRACE)
    spans.ended_attempt(attempted, 4_000, 5, 500, "the receiver answered 500", channel="private-room")
    began, dropped, attempt = sent
    assert (began.name, began.parent_id) == ("client event", "")
    assert began.attributes["redpoll.event"] == "client-x"
    assert [dropped.parent_id, attempt.parent_id] == [began.span_id] * 2
    assert dropped.attributes["redpoll.socket_id"] == "5.6"
    assert dropped.error
    assert (attempt.kind, attempt.start_us, attempt.end_us) == (Kind.CLIENT, 4_000, 9_000)
    assert attempt.error == "the receiver answered 500"
    assert attempted.traceparent == f"00-{TRACE}-{attempt.span_id}-01"


def test_webhook_attempts_beyond_the_limit_say_that_they_are_not_recorded():
    spans, sent = made(per_flush=1)
    first, second = spans.begin_attempt(None), spans.begin_attempt(None)
    assert (first.traceparent[-2:], second.traceparent[-2:]) == ("01", "00")
    assert first.trace_id != second.trace_id
    spans.ended_attempt(second, 4_000, 5, 200, "")
    assert sent == []
