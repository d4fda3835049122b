"""Opens the record store: its database, migrations and transactions. schema.py has the tables, the other modules the
queries.

The database is an SQLite file of one server, or PostgreSQL that the control planes of several machines share. Both have
the same tables. Transactions that write run one at a time, on all machines.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store import audit, schema
from redpoll.store.audit import Actor
from redpoll.store.errors import StoreError, StoreUnavailable, reason_of
from redpoll.store.postgres import Postgres
from redpoll.store.schema import changes, meta
from redpoll.store.sqlite import Sqlite, finish_restore

if TYPE_CHECKING:
    from redpoll.store.migrating import Schema

__all__ = [
    "Store",
    "StoreError",
    "Versions",
    "all_follow_from",
    "batched",
    "database_url",
    "has_version",
    "raise_version",
    "schema_of",
    "versions",
]

log = structlog.get_logger(__name__)

_SQLITE: Final = "sqlite:"
_VERSION: Final = "version"
_VERSION_ID: Final = "version_id"
_DIRECTORY_VERSION: Final = "directory_version"
# SQLite and PostgreSQL bound how many values a statement may have.
_IDS_PER_STATEMENT: Final = 1_000
_DIRECTORY_ID: Final = "directory_id"
# How many versions keep their ids. A control plane that is further behind reads all records.
_KEEP_IDS: Final = 1_000
# The file with what was written last is cut to this size when it is empty.
_MAX_JOURNAL_BYTES: Final = 16 * 1024 * 1024
# Pages have 4 kB. What `shrink` leaves free at least, and how much it does at a time and in all.
_FREE_PAGES: Final = 512
_PAGES_AT_ONCE: Final = 256
_SHRINK_STEPS: Final = 40
# Rewriting a file of this size at the start takes a few seconds.
_MAX_REWRITTEN_BYTES: Final = 256 * 1024 * 1024


class Versions(NamedTuple):
    """`records` increases with every change of what control planes keep in memory: apps, keys, tokens, webhooks, and
    with changes of users and their sessions. `directory` increases with every change of what workers read: it is the
    version that the app directory in Redis should have (cluster/README.md "Directory"). The ids are random: after a
    fail-over that lost changes, PostgreSQL uses the numbers again."""

    records: int
    directory: int
    id: str
    directory_id: str


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
    async def open(cls, url: str, *, patient: bool = False) -> "Store":
        """Connects, and creates the tables or migrates them to the newest version. A restore that was begun is finished
        before.

        `url` is `sqlite:PATH` or `postgresql://…`. `patient`: no limits of time for PostgreSQL, for long work while no
        server runs. Raises StoreError, or StoreUnavailable while PostgreSQL can't be reached.
        """
        if url.startswith(_SQLITE):
            try:
                if finish_restore(Path(url.removeprefix(_SQLITE))):
                    log.info("records restored", file=url.removeprefix(_SQLITE))
            except OSError as error:
                raise StoreError(f"the restored records can't be put in place: {error}") from error
        # FULL: a confirmed change survives a power loss. It costs little, because records change rarely.
        # The first must come before anything is written to a new file.
        database = _database(
            url,
            "auto_vacuum=INCREMENTAL",
            "journal_mode=WAL",
            f"journal_size_limit={_MAX_JOURNAL_BYTES}",
            "synchronous=FULL",
            "foreign_keys=ON",
            "busy_timeout=5000",
            patient=patient,
        )
        try:
            async with database.migrating() as connection:
                await connection.run_sync(_prepare, database.name)
                await _init_versions(connection)
            if isinstance(database, Sqlite):
                await _make_shrinkable(database)
        except BaseException as error:
            await database.close()
            if isinstance(error, StoreUnavailable) and isinstance(database, Postgres):
                if error.misconfigured:
                    raise StoreError(str(error)) from None
                raise
            if isinstance(error, sa.exc.SQLAlchemyError):
                raise StoreError(f"the record store {database.name} can't be opened: {reason_of(error)}") from error
            raise
        return cls(database)

    async def close(self) -> None:
        await self._database.close()

    async def shrink(self) -> None:
        """Gives back space of an SQLite file that isn't used, a MB at a time, so that changes wait only for one. A
        quarter of the file may stay free, for what is written next."""
        database = self._database
        if not isinstance(database, Sqlite):
            return
        for step in range(_SHRINK_STEPS + 1):
            free, pages = await database.free_pages()
            if step == _SHRINK_STEPS or free <= max(_FREE_PAGES, pages // 4):
                if step:
                    await database.checkpoint()
                return
            async with self._changing:
                await database.give_back(_PAGES_AT_ONCE)

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
        async with self._changing, self._transaction() as connection:
            # The dictionary stays with the connection when that returns to the pool.
            connection.info.pop(_VERSION, None)
            yield connection
            raised = connection.info.pop(_VERSION, None)
        if raised is not None and self.on_version is not None:
            self.on_version(raised)

    def _transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        if isinstance(self._database, Sqlite):
            return self._database.change()
        return self._database.change(sa.select(meta.c.value).where(meta.c.name == _VERSION).with_for_update())

    async def note(self, by: Actor | None, action: str, app_id: str = "", target: str = "", detail: str = "") -> None:
        """Adds an entry to the audit log about something that changes no record."""
        async with self.change() as connection:
            await audit.add(connection, by, action, app_id, target, detail)

    async def note_done(
        self, by: Actor | None, action: str, app_id: str = "", target: str = "", detail: str = ""
    ) -> None:
        """As `note`, about something that is done already. If the store is away, the process' log has the entry: an
        error would make people do it again."""
        try:
            await self.note(by, action, app_id, target, detail)
        except sa.exc.SQLAlchemyError as error:
            entry = {"who": by and by.who, "action": action, "app": app_id, "target": target, "detail": detail}
            log.error("not in the audit log", **entry, reason=reason_of(error))


async def versions(connection: AsyncConnection) -> Versions:
    """The present versions."""
    names = (_VERSION, _DIRECTORY_VERSION, _VERSION_ID, _DIRECTORY_ID)
    rows = await connection.execute(sa.select(meta).where(meta.c.name.in_(names)))
    values = {row.name: row.value for row in rows}
    return Versions(int(values[_VERSION]), int(values[_DIRECTORY_VERSION]), values[_VERSION_ID], values[_DIRECTORY_ID])


async def has_version(connection: AsyncConnection, known: Versions) -> bool:
    """Whether the present state was made from this one, so that rows with a greater version are all that changed."""
    result = await connection.execute(sa.select(changes.c.id).where(changes.c.version == known.records))
    return bool(result.scalar_one_or_none() == known.id)


def all_follow_from(stored: Versions) -> int:
    """The greatest version that every control plane has read, or will read past: one that is further behind reads all
    records again (`has_version`)."""
    return stored.records - _KEEP_IDS


async def raise_version(
    connection: AsyncConnection,
    *,
    apps: Collection[str] = (),
    tokens: Collection[str] = (),
    webhooks: Collection[str] = (),
    for_workers: bool = False,
) -> Versions:
    """Increases the version, in the same transaction as the change of the records. Returns the new versions.

    The arguments say what changed: apps or their keys, tokens and webhooks by id. `for_workers`: the directory changes
    too.
    """
    before = await versions(connection)
    new_id = secrets.token_hex(8)
    directory_id = new_id if for_workers else before.directory_id
    after = Versions(before.records + 1, before.directory + for_workers, new_id, directory_id)
    await _put(connection, _VERSION, str(after.records))
    await _put(connection, _VERSION_ID, new_id)
    if for_workers:
        await _put(connection, _DIRECTORY_VERSION, str(after.directory))
        await _put(connection, _DIRECTORY_ID, new_id)
    await connection.execute(sa.insert(changes).values(version=after.records, id=new_id))
    await connection.execute(sa.delete(changes).where(changes.c.version <= after.records - _KEEP_IDS))
    for table, ids in ((schema.apps, apps), (schema.tokens, tokens), (schema.webhooks, webhooks)):
        for some in batched(ids):
            await connection.execute(sa.update(table).where(table.c.id.in_(some)).values(version=after.records))
    connection.info[_VERSION] = after.records
    return after


def batched(ids: Collection[str]) -> Iterator[list[str]]:
    """The ids in lists that one statement may name: databases bound the number of its values."""
    listed = list(ids)
    for at in range(0, len(listed), _IDS_PER_STATEMENT):
        yield listed[at : at + _IDS_PER_STATEMENT]


async def _make_shrinkable(database: Sqlite) -> None:
    """For files of earlier redpolls. Without it everything works, but the file never becomes smaller."""
    try:
        if not await database.make_shrinkable(_MAX_REWRITTEN_BYTES):
            log.warning("the record store's file can't shrink; see Backup in the manual", file=database.name)
    except (OSError, sa.exc.SQLAlchemyError) as error:
        # No space on the disk, or another process reads it.
        log.warning("the record store's file can't shrink yet", file=database.name, reason=reason_of(error))


async def _put(connection: AsyncConnection, name: str, value: str) -> None:
    await connection.execute(sa.update(meta).where(meta.c.name == name).values(value=value))


async def _init_versions(connection: AsyncConnection) -> None:
    stored = set((await connection.execute(sa.select(meta.c.name))).scalars())
    for name in (_VERSION, _DIRECTORY_VERSION):
        if name not in stored:
            # Start with the time in ms, not with 1. Redis may still have the directory of a deleted store, and must not
            # take a lower version of the new store for an old one.
            first = str(time.time_ns() // 1_000_000)
            await connection.execute(sa.insert(meta).values(name=name, value=first))
    for name in (_VERSION_ID, _DIRECTORY_ID):
        if name not in stored:
            await connection.execute(sa.insert(meta).values(name=name, value=secrets.token_hex(8)))
    if _VERSION_ID not in stored:
        present = await versions(connection)
        await connection.execute(sa.insert(changes).values(version=present.records, id=present.id))


def _database(url: str, *pragmas: str, patient: bool = False) -> Sqlite | Postgres:
    """The database of a URL, not connected yet. `pragmas` are for SQLite, `patient` is for PostgreSQL."""
    if url.startswith(_SQLITE):
        return Sqlite(url.removeprefix(_SQLITE), *pragmas)
    return Postgres(url, patient=patient)


async def schema_of(url: str) -> "Schema":
    """Which migrations the database has had. Changes nothing, and doesn't create an SQLite file.

    Raises StoreError, or StoreUnavailable while PostgreSQL can't be reached.
    """
    from redpoll.store.migrating import state_of

    database = _database(url)
    if isinstance(database, Sqlite) and not database.exists():
        return state_of(None, database.name)
    try:
        async with database.reading() as connection:
            return await connection.run_sync(state_of, database.name)
    except sa.exc.SQLAlchemyError as error:
        if isinstance(error, StoreUnavailable) and isinstance(database, Postgres):
            raise
        raise StoreError(f"the record store {database.name} can't be read: {reason_of(error)}") from error
    finally:
        await database.close()


def _prepare(connection: sa.Connection, database: str) -> None:
    """Creates the tables of a new store, and migrates an older one. Raises StoreError if a newer redpoll has migrated
    it, and this one doesn't understand it."""
    if not sa.inspect(connection).has_table(schema.revision.name):
        schema.create(connection)
    elif connection.execute(sa.select(schema.revision)).scalar() != schema.NEWEST:
        from redpoll.store.migrating import migrate

        migrate(connection, database)
