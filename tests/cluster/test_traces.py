"""Spans through a real Redis: in batches, in order, from where control stopped reading."""

import time

from redpoll.cluster.link import Link
from redpoll.cluster.traces import Span, TraceReader, TraceWriter, Triggered, new_trace_id


async def test_spans_of_a_worker_are_read_once_and_in_order(link, keys, wait_until):
    writer, reader = TraceWriter(link, keys), TraceReader(link, keys)
    spans = [Span("a" * 32, "1", 5, "received", {"worker": "r.1.0"}), Span("b" * 32, "1", 6, "written", {"sockets": 3})]
    triggered = Triggered("c" * 32, "1", 7, "client-x", "private-room", 12, "1.2")
    for span in spans:
        writer.note(span)
    writer.note_triggered(triggered)
    writer.flush()
    (entry,) = await reader.read("0-0")
    assert (entry.batch.spans, entry.batch.triggered) == (spans, [triggered])
    assert await reader.read(entry.id) == []
    writer.flush()
    writer.note(spans[0])
    writer.flush()
    (again,) = await reader.read(entry.id)
    assert again.batch.spans == [spans[0]]


async def test_a_long_stream_is_read_in_parts(link, keys):
    writer, reader = TraceWriter(link, keys), TraceReader(link, keys)
    for number in range(250):
        writer.note(Span("a" * 32, "1", number, "received", {}))
        writer.flush()
    seen, after = [], "0-0"
    while entries := await reader.read(after):
        assert len(entries) <= 16
        seen += [span.time_ms for entry in entries for span in entry.batch.spans]
        after = entries[-1].id
    assert seen == list(range(250))


async def test_entry_of_another_version_is_skipped(link, keys):
    await link.ask(b"XADD", keys.traces, b"*", b"d", b'{"of": "another version"}')
    writer = TraceWriter(link, keys)
    writer.note(Span("a" * 32, "1", 1, "received", {}))
    writer.flush()
    spans = [span for entry in await TraceReader(link, keys).read("0-0") for span in entry.batch.spans]
    assert [span.time_ms for span in spans] == [1]


async def test_while_redis_is_away_a_bounded_number_of_spans_waits(redis, keys, wait_until):
    link = Link(redis.url)
    writer = TraceWriter(link, keys)
    for number in range(10_050):
        writer.note(Span("a" * 32, "1", number, "received", {}))
    writer.flush()
    assert writer.lost == 50
    link.start()
    await wait_until(lambda: link.up)
    writer.flush()
    assert await wait_count(link, keys, writer) == 10_000
    await link.close()


async def wait_count(link, keys, writer) -> int:
    """Flushes until nothing waits; the number of spans in the stream."""
    while writer._spans:
        writer.flush()
    count, after = 0, "0-0"
    while entries := await TraceReader(link, keys).read(after):
        count += sum(len(entry.batch.spans) for entry in entries)
        after = entries[-1].id
    return count


async def test_entries_and_flushes_are_bounded_in_bytes(link, keys):
    """One entry per flush had any size: 12 MB were read ahead of the confirmations of publishes."""
    writer = TraceWriter(link, keys)
    for number in range(5_000):
        writer.note_triggered(Triggered("c" * 32, "1", number, "client-x" * 20, "private-room", 12, "1.2"))
    writer.flush()
    entries = await link.ask(b"XRANGE", keys.traces, b"-", b"+")
    sizes = [len(fields[1]) for _, fields in entries]
    assert max(sizes) <= 16 * 1024
    assert 15 * 16 * 1024 * 0.9 < sum(sizes) <= 16 * 16 * 1024
    assert writer._triggered
    assert writer.lost == 0


async def test_span_larger_than_an_entry_is_an_entry_of_its_own(link, keys):
    writer = TraceWriter(link, keys)
    writer.note(Span("a" * 32, "1", 1, "received", {"text": "x" * 20_000}))
    writer.note(Span("a" * 32, "1", 2, "written", {}))
    writer.flush()
    entries = await TraceReader(link, keys).read("0-0")
    assert [len(entry.batch.spans) for entry in entries] == [1, 1]


async def test_what_is_stored_is_removed_from_the_stream(link, keys):
    writer, reader = TraceWriter(link, keys), TraceReader(link, keys)
    for number in range(5):
        writer.note(Span("a" * 32, "1", number, "received", {}))
        writer.flush()
    entries = await reader.read("0-0")
    reader.trim(entries[3].id)
    assert await link.ask(b"XLEN", keys.traces) == 2
    assert await reader.read(entries[3].id) == entries[4:]


def test_trace_ids_differ():
    assert len({new_trace_id() for _ in range(1000)}) == 1000
    assert all(len(new_trace_id()) == 32 for _ in range(100))


def test_trace_id_has_its_time():
    before = time.time() * 1000 - 1
    assert before <= int(new_trace_id()[:12], 16) <= time.time() * 1000
