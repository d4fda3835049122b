"""The event log: one row for every trigger call, and the spans of the traced ones.

It is a database of its own, because its rows are many and less valuable than records. Writes don't wait for the disk,
so a power loss may lose the last rows. An unreadable file is renamed and a new one is started. Calls are stored in
batches, many in one row of the database: a row and two index entries per call would cost a quarter of the publish that
they describe (bench/tracing.py). A search reads the batches from the newest on. control/tracing.py fills the fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.sqlite import Sqlite

__all__ = ["CallBatch", "CallRow", "EventLog", "Found", "Query", "SpanRow", "trace_time_ms"]

# Increased with every change of the tables below; `_make_tables` upgrades older files.
_VERSION: Final = 2
_TABLES: Final = (
    # `calls` is a JSON array of CallRow in the order in which they ended. Their times are within first_ms and last_ms.
    "CREATE TABLE batches (id INTEGER PRIMARY KEY, first_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL, "
    "count INTEGER NOT NULL, calls BLOB NOT NULL)",
    "CREATE INDEX batches_by_time ON batches (last_ms)",
    # The batches of correlation ids, and of trace ids that don't contain their time.
    "CREATE TABLE marks (mark TEXT NOT NULL, batch_id INTEGER NOT NULL)",
    "CREATE INDEX marks_by_mark ON marks (mark)",
    "CREATE INDEX marks_by_batch ON marks (batch_id)",
    "CREATE TABLE spans (id INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, app_id TEXT NOT NULL, "
    "time_ms INTEGER NOT NULL, stage TEXT NOT NULL, detail TEXT NOT NULL, time_us INTEGER)",
    "CREATE INDEX spans_by_trace ON spans (trace_id)",
    "CREATE INDEX spans_by_time ON spans (time_ms)",
    # How far the stream of the workers' spans was read; written in one transaction with those spans.
    "CREATE TABLE position (stream_id TEXT NOT NULL)",
    "INSERT INTO position VALUES ('0-0')",
)
_ADD_BATCH: Final = "INSERT INTO batches (first_ms, last_ms, count, calls) VALUES (?, ?, ?, ?)"
_ADD_MARK: Final = "INSERT INTO marks (mark, batch_id) VALUES (?, ?)"
_ADD_SPAN: Final = "INSERT INTO spans (trace_id, app_id, time_ms, stage, detail, time_us) VALUES (?, ?, ?, ?, ?, ?)"
# Version 1 had no `time_us`; its spans have NULL there.
_UPGRADE_FROM_1: Final = "ALTER TABLE spans ADD COLUMN time_us INTEGER"
# A cursor is `batch id * _MAX_BATCH + index in the batch`.
_MAX_BATCH: Final = 10_000_000
# The time in a trace id and the time of its call differ by at most this: clocks are set, and calls wait.
_MAX_TIME_DIFFERENCE_MS: Final = 60_000
# The number of batches that one search step decodes in a thread.
_BATCHES_PER_STEP: Final = 20


class CallRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trigger call. `time_ms` and `time_us` are the Unix time of its start in ms and µs; `time_us` is 0 in rows of
    earlier versions. `name` and `channels` of a refused call are what could be read. `size` is the bytes of its data,
    `status` the HTTP status. `sampled`: it has spans."""

    trace_id: str
    app_id: str
    correlation_id: str | None
    time_ms: int
    name: str
    channels: Sequence[str]
    size: int
    caller: str
    status: int
    sampled: bool
    time_us: int = 0


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
    """Calls, newest first. `next` is the cursor of the older ones, None if there are none."""

    calls: list[CallRow]
    next: int | None


_encoder: Final = msgspec.json.Encoder()
_encode: Final = _encoder.encode
_encode_into: Final = _encoder.encode_into
_decode_calls: Final = msgspec.json.Decoder(list[CallRow]).decode


def trace_time_ms(trace_id: str) -> int:
    """The Unix time in ms at the beginning of a trace id that we generated. For a foreign trace id the number means
    nothing, 0 if it isn't hexadecimal."""
    try:
        return int(trace_id[:12], 16)
    except ValueError:
        return 0


