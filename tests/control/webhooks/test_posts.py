"""What is posted for one delivery and for several: headers, and the spans of the attempt."""

import json

import msgspec
import pytest

from control.webhooks.transitions import APP, NOW_S
from helpers.receiver import status
from redpoll.control.tracing.spans import Spans
from redpoll.control.webhooks.payloads import batch_id
from redpoll.control.webhooks.posts import Posts
from redpoll.control.webhooks.sender import Sender
from redpoll.protocol.apps import Key
from redpoll.store.deliveries import Waiting
from redpoll.store.webhooks import Endpoint

TRACES = ("0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d")


@pytest.fixture
async def sender(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    made = Sender(allow_http=True, allow_addresses=("127.0.0.0/8",))
    yield made
    await made.close()


def delivery(number, event="client_event", attempts=0, trace=None):
    body = json.dumps({"time_ms": number, "events": [{"name": event, "seq": number}]}).encode()
    return Waiting(number, f"d{number}", "e1", event, f"room-{number}", None, body, attempts, 0, trace)


def endpoint_of(receiver):
    return Endpoint(
        id="e1", app_id=APP, url=receiver.url, secret="s", events=("all",), channels=(), format="pusher", created_at=0.0
    )


async def test_one_delivery_is_posted_in_its_own_trace_under_its_own_id(sender, receiver):
    spans = []
    posts = Posts(sender, lambda _app: None, lambda: NOW_S, Spans(spans.append, 10))
    begun_s, attempt = await posts.post(endpoint_of(receiver), [delivery(1, attempts=2, trace=TRACES[0])])
    (request,) = receiver.requests
    assert (begun_s, attempt.ok, request.body) == (NOW_S, True, delivery(1).body)
    shown = [request.headers[f"x-service-{name}"] for name in ("event", "delivery", "attempt")]
    assert shown == ["client_event", "d1", "3"]
    (span,) = spans
    assert request.headers["traceparent"] == f"00-{TRACES[0]}-{span.span_id}-01"
    assert (span.attributes["redpoll.delivery"], span.attributes["redpoll.channel"]) == ("d1", "room-1")


@pytest.mark.parametrize(("format", "body", "signs"), [("service", "pusher", True), ("pusher", "service", False)])
async def test_headers_are_those_of_the_body_after_the_format_was_changed(sender, receiver, format, body, signs):
    """Waiting deliveries were sent in Pusher's format without Pusher's signature."""
    bodies = {"pusher": delivery(1).body, "service": b'{"event":"client_event","data":{},"timestamp":1}'}
    posts = Posts(sender, lambda _app: Key(key="k", secret="s"), lambda: NOW_S, None)
    endpoint = msgspec.structs.replace(endpoint_of(receiver), format=format)
    await posts.post(endpoint, [delivery(1)._replace(body=bodies[body])])
    (request,) = receiver.requests
    assert ("x-pusher-key" in request.headers, "x-pusher-signature" in request.headers) == (signs, signs)


async def test_several_are_posted_in_a_trace_of_their_own_that_the_events_spans_name(sender, receiver):
    receiver.answer = status(500)
    spans = []
    posts = Posts(sender, lambda _app: None, lambda: NOW_S, Spans(spans.append, 10))
    items = [delivery(1, attempts=1, trace=TRACES[0]), delivery(2, "channel.vacated"), delivery(3, trace=TRACES[1])]
    await posts.post(endpoint_of(receiver), items)
    (request,) = receiver.requests
    assert [event["seq"] for event in request.json()["events"]] == [1, 2, 3]
    shown = [request.headers[f"x-service-{name}"] for name in ("event", "delivery", "attempt")]
    assert shown == ["batch", batch_id(["d1", "d2", "d3"]), "2"]
    whole, *own = spans
    assert request.headers["traceparent"] == f"00-{whole.trace_id}-{whole.span_id}-01"
    assert (whole.parent_id, whole.attributes["redpoll.events"]) == ("", 3)
    assert whole.trace_id not in TRACES
    assert [(span.trace_id, span.parent_id) for span in own] == [(trace, trace[-16:]) for trace in TRACES]
    assert [(span.attributes["redpoll.delivery"], span.attributes["redpoll.attempt"]) for span in own] == [
        ("d1", 2),
        ("d3", 1),
    ]
    assert {span.attributes["redpoll.batch"] for span in own} == {whole.trace_id}
    assert {span.error for span in spans} == {"answered 500 Internal Server Error"}
