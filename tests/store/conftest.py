"""The record store's tests run on both databases: `store_url` names an empty store in each."""

import pytest

from redpoll.store.eventlog import EventLog
from redpoll.store.store import Store, database_url
from store.logged import DAY_S


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


@pytest.fixture
async def log(tmp_path):
    """An open event log."""
    log = await EventLog.open(tmp_path / "events.sqlite", 100_000, DAY_S)
    yield log
    await log.close()
