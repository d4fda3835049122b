"""Apps over HTTP: list, create, read, change and delete them."""

import asyncio
import contextlib
import copy
import json
import sqlite3

from redpoll.cluster.directory import read_apps
from redpoll.store import apps as app_rows


async def test_new_app_is_shown_with_its_secrets_once_and_works_at_once(manager, plane, audit):
    created = await manager("POST", "", {"name": "Shop"})
    app = created.json()
    assert created.status == 201
    assert (app["name"], app["settings"]["client_events"], app["tokens"]) == ("Shop", True, [])
    assert created.headers["location"] == f"/api/v1/apps/{app['id']}"
    assert created.headers["cache-control"] == "no-store"
    (key,) = app["keys"]
    triggered = await plane.call(
        "POST",
        f"/apps/{app['id']}/events",
        {"name": "e", "data": "{}", "channels": ["c"]},
        key=key["key"],
        secret=key["secret"],
    )
    assert triggered.status == 200
    shown = await manager("GET", f"/{app['id']}")
    assert shown.headers["etag"] == created.headers["etag"]
    assert shown.json()["keys"] == [{**key, "secret": f"{key['secret'][:4]}****"}]
    assert await read_apps(plane.plane.link, plane.plane.cluster.keys, [app["id"]]) == [manager.records.apps[app["id"]]]
    assert audit()[-1][:4] == (f"token {manager.token.id} platform", "app create", app["id"], "Shop")


async def test_app_is_created_with_all_that_belongs_to_it(manager, plane):
    body = {
        "id": "customer-7",
        "name": "Customer 7",
        "keys": [{"key": "mykey", "secret": "mysecret"}, {}],
        "settings": {"client_events": False, "allowed_origins": ["a.example", "*.b.example"], "cache_ttl_s": None},
        "history_rules": [{"name": "news-", "prefix": True, "keep": 10, "seconds": 60, "replay": 5}],
        "webhooks": [{"url": "https://receiver.example/hook", "events": ["channel.occupied"], "channels": ["news-"]}],
        "tokens": [{"name": "ci", "scopes": ["publish"], "lasts_s": 3600}, {"name": "monitor", "scopes": ["read"]}],
    }
    app = (await manager("POST", "", body)).json()
    first, second = app["keys"]
    assert first == {"key": "mykey", "secret": "mysecret", "enabled": True}
    assert (len(second["key"]), len(second["secret"])) == (20, 40)
    assert app["settings"]["allowed_origins"] == ["a.example", "*.b.example"]
    assert (app["settings"]["client_events"], app["settings"]["cache_ttl_s"]) == (False, 1800)
    (rule,) = app["history_rules"]
    assert (rule["name"], rule["prefix"], rule["keep"], rule["replay"]) == ("news-", True, 10, 5)
    (webhook,) = app["webhooks"]
    assert (webhook["url"], webhook["enabled"], len(webhook["secret"])) == ("https://receiver.example/hook", True, 40)
    ci, monitor = app["tokens"]
    # It counts from when the request was read.
    assert 0 <= ci["created_at"] + 3600 - ci["expires_at"] < 300
    assert monitor["expires_at"] is None
    read = await plane.ask("GET", "/apps/customer-7/channels", headers={"Authorization": f"Bearer {monitor['token']}"})
    assert read.status == 200
    shown = (await manager("GET", "/customer-7")).json()
    assert shown["keys"][0]["secret"] == "****"
    assert shown["webhooks"][0]["secret"] == f"{webhook['secret'][:4]}****"
    assert "token" not in shown["tokens"][0]


