"""Apps cannot use or see each other: every kind of credential on every route, and every name that both may use."""

import asyncio
import json

import msgspec
import pytest

from redpoll import _frame
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.http.router import Access

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
OTHER_KEY, OTHER_SECRET = "1111111111111111aaaa", "2222222222222222bbbb"
EVENT = b'{"name":"e","channel":"c","data":""}'
SUBSCRIPTION = b'{"socket_id":"1.2","channel_name":"private-a"}'
BODIES = {"events": EVENT, "batch_events": b'{"batch":[{"name":"e","channel":"c","data":""}]}', "auth": SUBSCRIPTION}


def routes_with_an_app(plane, app_id):
    """(method, path, body) of every route, under both prefixes."""
    for route in plane.plane.routes.all:
        if route.access is Access.APP:
            path = route.pattern.format(app_id=app_id, channel="presence-c", user_id="u", trace_id="1" * 32)
            for mount in ("", "/api/v1"):
                yield route.method, mount + path, BODIES.get(route.name, b"")


async def shown_by_4(plane, sign, method, path, body):
    """(kind, target, headers) for every way to send credentials of app 4."""
    _, plain = await plane.records.create_token("4", "t", ["all"])
    yield "token", path, {"Authorization": f"Bearer {plain}"}
    yield "pair", path, {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET}
    yield "signature", sign(method, path, body, key=OTHER_KEY, secret=OTHER_SECRET), {}
    # Credentials that mix keys and secrets of both apps.
    yield "our key, their secret", path, {"X-Service-Key": KEY, "X-Service-Secret": OTHER_SECRET}
    yield "their key, our secret", path, {"X-Service-Key": OTHER_KEY, "X-Service-Secret": SECRET}
    yield "our key, signed by them", sign(method, path, body, key=KEY, secret=OTHER_SECRET), {}


@pytest.fixture
async def plane(make_plane, redis):
    """Without the limit of failed authentications: these tests fail more often than it allows."""
    return await make_plane(redis.url, auth_failures_per_minute=0)


async def test_credentials_of_another_app_are_refused_on_every_route_without_revealing_the_app(
    plane, sign, hear, wait_until
):
    listener = await hear("c")
    tried = 0
    for method, path, body in routes_with_an_app(plane, "3"):
        unknown_path = path.replace("/apps/3/", "/apps/999/")
        unknown = [credential async for credential in shown_by_4(plane, sign, method, unknown_path, body)]
        async for what, target, headers in shown_by_4(plane, sign, method, path, body):
            reply = await plane.ask(method, target, body, headers)
            assert reply.status == 401, (what, path)
            _, unknown_target, unknown_headers = next(credential for credential in unknown if credential[0] == what)
            unknown_reply = await plane.ask(method, unknown_target, body, unknown_headers)
            # Keys are public, so an answer may reveal whose key it is. It must not reveal whether an app exists.
            if what != "our key, signed by them":
                assert unknown_reply.json()["code"] == reply.json()["code"]
                assert unknown_reply.json()["error"] == reply.json()["error"]
            assert SECRET not in reply.body.decode()
            tried += 1
    assert tried == 6 * 2 * sum(1 for route in plane.plane.routes.all if route.access is Access.APP)
    assert (await plane.trigger(name="ours")).status == 200
    await wait_until(lambda: listener.heard)
    assert [_frame.envelope(message)[6] for message in listener.heard] == [b"ours"]


async def test_manipulated_paths_reach_no_other_app(plane):
    pair = {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET}
    assert (await plane.ask("GET", "/apps/4/channels", headers=pair)).status == 200
    for path in ("/apps/4%2F..%2F3/channels", "/apps/3%00/channels", "/apps/4:3/channels", "/apps/%34%20/channels"):
        assert (await plane.ask("GET", path, headers=pair)).status == 401, path
    for path in ("/apps/4/../3/channels", "/apps/4//3/channels", "/apps/3;4/channels/"):
        assert (await plane.ask("GET", path, headers=pair)).status in (401, 404), path


async def as_4(plane, method, path, body=None, params=None):
    return await plane.call(method, path, body, params, key=OTHER_KEY, secret=OTHER_SECRET)


async def test_channels_members_and_cached_events_are_separate_per_app(plane, occupy, hear, wait_until):
    ours, theirs = await hear("presence-cache-a"), await hear("presence-cache-a", app_id="4")
    await occupy("presence-cache-a", {"w1": 3}, users=["u1", "u2"])
    assert (await plane.trigger(channels=["presence-cache-a"], data="secret")).status == 200
    path, info = "/apps/4/channels/presence-cache-a", {"info": "cache,user_count,subscription_count"}
    assert (await as_4(plane, "GET", path, params=info)).json() == {
        "occupied": False,
        "subscription_count": 0,
        "user_count": 0,
        "cache": None,
    }
    assert (await as_4(plane, "GET", path + "/users")).json() == {"users": []}
    for prefix in ("", "*", "presence-", "3:", "[p]"):
        listed = await as_4(plane, "GET", "/apps/4/channels", params={"filter_by_prefix": prefix})
        assert listed.json() == {"channels": {}}
    await wait_until(lambda: ours.heard)
    body = {"name": "theirs", "channels": ["presence-cache-a"], "data": "", "info": "user_count,subscription_count"}
    answer = await as_4(plane, "POST", "/apps/4/events", body)
    assert answer.json() == {"channels": {"presence-cache-a": {"user_count": 0, "subscription_count": 0}}}
    await wait_until(lambda: theirs.heard)
    assert (len(ours.heard), len(theirs.heard)) == (1, 1)


