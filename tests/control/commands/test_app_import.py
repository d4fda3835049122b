"""The command `app import`: apps of another server's configuration become records."""

import asyncio

import pytest
import sqlalchemy as sa

from redpoll.config.config import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.apps import Key
from redpoll.store.schema import audit
from redpoll.store.store import Store, database_url

WEBHOOK = {"url": "https://shop.example/h", "events": ["client_event"], "channels": ["presence-"]}
APP = {"id": "my_app.1", "key": "k-1", "secret": "s/1+=", "name": "Shop", "settings": {"max_connections": "5"}}


@pytest.fixture
async def context(tmp_path):
    """The context of a command while no server runs."""
    store = await Store.open(database_url(tmp_path))
    records = Records(store)
    await records.load()
    webhooks = Webhooks(store, records, Settings())
    await webhooks.load()
    yield Context(store, records, Settings(), webhooks)
    await webhooks.finish()
    await store.close()


async def imported(context, *apps, dry_run=False):
    planned = [{"webhooks": [], **app} for app in apps]
    return await commands.run(context, "app import", {"apps": planned, "dry_run": dry_run})


async def test_app_is_stored_with_id_key_secret_and_settings(context, tmp_path):
    (outcome,) = await imported(context, APP | {"webhooks": [WEBHOOK]})
    assert (outcome["outcome"], outcome["webhooks"][0]["outcome"]) == ("created", "created")
    again = Records(context.store)
    await again.load()
    app = again.apps["my_app.1"]
    assert (app.name, app.keys, app.max_connections) == ("Shop", (Key(key="k-1", secret="s/1+="),), 5)
    assert context.records.by_key["k-1"].hooks
    (endpoint,) = context.webhooks.endpoints.of_app("my_app.1")
    assert not endpoint.batch
    await imported(context, APP | {"webhooks": [WEBHOOK | {"url": "https://two.example/", "batch": True}]})
    assert [one.batch for one in context.webhooks.endpoints.of_app("my_app.1")] == [False, True]
    assert (endpoint.format, endpoint.channels) == ("pusher", ("presence-",))


async def test_existing_app_keeps_its_other_keys_name_and_settings(context):
    await imported(context, APP)
    await context.records.set_app("my_app.1", {"watchlist": True})
    added = await context.records.add_key("my_app.1")
    (outcome,) = await imported(context, APP | {"key": "k-2", "name": "Other", "settings": {"max_batch": "7"}})
    assert outcome == {"id": "my_app.1", "name": "Shop", "outcome": "updated", "left_out": [], "webhooks": []}
    app = context.records.apps["my_app.1"]
    assert {key.key for key in app.keys} == {"k-1", "k-2", added.key}
    assert (app.watchlist, app.max_connections, app.max_batch) == (True, 5, 7)


async def test_secret_and_disabled_key_become_those_of_the_configuration(context):
    await imported(context, APP)
    await context.records.add_key("my_app.1", "k-2")
    await context.records.disable_key("my_app.1", "k-1")
    assert (await imported(context, APP | {"secret": "new"}))[0]["outcome"] == "updated"
    again = Records(context.store)
    await again.load()
    assert again.apps["my_app.1"].keys[0] == Key(key="k-1", secret="new")
    assert (await imported(context, APP | {"secret": "new"}))[0]["outcome"] == "unchanged"


async def test_what_changes_while_the_import_waits_stays(context):
    """The record is made of what the app is then, not of what it was when the import began."""
    await imported(context, APP)
    records = context.records
    leaked = await records.add_key("my_app.1")
    async with records.edit(None):
        changes = [
            asyncio.create_task(records.disable_key("my_app.1", leaked.key)),
            asyncio.create_task(records.rename_app("my_app.1", "renamed")),
            asyncio.create_task(imported(context, APP | {"settings": {"max_batch": "7"}})),
        ]
        # All wait for the lock, in this order.
        await asyncio.sleep(0)
    await asyncio.gather(*changes)
    app = records.apps["my_app.1"]
    assert (app.name, app.max_batch, app.max_connections) == ("renamed", 7, 5)
    assert {key.key: key.enabled for key in app.keys} == {"k-1": True, leaked.key: False}


async def test_dry_run_checks_all_and_writes_nothing(context):
    (outcome,) = await imported(context, APP | {"webhooks": [WEBHOOK, WEBHOOK | {"url": "ftp://x"}]}, dry_run=True)
    assert outcome["outcome"] == "created"
    assert [webhook["outcome"] for webhook in outcome["webhooks"]] == ["created", "refused"]
    assert context.records.apps == {}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"id": "a b"}, "an app's id must have"),
        ({"key": "a/b"}, "a key must have"),
        ({"secret": "a b"}, "a secret must have"),
        ({"settings": {"max_batch": "0"}}, "max_batch must be between"),
        ({"settings": {"max_presence_members": "10000", "max_user_info_bytes": "16384"}}, "do not fit"),
        ({"name": " "}, "name must have"),
    ],
)
async def test_one_app_that_is_refused_stops_the_import(context, wrong, fault):
    other = {"id": "2", "key": "k-2", "secret": "s", "name": "n", "settings": {}}
    with pytest.raises(CommandError, match=fault):
        await imported(context, other, APP | wrong)
    assert context.records.apps == {}


async def test_audit_log_names_the_app_and_its_settings_but_no_secret(context):
    await imported(context, APP)
    async with context.store.reading() as connection:
        (entry,) = (await connection.execute(sa.select(audit))).all()
    assert (entry.action, entry.app_id, entry.detail) == ("app import", "my_app.1", "max_connections 0 → 5")
    assert "s/1" not in str(entry)


async def test_existing_endpoint_that_is_another_one_stays_and_is_reported(context):
    await imported(context, APP)
    endpoints = context.webhooks.endpoints
    words = {"events": WEBHOOK["events"], "channels": WEBHOOK["channels"]}
    own = await endpoints.create("my_app.1", WEBHOOK["url"], **words, client_events=("client-a",))
    await endpoints.change(own.id, enabled=False)
    (outcome,) = await imported(context, APP | {"webhooks": [WEBHOOK | {"batch": True}]})
    (webhook,) = outcome["webhooks"]
    assert (webhook["outcome"], webhook["fault"]) == ("differs", None)
    assert webhook["differs"] == "format service, not batched, only the client events client-a, disabled"
    assert [one.format for one in endpoints.of_app("my_app.1")] == ["service"]
    # One of several is what the plan says.
    await endpoints.create("my_app.1", WEBHOOK["url"], **words, format="pusher", batch=True)
    (outcome,) = await imported(context, APP | {"webhooks": [WEBHOOK | {"batch": True}]})
    assert (outcome["webhooks"][0]["outcome"], outcome["webhooks"][0]["differs"]) == ("unchanged", None)
