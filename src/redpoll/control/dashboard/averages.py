"""The charts of a day and of a week: averages of the samples that series.py takes, kept over restarts.

A sample costs a few additions for each app. When a step ends (every two minutes, every quarter of an hour) its averages
are written to the chart store, in the sampler's own task. An app's step without traffic isn't stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from redpoll.store.charts import KEEP_S, Charts, Point

__all__ = ["SPANS", "Averages"]

# What a chart may show: the step of its points, and the time that it covers, in seconds.
SPANS: Final = {"hour": (min(KEEP_S), 3_600), "day": (120, 86_400), "week": (900, 604_800)}
# Of these the greatest value of a step is kept, because an average would hide what matters.
_GREATEST: Final = frozenset({"connections", "p99_ms"})
# These have no value, instead of 0, while an app has no traffic.
_UNKNOWN_WHEN_IDLE: Final = frozenset({"p50_ms", "p99_ms"})

Row = tuple[float | None, ...]


class _Step:
    """The samples of one step since its beginning, by app."""

    __slots__ = ("began_s", "counts", "step_s", "values")

    def __init__(self, step_s: int) -> None:
        self.step_s = step_s
        self.began_s = 0
        self.values: dict[str, list[float]] = {}
        self.counts: dict[str, list[int]] = {}


class Averages:
    """`names` are the values of a sample, as in series.NAMES. Call `add` for each series of a sample, then `write`."""

    def __init__(self, charts: Charts, names: Sequence[str]) -> None:
        self._charts = charts
        self._names = tuple(names)
        self._greatest = tuple(name in _GREATEST for name in names)
        self._idle: Row = tuple(None if name in _UNKNOWN_WHEN_IDLE else 0.0 for name in names)
        self._steps = [_Step(step_s) for step_s in KEEP_S]
        self._ended: list[Point] = []

    def add(self, app_id: str, at_s: float, values: Mapping[str, float | None]) -> None:
        """Adds a sample of an app, or of the whole server ("")."""
        row = [values.get(name) for name in self._names]
        for step in self._steps:
            began_s = int(at_s) // step.step_s * step.step_s
            if began_s != step.began_s:
                self._end(step)
                step.began_s = began_s
            self._add(step, app_id, row)

    def _add(self, step: _Step, app_id: str, row: Sequence[float | None]) -> None:
        sums = step.values.get(app_id)
        if sums is None:
            sums = step.values[app_id] = [0.0] * len(row)
            step.counts[app_id] = [0] * len(row)
        counts = step.counts[app_id]
        for index, value in enumerate(row):
            if value is not None:
                counts[index] += 1
                sums[index] = max(sums[index], value) if self._greatest[index] else sums[index] + value

    def _row(self, step: _Step, app_id: str) -> Row:
        return tuple(
            None if not count else round(total if greatest else total / count, 3)
            for total, count, greatest in zip(step.values[app_id], step.counts[app_id], self._greatest, strict=True)
        )

    def _end(self, step: _Step) -> None:
        for app_id in step.values:
            row = self._row(step, app_id)
            if not app_id or any(row):
                self._ended.append(Point(step.step_s, app_id, step.began_s, row))
        step.values, step.counts = {}, {}

    async def write(self) -> None:
        """Writes the steps that have ended. If that fails, they are lost. Raises SQLAlchemyError."""
        ended, self._ended = self._ended, []
        if ended:
            await self._charts.add(ended)

    async def finish(self) -> None:
        """Writes the running steps too. Raises SQLAlchemyError."""
        for step in self._steps:
            self._end(step)
        await self.write()

    async def rows(self, app_id: str, span: str, now_s: float) -> list[tuple[float | None, ...]]:
        """Time and values of the points of a span, oldest first, with the running step at the end.

        Where no server ran, one row without values interrupts the line.
        """
        step_s, covers_s = SPANS[span]
        since_s = now_s - covers_s
        by_time: dict[float, Row] = {
            point.time_s: tuple(point.row) for point in await self._charts.points(step_s, app_id, since_s)
        }
        if app_id:
            # The server ran, so the app had no traffic.
            for point in await self._charts.points(step_s, "", since_s):
                by_time.setdefault(point.time_s, self._idle)
        step = next(step for step in self._steps if step.step_s == step_s)
        if app_id in step.values:
            by_time[step.began_s] = self._row(step, app_id)
        rows: list[tuple[float | None, ...]] = []
        before_s: float | None = None
        for time_s in sorted(by_time):
            if before_s is not None and time_s - before_s > 2 * step_s:
                rows.append((before_s + step_s, *[None] * len(self._names)))
            rows.append((time_s, *by_time[time_s]))
            before_s = time_s
        return rows
