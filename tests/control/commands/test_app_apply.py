"""The commands `app apply` and `app export`, on SQLite and on PostgreSQL. tests/cli/test_apply.py has the rest."""

import json

import pytest
import sqlalchemy as sa

from redpoll.config.config import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.importing.apps_file import parse
from redpoll.store.schema import audit
from redpoll.store.store import Store, database_url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    return database_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def opened(url) -> Context:
    store = await Store.open(url)
    records = Records(store)
    await records.load()
    webhooks = Webhooks(store, records, Settings())
    await webhooks.load()
    return Context(store, records, Settings(), webhooks)


async def closed(context: Context) -> None:
    await context.webhooks.finish()
    await context.store.close()


def wanted(app_id, **values):
    fields = {"name": None, "one_key": True, "keys": [], "settings": {}, "history": [], "webhooks": [], "tokens": []}
    return {**fields, "id": app_id, **values}


async def applied(context, *apps, dry_run=False, prune=False):
    args = {"apps": list(apps), "dry_run": dry_run, "prune": prune, "file": "apps.toml by anna"}
    return await commands.run(context, "app apply", args)


async def test_many_apps_are_one_change_that_other_control_planes_follow(url):
    context, other = await opened(url), await opened(url)
    try:
        version, asked = context.records.version, []
        context.records.on_changes = lambda: asked.append(context.records.version)
        webhook = {"url": "https://a.example/", "events": ["member.added"]}
        token = {"name": "ci", "scopes": ["publish"]}
        apps = [wanted(f"app-{n}", webhooks=[webhook], tokens=[token]) for n in range(1_100)]
        result = await applied(context, *apps)
        assert {app["outcome"] for app in result["apps"]} == {"created"}
        assert context.records.version == version + 1
        assert asked == [version + 1]
        if other.store.shared:
            await other.records.sync()
        else:
            await closed(other)
            other = await opened(url)
        assert other.records.apps == context.records.apps
        assert other.records.tokens == context.records.tokens
        assert other.records.apps["app-1099"].hooks == "m"
        assert other.webhooks.endpoints.of_app("app-1099") == context.webhooks.endpoints.of_app("app-1099")
        async with context.store.reading() as connection:
            rows = (await connection.execute(sa.select(audit).where(audit.c.app_id == "app-7"))).all()
        assert [(row.who, row.action, row.detail) for row in rows] == [
            ("command line", "apply", "apps.toml by anna: created")
        ]
        assert {app["outcome"] for app in (await applied(context, *apps, prune=True))["apps"]} == {"unchanged"}
        assert context.records.version == version + 1
    finally:
        await closed(context)
        await closed(other)


async def test_pruned_webhooks_and_tokens_end_in_memory_and_in_the_store(url):
    context = await opened(url)
    try:
        revoked = []
        context.records.on_revoked = revoked.extend
        both = {"webhooks": [{"url": "https://a.example/"}], "tokens": [{"name": "ci", "scopes": ["all"]}]}
        await applied(context, wanted("shop", **both))
        (token,) = context.records.tokens_of("shop")
        await applied(context, wanted("shop"), prune=True)
        assert revoked == [token.hash]
        assert context.records.tokens_of("shop")[0].revoked_at is not None
        assert context.webhooks.endpoints.of_app("shop") == ()
        assert context.records.apps["shop"].hooks == ""
        exported = await commands.run(context, "app export", {})
        assert [app.keys() & {"webhooks", "tokens"} for app in exported] == [set()]
    finally:
        await closed(context)


async def test_export_has_pins_and_applied_elsewhere_they_are_the_same(url, tmp_path):
    """Apps that were moved by export and apply accepted any certificate, without a word."""
    (tmp_path / "other").mkdir()
    context, other = await opened(url), await opened(database_url(tmp_path / "other"))
    try:
        webhooks = [{"url": "https://a.example/", "pin": "ab" * 32}, {"url": "https://b.example/"}]
        await applied(context, wanted("shop", webhooks=webhooks))
        exported = await commands.run(context, "app export", {})
        assert [one.get("pin") for one in exported[0]["webhooks"]] == ["ab" * 32, None]
        file = parse("apps.json", json.dumps({"apps": exported}).encode(), None, lambda text: text, 0.0)
        assert (file.faults, (await applied(other, *file.apps))["faults"]) == ([], [])
        assert await commands.run(other, "app export", {}) == exported
        refused = await applied(other, wanted("shop", webhooks=[{"url": "https://b.example/", "pin": "ab"}]))
        assert [fault["where"] for fault in refused["faults"]] == ["apps[0].webhooks[0].pin"]
    finally:
        await closed(context)
        await closed(other)


async def test_fault_in_one_app_changes_none(url):
    context = await opened(url)
    try:
        before = context.records.version
        result = await applied(context, wanted("good"), wanted("bad", settings={"max_batch": "0"}))
        assert [fault["where"] for fault in result["faults"]] == ["apps[1].settings.max_batch"]
        assert (context.records.apps, context.records.version) == ({}, before)
        assert (await applied(context, wanted("good"), dry_run=True))["made"] == []
        assert (context.records.apps, context.records.version) == ({}, before)
    finally:
        await closed(context)
