"""The id of the store, and terms in a real SQLite file."""

import pytest

from redpoll.store.leadership import NotLeader, check_term, raise_term, store_id, stored_term
from redpoll.store.store import Store, database_url


async def test_store_keeps_its_id_and_another_store_has_another_one(tmp_path):
    ids = []
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        store = await Store.open(database_url(tmp_path / folder))
        async with store.reading() as connection:
            ids.append(await store_id(connection))
        await store.close()
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16


@pytest.fixture
async def store(tmp_path):
    store = await Store.open(database_url(tmp_path))
    yield store
    await store.close()


async def test_term_only_grows(store):
    async with store.change() as connection:
        assert await stored_term(connection) == 0
        assert await raise_term(connection, 3)
        # Redis that lost writes may give another node the same term.
        assert not await raise_term(connection, 3)
        assert await raise_term(connection, 3, again=True)
        assert not await raise_term(connection, 2, again=True)
        assert await stored_term(connection) == 3
        assert await raise_term(connection, 4)
    async with store.reading() as connection:
        assert await stored_term(connection) == 4


async def test_transaction_of_an_earlier_leader_is_rolled_back(store):
    async with store.change() as connection:
        await raise_term(connection, 1)
    async with store.change() as connection:
        await check_term(connection, 1)
        await raise_term(connection, 2)

    async def write_as_the_first_leader() -> None:
        async with store.change() as connection:
            await raise_term(connection, 9)
            await check_term(connection, 1)

    with pytest.raises(NotLeader):
        await write_as_the_first_leader()
    async with store.reading() as connection:
        assert await stored_term(connection) == 2
