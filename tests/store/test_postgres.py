"""PostgreSQL as record store: errors without secrets, lost connections, transactions of several processes."""

import asyncio
import traceback

import asyncpg
import pytest
import sqlalchemy as sa

from redpoll.store.errors import StoreError, StoreUnavailable, reason_of
from redpoll.store.postgres import described
from redpoll.store.schema import apps, keys, meta
from redpoll.store.store import Store, raise_version, versions

PASSWORD = "s3cr3t"


@pytest.fixture
async def store(postgres_url):
    opened = await Store.open(postgres_url)
    yield opened
    await opened.close()


async def change(store: Store, *statements: sa.Executable) -> None:
    async with store.change() as connection:
        for statement in statements:
            await connection.execute(statement)


def test_description_of_a_database_has_no_credentials():
    url = "postgresql://redpoll:secret@db1:5433,db2/records?sslmode=require&password=secret"
    assert described(url) == "PostgreSQL at db1:5433,db2/records"
    assert described("postgresql://redpoll:secret@/records?host=%2Frun%2Fpg") == "PostgreSQL at /run/pg/records"
    assert described("postgresql://redpoll:12/secret@db1/records") == "PostgreSQL at db1/records"


async def test_unreachable_database_is_unavailable(tmp_path):
    url = f"postgresql://redpoll:{PASSWORD}@/records?host={tmp_path}"
    with pytest.raises(StoreUnavailable, match="can't be reached") as caught:
        await Store.open(url)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        (f"postgresql://redpoll:{PASSWORD}/more@db/records", {}),
        ("postgresql://redpoll@127.0.0.1/records", {"PGPORT": PASSWORD}),
    ],
)
async def test_values_that_the_driver_cant_read_are_an_error_of_the_settings(monkeypatch, url, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="can't be used") as caught:
        await Store.open(url)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


async def test_missing_database_is_an_error_of_the_settings(postgres_server):
    with pytest.raises(StoreError, match='database "missing" does not exist'):
        await Store.open(postgres_server.url("missing"))


async def test_errors_contain_no_values_of_rows(store):
    row = {"key": "k", "secret": PASSWORD, "app_id": "1", "enabled": True, "given": False}
    app = sa.insert(apps).values(id="1", name="a", settings="{}")
    for fault in ({"secret": None}, {"app_id": PASSWORD}, {"key": PASSWORD * 50}):
        with pytest.raises(sa.exc.DBAPIError) as caught:
            await change(store, app, sa.insert(keys).values(row | fault))
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))
        assert PASSWORD not in reason_of(caught.value)


async def test_two_control_planes_change_in_turn_and_see_each_others_changes(store, postgres_url):
    other = await Store.open(postgres_url)

    async def raise_often(mine: Store) -> list[int]:
        versions = []
        for _ in range(20):
            async with mine.change() as connection:
                versions.append((await raise_version(connection, for_workers=True)).directory)
        return versions

    async with store.reading() as connection:
        first = (await versions(connection)).directory
    results = await asyncio.gather(raise_often(store), raise_often(other))
    assert sorted(results[0] + results[1]) == list(range(first + 1, first + 41))
    await other.close()


async def test_migrations_of_several_servers_that_start_at_once_run_once(postgres_server):
    name = await asyncio.to_thread(postgres_server.create_database, empty=True)
    url = postgres_server.url(name)
    stores = await asyncio.gather(*(Store.open(url) for _ in range(4)))
    async with stores[0].reading() as connection:
        assert (await connection.execute(sa.select(sa.func.count()).select_from(apps))).scalar_one() == 0
    await asyncio.gather(*(store.close() for store in stores))
    await asyncio.to_thread(postgres_server.drop_database, name)


async def test_connections_that_postgres_closed_are_replaced(store):
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="terminating connection"):
            await change(store, sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
        async with store.change() as connection:
            await raise_version(connection, for_workers=True)


async def test_idle_connections_that_postgres_closed_are_replaced_without_an_error(store, wait_until):
    async with store.reading() as first, store.reading() as second:
        pids = [(await one.execute(sa.text("SELECT pg_backend_pid()"))).scalar_one() for one in (first, second)]
        raw = [(await one.get_raw_connection()).driver_connection for one in (first, second)]
    async with store.reading() as connection:
        # The second one is not in use: the pool gives the last returned one.
        idle = 0 if (await connection.get_raw_connection()).driver_connection is raw[1] else 1
        await connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pids[idle]})
    await wait_until(raw[idle].is_closed)
    async with store.reading() as first, store.reading() as second:
        assert (await versions(first)).directory == (await versions(second)).directory


async def test_change_that_waits_too_long_for_another_one_is_unavailable(postgres_url, store, monkeypatch):
    monkeypatch.setattr("redpoll.store.postgres._SESSION", "SET lock_timeout = '10ms'")
    other = await Store.open(postgres_url)
    # It is connected before the change below begins, which may be idle for 3 s.
    await change(other, sa.select(meta))
    async with store.change():
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await change(other, sa.select(meta))
    await change(other, sa.select(meta))
    await other.close()


async def blocked(store: Store) -> bool:
    """Whether a statement waits for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with store.reading() as connection:
        return bool((await connection.execute(sa.text(query))).scalar_one())


async def test_change_outwaits_that_of_a_process_that_stopped_later(postgres_url, store):
    other = await Store.open(postgres_url)

    async def stopped() -> None:
        async with store.change() as connection:
            waiting = asyncio.create_task(change(other, sa.select(meta)))
            while not await blocked(store):
                await asyncio.sleep(0.01)
            # The last statement of this process.
            await connection.execute(sa.text("SELECT 1"))
            await waiting
            await raise_version(connection)

    with pytest.raises(StoreUnavailable, match=r"^(?!.*lock timeout)"):
        await stopped()
    await other.close()


async def test_change_ends_that_of_a_process_that_stopped_within_a_statement(postgres_url, store):
    other = await Store.open(postgres_url)

    async def stopped() -> None:
        async with store.change() as connection:
            # PostgreSQL has the statement, and waits for its values.
            driver = (await connection.get_raw_connection()).driver_connection
            statement = await driver.prepare("SELECT version FROM apps WHERE id = $1")
            await change(other, sa.select(meta))
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
                await statement.fetch("1")
            await raise_version(connection)

    with pytest.raises(StoreUnavailable, match=r"^(?!.*lock timeout)"):
        await stopped()
    await change(store, sa.select(meta))
    await other.close()


async def test_slow_change_is_not_ended(postgres_url, store, monkeypatch):
    monkeypatch.setattr(
        "redpoll.store.postgres._SESSION", "SET application_name = 'redpoll'; SET lock_timeout = '10ms'"
    )
    other = await Store.open(postgres_url)
    async with store.change() as connection:
        # Longer than the time after which a session that waits for its client is ended.
        slow = asyncio.create_task(connection.execute(sa.text("SELECT pg_sleep(3.5)")))
        while not slow.done():
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                await change(other, sa.select(meta))
        await slow
        await raise_version(connection)
    await change(other, sa.select(meta))
    await other.close()


async def test_cancelled_task_ends_as_cancelled(store):
    async with store.change():
        reader = asyncio.create_task(read_slowly(store))
        await asyncio.sleep(0)
        while not reader.done():
            # At any moment: while it connects, while it waits for the answer.
            await asyncio.sleep(0.02)
            reader.cancel()
        assert reader.cancelled()
    async with store.change() as connection:
        await raise_version(connection)


async def read_slowly(store: Store) -> None:
    async with store.reading() as connection:
        await connection.execute(sa.text("SELECT pg_sleep(60)"))
