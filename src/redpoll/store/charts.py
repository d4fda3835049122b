"""What the dashboard's charts show and what each app used, kept over restarts: `charts.sqlite` in the data folder.

Points are averages over a step (two minutes, a quarter of an hour) of the server and of each app; days count what an
app used on a UTC day. Like the event log, the file makes no strong promises: nothing waits for the disk, and an
unreadable file is renamed to `.old`. control/dashboard/averages.py and control/observe/usage.py fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import sqlalchemy as sa

from redpoll.store.sqlite import Sqlite, opened_or_new

__all__ = ["FIRST", "KEEP_DAYS", "KEEP_S", "Charts", "Day", "Point", "Position"]

# An app and a day: a place among the days, which are sorted by both.
Position = tuple[str, str]
# Before all days.
FIRST: Final[Position] = ("", "")

# Seconds for which points of a step are kept: what a chart of a day and of a week shows, and a little more.
KEEP_S: Final = {120: 90_000, 900: 700_000}
# Days that are kept.
KEEP_DAYS: Final = 400
# Increased with every change of the tables. An older file is started again.
_VERSION: Final = 1
_TABLES: Final = (
    # `app_id` is "" for the whole server. `row` is a JSON array of numbers and nulls.
    "CREATE TABLE points (step_s INTEGER NOT NULL, app_id TEXT NOT NULL, time_s INTEGER NOT NULL, row TEXT NOT NULL, "
    "PRIMARY KEY (step_s, app_id, time_s)) WITHOUT ROWID",
    "CREATE TABLE days (app_id TEXT NOT NULL, day TEXT NOT NULL, peak_connections INTEGER NOT NULL, "
    "published INTEGER NOT NULL, client_events INTEGER NOT NULL, sent INTEGER NOT NULL, "
    "PRIMARY KEY (app_id, day)) WITHOUT ROWID",
)
_ADD_DAY: Final = (
    "INSERT INTO days VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "peak_connections = MAX(peak_connections, excluded.peak_connections), published = published + excluded.published, "
    "client_events = client_events + excluded.client_events, sent = sent + excluded.sent"
)
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode
_decode: Final = msgspec.json.Decoder(list[float | None]).decode


class Point(NamedTuple):
    """The averages of one step, which began at this Unix time. `app_id` "": of the whole server."""

    step_s: int
    app_id: str
    time_s: int
    row: Sequence[float | None]


class Day(NamedTuple):
    """What an app used on a day (`YYYY-MM-DD`, UTC). `published` counts events published over HTTP, `client_events`
    those of clients, `sent` what was sent to clients, counted per socket."""

    app_id: str
    day: str
    peak_connections: int
    published: int
    client_events: int
    sent: int


class Charts:
    """The open file, created by `open`."""

    def __init__(self, database: Sqlite) -> None:
        self._database = database
        self._engine = database.engine

    @classmethod
    async def open(cls, path: Path) -> Charts:
        """Opens the file. One that is damaged or of another version is renamed to `.old`, and a new one is made.

        Raises OSError or sqlalchemy.exc.SQLAlchemyError if that fails too.
        """
        return await opened_or_new(path, lambda: cls._open(path))

    @classmethod
    async def _open(cls, path: Path) -> Charts:
        database = Sqlite(path, "journal_mode=WAL", "synchronous=OFF", "busy_timeout=5000")
        try:
            async with database.engine.begin() as connection:
                version = (await connection.exec_driver_sql("PRAGMA user_version")).scalar_one()
                if version not in (0, _VERSION):
                    raise sa.exc.DatabaseError("PRAGMA user_version", None, ValueError(f"version {version}"))
                if not version:
                    for table in _TABLES:
                        await connection.exec_driver_sql(table)
                    await connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            await database.close()
            raise
        return cls(database)

    async def close(self) -> None:
        await self._database.close()

    async def add(self, points: Iterable[Point] = (), days: Iterable[Day] = ()) -> None:
        """Writes points, and adds to days, in one transaction. Raises SQLAlchemyError."""
        rows = [(point.step_s, point.app_id, point.time_s, _encode(point.row).decode()) for point in points]
        used = [tuple(day) for day in days]
        async with self._engine.begin() as connection:
            if rows:
                await connection.exec_driver_sql("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", rows)
            if used:
                await connection.exec_driver_sql(_ADD_DAY, used)

    async def points(self, step_s: int, app_id: str, since_s: float) -> list[Point]:
        """The points of one series that began at `since_s` or later, oldest first."""
        text = "SELECT time_s, row FROM points WHERE step_s = ? AND app_id = ? AND time_s >= ? ORDER BY time_s"
        async with self._engine.connect() as connection:
            rows = (await connection.exec_driver_sql(text, (step_s, app_id, since_s))).all()
        return [Point(step_s, app_id, row.time_s, _decode(row.row)) for row in rows]

    async def days(
        self, since_day: str, app_id: str | None = None, *, after: Position = FIRST, limit: int = -1
    ) -> list[Day]:
        """The days from `since_day` on, of all apps or of one, by app and day: the first `limit` that come after
        `after`; -1 for all."""
        where = "(app_id, day) > (?, ?) AND day >= ?"
        values: tuple[str | int, ...] = (*after, since_day)
        if app_id is not None:
            where, values = (f"{where} AND app_id = ?", (*values, app_id))
        text = f"SELECT * FROM days WHERE {where} ORDER BY app_id, day LIMIT ?"
        async with self._engine.connect() as connection:
            rows = await connection.exec_driver_sql(text, (*values, limit))
            return [Day._make(row) for row in rows]

    async def prune(self, now_s: float, oldest_day: str) -> None:
        """Removes points that no chart shows any more, and days before `oldest_day`."""
        async with self._engine.begin() as connection:
            for step_s, keep_s in KEEP_S.items():
                values = (step_s, now_s - keep_s)
                await connection.exec_driver_sql("DELETE FROM points WHERE step_s = ? AND time_s < ?", values)
            await connection.exec_driver_sql("DELETE FROM days WHERE day < ?", (oldest_day,))
