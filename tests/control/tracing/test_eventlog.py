"""The event log and traces over HTTP."""

import json

import pytest

from control.conftest import signed


@pytest.fixture
async def flushed(plane):
    """`await flushed()` writes all calls so far to the event log."""
    await plane.write_log()
    return plane.write_log


async def search(plane, **params):
    return await plane.call("GET", "/apps/3/events/log", params=params)


async def test_trigger_is_found_by_trace_id_with_its_stages(plane, flushed):
    reply = await plane.trigger(name="order", channels=["a", "b"], data="12345", correlation_id="c-1")
    trace_id = reply.headers["x-service-trace-id"]
    await flushed()
    shown = (await plane.call("GET", f"/apps/3/trace/{trace_id}")).json()
    spans = shown.pop("spans")
    assert [span["stage"] for span in spans] == ["authenticated", "accepted"]
    # The start of a call is computed from two clocks when it ends. The process may pause between them.
    assert all(shown["time_us"] <= span["time_us"] + 60_000_000 for span in spans)
    assert all(span["time_us"] // 1_000 == span["time_ms"] for span in spans)
    assert shown.pop("time_us") // 1_000 == shown.pop("time_ms")
    assert shown.pop("caller").startswith("key ")
    assert shown == {
        "trace_id": trace_id,
        "correlation_id": "c-1",
        "name": "order",
        "channels": ["a", "b"],
        "size": 5,
        "status": 200,
        "sampled": True,
    }
    assert [event["trace_id"] for event in (await search(plane, correlation_id="c-1")).json()["events"]] == [trace_id]


async def test_calls_that_share_a_trace_id_are_shown_one_by_one(plane, flushed):
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    given = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    for name in ("first", "second"):
        body = json.dumps({"name": name, "channels": [f"of-{name}"], "data": "{}"}).encode()
        assert (await plane.ask("POST", signed("POST", "/apps/3/events", body), body, given)).status == 200
    await flushed()
    logged = {call["name"]: call for call in (await search(plane, trace_id=trace_id)).json()["events"]}
    path = f"/apps/3/trace/{trace_id}"
    shown = {}
    for name in ("first", "second"):
        reply = await plane.call("GET", path, params={"time_us": str(logged[name]["time_us"])})
        shown[name] = reply.json()
        spans = shown[name].pop("spans")
        assert [sorted(span) for span in spans] == 2 * [["stage", "time_ms", "time_us"]]
        assert [span["stage"] for span in spans] == ["authenticated", "accepted"]
        assert spans[0]["time_us"] >= logged[name]["time_us"]
    assert shown == logged
    newest = (await plane.call("GET", path)).json()
    assert (newest["name"], len(newest["spans"])) == ("second", 2)
    assert (await plane.call("GET", path, params={"time_us": "1"})).status == 404
    assert (await plane.call("GET", path, params={"time_us": "x"})).status == 400


async def test_refused_triggers_are_logged(plane, flushed):
    bad = await plane.trigger(name="pusher:no", channels=["a"])
    large = await plane.trigger(name="large", channels=["a"], data="x" * 11_000)
    await flushed()
    by_trace_id = {event["trace_id"]: event for event in (await search(plane, channel="a")).json()["events"]}
    assert by_trace_id[bad.headers["x-service-trace-id"]]["status"] == 400
    assert by_trace_id[large.headers["x-service-trace-id"]]["status"] == 413
    assert by_trace_id[large.headers["x-service-trace-id"]]["size"] == 11_000


async def test_rate_limited_trigger_is_logged(make_plane, redis):
    plane = await make_plane(redis.url, trigger_rate_per_minute=1)
    assert [(await plane.trigger()).status for _ in range(2)] == [200, 429]
    await plane.write_log()
    assert [event["status"] for event in (await search(plane)).json()["events"]] == [429, 200]


async def test_reads_and_unsigned_requests_are_not_logged(plane, flushed):
    await plane.call("GET", "/apps/3/channels")
    await plane.call("POST", "/apps/3/events", {"name": "e"}, secret="0" * 20)
    await flushed()
    assert (await search(plane)).json() == {"events": [], "next": None}


async def test_search_results_are_paged(plane, flushed):
    for number in range(5):
        await plane.trigger(name=f"n{number}")
    await flushed()
    first = (await search(plane, limit="3")).json()
    second = (await search(plane, limit="3", cursor=first["next"])).json()
    assert [event["name"] for event in first["events"] + second["events"]] == ["n4", "n3", "n2", "n1", "n0"]
    assert second["next"] is None


async def test_calls_of_another_app_are_not_found(plane, flushed):
    trace_id = (await plane.trigger()).headers["x-service-trace-id"]
    await flushed()
    _, token = await plane.records.create_token("4", "t", ["read"])
    shown = {"Authorization": f"Bearer {token}"}
    reply = await plane.ask("GET", f"/apps/4/trace/{trace_id}", headers=shown)
    assert (reply.status, reply.json()["code"]) == (404, "not_found")
    assert json.loads((await plane.ask("GET", "/apps/4/events/log", headers=shown)).body)["events"] == []


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"limit": "0"}, "bad_request"),
        ({"limit": "1001"}, "bad_request"),
        ({"limit": "ten"}, "bad_request"),
        ({"since": "yesterday"}, "bad_request"),
        ({"until": "-1"}, "bad_request"),
        ({"cursor": "x"}, "invalid_cursor"),
    ],
)
async def test_invalid_parameter_is_refused_by_name(plane, params, code):
    reply = await search(plane, **params)
    assert (reply.status, reply.json()["code"]) == (400, code)
    assert next(iter(params)) in reply.json()["error"]


async def test_call_refused_before_its_body_is_parsed_is_logged(make_plane, redis, connect):
    plane = await make_plane(redis.url)
    pair = {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": "7ad3773142a6692b25b8"}
    large = b"x" * (1024 * 1024 + 1)

    async def outcome_of(ask):
        # The server closes the connection after such a refusal.
        plane.wire = await connect(plane.port)
        reply = await ask
        return reply.headers["x-service-trace-id"], reply.status

    compressed = {**pair, "Content-Encoding": "gzip"}
    expected = [
        await outcome_of(plane.call("POST", "/apps/3/events", large)),
        await outcome_of(plane.ask("POST", "/apps/3/events", large, pair)),
        await outcome_of(plane.ask("POST", "/apps/3/events", b"{}", compressed)),
    ]
    # A call with a wrong signature belongs to no app, so it is not logged.
    assert (await outcome_of(plane.call("POST", "/apps/3/events", large, secret="0" * 20)))[1] == 413
    await plane.records.set_app("3", {"enabled": False})
    expected.append(await outcome_of(plane.call("POST", "/apps/3/events", {"name": "e", "channel": "c", "data": ""})))
    assert [status for _, status in expected] == [413, 413, 415, 403]
    await plane.write_log()
    await plane.records.set_app("3", {"enabled": True})
    plane.wire = await connect(plane.port)
    rows = (await search(plane)).json()["events"]
    assert [(row["trace_id"], row["status"]) for row in reversed(rows)] == expected
