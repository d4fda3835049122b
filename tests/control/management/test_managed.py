"""What the handlers of the management API share."""


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


async def test_use_of_the_token_is_recorded(manager, wait_until):
    await manager("GET")
    await wait_until(lambda: manager.records.tokens[manager.token.hash].last_used_at is not None)


async def test_debugging_an_app_shows_no_bodies_of_its_management(manager, capsys):
    await manager.records.debug("3", 1e10, "")
    await manager("POST", "/3/keys", {"key": "mine", "secret": "never-in-the-log"})
    assert "never-in-the-log" not in capsys.readouterr().out