async def test_correlation_ids_are_separate_per_app(plane):
    for app_id in ("3", "4"):
        await plane.records.set_app(app_id, {"idempotency": True})
    event = {"name": "e", "channel": "c", "data": "ours", "correlation_id": "1", "info": "subscription_count"}
    assert (await plane.call("POST", "/apps/3/events", event)).json() == {"channels": {"c": {"subscription_count": 0}}}
    reply = await as_4(plane, "POST", "/apps/4/events", {**event, "data": "theirs", "info": ""})
    assert (reply.status, reply.body) == (200, b"{}")


async def test_daily_limits_are_separate_per_app(plane, monkeypatch):
    from redpoll.protocol import apps

    monkeypatch.setitem(apps.DAILY_LIMITS, "free", 2)
    for app_id in ("3", "4"):
        await plane.records.set_app(app_id, {"plan": "free"})
    assert [(await plane.trigger()).status for _ in range(3)] == [200, 200, 429]
    reply = await as_4(plane, "POST", "/apps/4/events", json.loads(EVENT))
    assert (reply.status, reply.headers["x-ratelimit-remaining"]) == (200, "1")


async def test_terminating_a_users_connections_affects_only_the_app_of_the_credential(plane, redis, wait_until):
    asked, keys = [], Keys("rp")
    link = Link(redis.url)
    link.on_push = lambda topic, payload: asked.append(msgspec.json.decode(payload))
    link.start()
    await link.wait_up()
    subscribed = asyncio.get_running_loop().create_future()
    link.subscribe([keys.sys], subscribed.set_result)
    await subscribed
    target = "/users/u/terminate_connections"
    assert (await as_4(plane, "POST", target, {})).status == 200
    assert (await plane.call("POST", target, {})).status == 200
    _, plain = await plane.records.create_token("4", "t", ["publish"])
    shown = {"Authorization": f"Bearer {plain}"}
    assert (await plane.ask("POST", f"{target}?auth_key={KEY}", b"{}", {**shown, "X-Service-Key": KEY})).status == 200
    assert (await plane.ask("POST", "/apps/3" + target, b"{}", shown)).status == 401
    # No worker runs, so no answer is awaited. The test reads the topic that workers would read.
    await wait_until(lambda: len([message for message in asked if message["type"] == "TerminateUser"]) == 3)
    assert [message["app"] for message in asked if message["type"] == "TerminateUser"] == ["4", "3", "4"]
    await link.close()


async def test_auth_signs_only_with_keys_of_the_callers_app(plane):
    _, plain = await plane.records.create_token("4", "t", ["auth"])
    for headers in (
        {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET},
        {"Authorization": f"Bearer {plain}", "X-Service-Key": KEY},
    ):
        answer = (await plane.ask("POST", f"/apps/4/auth?auth_key={KEY}", SUBSCRIPTION, headers)).json()
        assert answer["auth"].startswith(OTHER_KEY + ":")


async def test_trace_id_of_another_app_reveals_nothing(plane, sign):
    reply = await plane.trigger(data="secret")
    trace = reply.headers["x-service-trace-id"]
    pair = {"X-Service-Key": OTHER_KEY, "X-Service-Secret": OTHER_SECRET}
    parent = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    for path, body in (("/apps/4/events", EVENT), ("/apps/4/events", b"{}"), ("/apps/3/events", EVENT)):
        reply = await plane.ask("POST", path, body, {**pair, **parent})
        assert b"secret" not in reply.body
        assert reply.headers["x-service-trace-id"] == trace


@pytest.mark.parametrize("credential", ["token", "pair"])
async def test_credentials_of_two_apps_on_the_same_connections_never_mix(plane, connect, hear, credential):
    """Every connection alternates between the apps. An answer must belong to the app of its request."""
    await plane.records.set_app("4", {"max_batch": 3})

    async def shown(app_id, key, secret):
        if credential == "pair":
            return {"X-Service-Key": key, "X-Service-Secret": secret}
        _, plain = await plane.records.create_token(app_id, "t", ["all"])
        return {"Authorization": f"Bearer {plain}"}

    ours, theirs = await shown("3", KEY, SECRET), await shown("4", OTHER_KEY, OTHER_SECRET)
    batch = json.dumps({"batch": [{"name": "e", "channel": "c", "data": ""}] * 4}).encode()

    def request(app_id, headers):
        lines = [f"POST /apps/{app_id}/batch_events HTTP/1.1", "Host: h", f"Content-Length: {len(batch)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + batch

    async def one(wire):
        statuses = []
        for number in range(20):
            app_id, headers = [("3", ours), ("4", theirs), ("3", theirs), ("4", ours)][number % 4]
            statuses.append((await wire.ask(request(app_id, headers))).status)
        return statuses

    found = await asyncio.gather(*[one(await connect(plane.port)) for _ in range(5)])
    assert found == [[200, 400, 401, 401] * 5] * 5
