"""Opens the record store: its database, migrations and transactions. schema.py has the tables, the other modules the
queries.

The database is an SQLite file of one server, or PostgreSQL that the control planes of several machines share. Both have
the same tables. Transactions that write run one at a time, on all machines.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll import __version__
from redpoll.store import schema
from redpoll.store.errors import StoreError, StoreUnavailable
from redpoll.store.postgres import Postgres
from redpoll.store.schema import meta
from redpoll.store.sqlite import Sqlite

__all__ = ["Store", "StoreError", "Versions", "database_url", "raise_version", "versions"]

_SQLITE: Final = "sqlite:"
_VERSION: Final = "version"
_DIRECTORY_VERSION: Final = "directory_version"
# The first migration whose redpoll may use a store that this redpoll has migrated. Raise it when a migration removes
# something, or adds what every writer must maintain (store/README.md "Migrations").
_COMPATIBLE: Final = "0007"


class Versions(NamedTuple):
    """`records` increases with every change of what control planes keep in memory: apps, keys, tokens, webhooks, and
    with changes of users and their sessions. `directory` increases with every change of what workers read: it is the
    version that the app directory in Redis should have (cluster/README.md "Directory")."""

    records: int
    directory: int


def database_url(data_dir: str | Path, setting: str = "") -> str:
    """The database of a server: the one that `setting` names (`postgresql://…`), else an SQLite file in the data
    folder, as `sqlite:PATH`."""
    return setting or f"{_SQLITE}{Path(data_dir) / 'redpoll.sqlite'}"


class Store:
    """An open record store, created by `open`. Everything is written inside `change`.

    `shared`: other processes may have it open too. `name` describes the database without credentials.
    `on_version(version)` is called after each commit of a change that has increased `Versions.records`.
    """

    def __init__(self, database: Sqlite | Postgres) -> None:
        self.name = database.name
        self.shared = isinstance(database, Postgres)
        self._database = database
        self.on_version: Callable[[int], None] | None = None
        self._changing = asyncio.Lock()

    @classmethod
    async def open(cls, url: str) -> "Store":
        """Connects and migrates the schema to the newest version.

        `url` is `sqlite:PATH` or `postgresql://…`. Raises StoreError, or StoreUnavailable while PostgreSQL can't be
        reached.
        """
        database: Sqlite | Postgres
        if url.startswith(_SQLITE):
            # FULL: a confirmed change survives a power loss. It costs little, because records change rarely.
            pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000")
            database = Sqlite(url.removeprefix(_SQLITE), *pragmas)
        else:
            database = Postgres(url)
        try:
            async with database.migrating() as connection:
                await connection.run_sync(_migrate, database.name)
                await _init_versions(connection)
        except StoreUnavailable as error:
            await database.close()
            if error.misconfigured:
                raise StoreError(str(error)) from None
            raise
        except sa.exc.SQLAlchemyError as error:
            await database.close()
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"the record store {database.name} can't be opened: {cause}") from error
        except BaseException:
            await database.close()
            raise
        return cls(database)

    async def close(self) -> None:
        await self._database.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading. All its reads see the same state of the database."""
        async with self._database.reading() as connection:
            yield connection

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction. It is on disk when the block ends, and rolled back if the block raises.

        Only one runs at a time, in all processes, so versions follow the order of commits, and what is read here can't
        change before the commit. SQLite has one writer anyway; in PostgreSQL the row of the version is locked. Within
        this process our own lock makes that a queue, because SQLite's busy handler sleeps. Don't nest changes: the
        inner one would wait forever.
        """
        async with self._changing, self._database.change() as connection:
            if self.shared:
                await connection.execute(sa.select(meta.c.value).where(meta.c.name == _VERSION).with_for_update())
            # The dictionary stays with the connection when that returns to the pool.
            connection.info.pop(_VERSION, None)
            yield connection
            raised = connection.info.pop(_VERSION, None)
        if raised is not None and self.on_version is not None:
            self.on_version(raised)


async def versions(connection: AsyncConnection) -> Versions:
    """The present versions."""
    rows = await connection.execute(sa.select(meta).where(meta.c.name.in_((_VERSION, _DIRECTORY_VERSION))))
    found = {row.name: int(row.value) for row in rows}
    return Versions(found[_VERSION], found[_DIRECTORY_VERSION])


async def raise_version(
    connection: AsyncConnection,
    *,
    app_id: str = "",
    tokens: Collection[str] = (),
    webhooks: Collection[str] = (),
    for_workers: bool = False,
) -> Versions:
    """Increases the version, in the same transaction as the change of the records. Returns the new versions.

    The arguments say what changed: an app or its keys, tokens and webhooks by id. `for_workers`: the directory changes
    too.
    """
    before = await versions(connection)
    after = Versions(before.records + 1, before.directory + for_workers)
    await _put(connection, _VERSION, after.records)
    if for_workers:
        await _put(connection, _DIRECTORY_VERSION, after.directory)
    for table, ids in ((schema.apps, (app_id,)), (schema.tokens, tokens), (schema.webhooks, webhooks)):
        changed = [one for one in ids if one]
        if changed:
            await connection.execute(sa.update(table).where(table.c.id.in_(changed)).values(version=after.records))
    connection.info[_VERSION] = after.records
    return after


async def _put(connection: AsyncConnection, name: str, version: int) -> None:
    await connection.execute(sa.update(meta).where(meta.c.name == name).values(value=str(version)))


async def _init_versions(connection: AsyncConnection) -> None:
    stored = set((await connection.execute(sa.select(meta.c.name))).scalars())
    for name in (_VERSION, _DIRECTORY_VERSION):
        if name not in stored:
            # Start with the time in ms, not with 1. Redis may still have the directory of a deleted store, and must not
            # take a lower version of the new store for an old one.
            first = str(time.time_ns() // 1_000_000)
            await connection.execute(sa.insert(meta).values(name=name, value=first))


def _migrate(connection: sa.Connection, database: str) -> None:
    """Runs the migrations that the store lacks. Raises StoreError if a newer redpoll has migrated it, and this one
    doesn't understand it."""
    config = Config()
    config.set_main_option("script_location", "redpoll:store/migrations")
    config.attributes["connection"] = connection
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in known:
        stated = {row.name: row.value for row in connection.execute(sa.select(meta))}
        if stated.get("compatible", revision) <= known[0]:
            return
        raise StoreError(
            f"the record store {database} was migrated by redpoll {stated.get('migrated_by', '(unknown version)')} "
            f"(revision {revision}), and this redpoll {__version__} (revision {known[0]}) doesn't understand it; "
            "install the newer one"
        )
    if revision == known[0]:
        return
    command.upgrade(config, "head")
    facts = {"compatible": _COMPATIBLE, "migrated_by": __version__}
    connection.execute(sa.delete(meta).where(meta.c.name.in_(facts)))
    connection.execute(sa.insert(meta), [{"name": name, "value": value} for name, value in facts.items()])
