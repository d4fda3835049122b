"""The data of the overview's charts: samples of the server's counters, one every five seconds, for the last hour.

Rates are computed from the growth of each worker's counters, so a restarted worker causes no negative rate. These
samples are in memory only; averages.py keeps averages of them for the charts of a day and of a week, usage.py what each
app used by day. The charts show all nodes' workers, the usage counts those of this node.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.redis.values import WorkerId
from redpoll.control.dashboard.averages import SPANS, Averages
from redpoll.control.http.router import Route, slot_bound_s
from redpoll.control.observe.usage import Usage
from redpoll.loop.slices import walk
from redpoll.store.charts import Charts
from redpoll.store.errors import reason_of

__all__ = ["EVERY_S", "NAMES", "Sampler", "Series"]

log = structlog.get_logger(__name__)

EVERY_S: Final = 5.0
_FIRST_S: Final = 0.5
MAX_SAMPLES: Final = 720
# The values of a sample, for the server and for each app. Rates are per second; an app's `received` and `sent` count
# events.
NAMES: Final = ("connections", "received", "sent", "published", "p50_ms", "p99_ms", "delivered", "failed")
_MAX_APPS: Final = 100
# A worker process that is missing in more samples than this, in which others are, has ended: it is forgotten.
_MISSING_SAMPLES: Final = 60
# One counter for each outcome (control/webhooks/webhooks.py).
_ATTEMPTS: Final = re.compile(r"webhook_attempts_\w+_total").fullmatch

Workers = Mapping[str, Mapping[str, Any]]
Columns = dict[str, list[float | None]]


class Series:
    """Samples by name over the last hour, oldest first. A value is None if it is not known."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=MAX_SAMPLES)

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        self._rows.append((at_s, *(values.get(name) for name in self.names)))

    def columns(self, before: Sequence[tuple[float | None, ...]] = ()) -> Columns:
        """`{"time": [Unix seconds], name: [value], …}`, all of the same length. `before`: earlier rows."""
        columns = list(zip(*before, *self._rows, strict=True)) or [()] * (len(self.names) + 1)
        return {name: list(column) for name, column in zip(("time", *self.names), columns, strict=True)}

    def first_s(self) -> float | None:
        """The time of the first sample."""
        return self._rows[0][0] if self._rows else None

    def last(self) -> dict[str, float | None]:
        row = self._rows[-1] if self._rows else (None,) * (len(self.names) + 1)
        return dict(zip(self.names, row[1:], strict=True))


class _OfApp(NamedTuple):
    """An app's connections on some workers, and how many client events they received and events they sent since the
    last sample."""

    connections: int = 0
    received: float = 0.0
    sent: float = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self.received or self.sent)


_NOTHING: Final = _OfApp()


class _Process:
    """What a worker process had counted when its counters were read last: messages received and frames posted; by app,
    client events and events sent. `missing`: in how many samples it was missing since then."""

    __slots__ = ("by_app", "is_own", "missing", "totals")

    def __init__(self, totals: tuple[float, float], is_own: bool) -> None:
        self.totals = totals
        self.is_own = is_own
        self.by_app: dict[str, tuple[int, int]] = {}
        self.missing = 0


class _AppSeries:
    """The series of at most _MAX_APPS apps: `by_app`, the app whose last traffic is the longest ago first.

    `existing` are the apps that are not deleted, None for any.
    """

    def __init__(self, existing: Container[str] | None) -> None:
        self.by_app: dict[str, Series] = {}
        self._existing = existing

    def sampled(self, busy: Iterable[str], connected: Iterable[str]) -> Mapping[str, Series]:
        """The series that get a sample. `busy` apps have traffic: when all places are taken, such an app gets the place
        of the one that has been idle for the longest time. `connected` apps get free places only."""
        self.by_app = {app_id: series for app_id, series in self.by_app.items() if self.exists(app_id)}
        busy = [app_id for app_id in busy if self.exists(app_id)]
        for app_id in busy:
            if app_id in self.by_app:
                self.by_app[app_id] = self.by_app.pop(app_id)
        has_traffic = set(busy)
        for app_id in busy:
            if app_id in self.by_app:
                continue
            if len(self.by_app) >= _MAX_APPS:
                oldest = next(iter(self.by_app))
                if oldest in has_traffic:
                    break
                del self.by_app[oldest]
            self.by_app[app_id] = Series(NAMES)
        for app_id in connected:
            if len(self.by_app) >= _MAX_APPS:
                break
            if app_id not in self.by_app and self.exists(app_id):
                self.by_app[app_id] = Series(NAMES)
        return self.by_app

    def exists(self, app_id: str) -> bool:
        return self._existing is None or app_id in self._existing


