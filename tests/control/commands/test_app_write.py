"""Whole apps created and deleted, on SQLite and on PostgreSQL. tests/control/management has the API's side."""

import time

import msgspec
import pytest
import sqlalchemy as sa

from redpoll.config.config import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.app_plan import Wanted
from redpoll.control.commands.app_write import create_app, delete_app
from redpoll.control.commands.context import Context
from redpoll.control.records.records import RecordConflict, RecordError, Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.command_socket import CommandError
from redpoll.store.audit import Actor
from redpoll.store.errors import StoreUnavailable
from redpoll.store.schema import attempts, audit, deliveries, keys, tokens
from redpoll.store.store import Store, database_url

BY = Actor("test")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    return database_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def context(url):
    store = await Store.open(url)
    records = Records(store)
    await records.load()
    webhooks = Webhooks(store, records, Settings())
    await webhooks.load()
    yield Context(store, records, Settings(), webhooks)
    await webhooks.finish()
    await store.close()


def wanted(app_id="", **values):
    fields = {"name": "n", "one_key": False, "keys": [], "settings": {}, "history": [], "webhooks": [], "tokens": []}
    return msgspec.convert({**fields, "id": app_id, **values}, Wanted)


async def created(context, app_id="", **values):
    return (await create_app(context.records, context.webhooks, wanted(app_id, **values), BY)).app


async def test_app_that_is_made_again_has_another_word(context):
    """By which workers that missed the deletion know it."""
    first = await created(context, "again")
    await delete_app(context.records, context.webhooks, "again", BY)
    second = await created(context, "again")
    assert "" != first.made != second.made != ""
    assert context.records.apps["again"].made == second.made


async def test_app_that_is_refused_at_the_commit_is_nowhere(context):
    """Another writer took the id after the plan, as a stopped server's command line may."""
    await created(context, "first")
    webhook = {"url": "https://a.example/"}
    with pytest.raises(RecordConflict):
        await created(context, "first", webhooks=[webhook])
    with pytest.raises(RecordError, match=r"settings\.max_batch"):
        await created(context, "second", settings={"max_batch": "0"}, webhooks=[webhook])
    assert list(context.records.apps) == ["first"]
    assert context.webhooks.endpoints.every() == []


async def test_condition_is_checked_in_the_transaction(context):
    app = await created(context)

    def refuse():
        raise RecordError("changed meanwhile")

    with pytest.raises(RecordError, match="changed meanwhile"):
        await delete_app(context.records, context.webhooks, app.id, Actor("test", condition=refuse))
    assert list(context.records.apps) == [app.id]


async def test_delete_command(context):
    webhook = {"url": "https://a.example/"}
    app = await created(context, webhooks=[webhook] * 2, tokens=[{"name": "ci", "scopes": ["read"]}])
    kept = await created(context)
    result = await commands.run(context, "app delete", {"id": app.id})
    assert result == {"id": app.id, "name": "n"}
    async with context.store.reading() as connection:
        assert set((await connection.execute(sa.select(keys.c.app_id))).scalars()) == {kept.id}
        assert (await connection.execute(sa.select(tokens.c.id))).all() == []
        rows = (await connection.execute(sa.select(audit).where(audit.c.app_id == app.id))).all()
    assert [(row.who, row.action) for row in rows] == [("test", "app create"), ("command line", "app delete")]
    assert all(one.secret == "" for one in context.webhooks.endpoints.every())
    await context.webhooks.endpoints.forget_deleted()
    assert context.webhooks.endpoints.every() == []
    with pytest.raises(CommandError, match="there is no app"):
        await commands.run(context, "app delete", {"id": app.id})


