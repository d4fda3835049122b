"""The entity tags of apps."""

import time

import msgspec
import pytest

from redpoll.control.commands.app_plan import Wanted
from redpoll.control.commands.app_write import create_app
from redpoll.control.management.tags import Tags
from redpoll.protocol.errors import ApiError
from redpoll.store.audit import Actor

# All that an app may have.
WANTED = {
    "id": "7",
    "name": "app 7",
    "one_key": False,
    "keys": [{"key": "first"}, {"key": "second", "enabled": False}],
    "settings": {"max_batch": "20", "user_authentication_timeout_s": "2", "allowed_origins": "b.example,a.example"},
    "history": [{"name": name, "prefix": True, "keep": 10, "seconds": 60} for name in ("b", "a")],
    "webhooks": [{"url": f"https://{name}.example/"} for name in "dbca"],
    "tokens": [{"name": name, "scopes": ["read", "publish"]} for name in "dbca"],
}


async def create(node):
    await create_app(node.records, node.webhooks, msgspec.convert(WANTED, Wanted), Actor("test"))


def names(node):
    endpoints = node.webhooks.endpoints.of_app("7")
    return [one.url[8] for one in endpoints], [token.name for token in node.records.tokens_of("7")]


async def test_tag_and_lists_are_the_same_on_all_nodes_in_whatever_order_they_heard_of_things(make_node):
    one, other = await make_node(), await make_node(lambda: time.time() - 60)
    await create(one)
    await other.records.sync()
    assert names(other) == names(one) == (list("dbca"), list("dbca"))
    assert other.tags.of("7") == one.tags.of("7")
    # Its clock is behind.
    await other.records.create_token("7", "e", ["read"])
    await other.webhooks.endpoints.create("7", "https://e.example/")
    await one.records.sync()
    third = await make_node()
    assert names(one) == names(other) == names(third) == (list("edbca"), list("edbca"))
    assert one.tags.of("7") == other.tags.of("7") == third.tags.of("7")


async def test_tag_is_the_same_on_a_node_that_still_has_a_token_that_is_to_be_forgotten(make_node):
    now_s = 1_000_000.0
    one, other, last = [await make_node(lambda: now_s) for _ in range(3)]
    apps = [await one.records.create_app(name) for name in "ab"]
    await one.records.create_token(apps[0].id, "short", ["read"], 60)
    for node in (other, last):
        await node.records.sync()
    now_s += 91 * 86_400
    # The row is removed, and no version tells the others.
    await one.records.create_token(apps[1].id, "next", ["read"])
    await other.records.sync()
    nodes = one, other, last, await make_node(lambda: now_s)
    assert [len(node.records.tokens) for node in nodes] == [1, 1, 1, 1]
    assert len({node.tags.of(apps[0].id) for node in nodes}) == 1
    assert [node.records.tokens_of(apps[0].id) for node in nodes] == [[]] * 4


async def test_tag_changes_with_all_that_is_shown_and_comes_back_with_it(manager):
    seen = [await manager.etag()]
    for path, body in (
        ("/keys", {}),
        ("/history_rules", {"name": "a", "keep": 1, "seconds": 1}),
        ("/webhooks", {"url": "https://a.example/"}),
        ("/tokens", {"name": "ci", "scopes": ["read"]}),
    ):
        seen.append((await manager("POST", f"/3{path}", body)).headers["etag"])
    seen.append((await manager.changed("PATCH", "/3", {"name": "other"})).headers["etag"])
    assert len(set(seen)) == 6
    assert (await manager.changed("PATCH", "/3", {"name": "app 3"})).headers["etag"] == seen[-2]
    for path in ("", "/keys", "/history_rules", "/webhooks", "/tokens"):
        assert (await manager("GET", f"/3{path}")).headers["etag"] == seen[-2]


async def test_tag_is_another_for_each_app_and_each_store(manager):
    endpoints = manager.plane.plane.webhooks.endpoints
    one, other = (Tags(manager.records, endpoints, secret) for secret in (b"one", b"other"))
    assert len({one.of("3"), one.of("4"), other.of("3"), await manager.etag()}) == 4


async def test_what_the_server_itself_changes_is_not_in_the_tag(manager):
    before = await manager.etag()
    await manager.records.watch_console("3", 1e10)
    await manager.records.debug("3", 1e10, "")
    assert await manager.etag() == before


async def test_conditions(manager):
    etag = await manager.etag()
    tags = Tags(manager.records, manager.plane.plane.webhooks.endpoints, b"")
    for right in (etag, "*", " * ", f'"a", {etag}', f'{etag},W/"b"', f"\t{etag} "):
        tags.check("3", right)
    for text, code in (
        (f"W/{etag}", "precondition_failed"),
        ('""', "precondition_failed"),
        (etag.strip('"'), "bad_request"),
        ("", "bad_request"),
        (f"{etag} {etag}", "bad_request"),
        (f"*, {etag}", "bad_request"),
        (f"{etag},", "bad_request"),
        ('"a"' + ',"a"' * 2_000, "bad_request"),
    ):
        with pytest.raises(ApiError) as refused:
            tags.check("3", text)
        assert refused.value.code == code, text
    with pytest.raises(ApiError) as refused:
        tags.check("5", "*")
    assert refused.value.code == "unknown_app"
