"""App tokens: what goes in comes out, and only its hash."""

import pytest

from redpoll.protocol.apps import App
from redpoll.protocol.tokens import Token
from redpoll.store import apps as app_rows
from redpoll.store import tokens as token_rows
from redpoll.store.store import Store, database_url


def token(number: int, **more) -> Token:
    values = {"id": f"t{number}", "app_id": "7", "name": "CI", "hash": f"{number:064x}", "prefix": "rp_abcde"}
    return Token(**{**values, "scopes": ("publish", "read"), "created_at": 1000.5 + number, **more})


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    async with opened.change() as connection:
        await app_rows.add(connection, App(id="7", name="x", keys=()))
    yield opened
    await opened.close()


async def read(store: Store) -> dict[str, Token]:
    async with store.reading() as connection:
        return await token_rows.every(connection)


async def put(store: Store, *tokens: Token) -> None:
    async with store.change() as connection:
        for each in tokens:
            await token_rows.add(connection, each)


async def test_a_token_comes_back_as_it_went_in_found_by_its_hash(store):
    whole = token(1, expires_at=5.25, last_used_at=6.5, revoked_at=7.75)
    every_app = token(2, app_id=None, scopes=("all",))
    await put(store, whole, every_app)
    assert await read(store) == {whole.hash: whole, every_app.hash: every_app}


async def test_they_are_oldest_first(store):
    await put(store, token(3), token(1), token(2))
    assert [each.id for each in (await read(store)).values()] == ["t1", "t2", "t3"]


async def test_a_revocation_is_for_those_named_and_keeps_the_time_of_one_before(store):
    await put(store, token(1), token(2, revoked_at=50.0), token(3))
    async with store.change() as connection:
        await token_rows.revoke(connection, ["t1", "t2"], 99.0)
    assert [each.revoked_at for each in (await read(store)).values()] == [99.0, 50.0, None]


async def test_times_of_use_are_written_for_many_at_once(store):
    await put(store, token(1), token(2), token(3))
    async with store.change() as connection:
        await token_rows.used(connection, {"t1": 10.0, "t3": 30.0})
    assert [each.last_used_at for each in (await read(store)).values()] == [10.0, None, 30.0]


async def test_forgotten_ones_are_gone(store):
    await put(store, token(1), token(2))
    async with store.change() as connection:
        await token_rows.forget(connection, ["t1"])
        await token_rows.forget(connection, [])
    assert [each.id for each in (await read(store)).values()] == ["t2"]
