"""The record store's shard key: new stores have one, older ones don't, and a copy keeps that of its source."""

import pytest
import sqlalchemy as sa

from helpers import old_store
from redpoll.store import copying
from redpoll.store.schema import meta
from redpoll.store.shard_key import shard_key
from redpoll.store.store import Store, database_url

# The migration since which channels are where the shard key says.
KEYED = "0009"


async def key_of(store: Store) -> str:
    async with store.reading() as connection:
        return await shard_key(connection)


async def compatible(store: Store) -> str:
    async with store.reading() as connection:
        return (await connection.execute(sa.select(meta.c.value).where(meta.c.name == "compatible"))).scalar_one()


async def make_old(url: str) -> None:
    """Takes a store back to the migration before the shard key."""
    store = await Store.open(url)
    async with store.change() as connection:
        for statement in old_store.STATEMENTS:
            await connection.execute(sa.text(statement))
    await store.close()


async def test_a_new_store_has_a_key_of_its_own_and_keeps_it(store_url, tmp_path):
    found = []
    for _ in range(2):
        store = await Store.open(store_url)
        found.append(await key_of(store))
        # An earlier redpoll would look for channels elsewhere.
        assert await compatible(store) == KEYED
        await store.close()
    folder = tmp_path / "other"
    folder.mkdir()
    other = await Store.open(database_url(folder))
    found.append(await key_of(other))
    await other.close()
    assert [len(bytes.fromhex(key)) for key in found] == [16] * 3
    assert found[0] == found[1] != found[2]


async def test_a_migrated_store_has_none_and_earlier_redpolls_may_use_it(store_url):
    await make_old(store_url)
    store = await Store.open(store_url)
    assert (await key_of(store), await compatible(store)) == ("", "0007")
    await store.close()


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_copy_has_the_key_of_its_source(store_url, tmp_path, keyed):
    if not keyed:
        await make_old(store_url)
    folder = tmp_path / "target"
    folder.mkdir()
    source, target = await Store.open(store_url), await Store.open(database_url(folder))
    assert await key_of(target) != await key_of(source)
    await copying.copy(source, target)
    assert (await key_of(target), await compatible(target)) == (await key_of(source), await compatible(source))
    assert bool(await key_of(target)) == keyed
    await source.close()
    await target.close()