class CallBatch:
    """Calls in the order in which they ended, encoded as they will be stored.

    Encoding each call at once is cheaper than keeping objects: at full rate, a second's worth of objects would cost a
    publish more than everything else in the log. `marks` are the correlation ids and foreign trace ids by which calls
    are found; other calls are found by the time in their trace id.
    """

    __slots__ = ("_first_id", "_past_last_id", "count", "first_ms", "json", "last_ms", "marks")

    def __init__(self, calls: Iterable[CallRow] = ()) -> None:
        self.json = bytearray(b"[")
        self.count = 0
        self.first_ms = self.last_ms = 0
        self.marks: set[str] = set()
        # Trace ids from `_first_id` to before `_past_last_id` contain a time near this batch. Hexadecimal texts of
        # equal length sort like their numbers.
        self._first_id = self._past_last_id = ""
        for call in calls:
            self.add(call)

    def add(self, call: CallRow) -> None:
        at_ms = call.time_ms
        if self.count == 0:
            self.first_ms = self.last_ms = at_ms
            self._first_id = f"{max(at_ms - _MAX_TIME_DIFFERENCE_MS, 0):012x}"
            self._past_last_id = f"{at_ms + _MAX_TIME_DIFFERENCE_MS + 1:012x}"
        elif at_ms > self.last_ms:
            self.last_ms = at_ms
        elif at_ms < self.first_ms:
            self.first_ms = at_ms
        self.count += 1
        _encode_into(call, self.json, -1)
        self.json += b","
        if call.correlation_id is not None:
            self.marks.add(call.correlation_id)
        if not self._first_id <= call.trace_id < self._past_last_id:
            self.marks.add(call.trace_id)

    def follow(self, before: CallBatch) -> None:
        """Inserts the calls of another batch before the ones of this batch."""
        if not before.count:
            return
        self.first_ms = min(before.first_ms, self.first_ms) if self.count else before.first_ms
        self.last_ms = max(before.last_ms, self.last_ms)
        self.json = before.json + self.json[1:]
        self.count += before.count
        self.marks |= before.marks
        if not self._first_id:
            self._first_id, self._past_last_id = before._first_id, before._past_last_id


class EventLog:
    """An open event log, created by `open`.

    It keeps the newest `keep_calls` calls, none older than `keep_s` seconds, in whole batches. Spans are kept as long
    as the oldest call.
    """

    def __init__(self, database: Sqlite, keep_calls: int, keep_s: float) -> None:
        self._database = database
        self._engine = database.engine
        self._keep_calls = keep_calls
        self._keep_ms = int(keep_s * 1000)

    @classmethod
    async def open(cls, path: Path, keep_calls: int, keep_s: float) -> EventLog:
        """Opens the file. An unusable file is renamed to `.old` and a new one is created.

        Raises OSError or sqlalchemy.exc.SQLAlchemyError if that fails too.
        """
        try:
            return await cls._open(path, keep_calls, keep_s)
        except sa.exc.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(path.with_name(path.name + ".old" + suffix))
            return await cls._open(path, keep_calls, keep_s)

    @classmethod
    async def _open(cls, path: Path, keep_calls: int, keep_s: float) -> EventLog:
        url = URL.create("sqlite+aiosqlite", database=str(path))
        database = Sqlite(url, "journal_mode=WAL", "synchronous=OFF", "busy_timeout=5000", "cache_size=-16384")
        try:
            async with database.engine.begin() as connection:
                await _make_tables(connection)
        except BaseException:
            await database.close()
            raise
        return cls(database, keep_calls, keep_s)

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
        async with self._engine.begin() as connection:
            for batch in calls:
                if batch.count:
                    await _add_batch(connection, batch)
            if spans:
                rows = [(*span[:4], _encode(span.detail).decode(), span.time_us) for span in spans]
                await connection.exec_driver_sql(_ADD_SPAN, rows)
            if position is not None:
                await connection.exec_driver_sql("UPDATE position SET stream_id = ?", (position,))

    async def find(self, app_id: str, query: Query, limit: int) -> Found:
        """At most `limit` calls of an app, newest first."""
        found: list[CallRow] = []
        cursors: list[int] = []
        where, values = _conditions(query)
        async with self._engine.connect() as connection:
            upto = None if query.before is None else query.before // _MAX_BATCH
            while len(found) <= limit:
                text = f"SELECT id, calls FROM batches WHERE {where} AND id <= ? ORDER BY id DESC LIMIT ?"
                last = (1 << 62) if upto is None else upto
                batches = (await connection.exec_driver_sql(text, (*values, last, _BATCHES_PER_STEP))).all()
                if not batches:
                    break
                for cursor, call in await asyncio.to_thread(_matching, batches, app_id, query, limit + 1 - len(found)):
                    found.append(call)
                    cursors.append(cursor)
                upto = int(batches[-1].id) - 1
        return Found(found[:limit], cursors[limit - 1] if len(found) > limit else None)

    async def trace(self, app_id: str, trace_id: str) -> tuple[CallRow, list[SpanRow]] | None:
        """A call and its spans in order of time; None if the app has no such call."""
        found = await self.find(app_id, Query(trace_id=trace_id), 1)
        if not found.calls:
            return None
        text = (
            "SELECT time_ms, stage, detail, COALESCE(time_us, time_ms * 1000) AS time_us FROM spans "
            "WHERE trace_id = ? AND app_id = ? ORDER BY 4, id"
        )
        async with self._engine.connect() as connection:
            spans = (await connection.exec_driver_sql(text, (trace_id, app_id))).all()
        return found.calls[0], [
            SpanRow(trace_id, app_id, span.time_ms, span.stage, msgspec.json.decode(span.detail), span.time_us)
            for span in spans
        ]

    async def prune(self, now_ms: int) -> int:
        """Removes what is too old or beyond `keep_calls`. Returns the number of removed calls."""
        oldest_ms = now_ms - self._keep_ms
        async with self._engine.begin() as connection:
            # Without the calls themselves, which are stored on other pages of the file.
            text = "SELECT id, first_ms, last_ms, count FROM batches ORDER BY id DESC"
            batches = [tuple(row) for row in await connection.exec_driver_sql(text)]
            kept, since_ms, keep_from = 0, now_ms, None
            for batch_id, first_ms, last_ms, count in batches:
                if kept >= self._keep_calls or last_ms < oldest_ms:
                    keep_from = batch_id + 1
                    break
                kept += count
                since_ms = first_ms
            if keep_from is None:
                return 0
            await connection.exec_driver_sql("DELETE FROM batches WHERE id < ?", (keep_from,))
            await connection.exec_driver_sql("DELETE FROM marks WHERE batch_id < ?", (keep_from,))
            await connection.exec_driver_sql("DELETE FROM spans WHERE time_ms < ?", (max(oldest_ms, since_ms),))
            return int(sum(count for *_, count in batches)) - kept


