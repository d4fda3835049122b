"""Apps and their keys in the record store: written, changed, read back."""

import msgspec
import sqlalchemy as sa

from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.store import apps as app_rows
from redpoll.store import schema
from redpoll.store import webhooks as webhook_rows
from redpoll.store.store import Store, raise_version
from redpoll.store.webhooks import Endpoint

KEYS = (Key(key="aa", secret="s1"), Key(key="bb", secret="s2", enabled=False))
APP = App(id="7", name="Büro “7”", keys=KEYS, client_events=False, allowed_origins=("*.x.example",), max_batch=3)


async def read(store: Store) -> dict[str, App]:
    async with store.reading() as connection:
        return await app_rows.all_by_id(connection)


async def test_app_is_read_back_as_written(store):
    plain = App(id="10", name="plain", keys=())
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.add(connection, plain)
    assert await read(store) == {"7": APP, "10": plain}
    async with store.reading() as connection:
        assert await app_rows.find_by_id(connection, "7") == APP
        assert await app_rows.find_by_id(connection, "8") is None


async def test_only_settings_that_differ_from_the_default_are_stored(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        text = (await connection.execute(sa.select(schema.apps.c.settings))).scalar_one()
    assert text == '{"client_events":false,"allowed_origins":["*.x.example"],"max_batch":3}'


async def test_keys_are_sorted_oldest_first(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.add_key(connection, "7", Key(key="00", secret="s3"), given=False)
    assert [key.key for key in (await read(store))["7"].keys] == ["aa", "bb", "00"]


async def test_removing_keys_from_settings_keeps_created_keys(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        for name in ("g1", "g2"):
            await app_rows.add_key(connection, "7", Key(key=name, secret="s"), given=True)
        assert await app_rows.remove_given_keys(connection, "7", except_key="g2") == 1
    assert [key.key for key in (await read(store))["7"].keys] == ["aa", "bb", "g2"]


async def test_update_writes_name_and_settings_but_not_keys(store):
    changed = App(id="7", name="other", keys=(), plan="free", user_authentication_timeout_s=1.5)
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.update(connection, changed)
    found = (await read(store))["7"]
    assert found == App(id="7", name="other", keys=KEYS, plan="free", user_authentication_timeout_s=1.5)


async def test_history_rules_and_console_key_are_stored_but_computed_fields_are_not(store):
    rule = HistoryRule(id="0a1b2c", name="news-", prefix=True, keep=10, seconds=60, replay=5)
    console = Key(key="cc", secret="c1")
    expected = App(id="7", name="demo", keys=KEYS, history=(rule,), console_key=console, console_until=5.0)
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.update(connection, msgspec.structs.replace(expected, hooks="om"))
    assert (await read(store))["7"] == expected


async def test_enabling_or_disabling_a_key_keeps_its_position(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.enable_key(connection, "aa", False)
        await app_rows.enable_key(connection, "bb", True)
    keys = (await read(store))["7"].keys
    assert [(key.key, key.enabled) for key in keys] == [("aa", False), ("bb", True)]


async def test_secret_of_a_key_is_replaced(store):
    async with store.change() as connection:
        await app_rows.add(connection, APP)
        await app_rows.set_secret(connection, "aa", "new")
    assert (await read(store))["7"].keys[0] == Key(key="aa", secret="new")


async def test_deleted_app_is_gone_and_its_id_can_be_used_again(store):
    other = App(id="8", name="other", keys=(Key(key="cc", secret="s3"),))
    async with store.change() as connection:
        await app_rows.add_many(connection, [APP, other])
        deleted_in = (await raise_version(connection, apps=["7"])).records
        await app_rows.mark_deleted(connection, "7", 1.0)
        assert await app_rows.find_by_id(connection, "7") is None
        assert await app_rows.deleted_since(connection, deleted_in - 1) == ["7"]
        assert await app_rows.deleted_since(connection, deleted_in) == []
    assert await read(store) == {"8": other}
    again = App(id="7", name="again", keys=(Key(key="bb", secret="s4"),))
    async with store.change() as connection:
        await app_rows.add_many(connection, [again, App(id="9", name="new", keys=())])
        await app_rows.forget_deleted(connection, deleted_in)
        assert await app_rows.deleted_since(connection, 0) == []
    assert (await read(store))["7"] == again


async def test_row_of_a_deleted_app_stays_while_others_may_need_it_and_while_it_has_webhooks(store):
    async with store.change() as connection:
        await app_rows.add_many(connection, [APP, msgspec.structs.replace(APP, id="8", keys=())])
        endpoint = Endpoint(
            id="e", app_id="8", url="u", secret="", events=("all",), channels=(), format="service", created_at=0.0
        )
        await webhook_rows.add(connection, endpoint)
        await raise_version(connection)
        deleted_in = (await raise_version(connection, apps=["7", "8"])).records
        for app_id in ("7", "8"):
            await app_rows.mark_deleted(connection, app_id, 1.0)
        await app_rows.forget_deleted(connection, deleted_in - 1)
        assert sorted(await app_rows.deleted_since(connection, 0)) == ["7", "8"]
        await app_rows.forget_deleted(connection, deleted_in)
        assert await app_rows.deleted_since(connection, 0) == ["8"]
