"""Calls and spans for tests of the event log, and what its statements cost."""

import sqlalchemy as sa

from redpoll.store.call_batch import CallBatch, CallRow
from redpoll.store.eventlog import EventLog, Query, SpanRow

DAY_S = 86_400.0


def tid(number: int) -> str:
    """A trace id as the server generates it, with the time of `call(number)`."""
    return f"{1_000_000 + number:012x}{number:020x}"


def call(number: int, **fields) -> CallRow:
    values = {
        "trace_id": tid(number),
        "app_id": "1",
        "correlation_id": None,
        "time_ms": 1_000_000 + number,
        "name": "news",
        "channels": ["room"],
        "size": 2,
        "caller": "key k 127.0.0.1",
        "status": 200,
        "sampled": False,
    }
    return CallRow(**{**values, **fields})


def span_of(trace_id: str, app_id: str, time_ms: int, stage: str, detail: dict, us: int = 0) -> SpanRow:
    return SpanRow(trace_id, app_id, time_ms, stage, detail, time_ms * 1000 + us)


def batch(*calls: CallRow) -> list[CallBatch]:
    return [CallBatch(calls)]


async def numbers(log: EventLog, query: Query | None = None, limit: int = 100, app_id: str = "1") -> list[int]:
    return [int(row.trace_id[12:], 16) for row in (await log.find(app_id, query or Query(), limit)).calls]


async def statements_of(log: EventLog, action) -> list[str]:
    statements: list[str] = []

    def count(connection, cursor, statement, *rest) -> None:
        statements.append(statement)

    sa.event.listen(log._engine.sync_engine, "before_cursor_execute", count)
    await action()
    sa.event.remove(log._engine.sync_engine, "before_cursor_execute", count)
    return statements


async def steps_of(log: EventLog, action) -> int:
    """The steps, in tens, that SQLite's virtual machine takes for it."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    async with log._engine.connect() as connection:
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        await raw.set_progress_handler(count, 10)
    await action()
    return steps
