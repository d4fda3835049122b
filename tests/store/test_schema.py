"""What the tables themselves refuse."""

import pytest
import sqlalchemy as sa

from redpoll.store.schema import apps, keys
from redpoll.store.store import Store, database_url


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    async with opened.change() as connection:
        await connection.execute(sa.insert(apps).values(id="1", name="a", settings="{}"))
    yield opened
    await opened.close()


def key(**more) -> sa.Insert:
    return sa.insert(keys).values({"key": "k", "secret": "s", "app_id": "1", "enabled": True, "given": False, **more})


async def test_a_key_opens_one_app_only(store):
    async with store.change() as connection:
        await connection.execute(key())
        with pytest.raises(sa.exc.IntegrityError):
            await connection.execute(key(secret="other"))


async def test_a_key_has_an_app_and_goes_with_it(store):
    async with store.change() as connection:
        with pytest.raises(sa.exc.IntegrityError):
            await connection.execute(key(app_id="2"))
        await connection.execute(key())
        await connection.execute(sa.delete(apps))
        assert (await connection.execute(sa.select(keys))).all() == []