async def test_refused_app_leaves_nothing(manager):
    before = dict(manager.records.apps)
    rule = {"name": "news-", "prefix": True, "keep": 10, "seconds": 60}
    for body, status, words in (
        ({"name": " "}, 400, "name"),
        ({"name": "x", "id": "."}, 400, "$.id"),
        ({"name": "x", "id": "a" * 65}, 400, "$.id"),
        ({"name": "x", "more": 1}, 400, "more"),
        ({"name": "x", "settings": {"max_batch": 0}}, 400, "$.settings.max_batch"),
        ({"name": "x", "settings": {"max_batches": 3}}, 400, "max_batches"),
        ({"name": "x", "settings": {"allowed_origins": ["a/b"]}}, 400, "settings.allowed_origins"),
        ({"name": "x", "history_rules": [rule, rule]}, 400, "history_rules[1]"),
        ({"name": "x", "history_rules": [{**rule, "replay": 11}]}, 400, "history_rules[0]"),
        ({"name": "x", "webhooks": [{"url": "ftp://x"}]}, 400, "webhooks[0]"),
        ({"name": "x", "webhooks": [{"url": "https://x.example", "events": ["vacant"]}]}, 400, "webhooks[0]"),
        ({"name": "x", "tokens": [{"name": "a", "scopes": ["manage"]}]}, 400, "tokens[0]"),
        ({"name": "x", "tokens": [{"name": "a", "scopes": ["read"]}] * 2}, 400, "tokens[1]"),
        ({"name": "x", "keys": [{"key": "k"}, {"key": "k"}]}, 400, "twice"),
        ({"name": "x", "keys": [{"key": "278d425bdf160c739803"}]}, 409, "belongs to another app"),
        ({"name": "x", "id": "3"}, 409, "already"),
        (b"{", 400, "body"),
        (b"\xff", 400, "body"),
        ([], 400, "body"),
    ):
        reply = await manager("POST", "", body)
        assert (reply.status, reply.json()["code"]) == (status, "bad_request" if status == 400 else "conflict"), body
        assert words in reply.json()["error"], reply.json()
    assert manager.records.apps == before


async def test_apps_are_listed_in_pages_by_id(manager):
    for number in range(5):
        await manager("POST", "", {"name": f"app {number}", "id": f"b{number}"})
    seen, cursor = [], ""
    while cursor is not None:
        page = (await manager("GET", f"?limit=3{cursor and '&cursor='}{cursor}")).json()
        seen += [app["id"] for app in page["apps"]]
        cursor = page["next"]
    assert seen == ["3", "4", "b0", "b1", "b2", "b3", "b4"]
    assert (await manager("GET")).json()["apps"][0] == {"id": "3", "name": "app 3", "enabled": True}
    for query, code in (("limit=0", "bad_request"), ("limit=1001", "bad_request"), ("cursor=x", "invalid_cursor")):
        assert (await manager("GET", f"?{query}")).json()["code"] == code


async def test_change_needs_the_tag_of_what_was_read(manager, audit):
    assert (await manager("PATCH", "/3", {"name": "new"})).status == 428
    assert (await manager("DELETE", "/3")).json()["code"] == "precondition_required"
    refused = await manager("PATCH", "/3", {"name": "new"}, '"0123"')
    assert (refused.status, refused.json()["code"]) == (412, "precondition_failed")
    assert (await manager("PATCH", "/3", {"name": "new"}, "0123")).status == 400
    etag = await manager.etag()
    assert (await manager("PATCH", "/3", {"name": "new"}, f"W/{etag}")).status == 412
    changed = await manager("PATCH", "/3", {"name": "new", "settings": {"max_batch": 7}}, etag)
    assert (changed.status, changed.json()["name"], changed.json()["settings"]["max_batch"]) == (200, "new", 7)
    assert changed.headers["etag"] == await manager.etag() != etag
    assert (manager.records.apps["3"].name, manager.records.apps["3"].max_batch) == ("new", 7)
    assert audit() == [(f"token {manager.token.id} platform", "app set", "3", "new", "was app 3, max_batch 10 → 7")]


async def test_of_two_writers_with_one_tag_one_wins(manager, connect):
    """Both requests are under way at once, so the second is decided in its transaction."""
    etag = await manager.etag()
    plane = copy.copy(manager.plane)
    plane.wire = await connect(plane.port)
    second = type(manager)(plane, manager.token, manager.plain)
    for _ in range(10):
        replies = await asyncio.gather(
            manager("PATCH", "/3", {"settings": {"max_batch": 20}}, etag),
            second("PATCH", "/3", {"settings": {"max_channels": 20}}, etag),
        )
        assert sorted(reply.status for reply in replies) == [200, 412]
        app = manager.records.apps["3"]
        assert (app.max_batch, app.max_channels) in ((20, 100), (10, 20))
        again = await manager("PATCH", "/3", {"settings": {"max_batch": None, "max_channels": None}}, "*")
        assert again.headers["etag"] == etag