async def test_deliveries_of_a_deleted_app_are_removed_and_another_app_with_its_id_has_none(context):
    """Dead letters stayed for good: nobody could list them, but an app that got the id later."""
    app = await created(context, webhooks=[{"url": "https://a.example/"}] * 2)
    before, endpoint = context.webhooks.endpoints.of_app(app.id)
    await add_deliveries(context, before, "failed")
    await context.webhooks.endpoints.delete(before.id)
    for state in ("waiting", "failed", "delivered"):
        await add_deliveries(context, endpoint, state)
    await delete_app(context.records, context.webhooks, app.id, BY)
    async with context.store.reading() as connection:
        for table in (deliveries, attempts):
            assert (await connection.execute(sa.select(sa.func.count()).select_from(table))).scalar_one() == 0
    await created(context, app.id)
    assert await context.webhooks.deliveries(app.id) == []


async def test_another_app_with_the_id_has_no_deliveries_if_their_removal_was_interrupted(context, monkeypatch):
    app = await created(context, webhooks=[{"url": "https://a.example/"}])
    (endpoint,) = context.webhooks.endpoints.of_app(app.id)
    await add_deliveries(context, endpoint, "failed")

    async def killed(_):
        raise StoreUnavailable("killed here")

    with monkeypatch.context() as broken:
        broken.setattr(context.webhooks.endpoints, "remove_deliveries", killed)
        with pytest.raises(StoreUnavailable):
            await delete_app(context.records, context.webhooks, app.id, BY)
    new = {"url": "https://b.example/"}
    await created(context, app.id, webhooks=[new])
    assert await context.webhooks.deliveries(app.id) == []
    await context.webhooks.endpoints.forget_deleted()
    assert [one.url for one in context.webhooks.endpoints.every()] == [new["url"]]


async def add_deliveries(context, endpoint, state):
    async with context.store.change() as connection:
        await connection.execute(
            sa.insert(deliveries),
            [
                {
                    "id": f"{endpoint.id} {state} {number}",
                    "endpoint_id": endpoint.id,
                    "event": "channel.occupied",
                    "channel": "c",
                    "stamp": number,
                    "time_ms": 0,
                    "body": b"{}",
                    "state": state,
                    "at": 0.0,
                    "attempts": 0,
                    "cycle_from": 0,
                    "created_at": 0.0,
                }
                for number in range(3)
            ],
        )


async def test_tokens_of_deleted_apps_are_forgotten(context):
    """Each stayed in the memory of every node, and an app that got the id later showed it."""
    for _ in range(3):
        await created(context, "again", tokens=[{"name": "own", "scopes": ["all"]}])
        await delete_app(context.records, context.webhooks, "again", BY)
    await created(context, "again")
    assert (context.records.tokens, await stored_tokens(context)) == ({}, set())


async def test_tokens_that_ended_long_ago_are_removed_with_the_next_that_an_app_is_made_with(context, monkeypatch):
    token = {"name": "own", "scopes": ["all"]}
    first = await created(context, tokens=[token])
    await context.records.revoke_tokens([one.id for one in context.records.tokens_of(first.id)])
    in_91_days = time.time() + 91 * 86_400
    monkeypatch.setattr(context.records, "_clock", lambda: in_91_days)
    second = await created(context, tokens=[token])
    (kept,) = context.records.tokens.values()
    assert (kept.app_id, await stored_tokens(context)) == (second.id, {kept.hash})


async def stored_tokens(context):
    async with context.store.reading() as connection:
        return set((await connection.execute(sa.select(tokens.c.hash))).scalars())


async def test_server_whose_apps_were_all_deleted_gets_no_first_app(context):
    assert await context.records.first_app(Settings()) is not None
    await delete_app(context.records, context.webhooks, next(iter(context.records.apps)), BY)
    assert await context.records.first_app(Settings()) is None
    assert context.records.apps == {}


async def test_app_of_the_settings_stays(context):
    app = await created(context, "given")
    with pytest.raises(RecordConflict, match="REDPOLL_APP_ID"):
        await delete_app(context.records, context.webhooks, app.id, BY, given_id="given")
    assert "given" in context.records.apps
