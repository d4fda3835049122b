"""The event log over HTTP: `GET …/events/log` searches calls, `GET …/trace/{trace_id}` returns one with its spans.

tracing.py writes the log; a call is visible within two seconds. An app sees only its own calls.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET

from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import EventsResponse, LoggedCall, TraceResponse
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.protocol.errors import ApiError
from redpoll.store.call_batch import CallRow
from redpoll.store.eventlog import Query

__all__ = ["LOG_QUERY", "EventTrace"]

LOG_QUERY: Final = tuple(
    f"log_{name}" for name in ("trace_id", "correlation_id", "channel", "name", "since", "until", "limit", "cursor")
)
_DEFAULT_LIMIT: Final = 100
_MAX_LIMIT: Final = 1_000
_NUMBER: Final = re.compile(r"[0-9]{1,18}").fullmatch
_encode: Final = msgspec.json.Encoder().encode


class EventTrace:
    """The handlers. `event_log` is None if the operator switched the log off."""

    def __init__(self, event_log: ClusterLog | None) -> None:
        self._log = event_log

    async def search(self, request: Request) -> Response:
        """Answers `{"events": [{…}], "next": cursor or null}`, newest first. `since` and `until` are Unix ms.
        `unanswered` names nodes whose calls are missing, if any."""
        limit = _number(request, "limit", _DEFAULT_LIMIT)
        if not 1 <= limit <= _MAX_LIMIT:
            raise ApiError("bad_request", f"limit must be a number from 1 to {_MAX_LIMIT}")
        query = Query(
            request.param("trace_id"),
            request.param("correlation_id"),
            request.param("channel"),
            request.param("name"),
            _number(request, "since", None),
            _number(request, "until", None),
        )
        try:
            page = await self._opened().find(request.app.id, query, limit, request.param("cursor"))
        except ValueError:
            raise ApiError("invalid_cursor", "cursor must be the `next` of an earlier answer to this request") from None
        calls = [LoggedCall(**_fields(row)) for row in page.calls]
        return request.ok(_encode(EventsResponse(calls, page.next, page.missing or UNSET)))

    async def show(self, request: Request) -> Response:
        """Answers a call and its spans in order of time. `time_us`: the one of this time, else the newest
        that was traced.

        `sampled` is false if the call has no spans because more calls came than are traced per second.
        """
        trace_id = request.parameters[1]
        trace = await self._opened().trace(request.app.id, trace_id, _number(request, "time_us", None))
        if trace is None:
            raise ApiError("not_found", "this app has no call with that trace id, or it is no longer kept")
        rendered = [
            {"time_ms": span.time_ms, "time_us": span.time_us, "stage": span.stage, **span.detail}
            for span in trace.spans
        ]
        answer = TraceResponse(**_fields(trace.call), spans=rendered, unanswered=trace.missing or UNSET)
        return request.ok(_encode(answer))

    def _opened(self) -> ClusterLog:
        if self._log is None:
            raise ApiError("not_found", "the event log is switched off (the setting event_log_calls is 0)")
        return self._log


def _fields(row: CallRow) -> dict[str, Any]:
    fields = msgspec.structs.asdict(row)
    del fields["app_id"]
    return fields


def _number(request: Request, name: str, absent: Any) -> Any:
    text = request.param(name)
    if text is None:
        return absent
    if not _NUMBER(text):
        raise ApiError("bad_request", f"{name} must be a whole number, not {text[:40]!r}")
    return int(text)
