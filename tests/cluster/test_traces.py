"""Spans through a real Redis: in batches, in order, from where control stopped reading."""

import time
import zlib

from msgspec import structs

from redpoll.cluster import traces
from redpoll.cluster.redis.link import Link
from redpoll.cluster.traces import Span, TraceReader, TraceWriter, Triggered, new_trace_id

RUN, OTHER = "0123456789ab", "ba9876543210"


def pair(link, keys, run=RUN):
    reader = TraceReader(link, keys, run)
    reader.renew()
    return TraceWriter(link, keys, RUN), reader


async def all_of(reader) -> list[Span]:
    spans, after = [], "0-0"
    while entries := await reader.read(after):
        spans += [span for entry in entries for span in entry.batch.spans]
        after = entries[-1].id
    return spans


async def test_spans_go_to_the_node_that_the_event_names_and_to_no_other(link, keys):
    """All went to one stream that each node read: 50 nodes took each span 50 times."""
    writer, here = pair(link, keys)
    elsewhere, gone = TraceReader(link, keys, OTHER), TraceReader(link, keys, "f" * 12)
    elsewhere.renew()
    for run, number in ((RUN, "1"), (OTHER, "2"), ("f" * 12, "3")):
        writer.note(Span(run + number, "1", 5, "received", {}))
    writer.note_triggered(Triggered("c" * 32, "1", 7, "client-x", "private-room", 12, "1.2"))
    writer.flush()
    assert writer.waiting == 0
    assert [span.trace_id for span in await all_of(here)] == ["1"]
    assert [span.trace_id for span in await all_of(elsewhere)] == ["2"]
    # The stream of a node that ended isn't created again.
    assert await all_of(gone) == []
    assert await link.ask(b"EXISTS", keys.traces("f" * 12)) == 0
    assert 0 < await link.ask(b"TTL", keys.traces(OTHER)) <= 60
    assert sum([len(entry.batch.triggered) for entry in await here.read("0-0")]) == 1


async def test_entry_takes_a_small_part_of_its_text(link, keys):
    """100 events, their two spans each, took 23 kB."""
    writer, reader = pair(link, keys)
    for number in range(100):
        at_us = 1_700_000_000_000_000 + 10_017 * number
        detail = {"worker": "0123456789ab.1.0", "channel": "room", "sockets": 1, "waited_us": 100 + 7 * number % 83}
        writer.note(Span(f"{RUN}a1b{number:02x}", "1", at_us // 1000, "written", detail, at_us))
    writer.flush()
    received, written, *_ = await all_of(reader)
    assert (received.stage, received.time_us) == ("received", 1_700_000_000_000_000 - 100)
    assert (written.stage, written.time_us) == ("written", 1_700_000_000_000_000)
    assert (received.detail, written.detail["worker"]) == ({"worker": "0123456789ab.1.0"}, "0123456789ab.1.0")
    stored = await link.ask(b"XRANGE", keys.traces(RUN), b"-", b"+")
    assert sum(len(fields[1]) for _, fields in stored) < 1_500


async def test_spans_of_a_worker_are_read_once_and_in_order(link, keys, wait_until):
    writer, reader = pair(link, keys)
    spans = [
        Span("a" * 32, "1", 5, "received", {"worker": "r.1.0"}, 5_003),
        Span("b", "1", 6, "written", {"sockets": 3}, 6_004),
    ]
    triggered = Triggered("c" * 32, "1", 7, "client-x", "private-room", 12, "1.2")
    for span in spans:
        writer.note(structs.replace(span, trace_id=RUN + span.trace_id))
    writer.note_triggered(triggered)
    writer.flush()
    _, entry = await reader.read("0-0")
    assert (entry.batch.spans, entry.batch.triggered) == (spans, [triggered])
    assert await reader.read(entry.id) == []
    writer.flush()
    writer.note(structs.replace(spans[0], trace_id=RUN + spans[0].trace_id))
    writer.flush()
    (again,) = await reader.read(entry.id)
    assert again.batch.spans == [spans[0]]


async def test_a_long_stream_is_read_in_parts(link, keys):
    writer, reader = pair(link, keys)
    for number in range(250):
        writer.note(Span(RUN + "a", "1", number, "received", {}, 1000 * number))
        writer.flush()
    seen, after = [], "0-0"
    while entries := await reader.read(after):
        assert len(entries) <= 16
        seen += [span.time_ms for entry in entries for span in entry.batch.spans]
        after = entries[-1].id
    assert seen == list(range(250))


async def test_entry_of_another_version_is_skipped(link, keys):
    writer, reader = pair(link, keys)
    await link.ask(b"XADD", keys.traces(RUN), b"*", b"d", b'{"of": "another version"}')
    writer.note(Span(RUN + "a", "1", 1, "received", {}, 1_000))
    writer.flush()
    assert [span.time_ms for span in await all_of(reader)] == [1]


async def test_while_redis_is_away_a_bounded_number_of_spans_waits(redis, keys, wait_until):
    link = Link(redis.url)
    writer = TraceWriter(link, keys, RUN)
    for number in range(10_050):
        writer.note(Span(RUN + "a", "1", number, "received", {}, 1000 * number))
    writer.flush()
    assert writer.lost == 50
    link.start()
    await wait_until(lambda: link.up)
    reader = TraceReader(link, keys, RUN)
    reader.renew()
    while writer.waiting:
        writer.flush()
    assert len(await all_of(reader)) == 10_000
    await link.close()


async def test_entries_and_flushes_are_bounded_in_bytes(link, keys):
    """One entry per flush had any size: 12 MB were read ahead of the confirmations of publishes."""
    writer, _ = pair(link, keys)
    for number in range(5_000):
        writer.note_triggered(Triggered("c" * 32, "1", number, "client-x" * 20, "private-room", 12, "1.2"))
    writer.flush()
    entries = await link.ask(b"XRANGE", keys.traces(RUN), b"-", b"+")
    sizes = [len(zlib.decompressobj(-15, traces._COMMON).decompress(fields[1])) for _, fields in entries]
    assert max(sizes) <= 16 * 1024
    assert 15 * 16 * 1024 * 0.9 < sum(sizes) <= 16 * 16 * 1024
    assert writer.waiting
    assert writer.lost == 0


async def test_span_larger_than_an_entry_is_an_entry_of_its_own(link, keys):
    writer, reader = pair(link, keys)
    writer.note(Span(RUN + "a", "1", 1, "received", {"text": "x" * 20_000}))
    writer.note(Span(RUN + "a", "1", 2, "written", {}))
    writer.flush()
    _, *entries = await reader.read("0-0")
    assert [len(entry.batch.spans) for entry in entries] == [1, 1]


async def test_what_is_stored_is_removed_from_the_stream(link, keys):
    writer, reader = pair(link, keys)
    for number in range(5):
        writer.note(Span(RUN + "a", "1", number, "received", {}, 1000 * number))
        writer.flush()
    _, *entries = await reader.read("0-0")
    reader.trim(entries[3].id)
    assert await link.ask(b"XLEN", keys.traces(RUN)) == 2
    assert await reader.read(entries[3].id) == entries[4:]


def test_trace_ids_differ():
    assert len({new_trace_id() for _ in range(1000)}) == 1000
    assert all(len(new_trace_id()) == 32 for _ in range(100))


def test_trace_id_has_its_time():
    before = time.time() * 1000 - 1
    assert before <= int(new_trace_id()[:12], 16) <= time.time() * 1000
