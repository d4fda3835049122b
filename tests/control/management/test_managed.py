"""What the handlers of the management API share."""

from types import SimpleNamespace

import pytest

from redpoll.protocol.errors import ApiError


async def test_answers_are_json_with_a_trace_and_never_stored_by_caches(manager):
    trace = "0af7651916cd43dd8448eb211c80319c"
    reply = await manager("GET", "/3", traceparent=f"00-{trace}-b7ad6b7169203331-01")
    assert reply.headers["x-service-trace-id"] == trace
    assert (reply.headers["content-type"], reply.headers["cache-control"]) == ("application/json", "no-store")
    head = await manager("HEAD", "/3")
    assert (head.status, head.headers["etag"], head.body) == (200, reply.headers["etag"], b"")


async def test_condition_of_a_request_that_adds_something_counts_if_it_is_sent(manager):
    assert (await manager("POST", "/3/keys", {}, '"other"')).status == 412
    assert (await manager("POST", "/3/keys", {}, await manager.etag())).status == 201


async def test_tag_that_another_node_has_just_answered_with_is_right(make_node):
    """It got 412 while this node hadn't read the change."""
    one, other = await make_node(), await make_node()
    app = await one.records.create_app("name")
    token, _ = await one.records.create_token(None, "platform", ["manage"])
    await other.records.sync()
    before = one.tags.of(app.id)
    await one.records.rename_app(app.id, "new")
    asked = SimpleNamespace(headers={"If-Match": one.tags.of(app.id)}, token=token, remote="")
    by = await other.changing(asked, app)
    assert (await other.records.set_app(app.id, {"max_batch": 7}, by=by)).name == "new"
    asked.headers["If-Match"] = before
    with pytest.raises(ApiError) as refused:
        await other.changing(asked, app)
    assert refused.value.code == "precondition_failed"


async def test_use_of_the_token_is_recorded(manager, wait_until):
    await manager("GET")
    await wait_until(lambda: manager.records.tokens[manager.token.hash].last_used_at is not None)


async def test_debugging_an_app_shows_no_bodies_of_its_management(manager, capsys):
    await manager.records.debug("3", 1e10, "")
    await manager("POST", "/3/keys", {"key": "mine", "secret": "never-in-the-log"})
    assert "never-in-the-log" not in capsys.readouterr().out
