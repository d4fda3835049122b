"""Copying a record store to another database: all rows, in both directions, only into an empty one."""

import asyncio

import pytest
import sqlalchemy as sa

from redpoll.protocol.apps import App, Key
from redpoll.protocol.tokens import Token
from redpoll.store import accounts, audit, copying, daily, dropped, postgres, revoked_grants, tokens
from redpoll.store import apps as app_rows
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import AttemptRow, Result
from redpoll.store.errors import StoreError
from redpoll.store.schema import changes, keys, meta, metadata
from redpoll.store.store import Store, database_url, raise_version, versions
from redpoll.store.webhooks import Endpoint

TABLES = [table for table in metadata.sorted_tables if table not in (meta, changes)]


async def fill(store: Store) -> None:
    """Rows in every table."""
    async with store.change() as connection:
        for number in ("7", "8"):
            await app_rows.add(connection, App(id=number, name="Büro", keys=(Key(key=f"k{number}", secret="s"),)))
        token = Token(id="t", app_id="7", name="CI", hash="h", prefix="rp_", scopes=("all",), created_at=1.5)
        await tokens.add(connection, token)
        await revoked_grants.add(connection, [("7", "jti x", 2**31)])
        await daily.put(connection, "20261121", {"7": 2**40})
        endpoint = Endpoint(
            id="e",
            app_id="7",
            url="https://e.com",
            secret="s",
            events=("all",),
            channels=(),
            format="service",
            created_at=1.0,
        )
        await endpoint_rows.add(connection, endpoint)
        row = {"endpoint_id": "e", "event": "member.added", "channel": "c", "user": "u", "stamp": 2**50, "time_ms": 5}
        row |= {"trace": None, "body": b"\x00\xff", "at": 1.0, "created_at": 1.0}
        added = await delivery_rows.add(connection, [{**row, "id": f"d{number}"} for number in range(1200)])
        attempt = AttemptRow(1, 2.0, 500, 7, "status", "answered 500", b"\xff")
        await delivery_rows.put_results(connection, [Result(added[-1].number, added[-1].id, "failed", 3.0, attempt)])
        user = accounts.User(name="vera", password_hash="p", role="admin", must_change=True, created_at=1.0)
        await accounts.add(connection, user)
        await accounts.add_session(connection, "s", "vera", 2.0)
        await audit.add(connection, audit.Actor("vera", "::1"), "did")
        await dropped.note(connection, {"e": 3}, 4.5)
        await raise_version(connection, apps=("7",), tokens=("t",), webhooks=("e",), for_workers=True)


async def rows_of(store: Store) -> dict[str, list]:
    async with store.reading() as connection:
        return {
            table.name: [
                {name: value for name, value in row._mapping.items() if name != "version"}
                for row in await connection.execute(sa.select(table).order_by(*table.primary_key.columns))
            ]
            for table in TABLES
        }


@pytest.fixture
async def stores(tmp_path, postgres_url):
    urls = {"sqlite": database_url(tmp_path), "postgres": postgres_url}
    opened = {name: await Store.open(url, patient=True) for name, url in urls.items()}
    yield opened
    for store in opened.values():
        await store.close()


@pytest.mark.parametrize(("one", "other"), [("sqlite", "postgres"), ("postgres", "sqlite")])
async def test_every_row_is_copied_and_new_rows_get_new_numbers(stores, one, other):
    source, target = stores[one], stores[other]
    await fill(source)
    before = await rows_of(source)
    copied = await copying.copy(source, target)
    assert copied == {name: len(rows) for name, rows in before.items()}
    assert all(copied.values())
    assert await rows_of(source) == await rows_of(target) == before
    async with target.change() as connection:
        assert await dropped.counts(connection, None) == {"e": (3, 4.5)}
        await app_rows.add_key(connection, "7", Key(key="new", secret="s"), given=False)
        await audit.add(connection, audit.Actor("vera", "::1"), "did")
        numbers = (await connection.execute(sa.select(keys.c.number).order_by(keys.c.number))).scalars().all()
    assert len(set(numbers)) == 3


async def test_target_that_is_not_empty_is_refused_and_not_changed(stores):
    await fill(stores["sqlite"])
    async with stores["postgres"].change() as connection:
        await app_rows.add(connection, App(id="1", name="x", keys=()))
        before = await versions(connection)
    with pytest.raises(StoreError, match="isn't empty, so nothing was copied: it has 1 rows in apps"):
        await copying.copy(stores["sqlite"], stores["postgres"])
    async with stores["postgres"].reading() as connection:
        assert list(await app_rows.all_by_id(connection)) == ["1"]
        assert await versions(connection) == before


@pytest.mark.parametrize("one", ["sqlite", "postgres"])
async def test_neither_database_limits_the_time_that_the_other_takes(tmp_path, postgres_url, monkeypatch, one):
    """At the very end of a copy of some GB, PostgreSQL ended the transaction that had it while SQLite counted."""
    monkeypatch.setattr(postgres, "_SESSION", f"{postgres._SESSION}; SET idle_in_transaction_session_timeout = '20ms'")
    monkeypatch.setattr(postgres, "_STATEMENT_TIMEOUT_S", 0.02)
    count = copying._count

    async def counts_slowly(connection):
        counted = await count(connection)
        if connection.dialect.name == "postgresql":
            await connection.execute(sa.text("SELECT pg_sleep(0.1)"))
        await asyncio.sleep(0.1)
        return counted

    monkeypatch.setattr(copying, "_count", counts_slowly)
    urls = {"sqlite": database_url(tmp_path), "postgres": postgres_url}
    source, target = (await Store.open(urls.pop(one), patient=True), await Store.open(*urls.values(), patient=True))
    try:
        assert not any((await copying.copy(source, target)).values())
    finally:
        await source.close()
        await target.close()
