"""Carries trace spans from the workers to control: one stream in Redis, written in batches, lossy.

A worker records the stages of traced events and appends them to the stream as one entry per flush. Control reads on
from where it stopped. The recorder chooses a span's fields.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final, NamedTuple

import msgspec

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Batch", "Span", "TraceReader", "TraceWriter", "Triggered", "new_trace_id"]

# Entries of the stream, about: twenty minutes of four workers with two flushes a second, while control is down.
_MAX_ENTRIES: Final = 10_000
# Spans that may wait while Redis is disconnected; as many triggers.
_MAX_WAITING: Final = 10_000
_MAX_READ: Final = 100
# Trace ids are unique but not secret, so a generator that the kernel seeds at import is enough. Asking the kernel for
# each one would cost as much as parsing the event.
_random_bits: Final = random.Random().getrandbits


def new_trace_id() -> str:
    """32 hex digits. They begin with the Unix time in ms, so the event log can find them by time
    (store/eventlog.py)."""
    return f"{int(time.time() * 1000) << 80 | _random_bits(80):032x}"


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
        self._batch = Batch([], [])

    def note(self, span: Span) -> None:
        if len(self._batch.spans) < _MAX_WAITING:
            self._batch.spans.append(span)
        else:
            self.lost += 1

    def note_triggered(self, triggered: Triggered) -> None:
        if len(self._batch.triggered) < _MAX_WAITING:
            self._batch.triggered.append(triggered)
        else:
            self.lost += 1

    def flush(self) -> None:
        """Appends the queued spans to the stream, if Redis is connected. The outcome doesn't matter: traces may be
        lost."""
        if not self._link.up or not (self._batch.spans or self._batch.triggered):
            return
        batch, self._batch = self._batch, Batch([], [])
        encoded = msgspec.json.encode(batch)
        self._link.call(b"XADD", self._key, b"MAXLEN", b"~", _MAX_ENTRIES, b"*", b"d", encoded)


class TraceReader:
    """The control plane's end."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._key = keys.traces
        self._decode = msgspec.json.Decoder(Batch).decode

    async def read(self, after: str) -> list[Entry]:
        """Entries after the one with this id, oldest first, at most 100. Raises LinkDown or hiredis.ReplyError. An
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
