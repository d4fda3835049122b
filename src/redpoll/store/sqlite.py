"""SQLite under SQLAlchemy: connections that end well, whatever becomes of who uses them."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import aiosqlite
import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

__all__ = ["Sqlite", "reason_of"]


def reason_of(error: Exception) -> str:
    """What the database said (`database is locked`), without the statement that it said it of."""
    return str(getattr(error, "orig", None) or error)


class _Connection(aiosqlite.Connection):
    """May be stopped twice. When its user is cancelled, and again while it is closed for that, SQLAlchemy stops it as
    well; the close would then wait for ever for a thread that has ended.

    `stopped` is done when that thread asks nothing of the loop any more.
    """

    stopped: asyncio.Future[Any] | None = None

    def stop(self) -> asyncio.Future[Any] | None:
        if self.stopped is None:
            self.stopped = super().stop()
        return self.stopped


class Sqlite:
    """A file with an engine on it; the pragmas are set on each of its connections."""

    def __init__(self, url: URL, *pragmas: str) -> None:
        self._path = str(url.database)
        self._pragmas = pragmas
        self._connections: WeakSet[_Connection] = WeakSet()
        self.engine: AsyncEngine = create_async_engine(
            url,
            async_creator=self._connect,
            # An error would tell them: secrets and payloads, which no log may have.
            hide_parameters=True,
        )
        sa.event.listen(self.engine.sync_engine, "connect", self._prepare)
        sa.event.listen(self.engine.sync_engine, "invalidate", _roll_back)

    async def close(self) -> None:
        """Returns when no thread of it will answer to the loop any more."""
        await self.engine.dispose()
        ending = [each.stopped for each in self._connections if each.stopped is not None]
        await asyncio.gather(*ending, return_exceptions=True)

    def _connect(self) -> _Connection:
        # Made, used and closed in a thread of its own, except where the garbage collector closes it.
        connection = _Connection(lambda: sqlite3.connect(self._path, check_same_thread=False), iter_chunk_size=64)
        connection._thread.daemon = True
        self._connections.add(connection)
        return connection

    def _prepare(self, connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        try:
            for pragma in self._pragmas:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()
        except Exception:
            # It isn't in the pool yet: nobody else would close it, and its thread would stay.
            connection.close()
            raise


def _roll_back(connection: Any, _record: Any, _error: BaseException | None) -> None:
    """A connection whose user was cancelled is closed; but while something holds a statement of it, as that user's
    traceback does, SQLite keeps it and its locks, and nobody can write."""
    # ValueError: it was closed before. Cancelled again, it is rolled back all the same, and is still to be closed.
    with suppress(sqlite3.Error, ValueError, asyncio.CancelledError):
        connection.rollback()
