"""Spans for the event trace: what this worker did with traced events.

An event is traced if its envelope carries a trace. The hub reports when one came, to how many connections it was sent,
and which connections were closed before they got it. The spans go to a TraceWriter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from redpoll._fanout import Audience
from redpoll.cluster.traces import WAITED_US, Span, TraceWriter, Triggered
from redpoll.protocol.joining import Joined

__all__ = ["Tracing"]

# How often `flush` is called.
_FLUSHES_PER_S: Final = 4
# Traced events between two flushes for which dropped connections are recorded.
_MAX_RECENT: Final = 100


class Tracing:
    """`worker()` is this worker's name, `clock` Unix time. Of this worker's client events, at most `spans_per_s` have
    spans. `when_sent(note)` calls `note` when the frames that are queued now are written."""

    def __init__(
        self,
        writer: TraceWriter,
        worker: Callable[[], str],
        spans_per_s: int,
        *,
        when_sent: Callable[[Callable[[], None]], object] = lambda note: note(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._when_sent = when_sent
        self._per_flush = -(-spans_per_s // _FLUSHES_PER_S)
        self._left = self._per_flush
        self._worker = worker
        self._clock = clock
        # Joined frames so far; their numbers are their names.
        self._frames = 0
        # Sent since the last flush, perhaps not to all yet: trace id, app, channel and its subscribers.
        self._recent: list[tuple[str, str, str, Audience]] = []

    def posted(
        self, trace: bytes, app_id: str, channel: str, audience: Audience, sockets: int, **more: str | int
    ) -> None:
        """An event came and was queued for this many connections. `more` is for the detail of its span."""
        trace_id = trace.decode()
        self._when_sent(partial(self._written, trace_id, app_id, channel, sockets, self._now_us(), more))
        if len(self._recent) < _MAX_RECENT:
            self._recent.append((trace_id, app_id, channel, audience))

    def joined(self, joined: Joined, app_id: str, channel: str, audience: Audience, sockets: int) -> None:
        """A frame of a channel with a rate was queued for this many connections. Each of its traced events has a span
        that names the frame, `WORKER.NUMBER`, and how many events are in it; so has each that a newer one replaced."""
        self._frames += 1
        frame = f"{self._worker()}.{self._frames}"
        for trace in joined.traces:
            if joined.parts > 1:
                self.posted(trace, app_id, channel, audience, sockets, frame=frame, parts=joined.parts)
            else:
                self.posted(trace, app_id, channel, audience, sockets)
        for trace in joined.replaced:
            self._span(trace.decode(), app_id, "replaced", channel=channel, frame=frame)

    def dropped(self, app_id: str, socket_id: str, sink: Any) -> None:
        """A connection was closed because its send buffer overflowed. Recent traced events of its channels are lost."""
        for trace_id, event_app_id, channel, audience in self._recent:
            if event_app_id == app_id and sink in audience:
                self._span(trace_id, app_id, "dropped", channel=channel, socket_id=socket_id)

    def sample(self) -> bool:
        """Whether the stages of the next client event are recorded. Call it once for each."""
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def carried(self, trace_id: str) -> str:
        """What a client event with this trace id carries to the workers (cluster/traces.py)."""
        return self._writer.run + trace_id

    def triggered(
        self, trace_id: str, app_id: str, event: str, channel: str, size: int, socket_id: str, sampled: bool
    ) -> None:
        """A client event was published with this trace id. `sampled`: the answer of `sample`."""
        now_us = self._now_us()
        self._writer.note_triggered(
            Triggered(trace_id, app_id, now_us // 1000, event, channel, size, socket_id, now_us, sampled)
        )
        if sampled:
            self._span(self.carried(trace_id), app_id, "accepted")

    def flush(self) -> None:
        """Write the spans. Called four times a second."""
        self._left = self._per_flush
        self._recent.clear()
        self._writer.flush()

    def _span(self, trace_id: str, app_id: str, stage: str, **detail: Any) -> None:
        now_us = self._now_us()
        detail = {"worker": self._worker(), **detail}
        self._writer.note(Span(trace_id, app_id, now_us // 1000, stage, detail, now_us))

    def _written(
        self, trace_id: str, app_id: str, channel: str, sockets: int, received_us: int, more: dict[str, str | int]
    ) -> None:
        # One span for both stages: the reader makes two of it.
        now_us = self._now_us()
        waited_us = now_us - received_us
        detail = {"worker": self._worker(), "channel": channel, "sockets": sockets, **more, WAITED_US: waited_us}
        self._writer.note(Span(trace_id, app_id, now_us // 1000, "written", detail, now_us))

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)
