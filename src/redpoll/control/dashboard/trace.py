"""The event trace: did my event go out, to whom, and when? A search in the event log, and the page of one call.

What is shown was written by control/tracing.py, at most a second or two before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.response import Response
from redpoll.control.router import Route
from redpoll.protocol.errors import ApiError
from redpoll.store.eventlog import CallRow, EventLog, Query, SpanRow

__all__ = ["Step", "TracePages", "steps_of"]

_PAGE: Final = 50
_MAX_CHARS: Final = 200
_NUMBER: Final = re.compile(r"[0-9]{1,15}").fullmatch
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}").fullmatch
# What may be chosen as the time to look at, in seconds back from now; none: all that is kept.
WITHIN: Final = {"": "any time", "300": "last 5 minutes", "3600": "last hour", "86400": "last day"}
# Between these, both included.
_ENDS: Final = ("since", "until")
_MARKS: Final = ("trace_id", "correlation_id", "channel", "name")


class Step(NamedTuple):
    """One line of the timeline. `after_ms`: since the call came. `kind`: ok, bad or nothing."""

    after_ms: int
    title: str
    detail: str
    kind: str


class TracePages:
    """`event_log` None: the operator keeps none."""

    def __init__(self, door: AccessControl, event_log: EventLog | None, clock: Callable[[], float] = time.time) -> None:
        self._door = door
        self._log = event_log
        self._clock = clock

    def routes(self) -> list[Route]:
        door = self._door
        return [
            door.route("GET", "/apps/{app_id}/trace", "event_trace", self.search),
            door.route("GET", "/apps/{app_id}/trace/{trace_id}", "event_trace_call", self.show),
        ]

    async def search(self, visit: Visit) -> Response:
        """GET …/trace: trace_id, correlation_id, channel, name, within (seconds back), since, until (ms), cursor."""
        app = visit.app
        form = Form([(name, visit.query.get(name, "")) for name in (*_MARKS, "within", *_ENDS)])
        wanted = {name: visit.query.get(name, "").strip()[:_MAX_CHARS] for name in (*_MARKS, *_ENDS)}
        within = visit.query.get("within", "")
        cursor = visit.query.get("cursor", "")
        if wanted["trace_id"] and not _TRACE_ID(wanted["trace_id"]):
            form.fault("trace_id", "A trace id has 32 digits of 0-9 and a-f, as the header X-Service-Trace-Id says it.")
        if within not in WITHIN:
            form.fault("within", "Choose one of these times.")
        for name in _ENDS:
            if wanted[name] and not _NUMBER(wanted[name]):
                form.fault(name, "That isn't a time.")
        if form.good and wanted["since"] and wanted["until"] and int(wanted["since"]) > int(wanted["until"]):
            form.fault("until", "That is before the time from which on to look.")
        if cursor and not _NUMBER(cursor):
            form.fault("", "That page isn't one of this list. Search again.")
        context: dict[str, Any] = {"calls": [], "older": ""}
        if form.good and self._log is not None:
            since = [int((self._clock() - int(within)) * 1000)] if within else []
            since += [int(wanted["since"])] if wanted["since"] else []
            query = Query(
                wanted["trace_id"] or None,
                wanted["correlation_id"] or None,
                wanted["channel"] or None,
                wanted["name"] or None,
                since_ms=max(since, default=None),
                until_ms=int(wanted["until"]) if wanted["until"] else None,
                before=int(cursor) if cursor else None,
            )
            found = await self._log.find(app.id, query, _PAGE)
            context["calls"] = found.calls
            if found.next is not None:
                more = {**wanted, "within": within, "cursor": str(found.next)}
                context["older"] = (
                    f"{visit.call.path}?{urlencode({name: value for name, value in more.items() if value})}"
                )
        return visit.page(
            "trace_search.html",
            status=200 if form.good else 422,
            app=app,
            form=form,
            wanted=wanted,
            within=within,
            choices=WITHIN,
            kept=self._log is not None,
            asked=bool(within or any(wanted.values())),
            begun=not cursor,
            **context,
        )

    async def show(self, visit: Visit) -> Response:
        """GET …/trace/{trace_id}."""
        app, trace_id = visit.app, visit.call.parameters[1]
        found = await self._log.trace(app.id, trace_id) if self._log is not None else None
        if found is None:
            raise ApiError("not_found", "This app has no call with that trace id, or it is no longer kept.")
        call, spans = found
        deliveries = [span.detail for span in spans if span.stage == "webhook"]
        written = sum(span.detail.get("sockets", 0) for span in spans if span.stage == "written")
        return visit.page(
            "trace.html",
            app=app,
            each=call,
            steps=steps_of(call, spans),
            written=written,
            workers=len({span.detail.get("worker") for span in spans if span.stage == "received"}),
            deliveries=deliveries,
            again=f"{HOME}/apps/{app.id}/trace",
        )


def steps_of(call: CallRow, spans: list[SpanRow]) -> list[Step]:
    """The spans as lines to read, in order of time."""
    return [_step(call, span) for span in spans]


def _step(call: CallRow, span: SpanRow) -> Step:
    told = span.detail
    # The clocks of machines differ by a little.
    after_ms = max(0, span.time_ms - call.time_ms)
    worker, channel = f"worker {told.get('worker', '')}", told.get("channel", "")
    if span.stage == "authenticated":
        return Step(after_ms, "Let in", call.caller, "ok")
    if span.stage == "accepted":
        return Step(after_ms, "Accepted by Redis", "From here on it is delivered.", "ok")
    if span.stage == "received":
        return Step(after_ms, "Received by a worker", worker, "ok")
    if span.stage == "written":
        sockets = told.get("sockets", 0)
        many = f"{sockets:,} socket{'' if sockets == 1 else 's'}"
        return Step(after_ms, f"Written to {many}", f"{channel}, {worker}", "ok" if sockets else "")
    if span.stage == "dropped":
        title = f"Lost for {told.get('socket_id', '')}"
        return Step(after_ms, title, f"It read too slowly and was closed; {channel}, {worker}", "bad")
    if span.stage == "webhook":
        return Step(after_ms, "Webhook", f"{told.get('event', '')}, delivery {told.get('delivery', '')}", "ok")
    return Step(after_ms, span.stage, "", "")
