"""Opening the record store, migrations, versions, transactions and errors."""

import asyncio
import contextlib
import os
import sqlite3
import threading

import pytest
import sqlalchemy as sa

from redpoll.store import apps as app_rows
from redpoll.store import tokens as token_rows
from redpoll.store.schema import apps, meta, metadata
from redpoll.store.store import Store, StoreError, database_url, raise_version, versions


@pytest.fixture
async def sqlite_store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    yield opened
    await opened.close()


async def test_connections_use_wal_full_sync_and_foreign_keys(sqlite_store):
    async with sqlite_store.reading() as connection:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert (await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar_one() == value


async def test_version_increases_with_each_change_and_survives_reopening(store, store_url):
    async with store.change() as connection:
        first = (await versions(connection)).directory
        assert (await raise_version(connection, for_workers=True)).directory == first + 1
    await store.close()
    again = await Store.open(store_url)
    async with again.reading() as connection:
        assert (await versions(connection)).directory == first + 1
    await again.close()


async def test_reading_sees_one_state_during_the_changes_of_others(store):
    async with store.reading() as connection:
        before = (await versions(connection)).directory
        async with store.change() as other:
            await raise_version(other, for_workers=True)
        assert (await versions(connection)).directory == before
    async with store.reading() as connection:
        assert (await versions(connection)).directory == before + 1


async def test_new_store_starts_with_a_higher_version_than_a_deleted_one(sqlite_store, tmp_path):
    async with sqlite_store.change() as connection:
        before = (await raise_version(connection, for_workers=True)).directory
    await sqlite_store.close()
    os.unlink(tmp_path / "redpoll.sqlite")
    # Versions start with the time in ms, so this needs at most one new store per ms.
    again = await Store.open(database_url(tmp_path))
    async with again.reading() as connection:
        assert (await versions(connection)).directory > before
    await again.close()


async def test_failed_change_is_rolled_back(store):
    async def fail_half_way() -> None:
        async with store.change() as connection:
            await connection.execute(sa.insert(meta).values(name="x", value="1"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail_half_way()
    async with store.reading() as connection:
        assert (await connection.execute(sa.select(meta).where(meta.c.name == "x"))).first() is None


async def test_store_of_the_first_version_is_upgraded_and_keeps_its_rows(sqlite_store, tmp_path):
    await sqlite_store.close()
    later = [name for name in metadata.tables if name not in ("meta", "apps", "keys")]
    with sqlite3.connect(tmp_path / "redpoll.sqlite") as connection:
        # As migration 0001 left it.
        connection.executescript(
            "".join(f"DROP TABLE {name};" for name in later)
            + "DROP INDEX apps_by_version; ALTER TABLE apps DROP COLUMN version; DELETE FROM meta;"
            "ALTER TABLE apps DROP COLUMN deleted_at;"
            "INSERT INTO meta VALUES ('directory_version', '5'); UPDATE alembic_version SET version_num = '0001';"
            "INSERT INTO apps VALUES ('7', 'old', '{}');"
            "INSERT INTO keys (key, secret, app_id, enabled, given) VALUES ('k', 's', '7', 1, 0);"
        )
    connection.close()
    again = await Store.open(database_url(tmp_path))
    async with again.reading() as connection:
        (app,) = (await app_rows.all_by_id(connection)).values()
        assert (app.id, app.name, app.secret_of("k")) == ("7", "old", "s")
        assert await token_rows.all_by_hash(connection) == {}
    await again.close()


async def test_changes_wait_for_each_other(store):
    async with store.change() as connection:
        await raise_version(connection, for_workers=True)
        other = asyncio.create_task(raise_once(store))
        await asyncio.sleep(0)
        # No other change runs until this one ends, so the version that it reads stays valid.
        before = (await versions(connection)).directory
        await raise_version(connection, for_workers=True)
    assert await other == before + 2


async def raise_once(store):
    async with store.change() as connection:
        return (await raise_version(connection, for_workers=True)).directory


async def test_change_cancelled_at_any_moment_leaves_no_lock(store):
    async def change() -> None:
        async with store.change() as connection:
            await connection.execute(sa.insert(meta), [{"name": f"{number}", "value": "x"} for number in range(300)])
            await connection.execute(sa.update(meta).where(meta.c.name == "0").values(value="y"))
            raise RuntimeError

    # The list keeps the tasks, and with them tracebacks that refer to statements of the change.
    changes = []
    for moment in range(60):
        changes.append(asyncio.create_task(change()))
        await asyncio.sleep(moment * 0.00005)
        changes[-1].cancel()
        await asyncio.gather(changes[-1], return_exceptions=True)
        await asyncio.wait_for(raise_once(store), 60)


async def pretend_newer(store: Store, compatible: str) -> None:
    """What a redpoll with the migration 9999 leaves."""
    async with store.change() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        await connection.execute(sa.update(meta).where(meta.c.name == "compatible").values(value=compatible))
        await connection.execute(sa.update(meta).where(meta.c.name == "migrated_by").values(value="7.5.0"))
    await store.close()


async def test_store_of_a_newer_redpoll_is_refused(store, store_url):
    await pretend_newer(store, compatible="9998")
    with pytest.raises(StoreError, match=r"migrated by redpoll 7\.5\.0 \(revision 9999\), and this redpoll"):
        await Store.open(store_url)


async def test_store_of_a_newer_redpoll_is_used_if_it_is_compatible(store, store_url):
    await pretend_newer(store, compatible="0001")
    again = await Store.open(store_url)
    async with again.reading() as connection:
        assert (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).scalar_one() == "9999"
        assert (await versions(connection)).directory > 0
    await again.close()


async def test_text_may_contain_nul(store):
    """PostgreSQL can't store NUL; a client's user id may contain it."""
    async with store.change() as connection:
        await connection.execute(sa.insert(apps).values(id="1", name="a\0b", settings="{}"))
        name = (await connection.execute(sa.select(apps.c.name))).scalar_one()
    assert name == "a\ufffdb"


async def test_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "redpoll.sqlite").write_text("hello " * 1000)
    with pytest.raises(StoreError, match="can't be opened: file is not a database"):
        await Store.open(database_url(tmp_path))


async def test_missing_folder_is_refused(tmp_path, wait_until):
    threads = threading.active_count()
    with pytest.raises(StoreError, match="can't be opened: unable to open database file"):
        await Store.open(database_url(tmp_path / "none"))
    # aiosqlite doesn't wait for the thread of a connection that failed. The thread must not outlive the loop.
    await wait_until(lambda: threading.active_count() <= threads)


async def fill_and_empty(store):
    rows = [{"name": f"x{number}", "value": "y" * 3_000} for number in range(10_000)]
    async with store.change() as connection:
        await connection.execute(sa.insert(meta), rows)
    async with store.change() as connection:
        await connection.execute(sa.delete(meta).where(meta.c.name.like("x%")))


async def test_file_becomes_smaller_after_much_was_deleted(sqlite_store, tmp_path):
    await fill_and_empty(sqlite_store)
    await sqlite_store.shrink()
    free, pages = await sqlite_store._database.free_pages()
    assert free * 4096 < 4_000_000
    assert pages * 4096 < 5_000_000
    assert (tmp_path / "redpoll.sqlite").stat().st_size < 5_000_000


async def test_file_of_an_earlier_redpoll_becomes_smaller_too(sqlite_store, tmp_path):
    path = tmp_path / "redpoll.sqlite"
    await fill_and_empty(sqlite_store)
    await sqlite_store.close()
    # As it was made before: without room for the lists that moving pages needs.
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA auto_vacuum=NONE")
        connection.execute("VACUUM")
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    again = await Store.open(database_url(tmp_path))
    await fill_and_empty(again)
    await again.shrink()
    assert path.stat().st_size < 5_000_000
    await again.close()
