"""The event trace over HTTP: `GET …/events/log` finds calls, `GET …/trace/{trace_id}` tells one with its spans.

Reads what tracing.py wrote, at most a second or two before. Shows an app its own calls only.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from redpoll.control.request import Request
from redpoll.control.response import Response
from redpoll.control.schemas import CallAnswer, EventsAnswer, TraceAnswer
from redpoll.protocol.errors import ApiError
from redpoll.store.eventlog import CallRow, EventLog, Query

__all__ = ["LOG_QUERY", "EventTrace"]

LOG_QUERY: Final = tuple(
    f"log_{name}" for name in ("trace_id", "correlation_id", "channel", "name", "since", "until", "limit", "cursor")
)
_DEFAULT_LIMIT: Final = 100
_MAX_LIMIT: Final = 1_000
_NUMBER: Final = re.compile(r"[0-9]{1,15}").fullmatch
_encode: Final = msgspec.json.Encoder().encode


class EventTrace:
    """The handlers; `event_log` None where the operator keeps none."""

    def __init__(self, event_log: EventLog | None) -> None:
        self._log = event_log

    async def search(self, call: Request) -> Response:
        """`{"events": [{…}], "next": cursor or null}`, newest first. `since` and `until`: Unix time in ms."""
        limit = _number(call, "limit", _DEFAULT_LIMIT)
        if not 1 <= limit <= _MAX_LIMIT:
            raise ApiError("bad_request", f"limit is a number from 1 to {_MAX_LIMIT}")
        cursor = call.param("cursor")
        if cursor is not None and not _NUMBER(cursor):
            raise ApiError("invalid_cursor", "cursor is not one that an answer of this address gave")
        query = Query(
            call.param("trace_id"),
            call.param("correlation_id"),
            call.param("channel"),
            call.param("name"),
            _number(call, "since", None),
            _number(call, "until", None),
            None if cursor is None else int(cursor),
        )
        found = await self._opened().find(call.app.id, query, limit)
        after = None if found.next is None else str(found.next)
        return call.answer(_encode(EventsAnswer([CallAnswer(**_told(row)) for row in found.calls], after)))

    async def show(self, call: Request) -> Response:
        """A call and its spans in order of time. `sampled` false: it came when more were triggered than are traced."""
        trace_id = call.parameters[1]
        found = await self._opened().trace(call.app.id, trace_id)
        if found is None:
            raise ApiError("not_found", "this app has no call with that trace id, or none any more")
        row, spans = found
        told = [{"time_ms": span.time_ms, "stage": span.stage, **span.detail} for span in spans]
        return call.answer(_encode(TraceAnswer(**_told(row), spans=told)))

    def _opened(self) -> EventLog:
        if self._log is None:
            raise ApiError("not_found", "this server keeps no event log (event_log_calls is 0)")
        return self._log


def _told(row: CallRow) -> dict[str, Any]:
    told = msgspec.structs.asdict(row)
    del told["app_id"]
    return told


def _number(call: Request, name: str, absent: Any) -> Any:
    given = call.param(name)
    if given is None:
        return absent
    if not _NUMBER(given):
        raise ApiError("bad_request", f"{name} is a whole number, not {given[:40]!r}")
    return int(given)
