"""The event log: a row for every trigger call, and the spans of those that are traced.

A database of its own, since its rows are many and worth little: nothing waits for the disk here, a power loss may
cost the last of them, and an unreadable or older file is put aside for an empty one. Calls are kept as they are
written, many to a row of the database: that costs a small part of the publish that it tells of, where a row and two
indexes each cost a quarter of it (bench/tracing.py). A search reads batches from the newest on. What is said of a call
decides control/tracing.py.
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

# Raised with every change of the tables below.
_VERSION: Final = 1
_TABLES: Final = (
    # `calls` is a JSON array of CallRow in order of their end, between `first_ms` and `last_ms`.
    "CREATE TABLE batches (id INTEGER PRIMARY KEY, first_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL, "
    "count INTEGER NOT NULL, calls BLOB NOT NULL)",
    "CREATE INDEX batches_by_time ON batches (last_ms)",
    # Where a correlation id is, and a trace id that doesn't say itself when it was made.
    "CREATE TABLE marks (mark TEXT NOT NULL, batch_id INTEGER NOT NULL)",
    "CREATE INDEX marks_by_mark ON marks (mark)",
    "CREATE INDEX marks_by_batch ON marks (batch_id)",
    "CREATE TABLE spans (id INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, app_id TEXT NOT NULL, "
    "time_ms INTEGER NOT NULL, stage TEXT NOT NULL, detail TEXT NOT NULL)",
    "CREATE INDEX spans_by_trace ON spans (trace_id)",
    "CREATE INDEX spans_by_time ON spans (time_ms)",
    # How far the stream of the workers' spans was read, in the transaction of what was read.
    "CREATE TABLE position (stream_id TEXT NOT NULL)",
    "INSERT INTO position VALUES ('0-0')",
)
_ADD_BATCH: Final = "INSERT INTO batches (first_ms, last_ms, count, calls) VALUES (?, ?, ?, ?)"
_ADD_MARK: Final = "INSERT INTO marks (mark, batch_id) VALUES (?, ?)"
_ADD_SPAN: Final = "INSERT INTO spans (trace_id, app_id, time_ms, stage, detail) VALUES (?, ?, ?, ?, ?)"
# A cursor is the number of a batch and the place in it; a batch has fewer than this.
_PLACES: Final = 10_000_000
# How far the time in a trace id and that of its call may differ: clocks are set, calls wait.
_APART_MS: Final = 60_000
# Batches looked through in one turn of a thread.
_READ_AT_ONCE: Final = 20


class CallRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trigger call. `time_ms` is Unix time; `name` and `channels` are what could be read of a refused one;
    `size` counts the bytes of its data; `status` is HTTP's. `sampled`: its spans were asked for."""

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


class SpanRow(NamedTuple):
    """One stage of one call. `detail` are the stage's own members. The app is named too: a caller chooses the trace id,
    and may choose one of another app."""

    trace_id: str
    app_id: str
    time_ms: int
    stage: str
    detail: dict[str, Any]


class Query(NamedTuple):
    """What to look for; None is anything. `since_ms` and `until_ms` are Unix times, both included. `before`: calls
    older than the one at this place, which an earlier answer gave as `next`."""

    trace_id: str | None = None
    correlation_id: str | None = None
    channel: str | None = None
    name: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    before: int | None = None


class Found(NamedTuple):
    """Calls, newest first, and where to go on: None when there are no more."""

    calls: list[CallRow]
    next: int | None


_encoder: Final = msgspec.json.Encoder()
_encode: Final = _encoder.encode
_encode_into: Final = _encoder.encode_into
_decode_calls: Final = msgspec.json.Decoder(list[CallRow]).decode


def trace_time_ms(trace_id: str) -> int:
    """The Unix time in ms with which a trace id of ours begins (control/request.py); of any other one some number."""
    try:
        return int(trace_id[:12], 16)
    except ValueError:
        return 0


class CallBatch:
    """Calls as they will lie in the log, in order of their end: bytes from the start. At full rate so many objects kept
    for a second would cost a publish more than everything else here.

    `marks` are what a call is found by where its time doesn't tell: correlation ids and foreign trace ids.
    """

    __slots__ = ("_above", "_low", "count", "first_ms", "json", "last_ms", "marks")

    def __init__(self, calls: Iterable[CallRow] = ()) -> None:
        self.json = bytearray(b"[")
        self.count = 0
        self.first_ms = self.last_ms = 0
        self.marks: set[str] = set()
        # Between these are trace ids whose time is that of this batch. Hex digits of one length are in the order of
        # their numbers.
        self._low = self._above = ""
        for call in calls:
            self.add(call)

    def add(self, call: CallRow) -> None:
        at_ms = call.time_ms
        if self.count == 0:
            self.first_ms = self.last_ms = at_ms
            self._low, self._above = f"{max(at_ms - _APART_MS, 0):012x}", f"{at_ms + _APART_MS + 1:012x}"
        elif at_ms > self.last_ms:
            self.last_ms = at_ms
        elif at_ms < self.first_ms:
            self.first_ms = at_ms
        self.count += 1
        _encode_into(call, self.json, -1)
        self.json += b","
        if call.correlation_id is not None:
            self.marks.add(call.correlation_id)
        if not self._low <= call.trace_id < self._above:
            self.marks.add(call.trace_id)

    def follow(self, before: CallBatch) -> None:
        """Puts another batch in front of this one."""
        if not before.count:
            return
        self.first_ms = min(before.first_ms, self.first_ms) if self.count else before.first_ms
        self.last_ms = max(before.last_ms, self.last_ms)
        self.json = before.json + self.json[1:]
        self.count += before.count
        self.marks |= before.marks
        if not self._low:
            self._low, self._above = before._low, before._above


