"""Spans reach an OpenTelemetry collector: a stand-in that decodes OTLP with the official protocol package."""

import asyncio
import logging
import threading
import urllib.request
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Socket, eventually, signed_path
from redpoll.config.settings import Settings
from redpoll.control.tracing import otlp
from redpoll.control.tracing.otlp import OtlpSender, open_sender
from redpoll.control.tracing.spans import Kind, SpanData
from redpoll.ipc.command_socket import ask, socket_path

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


class Collector:
    """Takes spans at `/v1/traces`, as a collector does. `status` is what it answers."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[Message] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces" and collector.status == 200:
                    collector.take(body, self.headers)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes, headers: Message) -> None:
        self.headers.append(headers)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in group.resource.attributes})
            for scope in group.scope_spans:
                assert scope.scope.name == "redpoll"
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def in_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def span(number: int, **more) -> SpanData:
    given = {"parent_id": CALLER, "error": "", **more}
    attributes = {"redpoll.app": "3", "redpoll.sockets": 7}
    return SpanData(
        TRACE, f"{number:016x}", given["parent_id"], "publish", Kind.PRODUCER, 1, 3, attributes, given["error"]
    )


async def test_a_span_arrives_as_it_was_made(collector, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    sender = OtlpSender(f"{collector.url}/v1/traces", "node-1")
    sender.put(span(1))
    sender.put(span(2, parent_id="", error="status 503"))
    await sender.finish(60.0)
    one, two = collector.spans
    assert (one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()) == (TRACE, f"{1:016x}", CALLER)
    assert (one.name, one.kind) == ("publish", Span.SPAN_KIND_PRODUCER)
    assert (one.start_time_unix_nano, one.end_time_unix_nano) == (1_000, 3_000)
    values = {pair.key: pair.value for pair in one.attributes}
    assert (values["redpoll.app"].string_value, values["redpoll.sockets"].int_value) == ("3", 7)
    assert one.status.code == Status.STATUS_CODE_UNSET
    assert two.parent_span_id == b""
    assert (two.status.code, two.status.message) == (Status.STATUS_CODE_ERROR, "status 503")
    resource = collector.resources[0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("redpoll", "node-1")
    assert resource["deployment.environment"] == "test"
    assert collector.headers[0]["Authorization"] == "Bearer x"
    assert (sender.sent_total, sender.lost_total) == (2, 0)


async def test_spans_that_the_collector_refuses_are_counted_and_logged_once(collector, monkeypatch):
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(otlp.log, "warning", lambda event, **more: said.append((event, more["reason"])))
    collector.status = 400
    sender = OtlpSender(f"{collector.url}/v1/traces", "node-1")
    for number in (1, 2):
        sender.put(span(number))
        await eventually(lambda number=number: asyncio.sleep(0, sender.lost_total), number)
    collector.status = 200
    sender.put(span(3))
    await sender.finish(60.0)
    ((event, reason),) = said
    assert event == "spans not sent to opentelemetry"
    assert "400" in reason
    assert (sender.sent_total, sender.lost_total) == (1, 2)
    assert not logging.getLogger("opentelemetry").propagate


async def test_a_full_queue_drops_spans_and_never_waits(collector, monkeypatch):
    blocked, go_on = threading.Event(), threading.Event()

    def hang(self: OtlpSender, spans: list[SpanData]) -> None:
        blocked.set()
        go_on.wait()

    monkeypatch.setattr(OtlpSender, "_send", hang)
    sender = OtlpSender(f"{collector.url}/v1/traces", "node-1", max_waiting=2)
    sender.put(span(0))
    assert await asyncio.to_thread(blocked.wait, 60)
    for number in range(5):
        sender.put(span(number))
    assert sender.lost_total == 3
    go_on.set()
    await sender.finish()


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        (Settings(), {}),
        (Settings(otel_endpoint="http://localhost:4318"), {"OTEL_SDK_DISABLED": "true"}),
        (Settings(otel_endpoint="http://localhost:4318", trace_calls_per_second=0), {}),
        (Settings(otel_endpoint="http://localhost:4318", event_log_calls=0), {}),
    ],
)
def test_without_a_collector_nothing_starts(settings, environment):
    # A thread of an earlier test may end meanwhile.
    before = set(threading.enumerate())
    assert open_sender(settings, environment) is None
    assert set(threading.enumerate()) <= before


def test_without_the_extra_the_server_says_what_is_missing(monkeypatch):
    def missing(*_: object) -> None:
        raise ImportError("opentelemetry")

    said: list[str] = []
    monkeypatch.setattr(otlp, "OtlpSender", missing)
    monkeypatch.setattr(otlp.log, "warning", lambda event, **more: said.append(more["reason"]))
    assert open_sender(Settings(otel_endpoint="http://localhost:4318"), {}) is None
    assert said == ["its SDK is missing; pip install 'redpoll[otel]'"]


async def test_a_publish_and_a_webhook_of_a_running_server(collector):
    """From the caller's span to the receiver's: a publish in the caller's trace, and a client event with a webhook."""
    settings = {"webhook_allow_http": True, "webhook_allow_addresses": "127.0.0.0/8", "otel_endpoint": collector.url}
    with Server(workers=2, node_name="node-1", **settings) as server:
        async with Receiver() as receiver:
            socket = socket_path(server.folder / "data")
            hook = {"url": receiver.url, "events": ["client_event"], "format": "service", "channels": [], "pin": False}
            ask(socket, "webhook create", {"app": server.app_id, **hook})
            client = await Socket.connect(server)
            await client.subscribe("private-room")
            await asyncio.to_thread(publish, server, f"00-{TRACE}-{CALLER}-01")
            await client.next("hello", "private-room")
            client.send({"event": "client-x", "channel": "private-room", "data": {"n": 1}})
            await eventually(lambda: asyncio.sleep(0, bool(receiver.requests)), True)
            await client.close()
            _, trace_id, span_id, flags = receiver.requests[0].headers["traceparent"].split("-")
            await eventually(lambda: asyncio.sleep(0, len(collector.in_trace(TRACE))), 3)
            await eventually(lambda: asyncio.sleep(0, "webhook" in names(collector.in_trace(trace_id))), True)
            await eventually(lambda: asyncio.sleep(0, "deliver" in names(collector.in_trace(trace_id))), True)
    published = {found.name: found for found in collector.in_trace(TRACE)}
    served, publish_span, deliver = published["POST /apps/{app_id}/events"], published["publish"], published["deliver"]
    assert served.parent_span_id.hex() == CALLER
    assert publish_span.parent_span_id == served.span_id
    assert deliver.parent_span_id == publish_span.span_id
    # The start of a call is computed from two clocks when it ends. The process may pause between them.
    assert served.start_time_unix_nano <= publish_span.start_time_unix_nano + 60 * 10**9
    assert publish_span.start_time_unix_nano <= publish_span.end_time_unix_nano
    assert deliver.start_time_unix_nano <= deliver.end_time_unix_nano
    client_event = {found.name: found for found in collector.in_trace(trace_id)}
    assert flags == "01"
    assert client_event["webhook"].span_id.hex() == span_id
    assert client_event["webhook"].parent_span_id == client_event["client event"].span_id
    assert client_event["deliver"].parent_span_id == client_event["client event"].span_id
    assert {resource["service.instance.id"] for resource in collector.resources} == {"node-1"}


def names(spans: list[Span]) -> set[str]:
    return {span.name for span in spans}


def publish(server: Server, traceparent: str) -> None:
    body = b'{"name":"hello","channel":"private-room","data":"{}"}'
    target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    headers = {"Content-Type": "application/json", "traceparent": traceparent}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{target}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["X-Service-Trace-Id"] == traceparent.split("-")[1]