async def test_null_gives_a_setting_its_default(manager):
    await manager.changed("PATCH", "/3", {"settings": {"max_batch": 20, "user_authentication_timeout_s": 0.25}})
    assert manager.records.apps["3"].user_authentication_timeout_s == 0.25
    reply = await manager.changed("PATCH", "/3", {"settings": {"max_batch": None}})
    assert reply.json()["settings"]["max_batch"] == 10
    for body in ({"name": None}, {"settings": None}, {"settings": {"enabled": "yes"}}, {"id": "5"}):
        assert (await manager.changed("PATCH", "/3", body)).status == 400


async def test_body_is_json_or_a_merge_patch(manager):
    body, etag = json.dumps({"name": "new"}).encode(), await manager.etag()
    kinds = {"Content-Type": "application/merge-patch+json"}
    assert (await manager("PATCH", "/3", body, etag, **kinds)).status == 200
    for kind in ({"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}):
        assert (await manager("PATCH", "/3", body, "*", **kind)).status == 415


async def test_deleted_app_takes_everything_with_it_but_the_logs(manager, plane, audit, tmp_path):
    records = manager.records
    webhook = (await manager("POST", "/3/webhooks", {"url": "https://receiver.example/"})).json()
    token = await manager("POST", "/3/tokens", {"name": "ci", "scopes": ["all"]})
    await plane.trigger()
    await plane.write_log()
    etag = await manager.etag()
    assert (await manager("DELETE", "/3", None, '"other"')).status == 412
    deleted = await manager("DELETE", "/3", None, etag)
    assert (deleted.status, deleted.body) == (204, b"")
    assert "3" not in records.apps
    assert "278d425bdf160c739803" not in records.by_key
    assert await read_apps(plane.plane.link, plane.plane.cluster.keys, ["3"]) == [None]
    assert (await plane.trigger()).status == 401
    bearer = {"Authorization": f"Bearer {token.json()['token']}"}
    assert (await plane.ask("GET", "/apps/3/channels", headers=bearer)).json()["code"] == "unauthorized"
    assert audit()[-1][1:] == ("app delete", "3", "app 3", "1 keys, 0 history rules, 1 webhooks, 1 tokens")
    assert (await manager("GET", "/3")).json()["code"] == "unknown_app"
    assert (await manager("DELETE", "/3", None, "*")).status == 404
    with contextlib.closing(sqlite3.connect(tmp_path / "events.sqlite")) as log:
        assert log.execute("SELECT count(*) FROM batches WHERE app_id = '3'").fetchone() == (1,)
    with contextlib.closing(sqlite3.connect(tmp_path / "redpoll.sqlite")) as store:
        assert store.execute("SELECT * FROM keys WHERE app_id = '3'").fetchall() == []
        assert store.execute("SELECT secret FROM webhooks WHERE id = ?", (webhook["id"],)).fetchall() in ([], [("",)])
        assert store.execute("SELECT * FROM tokens WHERE app_id = '3'").fetchall() == []


async def test_id_of_a_deleted_app_can_be_used_again(manager, plane):
    first = (
        await manager("POST", "", {"name": "one", "id": "again", "tokens": [{"name": "a", "scopes": ["all"]}]})
    ).json()
    await manager("DELETE", "/again", None, "*")
    second = (await manager("POST", "", {"name": "two", "id": "again"})).json()
    assert (second["webhooks"], second["history_rules"]) == ([], [])
    assert second["keys"] != first["keys"]
    bearer = {"Authorization": f"Bearer {first['tokens'][0]['token']}"}
    assert (await plane.ask("GET", "/apps/again/channels", headers=bearer)).status == 401
    assert (await manager("GET", "/again")).json()["name"] == "two"


async def test_rows_of_deleted_apps_are_forgotten_when_no_control_plane_needs_them(manager, plane):
    for _ in range(2):
        await manager("POST", "", {"name": "one", "id": "again"})
        await manager("DELETE", "/again", None, "*")
    store = manager.records._store
    async with store.change() as connection:
        assert await app_rows.deleted_since(connection, 0) == ["again"]
        await app_rows.forget_deleted(connection, manager.records.known.records)
        assert await app_rows.deleted_since(connection, 0) == []