async def _add_batch(connection: AsyncConnection, batch: CallBatch) -> None:
    row = (batch.first_ms, batch.last_ms, batch.count, batch.json[:-1] + b"]")
    batch_id = (await connection.exec_driver_sql(_ADD_BATCH, row)).lastrowid
    if batch.marks:
        await connection.exec_driver_sql(_ADD_MARK, [(mark, batch_id) for mark in sorted(batch.marks)])


def _conditions(query: Query) -> tuple[str, list[Any]]:
    """A WHERE clause and its values for the batches that may have matching calls."""
    where: list[str] = ["1"]
    values: list[Any] = []
    has_mark = "id IN (SELECT batch_id FROM marks WHERE mark = ?)"
    if query.correlation_id is not None:
        where.append(has_mark)
        values.append(query.correlation_id)
    if query.trace_id is not None:
        at_ms = trace_time_ms(query.trace_id)
        where.append(f"({has_mark} OR (first_ms <= ? AND last_ms >= ?))")
        values += [query.trace_id, at_ms + _MAX_TIME_DIFFERENCE_MS, at_ms - _MAX_TIME_DIFFERENCE_MS]
    if query.since_ms is not None:
        where.append("last_ms >= ?")
        values.append(query.since_ms)
    if query.until_ms is not None:
        where.append("first_ms <= ?")
        values.append(query.until_ms)
    return " AND ".join(where), values


def _matching(batches: Sequence[Any], app_id: str, query: Query, limit: int) -> list[tuple[int, CallRow]]:
    """At most `limit` matching calls of these batches, newest first, each with its cursor."""
    found: list[tuple[int, CallRow]] = []
    for batch in batches:
        calls = _decode_calls(batch.calls)
        for index in range(len(calls) - 1, -1, -1):
            cursor = batch.id * _MAX_BATCH + index
            if (query.before is None or cursor < query.before) and _matches(calls[index], app_id, query):
                found.append((cursor, calls[index]))
                if len(found) == limit:
                    return found
    return found


def _matches(call: CallRow, app_id: str, query: Query) -> bool:
    return (
        call.app_id == app_id
        and (query.trace_id is None or call.trace_id == query.trace_id)
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
    if version == 1:
        await connection.exec_driver_sql(_UPGRADE_FROM_1)
        await connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")
        return
    if version:
        raise sa.exc.DatabaseError("PRAGMA user_version", None, ValueError(f"version {version}"))
    for table in _TABLES:
        await connection.exec_driver_sql(table)
    await connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")
