"""SQLite with SQLAlchemy: an engine whose connections are closed cleanly, also when the task that uses one is
cancelled."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

import aiosqlite
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from redpoll.store.errors import StoreUnavailable, reason_of

__all__ = ["Sqlite", "finish_restore", "opened_or_new", "reason_of", "restoring"]

log = structlog.get_logger(__name__)

_File = TypeVar("_File")
# Primary result codes of a file that can't be used at present.
_UNAVAILABLE: Final = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}


class _Connection(aiosqlite.Connection):
    """An aiosqlite connection that may be stopped while a task uses it, and twice.

    If a task is cancelled and then cancelled again while its connection is being closed, SQLAlchemy stops the
    connection too. Without this class, the close would wait forever for a thread that has ended. `stopped` is done when
    the thread no longer uses the loop; the thread then has closed the file, which rolls back.
    """

    stopped: asyncio.Future[Any] | None = None

    def stop(self) -> asyncio.Future[Any] | None:
        if self.stopped is None:
            self.stopped = super().stop()
        return self.stopped

    def end(self) -> asyncio.Future[Any] | None:
        """Stops it, also in use. Returns `stopped`; None if its thread has not begun."""
        return self.stop() if self.stopped is not None or self._thread.is_alive() else None

    async def rollback(self) -> None:
        if self.stopped is None:
            await super().rollback()

    async def close(self) -> None:
        if self.stopped is None:
            await super().close()
        else:
            await asyncio.wait((self.stopped,))


class Sqlite:
    """An SQLite file and its engine. `pragmas` are set on each connection.

    Every error of the engine is an SQLAlchemyError; it is StoreUnavailable if the file can't be used at present.
    """

    def __init__(self, path: str | Path, *pragmas: str) -> None:
        self._path = str(path)
        self.name = self._path
        self._pragmas = pragmas
        self._connections: WeakSet[_Connection] = WeakSet()
        self.engine: AsyncEngine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=self._path),
            async_creator=self._connect,
            # Errors must not contain parameters: these are secrets and payloads, and errors are logged.
            hide_parameters=True,
        )
        sa.event.listen(self.engine.sync_engine, "connect", self._prepare)
        sa.event.listen(self.engine.sync_engine, "invalidate", _roll_back)
        sa.event.listen(self.engine.sync_engine, "handle_error", _explain)

    def exists(self) -> bool:
        """Whether there is a file. The first connection creates it."""
        return Path(self._path).exists()

    async def close(self) -> None:
        """Closes all connections and waits until their threads no longer use the loop. Statements that still run are
        completed; their tasks get the result, and an error afterwards."""
        await self.engine.dispose()
        # Those of tasks that go on, or that were cancelled and don't wait, are not in the pool.
        stopped = [connection.end() for connection in list(self._connections)]
        await asyncio.gather(*filter(None, stopped), return_exceptions=True)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading. All its reads see the same state of the database."""
        async with self.engine.connect() as connection:
            # sqlite3 begins no transaction for reads by itself.
            await connection.exec_driver_sql("BEGIN")
            yield connection

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction."""
        async with self.engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def migrating(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that creates and changes tables. sqlite3 begins none for such statements by itself."""
        async with self.change() as connection:
            await connection.exec_driver_sql("BEGIN")
            yield connection

    async def make_shrinkable(self, max_bytes: int) -> bool:
        """Rewrites a file that can't give back free pages (`auto_vacuum` 0), if it isn't larger. Returns whether it can
        now. New files can: the pragma does it."""
        async with self.engine.connect() as connection:
            if (await connection.exec_driver_sql("PRAGMA auto_vacuum")).scalar_one():
                return True
            pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
            if pages * (await connection.exec_driver_sql("PRAGMA page_size")).scalar_one() > max_bytes:
                return False
            await connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
            await connection.exec_driver_sql("VACUUM")
            return True

    async def free_pages(self) -> tuple[int, int]:
        """How many pages of the file are free, and how many it has."""
        async with self.engine.connect() as connection:
            free = (await connection.exec_driver_sql("PRAGMA freelist_count")).scalar_one()
            return free, (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()

    async def give_back(self, pages: int) -> None:
        """Shortens the file by up to `pages` free pages. Other writers wait meanwhile."""
        async with self.engine.connect() as connection:
            # Each step of the statement frees a page. Python takes the first one only, because rows have no columns;
            # in a script it takes all.
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await driver.executescript(f"PRAGMA incremental_vacuum({pages})")

    async def checkpoint(self) -> None:
        """Writes the -wal into the file, as far as no reader needs it. Only then does the file become shorter."""
        async with self.engine.connect() as connection:
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _connect(self) -> _Connection:
        # It is opened, used and closed in its own thread, but the garbage collector may close it in another one.
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
            # It isn't in the pool yet, so nothing else would close it and end its thread.
            connection.close()
            raise


async def opened_or_new(path: Path, open_file: Callable[[], Awaitable[_File]]) -> _File:
    """Opens a file that may be lost: one that is damaged or of another version is renamed to `.old`, and a new one is
    made. Raises OSError or SQLAlchemyError if that fails too, and StoreUnavailable for a file that may be in order: on
    a full disk, a new one could not be written either."""
    try:
        return await open_file()
    except sa.exc.DatabaseError as error:
        log.warning("file not readable, a new one begins", file=str(path), kept=f"{path}.old", reason=reason_of(error))
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(path.with_name(path.name + ".old" + suffix))
        return await open_file()


def restoring(database: Path) -> Path:
    """The file that replaces the database when it is opened next. Whoever renames a complete one to this has the
    restore done, whatever happens afterwards."""
    return database.with_name(database.name + ".restoring")


def finish_restore(database: Path) -> bool:
    """Makes the file `restoring`, if there is one, the database, which must not be open. On disk when this returns
    True. Raises OSError; calling it again goes on from there, also after a crash.

    The present one is moved to NAME.before-restore with its -wal, and not copied: it may be damaged.
    """
    new = restoring(database)
    if not new.exists():
        return False
    name = database.name
    moved = {
        database.with_name(name + suffix): database.with_name(f"{name}.before-restore{suffix}")
        for suffix in ("", "-wal", "-shm")
    }
    if database.exists():
        # Otherwise an earlier call has moved it.
        for previous in moved.values():
            previous.unlink(missing_ok=True)
    for present, previous in moved.items():
        if present.exists():
            present.rename(previous)
    os.replace(new, database)
    folder = os.open(database.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True


def _explain(context: ExceptionContext) -> StoreUnavailable | None:
    """Called for each error of a statement. Its result replaces the error."""
    error = context.original_exception
    # The lowest byte; the others say more (SQLite, "Result and Error Codes").
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _UNAVAILABLE:
        return None
    return StoreUnavailable(str(error))


def _roll_back(connection: Any, _record: Any, _error: BaseException | None) -> None:
    """Rolls back a connection before it is closed because its task was cancelled.

    While an object (such as the task's traceback) still refers to a statement, SQLite keeps the connection open with
    its locks, and no other connection could write.
    """
    # ValueError: it is closed already. If this is cancelled, the rollback still happens.
    with suppress(sqlite3.Error, ValueError, asyncio.CancelledError):
        connection.rollback()
