"""Constraints of the tables: unique columns, foreign keys, cascades."""

import pytest
import sqlalchemy as sa

from redpoll.store.schema import apps, daily, keys, tokens
from redpoll.store.store import Store


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    async with opened.change() as connection:
        await connection.execute(sa.insert(apps).values(id="1", name="a", settings="{}"))
    yield opened
    await opened.close()


def key(**more) -> sa.Insert:
    return sa.insert(keys).values({"key": "k", "secret": "s", "app_id": "1", "enabled": True, "given": False, **more})


async def test_keys_are_unique_across_apps(store):
    async with store.change() as connection:
        await connection.execute(key())
        with pytest.raises(sa.exc.IntegrityError):
            await connection.execute(key(secret="other"))


async def test_key_needs_an_app_and_is_removed_with_it(store):
    async with store.change() as connection:
        with pytest.raises(sa.exc.IntegrityError):
            async with connection.begin_nested():
                await connection.execute(key(app_id="2"))
        await connection.execute(key())
        await connection.execute(sa.delete(apps))
        assert (await connection.execute(sa.select(keys))).all() == []


def token(**more) -> sa.Insert:
    values = {"id": "t", "app_id": "1", "name": "n", "hash": "h", "prefix": "rp_", "scopes": "[]", "created_at": 1.0}
    return sa.insert(tokens).values({**values, **more})


async def test_hashes_of_tokens_are_unique(store):
    async with store.change() as connection:
        await connection.execute(token())
        with pytest.raises(sa.exc.IntegrityError):
            await connection.execute(token(id="u"))


async def test_tokens_and_counters_are_removed_with_their_app(store):
    async with store.change() as connection:
        await connection.execute(token())
        await connection.execute(sa.insert(daily).values(app_id="1", day="20261121", used=1))
        await connection.execute(sa.delete(apps))
        for table in (tokens, daily):
            assert (await connection.execute(sa.select(table))).all() == []
