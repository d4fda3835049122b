"""Spans of a worker: what is noted of traced events, and for whom one was lost."""

from redpoll._fanout import Audience, Flusher, Sink
from redpoll.cluster.traces import Span, Triggered
from redpoll.worker.tracing import Tracing

TRACE = "a" * 32
NOW_MS = 1_700_000_000_000


class Noted:
    """Takes what a TraceWriter would send."""

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


def made() -> tuple[Tracing, Noted, Audience, Sink]:
    flusher = Flusher(lambda: None, 65_536)
    audience, sink, noted = Audience(flusher), Sink(flusher), Noted()
    audience.add(sink)
    return Tracing(noted, lambda: "r.1.0", clock=lambda: NOW_MS / 1000), noted, audience, sink


def test_an_event_is_received_and_written_to_so_many_sockets():
    tracing, noted, audience, _ = made()
    tracing.posted(TRACE.encode(), "1", "room", audience, 7)
    assert noted.spans == [
        Span(TRACE, "1", NOW_MS, "received", {"worker": "r.1.0"}),
        Span(TRACE, "1", NOW_MS, "written", {"worker": "r.1.0", "channel": "room", "sockets": 7}),
    ]


def test_a_socket_that_is_given_up_lost_the_events_of_its_own_channels():
    tracing, noted, audience, sink = made()
    elsewhere = Audience(Flusher(lambda: None, 65_536))
    tracing.posted(TRACE.encode(), "1", "room", audience, 1)
    tracing.posted(b"b" * 32, "1", "other", elsewhere, 0)
    tracing.posted(b"c" * 32, "2", "room", audience, 1)
    del noted.spans[:]
    tracing.dropped("1", "3.4", sink)
    detail = {"worker": "r.1.0", "channel": "room", "socket_id": "3.4"}
    assert noted.spans == [Span(TRACE, "1", NOW_MS, "dropped", detail)]


def test_what_was_flushed_before_counts_as_written():
    tracing, noted, audience, sink = made()
    tracing.posted(TRACE.encode(), "1", "room", audience, 1)
    tracing.flush()
    del noted.spans[:]
    tracing.dropped("1", "3.4", sink)
    assert noted.spans == []
    assert noted.flushes == 1


def test_a_client_event_has_its_row_and_its_first_stage():
    tracing, noted, _, _ = made()
    tracing.triggered(TRACE, "1", "client-x", "private-room", 12, "3.4")
    assert noted.calls == [Triggered(TRACE, "1", NOW_MS, "client-x", "private-room", 12, "3.4")]
    assert [span.stage for span in noted.spans] == ["accepted"]
