"""Opens the record store: its database, pragmas and migrations. schema.py has the tables, the other modules the
queries.

Only one process at a time has it open: the control plane of a running server, or a command while no server runs.
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
    """The default database: an SQLite file in the data folder."""
    return URL.create("sqlite+aiosqlite", database=str(Path(data_dir) / "redpoll.sqlite"))


class Store:
    """An open record store, created by `open`. Everything is written inside `change`."""

    def __init__(self, database: Sqlite) -> None:
        self._database = database
        self._engine = database.engine
        self._changing = asyncio.Lock()

    @classmethod
    async def open(cls, url: URL) -> "Store":
        """Connects and migrates the schema to the newest version. Raises StoreError."""
        # FULL: a confirmed change survives a power loss. It costs little, because records change rarely.
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")
        database = Sqlite(url, *pragmas)
        try:
            async with database.engine.begin() as connection:
                await connection.run_sync(_migrate)
                await _init_directory_version(connection)
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
        """A connection for reading. All its reads see the same state of the database."""
        async with self._engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction. It is on disk when the block ends, and rolled back if the block raises.

        Only one runs at a time, because SQLite has one writer. Waiting for our own lock ends at once when it is free,
        while SQLite's busy handler sleeps. Don't nest changes: the inner one would wait forever.
        """
        async with self._changing, self._engine.begin() as connection:
            yield connection


async def directory_version(connection: AsyncConnection) -> int:
    """The version that the app directory in Redis should have (cluster/README.md "Directory")."""
    row = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _DIRECTORY_VERSION))
    return int(row.scalar_one())


async def raise_directory_version(connection: AsyncConnection) -> int:
    """Increases the version, in the same transaction as the change of the records. Returns the new version."""
    version = await directory_version(connection) + 1
    await connection.execute(sa.update(meta).where(meta.c.name == _DIRECTORY_VERSION).values(value=str(version)))
    return version


async def _init_directory_version(connection: AsyncConnection) -> None:
    stored = await connection.execute(sa.select(meta.c.value).where(meta.c.name == _DIRECTORY_VERSION))
    if stored.first() is None:
        # Start with the time in ms, not with 1. Redis may still have the directory of a deleted store, and must not
        # take a lower version of the new store for an old one.
        first = str(time.time_ns() // 1_000_000)
        await connection.execute(sa.insert(meta).values(name=_DIRECTORY_VERSION, value=first))


def _migrate(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "redpoll:store/migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
