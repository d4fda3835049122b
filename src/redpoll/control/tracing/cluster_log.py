"""The event log of all nodes: a search asks every node, and merges what they find by time.

Each node logs the calls that it answered, and what happened to their events on all nodes (control/tracing/README.md
"Event log and trace"). A client's event is in the logs of all nodes, and is shown once. A node that doesn't answer
within a second is named. A node without others reads its own log only. Apps take turns: a search may read all that an
app has published, and only a few can run at a time.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from redpoll.cluster.questions import Question
from redpoll.cluster.survey import NodeSurvey
from redpoll.loop.turns import Turns
from redpoll.store.call_batch import CallRow
from redpoll.store.eventlog import EventLog, Query, SpanRow

__all__ = ["ClusterLog", "FoundCalls", "FoundTrace"]

# What a node returns to another at a time. With fewer calls than were asked for, the search says that there are more.
_MAX_ANSWER_BYTES: Final = 2_000_000
_MAX_NUMBER_CHARS: Final = 15
# Searches of an app that wait for those that it began before.
_MAX_WAITING: Final = 16


class FoundCalls(NamedTuple):
    """Calls, newest first. `next` is the cursor of the older ones, None if there are none. `missing` names the nodes
    that didn't answer."""

    calls: list[CallRow]
    next: str | None
    missing: list[str]


class FoundTrace(NamedTuple):
    """A call and its spans in order of time. `missing` as in FoundCalls."""

    call: CallRow
    spans: list[SpanRow]
    missing: list[str]


_Trace = tuple[CallRow | None, list[SpanRow]]


# SQLite's integers. Who searches can write a cursor too.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Cursor(msgspec.Struct):
    """How far a search has come: the cursor of the next calls by node name; for nodes that have shown none, the time in
    ms of the last call."""

    before: dict[str, _Number]
    until_ms: _Number | None = None

    def narrow(self, query: Query, name: str) -> Query:
        """The query for the rest of a node's calls."""
        if name in self.before:
            return query._replace(before=self.before[name])
        if self.until_ms is None:
            return query
        return query._replace(until_ms=min(self.until_ms, query.until_ms or self.until_ms))


class FindCalls(Question, frozen=True):
    """Asks a node for the newest `limit` calls of an app in its event log, from `cursor` on."""

    app: str
    query: Query
    limit: int
    cursor: _Cursor


class FindTrace(Question, frozen=True):
    """Asks a node for a call and its spans. `call_us` is as in EventLog.trace."""

    app: str
    trace_id: str
    call_us: int | None = None


class _Page(msgspec.Struct):
    """A node's calls and their cursors, newest first. `more`: it has older ones."""

    calls: list[CallRow]
    cursors: list[int]
    more: bool


