"""Makes OpenTelemetry's spans of traced events, from what the tracer records anyway.

    POST /apps/{app_id}/events    a call of the HTTP API; its parent is the caller's span, named by `traceparent`
      publish                 from its authentication to the confirmation by Redis
        deliver               for each worker and channel: from the receipt to the write to the last socket
    client event              a client event that webhooks want
      deliver
      webhook                 an attempt to deliver it; the receiver gets this span in `traceparent`. Of a delivery
                              that is pulled, the moment at which it was handed out

The parent of `deliver` travels with the event, after its trace id. otlp.py sends the spans. Without OpenTelemetry none
of this runs.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from redpoll.cluster.traces import Entry, Span, Triggered
from redpoll.control.http.request import Request

__all__ = ["TRACE_ID_CHARS", "Attempted", "Kind", "SpanData", "Spans", "trace_id_of"]

TRACE_ID_CHARS: Final = 32
_SPAN_ID_CHARS: Final = 16
# The parent of events whose caller decided that its trace is not recorded.
_UNRECORDED: Final = "0" * _SPAN_ID_CHARS
# The Triggered of a client event, and the receipt of an event by a worker, may come in an earlier entry than the rest.
_MAX_OPEN: Final = 1_000
_random_bits: Final = random.Random().getrandbits


class Kind(Enum):
    """OpenTelemetry's kinds of spans."""

    SERVER = "SERVER"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


class SpanData(NamedTuple):
    """A finished span. Ids are in hex, `parent_id` is empty for the first span of a trace. Times are Unix times in µs.
    `error` is empty if it succeeded."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: Kind
    start_us: int
    end_us: int
    attributes: Mapping[str, Any]
    error: str = ""


class _Call:
    """A call of the HTTP API that is being recorded."""

    __slots__ = ("accepted_us", "authenticated_us", "parent_id", "publish_id", "span_id")

    def __init__(self, parent_id: str, authenticated_us: int) -> None:
        self.parent_id = parent_id
        self.span_id = _new_span_id()
        self.publish_id = _new_span_id()
        self.authenticated_us = authenticated_us
        self.accepted_us = 0


class Attempted(NamedTuple):
    """An attempt to deliver a webhook. `traceparent` is the header for its receiver."""

    trace_id: str
    span_id: str
    parent_id: str
    is_recorded: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_recorded else '00'}"


def trace_id_of(trace: str) -> str:
    """The trace id in a traced call's text: the id alone, or followed by the id of a span."""
    return trace[:TRACE_ID_CHARS]


