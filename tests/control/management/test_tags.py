"""The entity tags of apps."""

import pytest

from redpoll.control.management.tags import Tags
from redpoll.protocol.errors import ApiError


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