class ClusterLog:
    """`name` is that of this node. Registers itself as an answerer of `survey`."""

    def __init__(self, event_log: EventLog, survey: NodeSurvey, name: str) -> None:
        self._log = event_log
        self._survey = survey
        self._name = name
        self._turns = Turns(_MAX_WAITING)
        survey.answerers.answer_later(FindCalls, self._answer_find)
        survey.answerers.answer_later(FindTrace, self._answer_trace)

    async def find(self, app_id: str, query: Query, limit: int, cursor: str | None = None) -> FoundCalls:
        """At most `limit` calls of an app, newest first. Raises ValueError: the cursor is none of ours. Raises
        TooManyWaiting."""
        position = _parse(cursor, self._name)
        async with self._turns.of(app_id):
            return await self._find(app_id, query, limit, position)

    async def _find(self, app_id: str, query: Query, limit: int, position: _Cursor) -> FoundCalls:
        if self._survey.alone:
            page = await self._log.find(app_id, position.narrow(query, self._name), limit)
            return FoundCalls(page.calls, None if page.next is None else str(page.next), [])
        own, others = await asyncio.gather(
            self._page(app_id, position.narrow(query, self._name), limit),
            self._survey.ask(FindCalls(app_id, query, limit, position)),
        )
        pages = {name: msgspec.json.decode(answer, type=_Page) for name, answer in others.answers.items()}
        calls, following = _merge({self._name: own, **pages}, position, limit)
        return FoundCalls(calls, following, others.missing)

    async def trace(self, app_id: str, trace_id: str, call_us: int | None = None) -> FoundTrace | None:
        """The call of this time in µs, or the newest one that was traced: callers may choose one trace id for several.
        None if no node that answered has such a call. Raises TooManyWaiting."""
        async with self._turns.of(app_id):
            own, others = await asyncio.gather(
                self._log.trace(app_id, trace_id, call_us), self._survey.ask(FindTrace(app_id, trace_id, call_us))
            )
        parts = [own, *(msgspec.json.decode(answer, type=_Trace) for answer in others.answers.values())]
        calls = (call for call, _ in parts if call is not None)
        call = max(calls, key=lambda call: (call.sampled, call.time_us), default=None)
        if call is None:
            return None
        # The node of the call has the workers' spans, the leader those of webhooks.
        own_or_all = (call.time_us, 0)
        spans = {msgspec.json.encode(span): span for _, spans in parts for span in spans if span.call_us in own_or_all}
        return FoundTrace(call, sorted(spans.values(), key=lambda span: span.time_us), others.missing)

    async def _page(self, app_id: str, query: Query, limit: int) -> _Page:
        page = await self._log.find(app_id, query, limit)
        return _Page(page.calls, list(page.cursors), page.next is not None)

    async def _answer_find(self, question: FindCalls) -> _Page:
        page = await self._page(question.app, question.cursor.narrow(question.query, self._name), question.limit)
        size = 0
        for at, call in enumerate(page.calls):
            size += len(msgspec.json.encode(call))
            if size > _MAX_ANSWER_BYTES and at:
                return _Page(page.calls[:at], page.cursors[:at], True)
        return page

    async def _answer_trace(self, question: FindTrace) -> _Trace:
        return await self._log.trace(question.app, question.trace_id, question.call_us)


def _identity(call: CallRow) -> tuple[str, int, str, str]:
    return call.trace_id, call.time_us, call.caller, call.name


def _merge(pages: Mapping[str, _Page], position: _Cursor, limit: int) -> tuple[list[CallRow], str | None]:
    """The newest calls of all pages, each once, and the cursor of the others."""
    calls: list[CallRow] = []
    shown: set[tuple[str, int, str, str]] = set()
    before = dict(position.before)
    places = dict.fromkeys(pages, 0)
    while True:
        left = {name: page for name, page in pages.items() if places[name] < len(page.calls)}
        cut = any(page.more for name, page in pages.items() if name not in left)
        if not left and not cut:
            return calls, None
        # Beyond the end of a page that has more, its node may have a newer call than the others.
        if len(calls) == limit or cut:
            break
        name = max(left, key=lambda name: left[name].calls[places[name]].time_us)
        page, place = left[name], places[name]
        call = page.calls[place]
        places[name] += 1
        before[name] = page.cursors[place]
        if _identity(call) not in shown:
            shown.add(_identity(call))
            calls.append(call)
    for name, page in left.items():
        while places[name] < len(page.calls) and _identity(page.calls[places[name]]) in shown:
            before[name] = page.cursors[places[name]]
            places[name] += 1
    for name, page in pages.items():
        if name not in before and page.cursors:
            # Nothing of this node was shown: it begins with its first call again.
            before[name] = page.cursors[0] + 1
    until_ms = calls[-1].time_ms if calls else position.until_ms
    cursor = msgspec.json.encode(_Cursor(before, until_ms))
    return calls, base64.urlsafe_b64encode(cursor).decode().rstrip("=")


def _parse(cursor: str | None, name: str) -> _Cursor:
    """A number is a cursor of this node's log, from when it was alone."""
    if cursor is None:
        return _Cursor({})
    if cursor.isascii() and cursor.isdigit() and len(cursor) <= _MAX_NUMBER_CHARS:
        return _Cursor({name: int(cursor)})
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(text, type=_Cursor)
    except (ValueError, msgspec.DecodeError):
        raise ValueError("not a cursor of the event log") from None
