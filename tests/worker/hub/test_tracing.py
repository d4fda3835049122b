"""Spans of a worker: received, sent to how many connections, and for which one an event was lost."""

import asyncio

from redpoll._fanout import Audience, Flusher, Sink
from redpoll.cluster.traces import Span, Triggered
from redpoll.protocol.joining import Joiner, Pace, Part
from redpoll.worker.hub.tracing import Tracing

TRACE = "a" * 32
NOW_MS = 1_700_000_000_000


class Recorder:
    """Records what a TraceWriter would write."""

    run = "0123456789ab"

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.calls: list[Triggered] = []
        self.flushes = 0

    def note(self, span: Span) -> None:
        self.spans.append(span)

    def note_triggered(self, triggered: Triggered) -> None:
        self.calls.append(triggered)

    def flush(self) -> None:
        self.flushes += 1


def made() -> tuple[Tracing, Recorder, Audience, Sink]:
    flusher = Flusher(lambda: None, 65_536)
    audience, sink, recorder = Audience(flusher), Sink(flusher), Recorder()
    audience.add(sink)
    return Tracing(recorder, lambda: "r.1.0", 8, clock=lambda: NOW_MS / 1000), recorder, audience, sink


def test_an_event_has_a_span_that_says_when_it_was_received_and_when_sent():
    tracing, recorder, audience, _ = made()
    waiting, times = [], iter((NOW_MS / 1000, NOW_MS / 1000 + 0.25))
    tracing = Tracing(recorder, lambda: "r.1.0", 8, when_sent=waiting.append, clock=lambda: next(times))
    tracing.posted(TRACE.encode(), "1", "room", audience, 7)
    assert recorder.spans == []
    waiting[0]()
    detail = {"worker": "r.1.0", "channel": "room", "sockets": 7, "waited_us": 250_000}
    assert recorder.spans == [Span(TRACE, "1", NOW_MS + 250, "written", detail, NOW_MS * 1000 + 250_000)]


def test_a_dropped_connection_lost_the_events_of_its_own_channels():
    tracing, recorder, audience, sink = made()
    elsewhere = Audience(Flusher(lambda: None, 65_536))
    tracing.posted(TRACE.encode(), "1", "room", audience, 1)
    tracing.posted(b"b" * 32, "1", "other", elsewhere, 0)
    tracing.posted(b"c" * 32, "2", "room", audience, 1)
    del recorder.spans[:]
    tracing.dropped("1", "3.4", sink)
    detail = {"worker": "r.1.0", "channel": "room", "socket_id": "3.4"}
    assert recorder.spans == [Span(TRACE, "1", NOW_MS, "dropped", detail, NOW_MS * 1000)]


async def test_only_a_websocket_with_too_much_unsent_is_one_that_lost_events(bench, monkeypatch):
    worker = await bench.start()
    lost = []
    monkeypatch.setattr(worker.hub.tracing, "dropped", lambda app_id, socket_id, sink: lost.append(socket_id))
    slow, leaving = await bench.client(worker), await bench.client(worker)
    # The same happens to a reader over HTTP.
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await asyncio.wait_for(reader.readline(), 60)
    (over_http,) = worker.gate.http.connections
    over_http.overrun_now()
    await bench.settled(worker, lambda: not worker.gate.http.connections)
    await leaving.socket.close()
    await bench.settled(worker, lambda: len(worker.hub.open_connections) == 1)
    assert lost == []
    worker.hub.find_socket("1", slow.socket_id).overrun_now()
    await bench.settled(worker, lambda: not len(worker.hub.open_connections))
    assert lost == [slow.socket_id]
    assert worker.flushing.flusher.overruns == 2
    writer.close()


def test_events_before_the_last_flush_count_as_sent():
    tracing, recorder, audience, sink = made()
    tracing.posted(TRACE.encode(), "1", "room", audience, 1)
    tracing.flush()
    del recorder.spans[:]
    tracing.dropped("1", "3.4", sink)
    assert recorder.spans == []
    assert recorder.flushes == 1


def test_a_client_event_has_its_row_and_its_first_span():
    tracing, recorder, _, _ = made()
    tracing.triggered(TRACE, "1", "client-x", "private-room", 12, "3.4", True)
    assert recorder.calls == [Triggered(TRACE, "1", NOW_MS, "client-x", "private-room", 12, "3.4", NOW_MS * 1000)]
    assert [(span.stage, span.trace_id) for span in recorder.spans] == [("accepted", Recorder.run + TRACE)]


def test_client_events_beyond_the_rate_have_a_row_but_no_spans():
    tracing, recorder, _, _ = made()
    # Eight a second are two per flush.
    for sampled in (True, True, False, False):
        assert tracing.sample() is sampled
        tracing.triggered(TRACE, "1", "client-x", "private-room", 12, "3.4", sampled)
    assert [call.sampled for call in recorder.calls] == [True, True, False, False]
    assert [span.stage for span in recorder.spans] == ["accepted"] * 2
    tracing.flush()
    assert tracing.sample()


def test_each_part_of_a_joined_frame_names_it_and_so_does_what_was_replaced():
    tracing, recorder, audience, _ = made()
    pace = Pace(5, join=("t",))
    joiner = Joiner(pace)
    for at in range(3):
        joiner.add(Part(pace, b"e", b'{"t":"x"}', trace=b"%d" % at))
    (joined,) = joiner.take()
    tracing.joined(joined, "1", "room", audience, 7)
    frame = {"worker": "r.1.0", "channel": "room", "sockets": 7, "frame": "r.1.0.1", "parts": 3, "waited_us": 0}
    assert [(span.trace_id, span.stage, span.detail) for span in recorder.spans] == [
        (str(at), "written", frame) for at in range(3)
    ]
    del recorder.spans[:]
    newest = Joiner(Pace(5))
    for at in range(2):
        newest.add(Part(Pace(5), b"e", b"", trace=b"%d" % at))
    (joined,) = newest.take()
    tracing.joined(joined, "1", "room", audience, 7)
    assert [(span.trace_id, span.stage, span.detail.get("frame")) for span in recorder.spans] == [
        ("1", "written", None),
        ("0", "replaced", "r.1.0.2"),
    ]
