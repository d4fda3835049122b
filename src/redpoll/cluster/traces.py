"""Carries trace spans from the workers to control: one stream in Redis for each node, written in batches, lossy.

A worker records the stages of traced events and appends them, in compressed entries of at most 16 KiB, to the stream
of the node where the event came in: only its event log has the call. That node's control reads on from where it
stopped, and removes what it has stored. So the stream's memory is bounded, and no read delays the confirmations of
publishes on the same connection. The recorder chooses a span's fields.

What a traced event carries begins with the run of its node. For an event of the HTTP API, a number follows that this
control knows: it is shorter than the trace id, which would go to each worker and back. For a client event, its trace id
follows.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["RUN_CHARS", "WAITED_US", "Batch", "Span", "TraceReader", "TraceWriter", "Triggered", "new_trace_id"]

RUN_CHARS: Final = 12
"""The length of a run, with which the text that a traced event carries begins."""
WAITED_US: Final = "waited_us"
"""In the detail of a span "written": how long before it the event came. The reader makes a span "received" of it."""
# Together they bound a stream to far less than 64 MiB while control is down. Without client events, that is minutes of
# four workers with four flushes a second.
_MAX_ENTRIES: Final = 4_000
_MAX_ENTRY_BYTES: Final = 16 * 1024
# What one flush appends; the rest waits for the next one.
_MAX_FLUSH_ENTRIES: Final = 16
# An entry is larger if one span alone is.
_MAX_READ_BYTES: Final = 1024 * 1024
# A stream is there while its node's control renews it. Workers append to no other, so dead nodes leave none.
_LIFETIME_S: Final = 60
# Spans that may wait while Redis is disconnected; as many triggers.
_MAX_WAITING: Final = 10_000
# A read brings at most 256 KiB.
_MAX_READ: Final = 16
_encode: Final = msgspec.json.Encoder().encode
# Text of every entry: the compression knows it from the beginning.
_COMMON: Final = (
    b'"client event","accepted",{"worker":"","dropped",{"worker":"","channel":"private-","socket_id":"'
    b'","1",0,"written",{"worker":"","channel":"private-","sockets":1,"waited_us":1'
)
# Trace ids are unique but not secret, so a generator that the kernel seeds at import is enough. Asking the kernel for
# each one would cost as much as parsing the event.
_random_bits: Final = random.Random().getrandbits


def new_trace_id() -> str:
    """32 hex digits. They begin with the Unix time in ms, so the event log can find them by time
    (store/eventlog.py)."""
    return f"{int(time.time() * 1000):012x}{_random_bits(80):020x}"


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stage of one traced event: its Unix time in ms, its name, and its own fields.

    `trace_id` is what the event carried; in the stream, the part after the run.
    """

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]
    # The same time in µs. Only this one is in the stream.
    time_us: int = 0


class Triggered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A client event with a trace id, for the event log. `size` is in bytes."""

    trace_id: str
    app_id: str
    time_ms: int
    event: str
    channel: str
    size: int
    socket_id: str
    # As in Span.
    time_us: int = 0
    # Whether its stages are recorded.
    sampled: bool = True


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One entry of the stream."""

    spans: list[Span]
    triggered: list[Triggered]


class Entry(NamedTuple):
    id: str
    batch: Batch


class _Queue:
    """What waits for one node. Encoded at once, so that the size of an entry is known."""

    def __init__(self) -> None:
        self.spans: deque[bytes] = deque()
        self.triggered: deque[bytes] = deque()


