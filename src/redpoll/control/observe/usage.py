"""What each app used on this node, by UTC day: the most connections at a time, and how many messages.

The dashboard's sampler counts every five seconds, and once a minute the counts are added to the chart store. So a
killed control plane loses at most a minute of them. cluster_usage.py adds up the days of all nodes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.store.charts import FIRST, KEEP_DAYS, Charts, Day, Position
from redpoll.store.errors import reason_of

__all__ = ["Usage", "first_day"]

log = structlog.get_logger(__name__)

WRITE_EVERY_S: Final = 60.0


class Usage:
    """`charts` is None if its file can't be used; then nothing is counted. `clock` is Unix time, for the day. `steady`
    says when to write, because Unix time may be set back."""

    def __init__(
        self,
        charts: Charts | None,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._charts = charts
        self._clock = clock
        self._steady = steady
        # By `steady`.
        self._write_at_s = -math.inf
        self._pruned_on = ""
        # By app and day, since the last write.
        self._counted: dict[tuple[str, str], Day] = {}
        self._writing: asyncio.Task[None] | None = None

    def count(self, app_id: str, connections: int, published: int, client_events: int, sent: int) -> None:
        """Adds what happened since the last call. `connections` are those of now."""
        if self._charts is not None and (connections or published or client_events or sent):
            self._add(Day(app_id, _day(self._clock()), connections, published, client_events, sent))

    def _add(self, used: Day) -> None:
        key = (used.app_id, used.day)
        counted = self._counted.get(key)
        if counted is not None:
            peak = max(counted.peak_connections, used.peak_connections)
            used = Day(*key, peak, *(a + b for a, b in zip(counted[3:], used[3:], strict=True)))
        self._counted[key] = used

    async def write(self, *, now: bool = False) -> None:
        """Writes the counts, if it is time, or if there are any `now`. If that fails they wait for the next time."""
        if self._charts is None or not (now or self._steady() >= self._write_at_s):
            return
        # The caller may be cancelled, by the end of the process or of another node's question. The write goes on:
        # else it would be unknown whether the counts are in the file.
        if self._writing is not None:
            await asyncio.shield(self._writing)
        # Many may have waited for that write. The first of them begins the next one, and it has the counts of all.
        if self._writing is None and (self._counted or not now):
            self._write_at_s = self._steady() + WRITE_EVERY_S
            self._writing = asyncio.create_task(self._write(self._charts), name="usage")
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self, charts: Charts) -> None:
        try:
            await self._write_counts(charts)
        finally:
            self._writing = None

    async def _write_counts(self, charts: Charts) -> None:
        counted, self._counted = self._counted, {}
        try:
            await charts.add(days=counted.values())
        except SQLAlchemyError as error:
            log.warning("usage not written", reason=reason_of(error))
            for used in counted.values():
                self._add(used)
            return
        at_s = self._clock()
        if self._pruned_on != _day(at_s):
            self._pruned_on = _day(at_s)
            await self._prune(charts, at_s)

    async def _prune(self, charts: Charts, at_s: float) -> None:
        try:
            await charts.prune(at_s, first_day(at_s, KEEP_DAYS))
        except SQLAlchemyError as error:
            log.warning("old chart data not removed", reason=reason_of(error))

    async def days(self, app_id: str, days: int, after: Position = FIRST, limit: int = -1) -> list[Day]:
        """The last `days` days of an app, or of all apps (""), today's included, by app and day: the first `limit` that
        come after `after`; -1 for all. Days without use are missing."""
        if self._charts is None:
            return []
        if after == FIRST:
            await self.write(now=True)
        return await self._charts.days(first_day(self._clock(), days), app_id or None, after=after, limit=limit)


def first_day(now_s: float, days: int) -> str:
    """The first of the last `days` days."""
    return (datetime.fromtimestamp(now_s, UTC) - timedelta(days=days - 1)).strftime("%Y-%m-%d")


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")
