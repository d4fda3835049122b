"""Migrations: what they leave is what a new store has."""

import subprocess
import sys

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from redpoll.store.migrating import migrate, state_of
from redpoll.store.postgres import Postgres
from redpoll.store.schema import NEWEST, create, meta, metadata, revision
from redpoll.store.sqlite import Sqlite


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database(request, tmp_path):
    """The URL of a PostgreSQL database without tables, or the path of an SQLite file that doesn't exist."""
    if request.param == "sqlite":
        return tmp_path / "redpoll.sqlite"
    server = request.getfixturevalue("postgres_server")
    return server.url(server.create_database(empty=True))


@pytest.fixture
async def database(empty_database):
    made = Postgres(empty_database) if isinstance(empty_database, str) else Sqlite(empty_database, "foreign_keys=ON")
    yield made
    await made.close()


async def migrated(database) -> None:
    async with database.migrating() as connection:
        await connection.run_sync(migrate, database.name)


async def test_migrations_end_at_the_schema(database):
    def differences(connection: sa.Connection) -> list:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": other_type}), metadata)

    def other_type(_context, _column, _expected, in_database: sa.types.TypeEngine, in_schema: sa.types.TypeEngine):
        # SQLite doesn't check the length of a text, so migrations don't change it there. None: compare as usual.
        return False if isinstance(in_database, sa.String) and isinstance(in_schema, sa.String) else None

    await migrated(database)
    async with database.reading() as connection:
        assert await connection.run_sync(differences) == []


def contents(connection: sa.Connection) -> dict[str, object]:
    """Everything that the database has: tables with columns, keys and indexes, and the rows of `meta`."""
    inspector = sa.inspect(connection)
    sqlite = connection.dialect.name == "sqlite"
    found: dict[str, object] = {}
    for table in inspector.get_table_names():
        columns = []
        for column in inspector.get_columns(table):
            # SQLite doesn't check the length of a text, so migrations don't change it there.
            kind = "text" if sqlite and isinstance(column["type"], sa.String) else str(column["type"])
            columns.append((column["name"], kind, column["nullable"], column["default"], column.get("autoincrement")))
        found[table] = (
            columns,
            inspector.get_pk_constraint(table),
            sorted(map(repr, inspector.get_foreign_keys(table))),
            sorted(map(repr, inspector.get_unique_constraints(table))),
            sorted(map(repr, inspector.get_indexes(table))),
        )
    rows = {row.name: row.value for row in connection.execute(sa.select(meta))}
    rows["store_id"] = f"{len(rows['store_id'])} characters"
    # Only new stores have a shard key (tests/store/test_shard_key.py).
    del rows["shard_key"], rows["compatible"]
    return {**found, "rows of meta": rows, "last migration": connection.execute(sa.select(revision)).all()}


async def test_a_new_store_is_what_all_migrations_leave(database):
    await migrated(database)
    async with database.reading() as connection:
        expected = await connection.run_sync(contents)
    async with database.engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(revision.drop)
    async with database.migrating() as connection:
        await connection.run_sync(create)
    async with database.reading() as connection:
        assert await connection.run_sync(contents) == expected


async def test_a_creation_that_is_interrupted_leaves_nothing(database):
    def half(connection: sa.Connection) -> None:
        create(connection)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        async with database.migrating() as connection:
            await connection.run_sync(half)
    async with database.reading() as connection:
        assert await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names()) == []


def test_the_newest_migration_is_the_schemas():
    assert state_of(None, "").missing[-1][0] == NEWEST


def test_a_store_of_this_version_is_opened_without_alembic(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from redpoll.store.store import Store, database_url\n"
        "for _ in range(2):\n"
        "    store = asyncio.run(Store.open(database_url(sys.argv[1])))\n"
        "    asyncio.run(store.close())\n"
        "print('alembic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
