"""Times of traced events, from the call to the workers' sockets."""

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.traces import Span, TraceReader, TraceWriter, Triggered
from redpoll.control.http.router import Route, time_slot
from redpoll.control.tracing.latency import PublishLatency
from redpoll.control.tracing.tracing import Tracer
from redpoll.store.eventlog import EventLog

NOW_US = 1_700_000_000_000_000
RUN = "0123456789ab"


def test_durations_are_counted_in_the_slots_of_routes():
    route = Route("", "", "", lambda request: None)
    for microseconds in (0, 1, 999, 1_000_000, 90_000_000):
        assert time_slot(microseconds) == route.count(200, (microseconds + 0.5) / 1e6)


def test_event_is_counted_once_for_each_worker_and_channel():
    latency = PublishLatency()
    latency.began("a", NOW_US, "http")
    latency.written("a", NOW_US + 3_000)
    latency.written("a", NOW_US + 5_000)
    latency.written("of an earlier run", NOW_US)
    assert sum(latency.times["http"]) == 2
    assert latency.microseconds == {"http": 8_000, "client": 0}


def test_clock_that_is_behind_counts_as_no_time():
    latency = PublishLatency()
    latency.began("a", NOW_US, "client")
    latency.written("a", NOW_US - 700)
    assert latency.times["client"][0] == 1
    assert latency.microseconds["client"] == 0


def test_events_of_ten_seconds_ago_are_forgotten():
    latency = PublishLatency()
    latency.began("old", NOW_US, "http")
    latency.began("new", NOW_US + 5_000_000, "http")
    latency.forget(NOW_US + 11_000_000)
    latency.written("old", NOW_US)
    latency.written("new", NOW_US)
    assert sum(latency.times["http"]) == 1


def test_after_the_clock_was_set_back_events_are_measured_at_once():
    """Until the old time came again, nothing was."""
    latency = PublishLatency()
    latency.began("ahead", NOW_US, "http")
    now_us = NOW_US - 3_600_000_000
    for number in range(3):
        latency.began(number, now_us + number * 6_000_000, "http")
    latency.forget(now_us + 12_000_000)
    for event in ("ahead", 0, 1, 2):
        latency.written(event, NOW_US)
    assert sum(latency.times["http"]) == 2


async def test_tracer_measures_traced_calls_and_client_events_when_their_spans_arrive(redis, tmp_path):
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    log = await EventLog.open(tmp_path / "events.sqlite", 1_000, 3_600)
    tracer = Tracer(log, TraceReader(link, Keys(), RUN), 10, clock=lambda: NOW_US / 1e6)
    # Creates the stream, and reads the log's position.
    await tracer.flush()
    tracer.latency.began(("a" * 32, 0), NOW_US - 4_000, "http")
    worker = TraceWriter(link, Keys(), RUN)
    worker.note_triggered(Triggered("c" * 32, "3", 1, "client-x", "private-a", 2, "1.2", NOW_US - 1_500))
    worker.note_triggered(Triggered("d" * 32, "3", 1, "client-x", "private-a", 2, "1.2", NOW_US, False))
    for trace_id in ("a" * 32, "c" * 32, "d" * 32):
        worker.note(Span(RUN + trace_id, "3", 1, "received", {}, NOW_US - 2_000))
        worker.note(Span(RUN + trace_id, "3", 1, "written", {}, NOW_US - 1_000))
    worker.flush()
    await tracer.flush()
    await tracer.flush()
    assert tracer.latency.microseconds == {"http": 3_000, "client": 500}
    assert sum(tracer.latency.times["http"]) == sum(tracer.latency.times["client"]) == 1
    await log.close()
    await link.close()
