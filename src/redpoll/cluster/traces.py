"""Spans on their way from the workers to the control plane: one stream, written in batches, lossy (cluster.md 2).

A worker notes what became of traced events and now and then appends all of it as one entry; control reads on from
where it stopped. What is in a span decides who notes it.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final, NamedTuple

import msgspec

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Batch", "Span", "TraceReader", "TraceWriter", "Triggered", "new_trace_id"]

# Entries of the stream, about: at two a second and worker an hour of four workers, if control is away so long.
_MAX_ENTRIES: Final = 10_000
# What may wait for Redis to come back.
_MOST_WAITING: Final = 10_000
_MAX_READ: Final = 100
# Seeded by the kernel at import. Trace ids tell requests apart and open nothing, so they may come from a
# generator: asking the kernel for each costs as much as parsing the event.
_random_bits: Final = random.Random().getrandbits


def new_trace_id() -> str:
    """32 hex digits. They begin with the Unix time in ms, by which the event log finds them (store/eventlog.py)."""
    return f"{int(time.time() * 1000) << 80 | _random_bits(80):032x}"


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stage of one trigger: when (Unix ms), which, and the stage's own members."""

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]


class Triggered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A client event that got a trace id: what the event log is to say of it. `size` is in bytes."""

    trace_id: str
    app_id: str
    time_ms: int
    event: str
    channel: str
    size: int
    socket_id: str


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One entry of the stream."""

    spans: list[Span]
    triggered: list[Triggered]


class Entry(NamedTuple):
    id: str
    batch: Batch


class TraceWriter:
    """A worker's end. `note` and `noted_trigger` queue, `flush` sends; `lost` counts what found no room."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.lost = 0
        self._link = link
        self._key = keys.traces
        self._batch = Batch([], [])

    def note(self, span: Span) -> None:
        if len(self._batch.spans) < _MOST_WAITING:
            self._batch.spans.append(span)
        else:
            self.lost += 1

    def note_triggered(self, triggered: Triggered) -> None:
        if len(self._batch.triggered) < _MOST_WAITING:
            self._batch.triggered.append(triggered)
        else:
            self.lost += 1

    def flush(self) -> None:
        """Appends what was noted, where Redis is there; not confirmed, as it may be lost."""
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
        """Entries behind the one with this id, oldest first, at most 100. Raises LinkDown or
        hiredis.ReplyError; an entry that is none of ours is left out."""
        found = await self._link.ask(b"XRANGE", self._key, f"({after}", b"+", b"COUNT", _MAX_READ)
        entries = []
        for entry_id, fields in found:
            try:
                batch = self._decode(fields[1])
            except msgspec.DecodeError:
                batch = Batch([], [])
            entries.append(Entry(entry_id.decode(), batch))
        return entries
