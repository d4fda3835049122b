"""What each app used on all nodes: a question for usage asks every node, and adds up their days.

Each node counts what its own workers and its own control plane did (usage.py), so that no event counts twice. The sum
of the nodes' peaks is an upper bound of the cluster's peak, because nodes have theirs at different times. A node that
doesn't answer within a second is named.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from redpoll.cluster.questions import Question
from redpoll.cluster.survey import NodeSurvey
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.schemas import UsageDay, UsageResponse
from redpoll.control.observe.usage import Usage
from redpoll.protocol.errors import ApiError
from redpoll.store.charts import KEEP_DAYS, Day

__all__ = ["DEFAULT_DAYS", "ClusterUsage", "FoundUsage"]

DEFAULT_DAYS: Final = 30
# int() of thousands of digits raises.
_NUMBER: Final = re.compile(r"[0-9]{1,3}").fullmatch
_encode: Final = msgspec.json.Encoder().encode


class FoundUsage(NamedTuple):
    """Days by app and day. `missing` names the nodes that didn't answer."""

    days: list[Day]
    missing: list[str]


class FindUsage(Question, frozen=True):
    """Asks a node what an app used on the last `days` days; "": all apps."""

    app: str
    days: int


class ClusterUsage:
    """`usage` is that of this node. Registers itself as an answerer of `survey`."""

    def __init__(self, usage: Usage, survey: NodeSurvey) -> None:
        self._usage = usage
        self._survey = survey
        survey.answerers.answer_later(FindUsage, lambda question: usage.days(question.app, question.days))

    async def find(self, app_id: str, days: int) -> FoundUsage:
        """The last `days` days of an app, or of all apps (""), today's included. Days without use are missing."""
        own, others = await asyncio.gather(self._usage.days(app_id, days), self._survey.ask(FindUsage(app_id, days)))
        used = own + [day for answer in others.answers.values() for day in msgspec.json.decode(answer, type=list[Day])]
        return FoundUsage(_summed(used), others.missing)

    async def show(self, request: Request) -> Response:
        """GET …/usage: `days` is 1 to 400, by default 30. `unanswered` names nodes whose use is missing, if any."""
        text = request.param("days")
        days = DEFAULT_DAYS if text is None else int(text) if _NUMBER(text) else 0
        if not 1 <= days <= KEEP_DAYS:
            raise ApiError("bad_request", f"days must be a number from 1 to {KEEP_DAYS}")
        found = await self.find(request.app.id, days)
        rows = [UsageDay(*day[1:]) for day in found.days]
        return request.ok(_encode(UsageResponse(rows, found.missing or UNSET)))


def _summed(used: Iterable[Day]) -> list[Day]:
    summed: dict[tuple[str, str], Day] = {}
    for day in used:
        key = (day.app_id, day.day)
        so_far = summed.get(key)
        summed[key] = day if so_far is None else Day(*key, *(a + b for a, b in zip(so_far[2:], day[2:], strict=True)))
    return [summed[key] for key in sorted(summed)]
