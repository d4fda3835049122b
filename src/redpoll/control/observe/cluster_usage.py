"""What each app used on all nodes: a question for usage asks every node, and adds up their days.

Each node counts what its own workers and its own control plane did (usage.py), so that no event counts twice. The
nodes' peaks of connections are added up as well, though they may be of different times. A node that doesn't answer
within a second is named.

Apps take turns, because each request asks all nodes, and a node answers only so many questions at a time.

A hundred thousand apps have millions of days. So all is asked in pages: publishes wait for no more than one of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from redpoll.cluster.questions import Question
from redpoll.cluster.survey import NodeSurvey
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import UsageDay, UsageResponse
from redpoll.control.observe.usage import Usage
from redpoll.loop.slices import walk
from redpoll.loop.turns import Turns
from redpoll.protocol.errors import ApiError
from redpoll.store.charts import FIRST, KEEP_DAYS, Day, Position

__all__ = ["DEFAULT_DAYS", "ClusterUsage", "FoundUsage"]

DEFAULT_DAYS: Final = 30
# Days of a page: more than one app can have.
PAGE: Final = 1_000
# Requests of an app that wait for its earlier ones.
_MAX_WAITING: Final = 16
# int() of thousands of digits raises.
_NUMBER: Final = re.compile(r"[0-9]{1,3}").fullmatch
_encode: Final = msgspec.json.Encoder().encode


class FoundUsage(NamedTuple):
    """Days by app and day. `missing` names the nodes that didn't answer. `next`: the page goes on after this; None on
    the last page."""

    days: list[Day]
    missing: list[str]
    next: Position | None = None


class FindUsage(Question, frozen=True):
    """Asks a node what an app used on the last `days` days; "": all apps. It answers with the first `limit` days that
    come after `after`."""

    app: str
    days: int
    after: Position
    limit: int


class ClusterUsage:
    """`usage` is that of this node. Registers itself as an answerer of `survey`."""

    def __init__(self, usage: Usage, survey: NodeSurvey) -> None:
        self._usage = usage
        self._survey = survey
        self._turns = Turns(_MAX_WAITING)
        survey.answerers.answer_later(
            FindUsage,
            lambda question: usage.days(question.app, question.days, question.after, question.limit),
        )

    async def find(self, app_id: str, days: int, after: Position = FIRST, limit: int = PAGE) -> FoundUsage:
        """The last `days` days of an app, or of all apps (""), today's included: a page, of those that come after
        `after`. Days without use are missing."""
        question = FindUsage(app_id, days, after, limit)
        own, others = await asyncio.gather(self._usage.days(app_id, days, after, limit), self._survey.ask(question))
        pages = [own, *(msgspec.json.decode(answer, type=list[Day]) for answer in others.answers.values())]
        # A node whose page is full may have more days after it, and what another has there waits for these.
        end = min((page[-1][:2] for page in pages if len(page) >= limit), default=None)
        return FoundUsage(await _summed(chain.from_iterable(pages), end), others.missing, end)

    async def show(self, request: Request) -> Response:
        """GET …/usage: `days` is 1 to 400, by default 30. `unanswered` names nodes whose use is missing, if any.
        Raises TooManyWaiting."""
        text = request.param("days")
        days = DEFAULT_DAYS if text is None else int(text) if _NUMBER(text) else 0
        if not 1 <= days <= KEEP_DAYS:
            raise ApiError("bad_request", f"days must be a number from 1 to {KEEP_DAYS}")
        async with self._turns.of(request.app.id):
            found = await self.find(request.app.id, days)
        rows = [UsageDay(*day[1:]) for day in found.days]
        return request.ok(_encode(UsageResponse(rows, found.missing or UNSET)))


async def _summed(used: Iterable[Day], end: Position | None) -> list[Day]:
    """The days up to `end`; None for all."""
    summed: dict[Position, Day] = {}

    def add(day: Day) -> None:
        key = (day.app_id, day.day)
        if end is not None and key > end:
            return
        so_far = summed.get(key)
        summed[key] = day if so_far is None else Day(*key, *(a + b for a, b in zip(so_far[2:], day[2:], strict=True)))

    await walk(used, add)
    return [summed[key] for key in sorted(summed)]
