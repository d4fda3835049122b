"""App records: what goes in comes out."""

import msgspec
import pytest
import sqlalchemy as sa

from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.store import apps as app_rows
from redpoll.store import schema
from redpoll.store.store import Store, database_url

KEYS = (Key(key="aa", secret="s1"), Key(key="bb", secret="s2", enabled=False))
APP = App(id="7", name="Büro “7”", keys=KEYS, client_events=False, allowed_origins=("*.x.example",), max_batch=3)


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    yield opened
    await opened.close()


async def read(store: Store) -> dict[str, App]:
    async with store.reading() as connection:
        return await app_rows.every(connection)


async def test_an_app_comes_back_as_it_went_in(store):
    plain = App(id="10", name="plain", keys=())
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.add(connection, plain)
    assert await read(store) == {"7": APP, "10": plain}
    async with store.reading() as connection:
        assert await app_rows.one(connection, "7") == APP
        assert await app_rows.one(connection, "8") is None


async def test_only_what_differs_from_the_default_is_written(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        text = (await connection.execute(sa.select(schema.apps.c.settings))).scalar_one()
    assert text == '{"client_events":false,"allowed_origins":["*.x.example"],"max_batch":3}'


async def test_keys_stay_oldest_first(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.add_key(connection, "7", Key(key="00", secret="s3"), given=False)
    assert [key.key for key in (await read(store))["7"].keys] == ["aa", "bb", "00"]


async def test_given_keys_are_removed_and_made_ones_stay(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        for name in ("g1", "g2"):
            await app_rows.add_key(connection, "7", Key(key=name, secret="s"), given=True)
        assert await app_rows.remove_given_keys(connection, "7", but="g2") == 1
    assert [key.key for key in (await read(store))["7"].keys] == ["aa", "bb", "g2"]


async def test_name_and_settings_are_written_anew_and_keys_stay(store):
    changed = App(id="7", name="other", keys=(), plan="free", user_authentication_timeout_s=1.5)
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.update(connection, changed)
    found = (await read(store))["7"]
    assert found == App(id="7", name="other", keys=KEYS, plan="free", user_authentication_timeout_s=1.5)


async def test_rules_and_the_consoles_key_are_kept_and_what_is_made_anew_is_not(store):
    rule = HistoryRule(id="0a1b2c", name="news-", prefix=True, keep=10, seconds=60, replay=5)
    console = Key(key="cc", secret="c1")
    kept = App(id="7", name="demo", keys=KEYS, history=(rule,), console_key=console)
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.update(connection, msgspec.structs.replace(kept, hooks="om", console_until=5.0))
    assert (await read(store))["7"] == kept


async def test_a_key_is_disabled_and_enabled_in_its_place(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.enable_key(connection, "aa", False)
        await app_rows.enable_key(connection, "bb", True)
    keys = (await read(store))["7"].keys
    assert [(key.key, key.enabled) for key in keys] == [("aa", False), ("bb", True)]


async def test_a_secret_can_be_replaced(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.set_secret(connection, "aa", "new")
    assert (await read(store))["7"].keys[0] == Key(key="aa", secret="new")
