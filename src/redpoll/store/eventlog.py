"""The event log: one row for every trigger call, and the spans of the traced ones.

It is a database of its own, because its rows are many and less valuable than records. Writes don't wait for the disk,
so a power loss may lose the last rows. An unreadable file is renamed and a new one is started. Calls are stored in
batches, many of one app in one row of the database: a row and two index entries per call would cost a quarter of the
publish that they describe (bench/parts/tracing.py; call_batch.py). A search reads the app's batches from the newest on.
Apps share the space evenly: the app with the most calls loses its oldest first, and so does the one with the most
bytes. control/tracing/tracing.py fills the fields.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.call_batch import MAX_TIME_DIFFERENCE_MS, AppBatch, CallBatch, CallRow, trace_time_ms
from redpoll.store.sqlite import Sqlite, opened_or_new

__all__ = ["EventLog", "Found", "Query", "SpanRow"]

# Increased with every change of the tables below. A change must also upgrade the files of the versions before; those of
# versions 1 and 2 are older than the first release.
_VERSION: Final = 3
_TABLES: Final = (
    # `calls` is a JSON array of one app's CallRow in the order in which they ended. Their times are within first_ms and
    # last_ms.
    "CREATE TABLE batches (id INTEGER PRIMARY KEY, app_id TEXT NOT NULL, first_ms INTEGER NOT NULL, "
    "last_ms INTEGER NOT NULL, count INTEGER NOT NULL, calls BLOB NOT NULL)",
    # Has all columns but `calls`, so that only batches with a match are read.
    "CREATE INDEX batches_by_app ON batches (app_id, id, first_ms, last_ms, count)",
    "CREATE INDEX batches_by_time ON batches (last_ms)",
    # The batches of correlation ids, and of trace ids that don't contain their time.
    "CREATE TABLE marks (mark TEXT NOT NULL, batch_id INTEGER NOT NULL)",
    "CREATE INDEX marks_by_mark ON marks (mark)",
    "CREATE INDEX marks_by_batch ON marks (batch_id)",
    "CREATE TABLE spans (id INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, app_id TEXT NOT NULL, "
    "time_ms INTEGER NOT NULL, stage TEXT NOT NULL, detail TEXT NOT NULL, time_us INTEGER)",
    "CREATE INDEX spans_by_trace ON spans (trace_id)",
    "CREATE INDEX spans_by_app ON spans (app_id, time_ms)",
    # How far the stream of the workers' spans was read; written in one transaction with those spans.
    "CREATE TABLE position (stream_id TEXT NOT NULL)",
    "INSERT INTO position VALUES ('0-0')",
)
# A batch fills many pages, and each costs system calls for the -wal and for the file: with SQLite's 4 KiB, a call costs
# the log a third more (bench/parts/log_pages.py). Larger ones would gain little, and each write of a quiet server fills
# some. A file that has smaller ones keeps them. A -wal of 256 pages is written back: 4 MiB.
_PRAGMAS: Final = (
    "page_size=16384",
    "journal_mode=WAL",
    "wal_autocheckpoint=256",
    "synchronous=OFF",
    "busy_timeout=5000",
    "cache_size=-16384",
)
_ADD_BATCH: Final = "INSERT INTO batches (app_id, first_ms, last_ms, count, calls) VALUES (?, ?, ?, ?, ?)"
_ADD_MARK: Final = "INSERT INTO marks (mark, batch_id) VALUES (?, ?)"
_ADD_SPAN: Final = "INSERT INTO spans (trace_id, app_id, time_ms, stage, detail, time_us) VALUES (?, ?, ?, ?, ?, ?)"
# A cursor is `batch id * _MAX_BATCH + index in the batch`.
_MAX_BATCH: Final = 10_000_000
# The number of batches that one search step decodes in a thread, and of searches at a time. Together they bound the
# memory that searches take.
_BATCHES_PER_STEP: Final = 20
_MAX_SEARCHES: Final = 2
# Above every id and time.
_MAX: Final = 1 << 62
# The file's size, whatever is published: bytes for each call that is kept, and at least. A traced call that reaches one
# channel has about 1 kB with its spans; one with many long names of channels has a hundred times as much.
_BYTES_PER_CALL: Final = 1_000
_MIN_BYTES: Final = 16_000_000
# What stays of a file that is too large, so that this isn't done at each pruning.
_KEPT_OF_BYTES: Final = 0.9
# About what a span takes.
_SPAN_BYTES: Final = 300
# Batches that one transaction removes; others may write in between.
_REMOVED_AT_A_TIME: Final = 500


class SpanRow(NamedTuple):
    """One stage of one call, at a Unix time in ms and µs. `detail` has the stage's own fields. The app id is needed
    because a caller chooses the trace id, and may choose one of another app."""

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]
    time_us: int


class Query(NamedTuple):
    """What to search for; None matches anything. `since_ms` and `until_ms` are Unix times, both inclusive. `before`:
    only calls older than this cursor, which is `Found.next` of an earlier search."""

    trace_id: str | None = None
    correlation_id: str | None = None
    channel: str | None = None
    name: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    before: int | None = None


class Found(NamedTuple):
    """Calls, newest first, and the cursor of each. `next` is the cursor of the older ones, None if there are none."""

    calls: list[CallRow]
    next: int | None
    cursors: Sequence[int] = ()


_encode: Final = msgspec.json.Encoder().encode
_decode_calls: Final = msgspec.json.Decoder(list[CallRow]).decode


class EventLog:
    """An open event log, created by `open`.

    It keeps `keep_calls` calls, none older than `keep_s` seconds, in whole batches. Each app keeps its newest ones, at
    least an even share. Spans are kept as long as the oldest call of their app. The file has at most about
    `keep_calls` kB, but for what is written between two prunings.
    """

    def __init__(self, database: Sqlite, keep_calls: int, keep_s: float) -> None:
        self._database = database
        self._engine = database.engine
        self._keep_calls = keep_calls
        self._keep_ms = int(keep_s * 1000)
        self._keep_bytes = max(keep_calls * _BYTES_PER_CALL, _MIN_BYTES)
        # Calls in the file, by app: counting them again would read every batch.
        self._counts: Counter[str] = Counter()
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)
        self._pruned_spans = False

    @classmethod
    async def open(cls, path: Path, keep_calls: int, keep_s: float) -> EventLog:
        """Opens the file. One that is damaged or of another version is renamed to `.old`, and a new one is made.

        Raises OSError or sqlalchemy.exc.SQLAlchemyError if that fails too.
        """
        return await opened_or_new(path, lambda: cls._open(path, keep_calls, keep_s))

    @classmethod
    async def _open(cls, path: Path, keep_calls: int, keep_s: float) -> EventLog:
        database = Sqlite(path, *_PRAGMAS)
        try:
            async with database.engine.begin() as connection:
                await _make_tables(connection)
                text = "SELECT app_id, SUM(count) AS calls FROM batches GROUP BY app_id"
                counts = (await connection.exec_driver_sql(text)).all()
        except BaseException:
            await database.close()
            raise
        log = cls(database, keep_calls, keep_s)
        log._counts.update({row.app_id: row.calls for row in counts})
        return log

    async def close(self) -> None:
        await self._database.close()

    async def position(self) -> str:
        """The id of the last entry of the workers' stream of spans that was written to the log."""
        async with self._engine.connect() as connection:
            return str((await connection.exec_driver_sql("SELECT stream_id FROM position")).scalar_one())

    async def write(self, calls: Sequence[CallBatch], spans: Sequence[SpanRow], position: str | None = None) -> None:
        """Adds calls and spans, all or none. `position` is the id up to which the stream was read.

        Raises SQLAlchemyError.
        """
        written: Counter[str] = Counter()
        async with self._engine.begin() as connection:
            for batches in calls:
                for app_id, batch in batches.by_app():
                    await _add_batch(connection, app_id, batch)
                    written[app_id] += batch.count
            if spans:
                rows = [(*span[:4], _encode(span.detail).decode(), span.time_us) for span in spans]
                await connection.exec_driver_sql(_ADD_SPAN, rows)
            if position is not None:
                await connection.exec_driver_sql("UPDATE position SET stream_id = ?", (position,))
        self._counts += written

    async def find(self, app_id: str, query: Query, limit: int) -> Found:
        """At most `limit` calls of an app, newest first."""
        calls: list[CallRow] = []
        cursors: list[int] = []
        where, values = _conditions(app_id, query)
        async with self._searches, self._engine.connect() as connection:
            upto = None if query.before is None else query.before // _MAX_BATCH
            while len(calls) <= limit:
                text = f"SELECT id, calls FROM batches WHERE {where} AND id <= ? ORDER BY id DESC LIMIT ?"
                last = (1 << 62) if upto is None else upto
                batches = (await connection.exec_driver_sql(text, (*values, last, _BATCHES_PER_STEP))).all()
                if not batches:
                    break
                for cursor, call in await asyncio.to_thread(_matching, batches, query, limit + 1 - len(calls)):
                    calls.append(call)
                    cursors.append(cursor)
                upto = int(batches[-1].id) - 1
        return Found(calls[:limit], cursors[limit - 1] if len(calls) > limit else None, cursors[:limit])

    async def trace(self, app_id: str, trace_id: str) -> tuple[CallRow | None, list[SpanRow]]:
        """A call and its spans in order of time. None: the app's call isn't here, but on another node, or nowhere."""
        page = await self.find(app_id, Query(trace_id=trace_id), 1)
        text = (
            "SELECT time_ms, stage, detail, COALESCE(time_us, time_ms * 1000) AS time_us FROM spans "
            "WHERE trace_id = ? AND app_id = ? ORDER BY 4, id"
        )
        async with self._engine.connect() as connection:
            spans = (await connection.exec_driver_sql(text, (trace_id, app_id))).all()
        return page.calls[0] if page.calls else None, [
            SpanRow(trace_id, app_id, span.time_ms, span.stage, msgspec.json.decode(span.detail), span.time_us)
            for span in spans
        ]

    async def prune(self, now_ms: int) -> int:
        """Removes what is too old, and what exceeds `keep_calls`, the latter from the apps with the most calls. Returns
        the number of removed calls. Its time depends on what it removes, not on what is stored, unless the file is too
        large."""
        oldest_ms = now_ms - self._keep_ms
        removed = 0
        if not self._pruned_spans:
            # Spans without a call, from before this start. Later ones go with the calls of their app.
            await self._remove_spans("time_ms < ?", oldest_ms)
            self._pruned_spans = True
        # SQLite would choose the other index, for GROUP BY, and read all of it.
        text = (
            "SELECT app_id, MAX(id) AS last_id FROM batches INDEXED BY batches_by_time WHERE last_ms < ? "
            "GROUP BY app_id"
        )
        async with self._engine.connect() as connection:
            outdated = (await connection.exec_driver_sql(text, (oldest_ms,))).all()
        for app in outdated:
            removed += await self._remove(app.app_id, self._counts[app.app_id], app.last_id, oldest_ms)
            await self._remove_spans("app_id = ? AND time_ms < ?", app.app_id, oldest_ms)
        share = _share(self._counts, self._keep_calls)
        for app_id, count in list(self._counts.items()):
            if count > share:
                removed += await self._remove(app_id, count - share)
                first_ms = await self._first_ms(app_id)
                if first_ms is not None:
                    await self._remove_spans("app_id = ? AND time_ms < ?", app_id, first_ms)
        return removed + await self._shrink()

    async def _shrink(self) -> int:
        """Removes calls and their spans until the file isn't too large, from the apps that take the most of it. Returns
        the number of calls."""
        removed = 0
        while (used := await self._used_bytes()) > self._keep_bytes:
            sizes = await self._sizes()
            # Indexes and pages that aren't full are in proportion.
            share = _share(sizes, int(sum(sizes.values()) * self._keep_bytes / used * _KEPT_OF_BYTES))
            large = {app_id: size for app_id, size in sizes.items() if size > share}
            if not large:
                break
            for app_id, size in large.items():
                # Calls are about equal in size. If the oldest are smaller, the next pass removes more.
                excess = math.ceil(self._counts[app_id] * (1 - share / size))
                removed += await self._remove(app_id, excess, at_least=True)
                first_ms = await self._first_ms(app_id)
                await self._remove_spans("app_id = ? AND time_ms < ?", app_id, _MAX if first_ms is None else first_ms)
        return removed

    async def _used_bytes(self) -> int:
        """What the file has, but for free pages, which it uses again."""
        async with self._engine.connect() as connection:
            pages, free, page_bytes = [
                int((await connection.exec_driver_sql(f"PRAGMA {name}")).scalar_one())
                for name in ("page_count", "freelist_count", "page_size")
            ]
        return (pages - free) * page_bytes

    async def _sizes(self) -> Counter[str]:
        """About how many bytes each app's calls and spans take."""
        sizes: Counter[str] = Counter()
        async with self._engine.connect() as connection:
            for text in (
                # Reads each batch once, in the order of the file, and not what it has beyond its first page.
                "SELECT app_id, SUM(length(calls)) AS bytes FROM batches NOT INDEXED GROUP BY app_id",
                f"SELECT app_id, COUNT(*) * {_SPAN_BYTES} AS bytes FROM spans GROUP BY app_id",
            ):
                for row in await connection.exec_driver_sql(text):
                    sizes[row.app_id] += row.bytes
        return sizes

    async def _first_ms(self, app_id: str) -> int | None:
        """When the app's oldest call began."""
        text = "SELECT first_ms FROM batches WHERE app_id = ? ORDER BY id LIMIT 1"
        async with self._engine.connect() as connection:
            first_ms: int | None = (await connection.exec_driver_sql(text, (app_id,))).scalar()
        return first_ms

    async def _remove(
        self, app_id: str, excess: int, last_id: int = _MAX, before_ms: int = _MAX, *, at_least: bool = False
    ) -> int:
        """Removes the app's oldest batches up to `last_id`, at most `excess` calls, or at least. Returns the number of
        calls. Those that aren't from `before_ms` stay: where a clock was set back and forth, they are among the
        others."""
        text = "SELECT id, count AS calls FROM batches WHERE app_id = ? AND id <= ? AND last_ms < ? ORDER BY id LIMIT ?"
        removed = 0
        while True:
            async with self._engine.begin() as connection:
                oldest = (
                    await connection.exec_driver_sql(text, (app_id, last_id, before_ms, _REMOVED_AT_A_TIME))
                ).all()
                ids: list[tuple[int]] = []
                calls = 0
                for batch in oldest:
                    if removed + calls + (0 if at_least else batch.calls - 1) >= excess:
                        break
                    ids.append((batch.id,))
                    calls += batch.calls
                if ids:
                    await connection.exec_driver_sql("DELETE FROM batches WHERE id = ?", ids)
                    await connection.exec_driver_sql("DELETE FROM marks WHERE batch_id = ?", ids)
            removed += calls
            self._counts[app_id] -= calls
            if len(ids) < _REMOVED_AT_A_TIME:
                if self._counts[app_id] <= 0:
                    del self._counts[app_id]
                return removed

    async def _remove_spans(self, where: str, *values: Any) -> None:
        async with self._engine.begin() as connection:
            await connection.exec_driver_sql(f"DELETE FROM spans WHERE {where}", values)


