"""The event trace pages: a search in the event log, and the timeline of one publish request.

They answer: was my event sent, to whom, and when? control/tracing/tracing.py writes the log; entries appear within two
seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.protocol.errors import ApiError
from redpoll.store.call_batch import CallRow
from redpoll.store.eventlog import Query, SpanRow

__all__ = ["Step", "TracePages", "steps_of"]

_PAGE: Final = 50
# The longest name that an app may allow (max_event_name_chars).
_MAX_CHARS: Final = 1_000
_NUMBER: Final = re.compile(r"[0-9]{1,15}").fullmatch
_TIME_US: Final = re.compile(r"[0-9]{1,18}").fullmatch
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}").fullmatch
# The choices of the time filter, in seconds before now; "" is no filter.
WITHIN: Final = {"": "any time", "300": "last 5 minutes", "3600": "last hour", "86400": "last day"}
# Both ends are included.
_ENDS: Final = ("since", "until")
_FILTERS: Final = ("trace_id", "correlation_id", "channel", "name")


class Step(NamedTuple):
    """One line of the timeline. `after_us` counts from the arrival of the request. `kind` is ok, bad or ""."""

    after_us: int
    title: str
    detail: str
    kind: str


class TracePages:
    """`event_log` is None if the event log is disabled."""

    def __init__(
        self, access: AccessControl, event_log: ClusterLog | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._access = access
        self._log = event_log
        self._clock = clock

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/trace", "event_trace", self.search),
            access.route("GET", "/apps/{app_id}/trace/{trace_id}", "event_trace_call", self.show),
        ]

    async def search(self, visit: Visit) -> Response:
        """GET …/trace: trace_id, correlation_id, channel, name, within (seconds back), since, until (ms), cursor."""
        app = visit.app
        form = Form([(name, visit.query.get(name, "")) for name in (*_FILTERS, "within", *_ENDS)])
        wanted = {name: visit.query.get(name, "").strip()[:_MAX_CHARS] for name in (*_FILTERS, *_ENDS)}
        within = visit.query.get("within", "")
        if wanted["trace_id"] and not _TRACE_ID(wanted["trace_id"]):
            form.fault("trace_id", "A trace id has 32 hex digits, as in the response header X-Service-Trace-Id.")
        if within not in WITHIN:
            form.fault("within", "Choose one of the options.")
        for name in _ENDS:
            if wanted[name] and not _NUMBER(wanted[name]):
                form.fault(name, "This is not a valid time.")
        if form.good and wanted["since"] and wanted["until"] and int(wanted["since"]) > int(wanted["until"]):
            form.fault("until", "The end is before the start.")
        cursor = visit.query.get("cursor") or None
        context: dict[str, Any] = {"calls": [], "older": "", "missing": []}
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
            )
            try:
                page = await self._log.find(app.id, query, _PAGE, cursor)
            except ValueError:
                form.fault("", "This page doesn't exist. Search again.")
            else:
                context["calls"], context["missing"] = page.calls, page.missing
                if page.next is not None:
                    more = {**wanted, "within": within, "cursor": page.next}
                    context["older"] = (
                        f"{visit.request.path}?{urlencode({name: value for name, value in more.items() if value})}"
                    )
        return visit.page(
            "trace_search.html",
            status=200 if form.good else 422,
            app=app,
            form=form,
            wanted=wanted,
            within=within,
            choices=WITHIN,
            enabled=self._log is not None,
            asked=bool(within or any(wanted.values())),
            begun=not cursor,
            **context,
        )

    async def show(self, visit: Visit) -> Response:
        """GET …/trace/{trace_id}; `time_us`: the call of this time, else the newest of this id that was traced."""
        app, trace_id = visit.app, visit.request.parameters[1]
        time_us = visit.query.get("time_us", "")
        call_us = int(time_us) if _TIME_US(time_us) else None
        trace = await self._log.trace(app.id, trace_id, call_us) if self._log is not None else None
        if trace is None:
            raise ApiError("not_found", "The event log has no request of this app with this trace id.")
        call, spans, missing = trace
        deliveries = [span.detail for span in spans if span.stage == "webhook"]
        written = sum(span.detail.get("sockets", 0) for span in spans if span.stage == "written")
        return visit.page(
            "trace.html",
            app=app,
            publish=call,
            steps=steps_of(call, spans),
            written=written,
            workers=len({span.detail.get("worker") for span in spans if span.stage == "received"}),
            deliveries=deliveries,
            missing=missing,
            search=f"{HOME}/apps/{app.id}/trace",
        )


def steps_of(call: CallRow, spans: list[SpanRow]) -> list[Step]:
    """The spans as lines of the timeline, in the given order."""
    return [_step(call, span) for span in spans]


def _step(call: CallRow, span: SpanRow) -> Step:
    detail = span.detail
    # Spans come from several processes, whose clocks differ a little.
    after_us = max(0, span.time_us - call.time_us)
    worker, channel = f"worker {detail.get('worker', '')}", detail.get("channel", "")
    if span.stage == "authenticated":
        return Step(after_us, "Authenticated", call.caller, "ok")
    if span.stage == "accepted":
        return Step(after_us, "Accepted by Redis", "Redis confirmed the event.", "ok")
    if span.stage == "received":
        return Step(after_us, "Received by a worker", worker, "ok")
    if span.stage == "written":
        sockets = detail.get("sockets", 0)
        count = f"{sockets:,} connection{'' if sockets == 1 else 's'}"
        frame = detail.get("frame")
        joined = f"; joined with {detail.get('parts', 1) - 1:,} others into frame {frame}" if frame else ""
        return Step(after_us, f"Written to {count}", f"{channel}, {worker}{joined}", "ok" if sockets else "")
    if span.stage == "replaced":
        return Step(after_us, "Replaced by a newer event", f"{channel}, {worker}, frame {detail.get('frame', '')}", "")
    if span.stage == "dropped":
        title = f"Not delivered to {detail.get('socket_id', '')}"
        return Step(after_us, title, f"The connection read too slowly and was closed; {channel}, {worker}", "bad")
    if span.stage == "webhook":
        return Step(after_us, "Webhook", f"{detail.get('event', '')}, delivery {detail.get('delivery', '')}", "ok")
    return Step(after_us, span.stage, "", "")