class EventLog:
    """An open event log. Made by `open`.

    Kept are the newest `keep_calls` calls, none older than `keep_s`, to the batch; spans as long as the oldest.
    """

    def __init__(self, database: Sqlite, keep_calls: int, keep_s: float) -> None:
        self._database = database
        self._engine = database.engine
        self._keep_calls = keep_calls
        self._keep_ms = int(keep_s * 1000)

    @classmethod
    async def open(cls, path: Path, keep_calls: int, keep_s: float) -> EventLog:
        """Opens the file, or begins a new one in the place of one that can't be used. Raises OSError and
        sqlalchemy.exc.SQLAlchemyError where that can't be made either."""
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
        """The id of the last entry of the stream of spans that is in here."""
        async with self._engine.connect() as connection:
            return str((await connection.exec_driver_sql("SELECT stream_id FROM position")).scalar_one())

    async def write(self, calls: Sequence[CallBatch], spans: Sequence[SpanRow], position: str | None = None) -> None:
        """Adds calls and spans; all or none. `position` is where the stream was read to. Raises SQLAlchemyError."""
        async with self._engine.begin() as connection:
            for batch in calls:
                if batch.count:
                    await _add_batch(connection, batch)
            if spans:
                rows = [(*each[:4], _encode(each.detail).decode()) for each in spans]
                await connection.exec_driver_sql(_ADD_SPAN, rows)
            if position is not None:
                await connection.exec_driver_sql("UPDATE position SET stream_id = ?", (position,))

    async def find(self, app_id: str, query: Query, limit: int) -> Found:
        """Calls of an app, newest first."""
        found: list[CallRow] = []
        places: list[int] = []
        where, values = _conditions(query)
        async with self._engine.connect() as connection:
            upto = None if query.before is None else query.before // _PLACES
            while len(found) <= limit:
                text = f"SELECT id, calls FROM batches WHERE {where} AND id <= ? ORDER BY id DESC LIMIT ?"
                last = (1 << 62) if upto is None else upto
                batches = (await connection.exec_driver_sql(text, (*values, last, _READ_AT_ONCE))).all()
                if not batches:
                    break
                for place, call in await asyncio.to_thread(_matching, batches, app_id, query, limit + 1 - len(found)):
                    found.append(call)
                    places.append(place)
                upto = int(batches[-1].id) - 1
        return Found(found[:limit], places[limit - 1] if len(found) > limit else None)

    async def trace(self, app_id: str, trace_id: str) -> tuple[CallRow, list[SpanRow]] | None:
        """A call and its spans in order of time; None where the app has no such call."""
        found = await self.find(app_id, Query(trace_id=trace_id), 1)
        if not found.calls:
            return None
        text = "SELECT time_ms, stage, detail FROM spans WHERE trace_id = ? AND app_id = ? ORDER BY time_ms, id"
        async with self._engine.connect() as connection:
            spans = (await connection.exec_driver_sql(text, (trace_id, app_id))).all()
        return found.calls[0], [
            SpanRow(trace_id, app_id, span.time_ms, span.stage, msgspec.json.decode(span.detail)) for span in spans
        ]

    async def prune(self, now_ms: int) -> int:
        """Forgets what is too old or too much; returns how many calls went."""
        oldest_ms = now_ms - self._keep_ms
        async with self._engine.begin() as connection:
            # Numbers only: the calls lie elsewhere in the file.
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
    """Which batches may hold what is looked for."""
    where: list[str] = ["1"]
    values: list[Any] = []
    marked = "id IN (SELECT batch_id FROM marks WHERE mark = ?)"
    if query.correlation_id is not None:
        where.append(marked)
        values.append(query.correlation_id)
    if query.trace_id is not None:
        at_ms = trace_time_ms(query.trace_id)
        where.append(f"({marked} OR (first_ms <= ? AND last_ms >= ?))")
        values += [query.trace_id, at_ms + _APART_MS, at_ms - _APART_MS]
    if query.since_ms is not None:
        where.append("last_ms >= ?")
        values.append(query.since_ms)
    if query.until_ms is not None:
        where.append("first_ms <= ?")
        values.append(query.until_ms)
    return " AND ".join(where), values


def _matching(batches: Sequence[Any], app_id: str, query: Query, most: int) -> list[tuple[int, CallRow]]:
    """Calls of these batches, newest first, with their places."""
    found: list[tuple[int, CallRow]] = []
    for batch in batches:
        calls = _decode_calls(batch.calls)
        for at in range(len(calls) - 1, -1, -1):
            place = batch.id * _PLACES + at
            if (query.before is None or place < query.before) and _is_meant(calls[at], app_id, query):
                found.append((place, calls[at]))
                if len(found) == most:
                    return found
    return found


def _is_meant(call: CallRow, app_id: str, query: Query) -> bool:
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
    if version:
        raise sa.exc.DatabaseError("PRAGMA user_version", None, ValueError(f"version {version}"))
    for table in _TABLES:
        await connection.exec_driver_sql(table)
    await connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")
