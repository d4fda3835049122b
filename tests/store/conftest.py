"""The record store's tests run on both databases: `store_url` names an empty store in each."""

import pytest

from redpoll.store.store import database_url


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return database_url(request.getfixturevalue("tmp_path"))