def _share(counts: Mapping[str, int], keep: int) -> int:
    """The greatest number of calls that every app may keep so that all together have at most `keep`."""
    left, apps = keep, len(counts)
    for count in sorted(counts.values()):
        if count * apps > left:
            return left // apps
        left -= count
        apps -= 1
    return keep


async def _add_batch(connection: AsyncConnection, app_id: str, batch: AppBatch) -> None:
    row = (app_id, batch.first_ms, batch.last_ms, batch.count, batch.json[:-1] + b"]")
    batch_id = (await connection.exec_driver_sql(_ADD_BATCH, row)).lastrowid
    if batch.marks:
        await connection.exec_driver_sql(_ADD_MARK, [(mark, batch_id) for mark in sorted(batch.marks)])


def _conditions(app_id: str, query: Query) -> tuple[str, list[Any]]:
    """A WHERE clause and its values for the batches that may have matching calls."""
    where: list[str] = ["app_id = ?"]
    values: list[Any] = [app_id]
    has_mark = "id IN (SELECT batch_id FROM marks WHERE mark = ?)"
    if query.correlation_id is not None:
        where.append(has_mark)
        values.append(query.correlation_id)
    if query.trace_id is not None:
        at_ms = trace_time_ms(query.trace_id)
        where.append(f"({has_mark} OR (first_ms <= ? AND last_ms >= ?))")
        values += [query.trace_id, at_ms + MAX_TIME_DIFFERENCE_MS, at_ms - MAX_TIME_DIFFERENCE_MS]
    if query.since_ms is not None:
        where.append("last_ms >= ?")
        values.append(query.since_ms)
    if query.until_ms is not None:
        where.append("first_ms <= ?")
        values.append(query.until_ms)
    # The texts as they are encoded in `calls`, with what is next to them, so that no batch is read for a longer text
    # that contains this one. SQLite compares outside of the interpreter's lock; to decode every batch would stop all
    # other threads.
    if query.channel is not None:
        where.append("instr(calls, ?)")
        values.append(_encode(query.channel))
    if query.name is not None:
        # `name` may hold several names.
        name = _encode(query.name)[1:-1]
        places = (b'"%b"', b'"%b, ', b", %b, ", b', %b"')
        where.append(f"instr(calls, ?) AND ({' OR '.join(['instr(calls, ?)'] * len(places))})")
        values += [name, *(place % name for place in places)]
    return " AND ".join(where), values


