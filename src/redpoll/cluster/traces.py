"""Carries trace spans from the workers to control: one stream in Redis, written in batches, lossy.

A worker records the stages of traced events and appends them to the stream in entries of at most 16 KiB. Control reads
on from where it stopped, and removes what it has stored. So the stream's memory is bounded, and no read delays the
confirmations of publishes on the same connection. The recorder chooses a span's fields.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Batch", "Span", "TraceReader", "TraceWriter", "Triggered", "new_trace_id"]

# Together they bound the stream to about 64 MiB while control is down. Without client events, that is minutes of four
# workers with four flushes a second.
_MAX_ENTRIES: Final = 4_000
_MAX_ENTRY_BYTES: Final = 16 * 1024
# What one flush appends; the rest waits for the next one.
_MAX_FLUSH_ENTRIES: Final = 16
# Spans that may wait while Redis is disconnected; as many triggers.
_MAX_WAITING: Final = 10_000
# A read brings at most 256 KiB.
_MAX_READ: Final = 16
_encode: Final = msgspec.json.Encoder().encode
# Trace ids are unique but not secret, so a generator that the kernel seeds at import is enough. Asking the kernel for
# each one would cost as much as parsing the event.
_random_bits: Final = random.Random().getrandbits


def new_trace_id() -> str:
    """32 hex digits. They begin with the Unix time in ms, so the event log can find them by time
    (store/eventlog.py)."""
    return f"{int(time.time() * 1000):012x}{_random_bits(80):020x}"


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stage of one traced event: its Unix time in ms, its name, and its own fields."""

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]
    # The same time in µs; 0 from a worker of an earlier version.
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


class TraceWriter:
    """A worker's end. `note` and `note_triggered` queue, `flush` sends. `lost` counts what didn't fit into the
    queue."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.lost = 0
        self._link = link
        self._key = keys.traces
        # Encoded at once, so that the size of an entry is known.
        self._spans: deque[bytes] = deque()
        self._triggered: deque[bytes] = deque()

    def note(self, span: Span) -> None:
        self._queue(self._spans, span)

    def note_triggered(self, triggered: Triggered) -> None:
        self._queue(self._triggered, triggered)

    def _queue(self, queue: deque[bytes], item: Span | Triggered) -> None:
        if len(queue) < _MAX_WAITING:
            queue.append(_encode(item))
        else:
            self.lost += 1

    def flush(self) -> None:
        """Appends queued spans to the stream, if Redis is connected. The outcome doesn't matter: traces may be
        lost."""
        if not self._link.up:
            return
        for _ in range(_MAX_FLUSH_ENTRIES):
            if not (self._spans or self._triggered):
                return
            room = _MAX_ENTRY_BYTES
            spans, room = _take(self._spans, room)
            triggered, _ = _take(self._triggered, room)
            entry = b"[[%b],[%b]]" % (b",".join(spans), b",".join(triggered))
            self._link.call(b"XADD", self._key, b"MAXLEN", b"~", _MAX_ENTRIES, b"*", b"d", entry)


def _take(queue: deque[bytes], room: int) -> tuple[list[bytes], int]:
    """Takes items off the queue that fit into `room` bytes, and returns them and the room that is left."""
    taken: list[bytes] = []
    # The first one in any case: an entry isn't empty.
    while queue and (room > len(queue[0]) or (not taken and room == _MAX_ENTRY_BYTES)):
        item = queue.popleft()
        room -= len(item) + 1
        taken.append(item)
    return taken, room


class TraceReader:
    """The control plane's end."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._key = keys.traces
        self._decode = msgspec.json.Decoder(Batch).decode

    async def read(self, after: str) -> list[Entry]:
        """Entries after the one with this id, oldest first, at most 16. Raises LinkDown or hiredis.ReplyError. An
        unreadable entry has an empty batch."""
        stored = await self._link.ask(b"XRANGE", self._key, f"({after}", b"+", b"COUNT", _MAX_READ)
        entries = []
        for entry_id, fields in stored:
            try:
                batch = self._decode(fields[1])
            except msgspec.DecodeError:
                batch = Batch([], [])
            entries.append(Entry(entry_id.decode(), batch))
        return entries

    def trim(self, upto: str) -> None:
        """Removes the entries before the one with this id: they are stored."""
        self._link.call(b"XTRIM", self._key, b"MINID", b"=", upto)
