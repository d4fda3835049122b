"""The event log: one row for every trigger call, and the spans of the traced ones.

It is a database of its own, because its rows are many and less valuable than records. Writes don't wait for the disk,
so a power loss may lose the last rows. An unreadable file is renamed and a new one is started. Calls are stored in
batches, many of one app in one row of the database: a row and two index entries per call would cost a quarter of the
publish that they describe (bench/parts/tracing.py; call_batch.py). A search reads the app's batches from the newest on.
Apps share the space evenly (pruning.py). control/tracing/tracing.py fills the fields.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.call_batch import MAX_TIME_DIFFERENCE_MS, AppBatch, CallBatch, CallRow, trace_time_ms
from redpoll.store.pruning import Pruning
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
_ADD_BATCH: Final = "INSERT INTO batches (id, app_id, first_ms, last_ms, count, calls) VALUES (?, ?, ?, ?, ?, ?)"
_ADD_MARK: Final = "INSERT INTO marks (mark, batch_id) VALUES (?, ?)"
_ADD_SPAN: Final = "INSERT INTO spans (trace_id, app_id, time_ms, stage, detail, time_us) VALUES (?, ?, ?, ?, ?, ?)"
# A cursor is `batch id * _MAX_BATCH + index in the batch`.
_MAX_BATCH: Final = 10_000_000
# The number of batches that one search step decodes in a thread, and of searches at a time. Together they bound the
# memory that searches take.
_BATCHES_PER_STEP: Final = 20
_MAX_SEARCHES: Final = 2
# Batches that one statement adds: the loop copies their bytes in one go.
_ADDED_AT_A_TIME: Final = 100


class SpanRow(NamedTuple):
    """One stage of one call, at a Unix time in ms and µs. `detail` has the stage's own fields. The app id is needed
    because a caller chooses the trace id, and may choose one of another app. It may also choose one for several calls:
    `call_us` is the `time_us` of the span's call, 0 if the span belongs to all calls of the trace id."""

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]
    time_us: int
    call_us: int = 0


class Query(NamedTuple):
    """What to search for; None matches anything. `since_ms` and `until_ms` are Unix times, both inclusive. `before`:
    only calls older than this cursor, which is `Found.next` of an earlier search. `time_us`: the call's own time.
    `sampled`: only calls that were traced."""

    trace_id: str | None = None
    correlation_id: str | None = None
    channel: str | None = None
    name: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    before: int | None = None
    time_us: int | None = None
    sampled: bool = False


class Found(NamedTuple):
    """Calls, newest first, and the cursor of each. `next` is the cursor of the older ones, None if there are none."""

    calls: list[CallRow]
    next: int | None
    cursors: Sequence[int] = ()


# Beside a span's own fields, so that the table stays as it is.
_CALL_US: Final = "call_us"
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
        # Calls in the file, by app: counting them again would read every batch.
        self._counts: Counter[str] = Counter()
        # Held by a transaction until `_counts` has it. SQLite has one writer, and makes others sleep.
        self._changing = asyncio.Lock()
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)
        self._pruning = Pruning(self._engine, self._counts, self._changing, keep_calls, keep_s)

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
        batches = [app_batch for call_batch in calls for app_batch in call_batch.by_app()]
        async with self._changing:
            async with self._engine.begin() as connection:
                for start in range(0, len(batches), _ADDED_AT_A_TIME):
                    await _add_batches(connection, batches[start : start + _ADDED_AT_A_TIME])
                if spans:
                    rows = [(*span[:4], _encode_detail(span), span.time_us) for span in spans]
                    await connection.exec_driver_sql(_ADD_SPAN, rows)
                if position is not None:
                    await connection.exec_driver_sql("UPDATE position SET stream_id = ?", (position,))
            for app_id, batch in batches:
                self._counts[app_id] += batch.count

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

    async def trace(
        self, app_id: str, trace_id: str, call_us: int | None = None
    ) -> tuple[CallRow | None, list[SpanRow]]:
        """A call, and the spans of all calls with its trace id, in order of time. `call_us` is the call's time, None
        for the newest one that was traced: a repeat that was answered from its claim isn't. None: the app's call isn't
        here, but on another node, or nowhere."""
        page = await self.find(app_id, Query(trace_id=trace_id, time_us=call_us, sampled=call_us is None), 1)
        if call_us is None and not page.calls:
            page = await self.find(app_id, Query(trace_id=trace_id), 1)
        text = (
            "SELECT time_ms, stage, detail, COALESCE(time_us, time_ms * 1000) AS time_us FROM spans "
            "WHERE trace_id = ? AND app_id = ? ORDER BY 4, id"
        )
        async with self._engine.connect() as connection:
            spans = (await connection.exec_driver_sql(text, (trace_id, app_id))).all()
        details = [msgspec.json.decode(span.detail) for span in spans]
        return page.calls[0] if page.calls else None, [
            SpanRow(trace_id, app_id, span.time_ms, span.stage, detail, span.time_us, detail.pop(_CALL_US, 0))
            for span, detail in zip(spans, details, strict=True)
        ]

    async def prune(self, now_ms: int) -> int:
        """Removes what is too old, and what exceeds the space. Returns the number of removed calls."""
        return await self._pruning.prune(now_ms)


def _encode_detail(span: SpanRow) -> str:
    return _encode({**span.detail, _CALL_US: span.call_us} if span.call_us else span.detail).decode()


async def _add_batches(connection: AsyncConnection, batches: Sequence[tuple[str, AppBatch]]) -> None:
    # Ids that are known before, so that one statement adds all. Nothing else adds batches.
    newest = (await connection.exec_driver_sql("SELECT MAX(id) FROM batches")).scalar() or 0
    rows = []
    marks = []
    for batch_id, (app_id, batch) in enumerate(batches, newest + 1):
        rows.append((batch_id, app_id, batch.first_ms, batch.last_ms, batch.count, batch.json[:-1] + b"]"))
        marks += [(mark, batch_id) for mark in sorted(batch.marks)]
    await connection.exec_driver_sql(_ADD_BATCH, rows)
    if marks:
        await connection.exec_driver_sql(_ADD_MARK, marks)


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
    if query.time_us is not None:
        where.append("first_ms <= ? AND last_ms >= ?")
        values += [query.time_us // 1000] * 2
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
        and (query.time_us is None or call.time_us == query.time_us)
        and (call.sampled or not query.sampled)
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
