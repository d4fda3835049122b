"""The record store's tests run on both databases: `store_url` names an empty store in each."""

import pytest

from redpoll.store.store import Store, database_url


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return database_url(request.getfixturevalue("tmp_path"))


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    yield opened
    await opened.close()


@pytest.fixture
async def connection(store):
    async with store.change() as opened:
        yield opened
