"""App tokens in the record store, which holds only their hashes."""

import pytest

from redpoll.protocol.apps import App
from redpoll.protocol.tokens import Token
from redpoll.store import apps as app_rows
from redpoll.store import tokens as token_rows
from redpoll.store.store import Store


def token(number: int, **more) -> Token:
    values = {"id": f"t{number}", "app_id": "7", "name": "CI", "hash": f"{number:064x}", "prefix": "rp_abcde"}
    return Token(**{**values, "scopes": ("publish", "read"), "created_at": 1000.5 + number, **more})


@pytest.fixture
async def store(store_url):
    opened = await Store.open(store_url)
    async with opened.change() as connection:
        await app_rows.add(connection, App(id="7", name="x", keys=()))
    yield opened
    await opened.close()


async def read(store: Store) -> dict[str, Token]:
    async with store.reading() as connection:
        return await token_rows.all_by_hash(connection)


async def put(store: Store, *tokens: Token) -> None:
    async with store.change() as connection:
        for added in tokens:
            await token_rows.add(connection, added)


async def test_tokens_are_read_back_by_hash_as_written(store):
    whole = token(1, expires_at=5.25, last_used_at=6.5, revoked_at=7.75)
    every_app = token(2, app_id=None, scopes=("all",))
    await put(store, whole, every_app)
    assert await read(store) == {whole.hash: whole, every_app.hash: every_app}


async def test_tokens_are_sorted_oldest_first(store):
    await put(store, token(3), token(1), token(2))
    assert [found.id for found in (await read(store)).values()] == ["t1", "t2", "t3"]


async def test_revoking_affects_only_the_given_tokens_and_keeps_earlier_times(store):
    await put(store, token(1), token(2, revoked_at=50.0), token(3))
    async with store.change() as connection:
        await token_rows.revoke(connection, ["t1", "t2"], 99.0)
    assert [found.revoked_at for found in (await read(store)).values()] == [99.0, 50.0, None]


async def test_last_use_is_written_for_several_tokens_at_once(store):
    await put(store, token(1), token(2), token(3))
    async with store.change() as connection:
        await token_rows.set_last_used(connection, {"t1": 10.0, "t3": 30.0})
    assert [found.last_used_at for found in (await read(store)).values()] == [10.0, None, 30.0]
    async with store.reading() as connection:
        assert [page async for page in token_rows.used_since(connection, 10.0)] == [[(token(3).hash, 30.0)]]
        pages = [page async for page in token_rows.used_since(connection, 9.0, page=1)]
        assert sorted(used for page in pages for used in page) == sorted([(token(1).hash, 10.0), (token(3).hash, 30.0)])
        assert len(pages) == 3


async def test_tokens_to_revoke_may_be_more_than_a_statement_has_values(store):
    """PostgreSQL takes 32,767."""
    await put(store, token(1), token(2), token(3))
    ids = ["t1", *(f"x{number}" for number in range(33_000)), "t3"]
    async with store.change() as connection:
        await token_rows.revoke(connection, ids, 99.0)
    assert [found.revoked_at for found in (await read(store)).values()] == [99.0, None, 99.0]


async def test_tokens_that_ended_before_a_time_are_removed(store):
    ends = [(49.0, None), (None, 49.0), (99.0, 49.0), (49.0, 99.0), (50.0, None), (None, 50.0), (None, None)]
    await put(store, *(token(n, expires_at=one, revoked_at=other) for n, (one, other) in enumerate(ends)))
    async with store.change() as connection:
        await token_rows.remove_ended(connection, 50.0)
    assert [found.id for found in (await read(store)).values()] == ["t4", "t5", "t6"]


async def test_tokens_of_an_app_that_expired_before_a_time_are_removed(store):
    ends = [(49.0, None), (50.0, None), (99.0, 49.0), (None, 49.0), (49.0, 99.0)]
    await put(store, *(token(n, expires_at=one, revoked_at=other) for n, (one, other) in enumerate(ends)))
    async with store.change() as connection:
        await token_rows.remove_expired(connection, None, 99.0)
        await token_rows.remove_expired(connection, "7", 50.0)
    assert [found.id for found in (await read(store)).values()] == ["t1", "t2", "t3"]