class Sampler:
    """Takes the samples.

    `read_workers` returns the workers' counters by worker name, and the last ones of processes that are given, even if
    they have ended. `webhooks` has the webhook counters, `published` the number of events by app and `attempts` the
    (delivered, failed) webhook attempts by app. `timed` are the routes whose response times make up the publish
    latency, `times_by_app` has the same by app. Averages go to `charts`, what apps used to `usage`: for it only workers
    count that `is_own` says are of this node. `apps` are those that exist; others are removed from the counters by app
    once they are counted. `clock` is Unix time; rates are by `steady`, because Unix time may be set.
    """

    def __init__(
        self,
        read_workers: Callable[[Iterable[str]], Awaitable[Workers]],
        webhooks: Callable[[], Mapping[str, float]],
        published: Callable[[], MutableMapping[str, int]],
        attempts: Callable[[], MutableMapping[str, tuple[int, int]]],
        *,
        charts: Charts | None = None,
        usage: Usage | None = None,
        is_own: Callable[[str], bool] = lambda worker: True,
        apps: Container[str] | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._averages = None if charts is None else Averages(charts, NAMES)
        self._usage = Usage(None) if usage is None else usage
        self.whole = Series(NAMES)
        self.workers: Workers = {}
        self.timed: Iterable[Route] = ()
        self.times_by_app: MutableMapping[str, list[int]] = {}
        self._read_workers = read_workers
        self._webhooks = webhooks
        self._published = published
        self._attempts = attempts
        self._clock = clock
        self._steady = steady
        self._is_own = is_own
        self._apps = _AppSeries(apps)
        # Control's own counters at the last sample.
        self._counted: dict[tuple[str, str], float] = {}
        # By process: a worker that takes another name goes on counting.
        self._processes: dict[str, _Process] = {}
        # Histograms of response times at the last sample, by app id, "" for the server.
        self._times: dict[str, list[int]] = {}
        # By `steady`.
        self._sampled_at_s: float | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run(), name="charts")

    async def finish(self) -> None:
        if self._running is not None:
            self._ending.set()
            await asyncio.gather(self._running, return_exceptions=True)
            # This node's workers have ended by now, after they wrote their last counters.
            await self.sample([name for name, process in self._processes.items() if process.is_own])
            await self._usage.write(now=True)
            if self._averages is not None:
                await self._write(self._averages.finish())

    def of_app(self, app_id: str) -> Series:
        """An app's series; an empty one for an unknown app."""
        return self._apps.by_app.get(app_id) or Series(NAMES)

    async def columns(self, app_id: str, span: str) -> Columns:
        """The data of the charts of an app, or of the server (""), over a span of averages.SPANS.

        The last hour is shown in steps of five seconds as far as this process has sampled it.
        """
        series = self.of_app(app_id) if app_id else self.whole
        if self._averages is None:
            return series.columns()
        now_s = self._clock()
        earlier = await self._averages.rows(app_id, span, now_s)
        if span != "hour":
            return Series(NAMES).columns(earlier)
        first_s = series.first_s()
        began_s = now_s if first_s is None else first_s
        before = [row for row in earlier if row[0] is not None and row[0] + SPANS[span][0] <= began_s]
        if before and began_s - (before[-1][0] or 0.0) > 2 * SPANS[span][0]:
            before.append((began_s - EVERY_S, *[None] * len(NAMES)))
        return series.columns(before)

    async def _write(self, writing: Awaitable[None]) -> None:
        try:
            await writing
        except SQLAlchemyError as error:
            log.warning("chart data not written", reason=reason_of(error))

    async def _run(self) -> None:
        # Never cancelled: what a sample had read and not counted would be lost. Redis has a moment to start.
        wait_s = _FIRST_S
        while not await self._ends_within(wait_s):
            await self.sample()
            if self._averages is not None:
                await self._write(self._averages.write())
            await self._usage.write()
            wait_s = EVERY_S

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        return self._ending.is_set()

    async def sample(self, ended: Iterable[str] = ()) -> None:
        """Takes one sample, with processes that may have ended. The first has no rates, because there is nothing to
        compare it with."""
        workers = await self._read_workers(ended)
        (received, sent), whole, own = await self._of_workers(workers)
        now_s, steady_s = self._clock(), self._steady()
        passed_s = steady_s - self._sampled_at_s if self._sampled_at_s is not None else None
        self._sampled_at_s, self.workers = steady_s, workers
        counted: dict[tuple[str, str], float] = {}
        webhooks, grown = self._webhooks(), await self._published_since(counted)
        done = self._one(counted, "webhook", "delivered", webhooks.get("webhook_attempts_delivered_total", 0.0))
        made = sum(
            count
            for name, count in webhooks.items()
            if name.startswith("webhook_attempts_") and name.endswith("_total")
        )
        attempts = self._one(counted, "webhook", "attempts", made)
        events = sum(grown.values())
        p50, p99 = self._latency("", [sum(slot) for slot in zip(*(route.times for route in self.timed), strict=True)])
        values = {
            "connections": sum(worker.get("connections", 0) for worker in workers.values()) if workers else None,
            "received": _per(received, passed_s),
            "sent": _per(sent, passed_s),
            "published": _per(events, passed_s),
            "p50_ms": p50,
            "p99_ms": p99,
            "delivered": _per(done, passed_s),
            "failed": _per(attempts - done, passed_s),
        }
        self.whole.add(now_s, values)
        if self._averages is not None:
            self._averages.add("", now_s, values)
        await self._sample_apps(now_s, passed_s, counted, whole, own, grown)
        await walk(list(self.times_by_app), self._forget_times)
        self._counted = counted

    async def _published_since(self, counted: dict[tuple[str, str], float]) -> dict[str, float]:
        """The growth of each app's counter since the last sample."""
        published = self._published()
        grown: dict[str, float] = {}

        def add(app_id: str) -> None:
            grown[app_id] = self._one(counted, "published", app_id, published[app_id], begun=0.0)
            if not self._apps.exists(app_id):
                # An app that gets its id begins at zero.
                del published[app_id], counted["published", app_id]

        await walk(list(published), add)
        return grown

    def _forget_times(self, app_id: str) -> None:
        if not self._apps.exists(app_id):
            del self.times_by_app[app_id]
            self._times.pop(app_id, None)

    async def _sample_apps(
        self,
        now_s: float,
        passed_s: float | None,
        counted: dict[tuple[str, str], float],
        whole: Mapping[str, _OfApp],
        own: Mapping[str, _OfApp],
        published: Mapping[str, float],
    ) -> None:
        """`whole` and `own` are those of `_of_workers`, `published` the growth of each app's counter."""

        def use(app_id: str) -> None:
            used = own.get(app_id, _NOTHING)
            self._usage.count(
                app_id, used.connections, int(published.get(app_id, 0)), int(used.received), int(used.sent)
            )

        await walk({**own, **published}, use)
        # Of all apps: a counter that isn't read would seem to begin at zero. This process counts these from zero.
        made = self._attempts()
        attempts: dict[str, list[float]] = {}
        busy: list[str] = []

        def add_attempts(app_id: str) -> None:
            attempts[app_id] = [
                self._one(counted, word, app_id, count, begun=0.0)
                for word, count in zip(("delivered", "failed"), made[app_id], strict=True)
            ]
            if not self._apps.exists(app_id):
                # An app that gets its id begins at zero.
                del made[app_id], counted["delivered", app_id], counted["failed", app_id]

        def add_busy(app_id: str) -> None:
            if whole.get(app_id, _NOTHING).is_busy or published.get(app_id) or any(attempts.get(app_id, ())):
                busy.append(app_id)

        await walk(list(made), add_attempts)
        await walk({**whole, **published, **attempts}, add_busy)
        for app_id, series in self._apps.sampled(busy, whole).items():
            of_app, (delivered, failed) = whole.get(app_id, _NOTHING), attempts.get(app_id, (0.0, 0.0))
            p50, p99 = self._latency(app_id, self.times_by_app.get(app_id, ()))
            values = {
                "connections": of_app.connections,
                "received": _per(of_app.received, passed_s),
                "sent": _per(of_app.sent, passed_s),
                "published": _per(published.get(app_id, 0.0), passed_s),
                "p50_ms": p50,
                "p99_ms": p99,
                "delivered": _per(delivered, passed_s),
                "failed": _per(failed, passed_s),
            }
            series.add(now_s, values)
            if self._averages is not None:
                self._averages.add(app_id, now_s, values)

    async def _of_workers(self, workers: Workers) -> tuple[Sequence[float], dict[str, _OfApp], dict[str, _OfApp]]:
        """How much the workers' totals have grown; each app's figures on all workers, and on those of this node.

        What a worker counted while its counters couldn't be read counts for this node's apps, but not in the charts,
        where it would be a peak.
        """
        totals = [0.0, 0.0]
        whole: dict[str, _OfApp] = {}
        own: dict[str, _OfApp] = {}
        processes = {WorkerId.parse(w).process_name: (w, worker) for w, worker in workers.items()}
        for name, (w, worker) in processes.items():
            counters = (worker.get("messages_received_total", 0.0), worker.get("frames_posted_total", 0.0))
            process = self._processes.get(name)
            # A new process counts from the next sample on. An app that is new in another one began at zero.
            begun = (0, 0) if process is not None else None
            if process is None:
                process = self._processes[name] = _Process(counters, self._is_own(w))
            elif not process.missing:
                totals = [
                    total + max(0.0, now - before)
                    for total, now, before in zip(totals, counters, process.totals, strict=True)
                ]
            process.totals = counters
            by_app = worker.get("by_app", {})
            await walk(by_app.items(), partial(self._add_app, process, begun, whole, own if process.is_own else {}))
            await walk(list(process.by_app), partial(self._forget_app, process, by_app))
        for name, process in list(self._processes.items()):
            # Where all are missing, nothing could be read.
            process.missing = 0 if name in processes else process.missing + 1 if processes else max(process.missing, 1)
            if process.missing > _MISSING_SAMPLES:
                del self._processes[name]
        return totals, whole, own

    def _add_app(
        self,
        process: _Process,
        begun: tuple[int, int] | None,
        whole: dict[str, _OfApp],
        own: dict[str, _OfApp],
        app: tuple[str, Sequence[int]],
    ) -> None:
        app_id, (count, events, *written) = app
        now = (events, sum(written))
        before = process.by_app.get(app_id, begun or now)
        process.by_app[app_id] = now
        received, sent = max(0, now[0] - before[0]), max(0, now[1] - before[1])
        so_far = own.get(app_id, _NOTHING)
        own[app_id] = _OfApp(so_far.connections + count, so_far.received + received, so_far.sent + sent)
        if process.missing:
            received = sent = 0
        so_far = whole.get(app_id, _NOTHING)
        whole[app_id] = _OfApp(so_far.connections + count, so_far.received + received, so_far.sent + sent)

    def _forget_app(self, process: _Process, reported: Container[str], app_id: str) -> None:
        # One that exists may only have left the largest apps, which is all that other nodes' workers report.
        if app_id not in reported and not self._apps.exists(app_id):
            del process.by_app[app_id]

    def _one(
        self, counted: dict[tuple[str, str], float], whose: str, name: str, count: float, begun: float | None = None
    ) -> float:
        """The growth of a counter since the last sample. A new or restarted counter counts from the next sample on,
        unless `begun` says where it started."""
        before = self._counted.get((whose, name), count if begun is None else begun)
        counted[whose, name] = count
        return max(0.0, count - before)

    def _latency(self, app_id: str, counted: Sequence[int]) -> tuple[float | None, float | None]:
        """Median and 99th percentile, in ms, of the publishes since the last sample."""
        times = list(counted)
        # A new app's histogram was counted since the last sample. The server's first histogram is older.
        before = self._times.get(app_id, [0] * len(times) if app_id else times)
        self._times[app_id] = times
        before = before or [0] * len(times)
        since = [now - then for now, then in zip(times, before, strict=True)]
        total = sum(since)
        return (_percentile(since, total, 0.5), _percentile(since, total, 0.99)) if total else (None, None)


def _percentile(slots: list[int], total: int, share: float) -> float:
    seen = 0
    for slot, count in enumerate(slots):
        seen += count
        if seen >= total * share:
            # A slot begins at half of its bound; this is its middle.
            return min(slot_bound_s(slot), 60.0) * 750
    return 0.0


def _per(grown: float, passed_s: float | None) -> float | None:
    return None if passed_s is None else round(grown / max(passed_s, 0.1), 2)