def _matching(batches: Sequence[Any], query: Query, limit: int) -> list[tuple[int, CallRow]]:
    """At most `limit` matching calls of these batches, newest first, each with its cursor."""
    matches: list[tuple[int, CallRow]] = []
    for batch in batches:
        calls = _decode_calls(batch.calls)
        for index in range(len(calls) - 1, -1, -1):
            cursor = batch.id * _MAX_BATCH + index
            if (query.before is None or cursor < query.before) and _matches(calls[index], query):
                matches.append((cursor, calls[index]))
                if len(matches) == limit:
                    return matches
    return matches


def _matches(call: CallRow, query: Query) -> bool:
    return (
        (query.trace_id is None or call.trace_id == query.trace_id)
        and (query.correlation_id is None or call.correlation_id == query.correlation_id)
        and (query.channel is None or query.channel in call.channels)
        and (query.name is None or query.name == call.name or query.name in call.name.split(", "))
        and (query.since_ms is None or call.time_ms >= query.since_ms)
        and (query.until_ms is None or call.time_ms <= query.until_ms)
    )


async def _make_tables(connection: AsyncConnection) -> None:
    version = (await connection.exec_driver_sql("PRAGMA user_version")).scalar_one()
    if version == _VERSION:
        return
    if version:
        raise sa.exc.DatabaseError("PRAGMA user_version", None, ValueError(f"version {version}"))
    for table in _TABLES:
        await connection.exec_driver_sql(table)
    await connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")