class TraceWriter:
    """The end of a worker of the node `run`. `note` and `note_triggered` queue, `flush` sends. `lost` counts what
    didn't fit into the queue."""

    def __init__(self, link: Link, keys: Keys, run: str) -> None:
        self.lost = 0
        self.run = run
        self._link = link
        self._keys = keys
        self._queues: dict[str, _Queue] = {}
        self._spans_waiting = self._triggered_waiting = 0

    @property
    def waiting(self) -> int:
        """How much is queued."""
        return self._spans_waiting + self._triggered_waiting

    def note(self, span: Span) -> None:
        """For the node whose run `span.trace_id` begins with."""
        if self._spans_waiting >= _MAX_WAITING:
            self.lost += 1
            return
        self._spans_waiting += 1
        run, rest = span.trace_id[:RUN_CHARS], span.trace_id[RUN_CHARS:]
        self._queue(run).spans.append(_encode(structs.replace(span, trace_id=rest, time_ms=0)))

    def note_triggered(self, triggered: Triggered) -> None:
        """For this worker's own node."""
        if self._triggered_waiting >= _MAX_WAITING:
            self.lost += 1
            return
        self._triggered_waiting += 1
        self._queue(self.run).triggered.append(_encode(triggered))

    def _queue(self, run: str) -> _Queue:
        queue = self._queues.get(run)
        if queue is None:
            queue = self._queues[run] = _Queue()
        return queue

    def flush(self) -> None:
        """Appends what is queued to the streams, if Redis is connected. The outcome doesn't matter: traces may be
        lost."""
        if not self._link.up:
            return
        room = _MAX_FLUSH_ENTRIES
        for run, queue in list(self._queues.items()):
            while (queue.spans or queue.triggered) and room > 0:
                room -= 1
                self._append(run, queue)
            if not (queue.spans or queue.triggered):
                del self._queues[run]

    def _append(self, run: str, queue: _Queue) -> None:
        spans, left = _pop_within(queue.spans, _MAX_ENTRY_BYTES)
        triggered, _ = _pop_within(queue.triggered, left)
        self._spans_waiting -= len(spans)
        self._triggered_waiting -= len(triggered)
        entry = _compressed(b"[[%b],[%b]]" % (b",".join(spans), b",".join(triggered)))
        key = self._keys.traces(run)
        self._link.call(b"XADD", key, b"NOMKSTREAM", b"MAXLEN", b"~", _MAX_ENTRIES, b"*", b"d", entry)


def _stages(span: Span) -> list[Span]:
    waited_us = span.detail.pop(WAITED_US, None)
    stages = [structs.replace(span, time_ms=span.time_us // 1000)]
    if waited_us is not None:
        came_us = span.time_us - waited_us
        detail = {"worker": span.detail["worker"]}
        stages.insert(0, Span(span.trace_id, span.app_id, came_us // 1000, "received", detail, came_us))
    return stages


def _compressed(batch: bytes) -> bytes:
    # Most of the text is the same in all spans.
    compress = zlib.compressobj(6, zlib.DEFLATED, -15, zdict=_COMMON)
    return compress.compress(batch) + compress.flush()


def _pop_within(queue: deque[bytes], room: int) -> tuple[list[bytes], int]:
    """Takes items off the queue that fit into `room` bytes, and returns them and the room that is left."""
    taken: list[bytes] = []
    # The first one in any case: an entry isn't empty.
    while queue and (room > len(queue[0]) or (not taken and room == _MAX_ENTRY_BYTES)):
        item = queue.popleft()
        room -= len(item) + 1
        taken.append(item)
    return taken, room


class TraceReader:
    """The end of the control plane of the node `run`. Nothing is appended before the first `renew`."""

    def __init__(self, link: Link, keys: Keys, run: str) -> None:
        self.run = run
        self._link = link
        self._key = keys.traces(run)
        self._decode = msgspec.json.Decoder(Batch).decode

    def renew(self) -> None:
        """Lets workers append for another minute: creates the stream, or prolongs its life. Does nothing while Redis is
        disconnected."""
        if not self._link.up:
            return
        self._link.call(b"XADD", self._key, b"MAXLEN", b"~", _MAX_ENTRIES, b"*", b"d", _compressed(b"[[],[]]"))
        self._link.call(b"EXPIRE", self._key, _LIFETIME_S)

    async def is_behind(self, position: str) -> bool:
        """Whether the stream has no entry with this id or a later one. `trim` keeps the entry, so then this isn't the
        stream that was read, and the clock was set back since. Raises LinkDown or hiredis.ReplyError."""
        return not await self._link.ask(b"XRANGE", self._key, position, b"+", b"COUNT", 1)

    async def read(self, after: str) -> list[Entry]:
        """Entries after the one with this id, oldest first, at most 16. Raises LinkDown or hiredis.ReplyError. An
        unreadable entry has an empty batch."""
        stored = await self._link.ask(b"XRANGE", self._key, f"({after}", b"+", b"COUNT", _MAX_READ)
        entries = []
        for entry_id, fields in stored:
            try:
                batch = self._decode(zlib.decompressobj(-15, _COMMON).decompress(fields[1], _MAX_READ_BYTES))
            except (msgspec.DecodeError, zlib.error):
                batch = Batch([], [])
            batch.spans = [stage for span in batch.spans for stage in _stages(span)]
            entries.append(Entry(entry_id.decode(), batch))
        return entries

    def trim(self, upto: str) -> None:
        """Removes the entries before the one with this id: they are stored."""
        self._link.call(b"XTRIM", self._key, b"MINID", b"=", upto)
