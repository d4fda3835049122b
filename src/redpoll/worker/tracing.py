"""What this worker did with traced events: spans for the event trace.

An event whose envelope carries a trace id is one that is followed; the hub says when one came and to how many sockets
it was written, and which sockets were given up while it was owed to them. Knows no Redis: spans go to a TraceWriter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from redpoll._fanout import Audience
from redpoll.cluster.traces import Span, TraceWriter, Triggered

__all__ = ["Tracing"]

# Beyond so many between two flushes, a socket that is given up isn't looked for in their audiences.
_MOST_RECENT: Final = 100


class Tracing:
    """`worker()` is this worker's name, `clock` Unix time."""

    def __init__(
        self, writer: TraceWriter, worker: Callable[[], str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._writer = writer
        self._worker = worker
        self._clock = clock
        # Posted since the last flush, and perhaps still owed to some: trace id, app, channel, who hears it.
        self._recent: list[tuple[str, str, str, Audience]] = []

    def posted(self, trace: bytes, app_id: str, channel: str, audience: Audience, sockets: int) -> None:
        """An event came and was noted for so many sockets, which are written to at the end of this tick."""
        trace_id = trace.decode()
        self._span(trace_id, app_id, "received")
        self._span(trace_id, app_id, "written", channel=channel, sockets=sockets)
        if len(self._recent) < _MOST_RECENT:
            self._recent.append((trace_id, app_id, channel, audience))

    def dropped(self, app_id: str, socket_id: str, sink: Any) -> None:
        """A socket is given up with what it was owed: the traced events of its channels that came just before."""
        for trace_id, of_app, channel, audience in self._recent:
            if of_app == app_id and sink in audience:
                self._span(trace_id, app_id, "dropped", channel=channel, socket_id=socket_id)

    def triggered(self, trace_id: str, app_id: str, event: str, channel: str, size: int, socket_id: str) -> None:
        """A client event was sent on under this trace id."""
        self._writer.note_triggered(Triggered(trace_id, app_id, self._now_ms(), event, channel, size, socket_id))
        self._span(trace_id, app_id, "accepted")

    def flush(self) -> None:
        """Four times a second: what was noted goes on its way."""
        self._recent.clear()
        self._writer.flush()

    def _span(self, trace_id: str, app_id: str, stage: str, **detail: Any) -> None:
        self._writer.note(Span(trace_id, app_id, self._now_ms(), stage, {"worker": self._worker(), **detail}))

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