class Spans:
    """`send` takes each finished span and doesn't wait. Each node sends the spans of the calls that came in at it, also
    those of other nodes' workers, and of its own clients' events. At most `per_flush` calls that follow a caller's
    trace, and as many webhook attempts, are recorded between two calls of `flush`."""

    def __init__(self, send: Callable[[SpanData], None], per_flush: int) -> None:
        self._send = send
        self._per_flush = per_flush
        self._followed_left = self._attempts_left = per_flush
        self._received_us: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._triggered: OrderedDict[str, Triggered] = OrderedDict()

    # -- calls of the HTTP API

    def follows(self, request: Request) -> bool:
        """Whether the call is traced because its caller records the trace. Call it once for each."""
        parent = request.parent
        if parent is None or not parent.is_recorded or self._followed_left <= 0:
            return False
        self._followed_left -= 1
        return True

    def begin(self, request: Request, now_us: int) -> str:
        """The trace id of the call, followed by the id of the span that its events belong to."""
        parent = request.parent
        if parent is not None and not parent.is_recorded:
            return request.trace_id + _UNRECORDED
        request.call = call = _Call("" if parent is None else parent.span_id, now_us)
        return request.trace_id + call.publish_id

    def accepted(self, request: Request, now_us: int) -> None:
        """Redis confirmed the call's events."""
        call: _Call | None = request.call
        if call is not None:
            call.accepted_us = now_us

    def ended(
        self,
        request: Request,
        status: int,
        began_us: int,
        ended_us: int,
        names: str,
        channels: Sequence[str],
        size: int,
    ) -> None:
        """The call was answered."""
        call: _Call | None = request.call
        if call is None:
            return
        trace_id, app_id = request.trace_id, request.app.id
        message = {
            "messaging.system": "redpoll",
            "messaging.destination.name": ", ".join(channels),
            "messaging.message.body.size": size,
            "redpoll.app": app_id,
            "redpoll.event": names,
        }
        route = request.route
        self._send(
            SpanData(
                trace_id,
                call.span_id,
                call.parent_id,
                f"{route.method} {route.pattern}",
                Kind.SERVER,
                began_us,
                ended_us,
                {
                    "http.request.method": request.method,
                    "http.route": route.pattern,
                    "http.response.status_code": status,
                    "url.path": request.path,
                    "client.address": request.remote,
                    "redpoll.app": app_id,
                },
                f"status {status}" if status >= 500 else "",
            )
        )
        error = "" if call.accepted_us else "not confirmed by Redis"
        self._send(
            SpanData(
                trace_id,
                call.publish_id,
                call.span_id,
                "publish",
                Kind.PRODUCER,
                call.authenticated_us,
                call.accepted_us or ended_us,
                message,
                error,
            )
        )

    # -- workers

    def read(self, entries: Sequence[Entry]) -> None:
        """Takes the stages that workers reported."""
        for entry in entries:
            for triggered in entry.batch.triggered:
                if triggered.sampled:
                    _remember(self._triggered, triggered.trace_id, triggered)
        for entry in entries:
            for span in entry.batch.spans:
                self._add(span)

    def _add(self, span: Span) -> None:
        trace_id, worker = trace_id_of(span.trace_id), span.detail["worker"]
        # A client event has one span, whose id is a part of the trace id.
        parent_id = span.trace_id[TRACE_ID_CHARS:] or _span_id_in(trace_id)
        if parent_id == _UNRECORDED:
            return
        attributes = {"redpoll.app": span.app_id, "redpoll.worker": worker}
        if span.stage == "accepted":
            self._client_event(trace_id, span, attributes)
            return
        if span.stage == "received":
            _remember(self._received_us, (span.trace_id, worker), span.time_us)
            return
        attributes["messaging.destination.name"] = span.detail["channel"]
        if span.stage == "written":
            started_us = self._received_us.get((span.trace_id, worker), span.time_us)
            attributes["redpoll.sockets"] = span.detail["sockets"]
            if "frame" in span.detail:
                attributes["redpoll.frame"] = span.detail["frame"]
            name, kind, error = "deliver", Kind.CONSUMER, ""
        elif span.stage == "replaced":
            started_us = span.time_us
            attributes["redpoll.frame"] = span.detail["frame"]
            name, kind, error = "replace", Kind.INTERNAL, ""
        else:
            started_us = span.time_us
            attributes["redpoll.socket_id"] = span.detail["socket_id"]
            name, kind, error = "drop", Kind.INTERNAL, "the client doesn't read: its connection was closed"
        self._send(
            SpanData(
                trace_id,
                _new_span_id(),
                parent_id,
                name,
                kind,
                min(started_us, span.time_us),
                span.time_us,
                attributes,
                error,
            )
        )

    def _client_event(self, trace_id: str, span: Span, attributes: dict[str, Any]) -> None:
        triggered = self._triggered.pop(trace_id, None)
        if triggered is not None:
            attributes |= {
                "messaging.system": "redpoll",
                "messaging.destination.name": triggered.channel,
                "messaging.message.body.size": triggered.size,
                "redpoll.event": triggered.event,
                "redpoll.socket_id": triggered.socket_id,
            }
        self._send(
            SpanData(
                trace_id, _span_id_in(trace_id), "", "client event", Kind.SERVER, span.time_us, span.time_us, attributes
            )
        )

    # -- webhooks

    def begin_attempt(self, trace_id: str | None) -> Attempted:
        """An attempt begins. `trace_id` is that of a client event; other transitions begin a trace."""
        is_recorded = self._attempts_left > 0
        self._attempts_left -= is_recorded
        parent_id = "" if trace_id is None else _span_id_in(trace_id)
        return Attempted(trace_id or f"{_random_bits(128):032x}", _new_span_id(), parent_id, is_recorded)

    def ended_attempt(
        self, attempted: Attempted, began_us: int, duration_ms: int, status: int | None, error: str, **attributes: Any
    ) -> None:
        """The attempt ended after `duration_ms`. `error` is empty if it succeeded."""
        named: dict[str, Any] = {"http.request.method": "POST"}
        if status is not None:
            named["http.response.status_code"] = status
        self._send_attempt(attempted, Kind.CLIENT, began_us, began_us + duration_ms * 1000, named, attributes, error)

    def handed_out(self, trace_id: str | None, at_us: int, **attributes: Any) -> str:
        """A delivery was handed out to a back end that pulls. Returns its `traceparent`."""
        attempted = self.begin_attempt(trace_id)
        self._send_attempt(attempted, Kind.PRODUCER, at_us, at_us, {}, attributes, "")
        return attempted.traceparent

    def _send_attempt(
        self,
        attempted: Attempted,
        kind: Kind,
        began_us: int,
        ended_us: int,
        named: Mapping[str, Any],
        attributes: Mapping[str, Any],
        error: str,
    ) -> None:
        if attempted.is_recorded:
            own = {f"redpoll.{name}": value for name, value in attributes.items()}
            ids = attempted.trace_id, attempted.span_id, attempted.parent_id
            self._send(SpanData(*ids, "webhook", kind, began_us, ended_us, {**named, **own}, error))

    def flush(self) -> None:
        """Called once a second."""
        self._followed_left = self._attempts_left = self._per_flush


def _new_span_id() -> str:
    return f"{_random_bits(64) or 1:016x}"


def _span_id_in(trace_id: str) -> str:
    return trace_id[-_SPAN_ID_CHARS:]


def _remember(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > _MAX_OPEN:
        table.popitem(last=False)
