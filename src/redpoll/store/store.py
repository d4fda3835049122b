"""Opening the record store: the database, its pragmas, its migrations. What is in it: schema.py and apps.py.

One process at a time has it open: the control plane of a running server, or a command while none runs.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import meta
from redpoll.store.sqlite import Sqlite

__all__ = ["Store", "StoreError", "database_url"]

_DIRECTORY_VERSION = "directory_version"


class StoreError(Exception):
    """The store can't be opened. The text is a sentence for the operator."""


def database_url(data_dir: str | Path) -> URL:
    """Where the records are when the operator names no other place: an SQLite file in the data folder."""
    return URL.create("sqlite+aiosqlite", database=str(Path(data_dir) / "redpoll.sqlite"))


class Store:
    """An open record store. Made by `open`; everything is written inside `change`."""

    def __init__(self, database: Sqlite) -> None:
        self._database = database
        self._engine = database.engine
        self._changing = asyncio.Lock()

    @classmethod
    async def open(cls, url: URL) -> "Store":
        """Connects and brings the schema up to date. Raises StoreError."""
        # FULL: what a command has confirmed outlives a power loss too; records change rarely: it costs little.
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")
        database = Sqlite(url, *pragmas)
        try:
            async with database.engine.begin() as connection:
                await connection.run_sync(_migrate)
                await _make_version(connection)
        except CommandError as error:
            await database.close()
            raise StoreError(f"{url.database} was written by another version of redpoll: {error}") from error
        except sa.exc.SQLAlchemyError as error:
            await database.close()
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"the record store {url.database} can't be opened: {cause}") from error
        return cls(database)

    async def close(self) -> None:
        await self._database.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection whose reads agree with each other."""
        async with self._engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: all of it is on disk when the block is left, none of it when the block raises.

        One at a time, which is all that SQLite has: who waits here goes on in the moment that it may, who waits there
        sleeps. So none may be begun inside another.
        """
        async with self._changing, self._engine.begin() as connection:
            yield connection


async def directory_version(connection: AsyncConnection) -> int:
    """The version of what the directory in Redis should hold (cluster.md 7)."""
    row = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _DIRECTORY_VERSION))
    return int(row.scalar_one())


async def raise_directory_version(connection: AsyncConnection) -> int:
    """One more, in the transaction of the change that it counts. Returns the new version."""
    version = await directory_version(connection) + 1
    await connection.execute(sa.update(meta).where(meta.c.name == _DIRECTORY_VERSION).values(value=str(version)))
    return version


async def _make_version(connection: AsyncConnection) -> None:
    known = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _DIRECTORY_VERSION))
    if known.first() is None:
        # Begins with the time in ms, not with 1: beside a Redis that still holds the directory of a store
        # since deleted, a low number could be taken for that store's.
        first = str(time.time_ns() // 1_000_000)
        await connection.execute(sa.insert(meta).values(name=_DIRECTORY_VERSION, value=first))


def _migrate(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "redpoll:store/migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
