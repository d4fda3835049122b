"""The endpoints of protocol/README.md "HTTP API", through real sockets and a real Redis."""

import asyncio
import hashlib
import hmac
import json
import re

import pusher
import pytest

from redpoll import _frame
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.idempotency import Idempotency
from redpoll.control.api.api import Api
from redpoll.protocol.apps import HistoryRule

SECRET = "7ad3773142a6692b25b8"


def parsed(payload):
    """(event, data, skip or None, trace id) of an envelope."""
    _offset, _prev, skip_hi, skip_lo, trace, _user, event, data = _frame.envelope(payload)
    skip = f"{skip_hi}.{skip_lo}" if skip_hi or skip_lo else None
    return event.decode(), data.decode(), skip, trace and trace.decode()


# -- trigger ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mount", ["/apps", "/api/v1/apps"])
async def test_a_trigger_reaches_the_channels_topic_and_answers_an_empty_object(plane, hear, wait_until, mount):
    listener = await hear("my-channel")
    body = {"name": "my-event", "channels": ["my-channel"], "data": '{"a":"ü"}', "socket_id": "12.34"}
    reply = await plane.call("POST", f"{mount}/3/events", body)
    assert (reply.status, reply.body) == (200, b"{}")
    assert reply.headers["content-type"] == "application/json"
    await wait_until(lambda: listener.heard)
    event, data, skip, trace = parsed(listener.heard[0])
    assert (event, data, skip) == ("my-event", '{"a":"ü"}', "12.34")
    # This node's run, and a number that is shorter than the trace id (cluster/traces.py).
    assert re.fullmatch(r"0123456789ab[0-9a-f]{1,13}", trace)


async def test_a_trigger_to_many_channels_reaches_each_distinct_one_once(plane, hear, wait_until):
    listener = await hear("a", "b")
    assert (await plane.trigger(channels=["a", "b", "a"])).status == 200
    assert (await plane.trigger(channels=["a"], name="end")).status == 200
    await wait_until(lambda: len(listener.heard) == 3)
    assert [parsed(message)[0] for message in listener.heard] == ["e", "e", "end"]


async def test_requests_one_after_another_and_items_of_a_batch_keep_their_order(plane, hear, wait_until):
    listener = await hear("c", "d")
    expected = []
    for number in range(20):
        await plane.trigger(name=f"e{number}")
        items = [{"name": f"b{number}-{item}", "channel": "cd"[item % 2], "data": ""} for item in range(10)]
        assert (await plane.call("POST", "/apps/3/batch_events", {"batch": items})).status == 200
        expected += [f"e{number}", *(item["name"] for item in items)]
    await wait_until(lambda: len(listener.heard) == len(expected))
    assert [parsed(message)[0] for message in listener.heard] == expected


async def test_pipelined_triggers_of_one_connection_keep_their_order(plane, hear, wait_until, sign):
    listener = await hear("c")
    for number in range(100):
        body = json.dumps({"name": f"e{number}", "channel": "c", "data": ""}).encode()
        target = sign("POST", "/apps/3/events", body)
        head = f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        plane.wire.send(head.encode() + body)
    for _ in range(100):
        assert (await plane.wire.receive()).status == 200
    await wait_until(lambda: len(listener.heard) == 100)
    assert [parsed(message)[0] for message in listener.heard] == [f"e{number}" for number in range(100)]


async def test_the_correlation_id_comes_back_in_a_header_when_it_was_sent(plane):
    assert (await plane.trigger(correlation_id="order 7")).headers["x-service-correlation-id"] == "order 7"
    assert "x-service-correlation-id" not in (await plane.trigger()).headers
    refused = await plane.trigger(correlation_id="a\r\nSet-Cookie: b")
    assert refused.status == 400
    assert "set-cookie" not in refused.headers


async def test_info_of_a_trigger_gives_what_applies_to_each_channel(plane, occupy):
    await occupy("presence-a", {"w1": 2, "w2": 1}, users=["1", "2"])
    await occupy("b", {"w1": 13})
    reply = await plane.trigger(channels=["presence-a", "b", "empty"], info="user_count,subscription_count")
    assert reply.json() == {
        "channels": {
            "presence-a": {"subscription_count": 3, "user_count": 2},
            "b": {"subscription_count": 13},
            "empty": {"subscription_count": 0},
        }
    }
    reply = await plane.trigger(channels=["b"], info="user_count")
    assert reply.json() == {"channels": {"b": {}}}


async def test_confirmed_events_whose_info_came_too_late_count_as_published(plane, monkeypatch):
    async def late(*_):
        raise TimeoutError

    monkeypatch.setattr(Api, "_attributes", late)
    assert (await plane.trigger(info="subscription_count")).status == 503
    publisher = plane.plane.publishing.publisher
    assert (publisher.events_published, publisher.unconfirmed) == (1, 0)


async def test_info_of_a_batch_is_returned_in_the_order_of_its_events(plane, occupy):
    await occupy("presence-a", {"w1": 42}, users=["1"])
    items = [
        {"name": "e", "channel": "presence-a", "data": "", "info": "user_count"},
        {"name": "e", "channel": "b", "data": ""},
        {"name": "e", "channel": "presence-a", "data": "", "info": "subscription_count"},
    ]
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert reply.json() == {"batch": [{"user_count": 1}, {}, {"subscription_count": 42}]}


async def test_a_batch_without_info_answers_an_empty_object(plane):
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": [{"name": "e", "channel": "c", "data": ""}]})
    assert reply.body == b"{}"
    assert "x-service-trace-id" in reply.headers


async def test_one_invalid_item_refuses_the_whole_batch(plane, hear, wait_until):
    listener = await hear("c")
    items = [{"name": "e", "channel": "c", "data": ""}, {"name": "pusher:x", "channel": "c", "data": ""}]
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert (reply.status, reply.json()["code"]) == (400, "invalid_event_name")
    assert "[1]" in reply.json()["error"]
    await plane.trigger(name="after")
    await wait_until(lambda: listener.heard)
    assert parsed(listener.heard[0])[0] == "after"


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        ({"data": ""}, 200, None),
        ({"data": "x" * 10_240}, 200, None),
        ({"data": "x" * 10_241}, 413, "payload_too_large"),
        ({"data": "ü" * 5_121}, 413, "payload_too_large"),
        ({"data": {"a": 1}}, 400, "bad_request"),
        ({"data": None}, 400, "bad_request"),
        ({"name": "x" * 200}, 200, None),
        ({"name": "x" * 201}, 400, "invalid_event_name"),
        ({"name": ""}, 400, "invalid_event_name"),
        ({"name": "pusher_internal:x"}, 400, "invalid_event_name"),
        ({"name": "svc:x"}, 400, "invalid_event_name"),
        ({"channels": [f"c{number}" for number in range(100)]}, 200, None),
        ({"channels": [f"c{number}" for number in range(101)]}, 400, "too_many_channels"),
        ({"channels": ["no spaces"]}, 400, "invalid_channel"),
        ({"channels": []}, 400, "bad_request"),
        ({"channels": "c"}, 400, "bad_request"),
        ({"socket_id": "12"}, 400, "invalid_socket_id"),
        ({"socket_id": None}, 200, None),
        ({"info": "users"}, 400, "invalid_info"),
        ({"correlation_id": "x" * 129}, 400, "bad_request"),
        ({"correlation_id": "x" * 128}, 200, None),
    ],
)
async def test_fields_of_a_trigger_are_checked(plane, event, status, code):
    reply = await plane.trigger(**event)
    assert reply.status == status
    assert reply.json().get("code") == code


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null", b"{", b"\xff", b"[" * 100_000, b'{"batch":{}}'])
@pytest.mark.parametrize("path", ["/apps/3/events", "/apps/3/batch_events", "/apps/3/auth"])
async def test_a_body_with_the_wrong_types_is_400(plane, path, body):
    reply = await plane.call("POST", path, body)
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("field", ["name", "data", "channel", "socket_id", "info", "correlation_id"])
@pytest.mark.parametrize("value", [r"\ud800", r"\udfff\ud800", r"a\u0000b"])
async def test_invalid_unicode_is_400_and_not_500(plane, field, value):
    fields = {"name": "e", "data": "d", "channel": "c", field: "VALUE"}
    body = json.dumps(fields).replace("VALUE", value).encode()
    reply = await plane.call("POST", "/apps/3/events", body)
    assert reply.status in (200, 400)


async def test_more_than_ten_items_are_refused(plane):
    items = [{"name": "e", "channel": "c", "data": ""}] * 11
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert (reply.status, reply.json()["code"]) == (400, "batch_too_large")


async def test_parameters_may_be_in_the_query(plane, hear, wait_until):
    listener = await hear("c")
    reply = await plane.call("POST", "/apps/3/events", {"data": "d"}, {"name": "asked", "channel": "c"})
    assert reply.status == 200
    await wait_until(lambda: listener.heard)
    assert parsed(listener.heard[0])[0] == "asked"


# -- channels and users ------------------------------------------------------------------------------------------


async def test_channels_is_an_empty_object_if_none_is_occupied(plane):
    reply = await plane.call("GET", "/apps/3/channels")
    assert (reply.status, reply.body) == (200, b'{"channels":{}}')


async def test_channels_lists_occupied_channels_with_the_wanted_info(plane, occupy):
    await occupy("presence-a", {"w1": 2}, users=["1", "2"])
    await occupy("b", {"w1": 1, "w2": 2})
    everything = {"info": "subscription_count,user_count"}
    assert (await plane.call("GET", "/apps/3/channels")).json() == {"channels": {"b": {}, "presence-a": {}}}
    assert (await plane.call("GET", "/apps/3/channels", params=everything)).json() == {
        "channels": {"b": {"subscription_count": 3}, "presence-a": {"subscription_count": 2, "user_count": 2}}
    }
    only = {"filter_by_prefix": "presence-", "info": "user_count"}
    assert (await plane.call("GET", "/apps/3/channels", params=only)).json() == {
        "channels": {"presence-a": {"user_count": 2}}
    }
    other = await plane.call("GET", "/apps/4/channels", key="1111111111111111aaaa", secret="2222222222222222bbbb")
    assert other.json() == {"channels": {}}


async def test_all_channels_are_listed_if_redis_returns_them_in_several_pages(plane, occupy):
    for number in range(1_200):
        await occupy(f"c{number}", {"w": 1})
    reply = await plane.call("GET", "/apps/3/channels", params={"info": "subscription_count"})
    channels = reply.json()["channels"]
    assert len(channels) == 1_200
    assert channels["c1199"] == {"subscription_count": 1}


@pytest.mark.parametrize("info", ["", "subscription_count,user_count"])
async def test_channels_in_pages_have_each_channel_once(plane, occupy, info):
    names = {f"presence-{number}" for number in range(30)} | {"other"}
    for name in names:
        await occupy(name, {"w": 2}, users=["1"])
    expected = {"subscription_count": 2, "user_count": 1} if info else {}
    query = {"filter_by_prefix": "presence-", "limit": "7", **({"info": info} if info else {})}
    found, sizes = {}, []
    while True:
        page = (await plane.call("GET", "/apps/3/channels", params=query)).json()
        assert set(page) == {"channels", "next"}
        found |= page["channels"]
        sizes.append(len(page["channels"]))
        if page["next"] is None:
            break
        query["cursor"] = page["next"]
    assert sizes == [7, 7, 7, 7, 2]
    assert found == dict.fromkeys(names - {"other"}, expected)


async def test_pages_have_100_channels_if_no_limit_is_given(plane, occupy):
    for number in range(130):
        await occupy(f"c{number}", {"w": 1})
    first = (await plane.call("GET", "/apps/3/channels", params={"limit": "30"})).json()
    second = (await plane.call("GET", "/apps/3/channels", params={"cursor": first["next"]})).json()
    assert (len(first["channels"]), len(second["channels"]), second["next"]) == (30, 100, None)


async def test_an_empty_page_has_no_next(plane):
    reply = await plane.call("GET", "/apps/3/channels", params={"limit": "10"})
    assert reply.body == b'{"channels":{},"next":null}'


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "1e2", "", "٣"])
async def test_a_limit_out_of_range_is_refused(plane, limit):
    reply = await plane.call("GET", "/apps/3/channels", params={"limit": limit})
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")
    assert "1 to 1000" in reply.json()["error"]


@pytest.mark.parametrize("cursor", ["", "x", "NjQ6YQ", "LTE6YQ", "OmE", "MQ", "_w", "M~"])
async def test_a_cursor_that_no_answer_had_is_refused(plane, cursor):
    """Shard 64, shard -1, none, no name, not UTF-8, not base64."""
    reply = await plane.call("GET", "/apps/3/channels", params={"cursor": cursor})
    assert (reply.status, reply.json()["code"]) == (400, "invalid_cursor")


async def test_more_channels_than_an_answer_takes_are_refused_with_the_way_to_pages(plane, occupy, monkeypatch):
    monkeypatch.setattr("redpoll.control.api.api.MAX_UNPAGED", 20)
    for number in range(21):
        await occupy(f"c{number}", {"w": 1})
    reply = await plane.call("GET", "/apps/3/channels")
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")
    assert "more than 20 occupied channels" in reply.json()["error"]
    assert "limit=" in reply.json()["error"]
    assert (
        len((await plane.call("GET", "/apps/3/channels", params={"filter_by_prefix": "c1"})).json()["channels"]) == 11
    )
    assert len((await plane.call("GET", "/apps/3/channels", params={"limit": "50"})).json()["channels"]) == 21


async def test_an_unknown_info_is_refused(plane):
    reply = await plane.call("GET", "/apps/3/channels", params={"info": "members"})
    assert (reply.status, reply.json()["code"]) == (400, "invalid_info")


async def test_a_channel_always_has_its_counts(plane, occupy):
    await occupy("presence-a", {"w1": 2}, users=["1"])
    await occupy("b", {"w1": 1})
    assert (await plane.call("GET", "/apps/3/channels/b")).json() == {"occupied": True, "subscription_count": 1}
    assert (await plane.call("GET", "/apps/3/channels/presence-a")).json() == {
        "occupied": True,
        "subscription_count": 2,
        "user_count": 1,
    }


async def test_a_channel_without_subscribers_has_zeros(plane):
    assert (await plane.call("GET", "/apps/3/channels/b")).json() == {"occupied": False, "subscription_count": 0}
    assert (await plane.call("GET", "/apps/3/channels/presence-a")).json() == {
        "occupied": False,
        "subscription_count": 0,
        "user_count": 0,
    }


async def test_a_channels_name_is_percent_decoded(plane, occupy):
    await occupy("presence-a@b", {"w1": 1}, users=["1"])
    path = "/apps/3/channels/presence-a%40b"
    assert (await plane.call("GET", path)).json()["occupied"] is True
    assert (await plane.call("GET", path + "/users")).json() == {"users": [{"id": "1"}]}
    assert (await plane.call("GET", "/apps/3/channels/a%20b")).json()["code"] == "invalid_channel"
    assert (await plane.call("GET", "/apps/3/channels/%ff")).json()["code"] == "bad_request"


async def test_only_presence_channels_have_users(plane, occupy):
    await occupy("presence-a", {"w1": 2}, users=["2", "1"])
    assert (await plane.call("GET", "/apps/3/channels/presence-a/users")).json() == {
        "users": [{"id": "1"}, {"id": "2"}]
    }
    assert (await plane.call("GET", "/apps/3/channels/presence-none/users")).json() == {"users": []}
    for path, params in (("/apps/3/channels/b/users", None), ("/apps/3/channels/b", {"info": "user_count"})):
        reply = await plane.call("GET", path, params=params)
        assert (reply.status, reply.json()["code"]) == (400, "not_presence_channel")


# -- auth -------------------------------------------------------------------------------------------------------


def digest(text):
    return hmac.new(SECRET.encode(), text.encode(), hashlib.sha256).hexdigest()


async def test_auth_signs_a_private_subscription_from_json_and_from_a_form(plane, sign):
    expected = {"auth": "278d425bdf160c739803:" + digest("1.2:private-a")}
    body = {"socket_id": "1.2", "channel_name": "private-a"}
    assert (await plane.call("POST", "/apps/3/auth", body)).json() == expected
    form = b"socket_id=1.2&channel_name=private-a&custom=1"
    reply = await plane.ask(
        "POST",
        sign("POST", "/apps/3/auth", form),
        form,
        {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"},
    )
    assert (reply.status, reply.json()) == (200, expected)


async def test_auth_returns_the_channel_data_that_it_signed(plane):
    data = '{"user_id": 7, "user_info": {"name": "ü"}}'
    body = {"socket_id": "1.2", "channel_name": "presence-a", "channel_data": data}
    reply = await plane.call("POST", "/apps/3/auth", body)
    expected = "278d425bdf160c739803:" + digest(f"1.2:presence-a:{data}")
    assert reply.json() == {"auth": expected, "channel_data": data}


async def test_auth_leaves_member_data_out_of_a_private_channels_signature(plane):
    """Only presence channels sign `channel_data`; pusher-js forwards only what the response has."""
    body = {"socket_id": "1.2", "channel_name": "private-a", "channel_data": '{"user_id":7}'}
    reply = await plane.call("POST", "/apps/3/auth", body)
    assert reply.json() == {"auth": "278d425bdf160c739803:" + digest("1.2:private-a")}


@pytest.mark.parametrize(
    "body",
    [
        {"channel_name": "private-a"},
        {"socket_id": "1", "channel_name": "private-a"},
        {"socket_id": "1.2", "channel_name": "public"},
        {"socket_id": "1.2", "channel_name": "private a"},
        {"socket_id": "1.2", "channel_name": "presence-a"},
        {"socket_id": "1.2", "channel_name": "presence-a", "channel_data": "[]"},
        {"socket_id": "1.2", "channel_name": "presence-a", "channel_data": '{"user_info":{}}'},
    ],
)
async def test_auth_refuses_what_a_subscribe_would_refuse(plane, body):
    assert (await plane.call("POST", "/apps/3/auth", body)).status == 400


async def test_auth_answers_a_preflight_without_credentials_and_allows_the_page(plane, sign):
    asked = {
        "Origin": "https://example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-custom",
    }
    reply = await plane.ask("OPTIONS", "/apps/3/auth", headers=asked)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "https://example.com"
    assert reply.headers["access-control-allow-headers"] == "authorization,x-custom"
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert reply.headers["vary"] == "Origin"
    body = b'{"socket_id":"1.2","channel_name":"private-a"}'
    origin = {"Origin": "https://example.com"}
    reply = await plane.ask("POST", sign("POST", "/apps/3/auth", body), body, origin)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://example.com")
    refused = await plane.ask("POST", "/apps/3/auth", body, origin)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://example.com")


async def test_auth_returns_the_secret_of_an_encrypted_channel_if_a_master_key_is_set(make_plane, redis):
    import base64

    master = bytes(range(32))
    plane = await make_plane(redis.url, encryption_master_key=base64.b64encode(master).decode())
    body = {"socket_id": "1.2", "channel_name": "private-encrypted-a"}
    expected = base64.b64encode(hashlib.sha256(b"private-encrypted-a" + master).digest()).decode()
    response = (await plane.call("POST", "/apps/3/auth", body)).json()
    assert response == {"auth": "278d425bdf160c739803:" + digest("1.2:private-encrypted-a"), "shared_secret": expected}
    assert (
        "shared_secret" not in (await plane.call("POST", "/apps/3/auth", {**body, "channel_name": "private-a"})).json()
    )


async def test_without_a_master_key_an_encrypted_channel_is_signed_like_a_private_one(plane):
    body = {"socket_id": "1.2", "channel_name": "private-encrypted-a"}
    response = (await plane.call("POST", "/apps/3/auth", body)).json()
    assert response == {"auth": "278d425bdf160c739803:" + digest("1.2:private-encrypted-a")}


# -- cache, encrypted and user channels ---------------------------------------------------------------------------


async def test_the_cached_event_is_returned_if_info_asks_for_it(plane):
    path, asked = "/apps/3/channels/private-cache-a", {"info": "cache,subscription_count"}
    counts = {"occupied": False, "subscription_count": 0}
    assert (await plane.call("GET", path, params=asked)).json() == {**counts, "cache": None}
    assert (await plane.trigger(channels=["private-cache-a", "b"], data="döta")).status == 200
    response = (await plane.call("GET", path, params=asked)).json()
    assert 1740 <= response["cache"].pop("ttl") <= 1800
    assert response == {**counts, "cache": {"data": "döta"}}
    assert (await plane.call("GET", path)).json() == counts
    reply = await plane.call("GET", "/apps/3/channels/b", params={"info": "cache"})
    assert (reply.status, reply.json()["code"]) == (400, "invalid_info")


@pytest.mark.parametrize("how", ["trigger", "batch", "idempotent"])
async def test_every_way_to_publish_fills_the_cache(plane, how):
    if how == "idempotent":
        await plane.records.set_app("3", {"idempotency": True})
    event = {"name": "e", "channel": "cache-a", "data": how}
    if how == "batch":
        reply = await plane.call("POST", "/apps/3/batch_events", {"batch": [event]})
    else:
        reply = await plane.call("POST", "/apps/3/events", {**event, "correlation_id": "1"})
    assert reply.status == 200
    response = (await plane.call("GET", "/apps/3/channels/cache-a", params={"info": "cache"})).json()
    assert response["cache"]["data"] == how


async def test_an_encrypted_channel_must_be_the_only_channel_of_a_trigger(plane):
    reply = await plane.trigger(channels=["private-encrypted-a", "b"])
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")
    assert "private-encrypted-a" in reply.json()["error"]
    assert (await plane.trigger(channels=["private-encrypted-a"])).status == 200


async def test_an_event_for_a_user_is_published_to_the_topic_of_the_user(plane, hear, wait_until):
    listener = await hear("#server-to-user-u1")
    reply = await plane.trigger(channels=["#server-to-user-u1"], info="subscription_count,user_count")
    # User channels have no counts.
    assert (reply.status, reply.json()) == (200, {"channels": {"#server-to-user-u1": {}}})
    await wait_until(lambda: listener.heard)
    assert parsed(listener.heard[0])[0] == "e"
    assert (await plane.trigger(channels=["#server-to-user-"])).status == 400
    assert (await plane.trigger(channels=["#other"])).status == 400


# -- the daily limit ----------------------------------------------------------------------------------------------


@pytest.fixture
def limited(plane, monkeypatch):
    """`await limited(n)`: the plan of app 3 allows n messages a day."""
    from redpoll.protocol import apps

    # At midnight the count begins again.
    daily = plane.plane.publishing.daily
    daily._wall_clock = daily._quota._wall_clock = lambda: 1_700_050_000.0

    async def limit(messages):
        monkeypatch.setitem(apps.DAILY_LIMITS, "free", messages)
        await plane.records.set_app("3", {"plan": "free"})

    return limit


async def test_each_channel_of_a_trigger_and_each_event_of_a_batch_counts_as_a_message(plane, limited):
    await limited(10)
    reply = await plane.trigger(channels=["a", "b", "a"])
    assert (reply.headers["x-ratelimit-policy"], reply.headers["x-ratelimit-remaining"]) == ("daily", "8")
    items = [{"name": "e", "channel": "a", "data": ""}] * 5
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert reply.headers["x-ratelimit-remaining"] == "3"
    assert (await plane.trigger()).headers["x-ratelimit-remaining"] == "2"
    assert (await plane.trigger(name="")).status == 400
    assert (await plane.trigger()).headers["x-ratelimit-remaining"] == "1"


async def test_a_publish_that_would_exceed_the_daily_limit_is_refused_completely(plane, limited, hear, wait_until):
    await limited(2)
    listener = await hear("a", "b", "c")
    reply = await plane.trigger(channels=["a", "b", "c"], correlation_id="x")
    assert (reply.status, reply.json()["code"]) == (429, "daily_limit_exceeded")
    assert (reply.headers["x-ratelimit-policy"], reply.headers["x-ratelimit-limit"]) == ("daily", "2")
    assert reply.headers["x-ratelimit-remaining"] == "2"
    assert int(reply.headers["retry-after"]) <= 86_400
    assert int(reply.headers["x-ratelimit-reset"]) % 86_400 == 0
    # The headers are those of this request, refused or not.
    assert reply.headers["x-service-correlation-id"] == "x"
    assert (await plane.trigger(channels=["a", "b"], name="fits")).status == 200
    assert (await plane.trigger(channels=["a"], name="beyond")).status == 429
    await wait_until(lambda: len(listener.heard) == 2)
    assert {parsed(message)[0] for message in listener.heard} == {"fits"}


async def test_headers_of_the_daily_limit_replace_those_of_the_rate_limit(make_plane, redis, monkeypatch):
    from redpoll.protocol import apps

    plane = await make_plane(redis.url, trigger_rate_per_minute=300)
    monkeypatch.setitem(apps.DAILY_LIMITS, "free", 1)
    await plane.records.set_app("3", {"plan": "free"})
    assert (await plane.trigger()).headers["x-ratelimit-policy"] == "ip"
    reply = await plane.trigger()
    assert (reply.status, reply.headers["x-ratelimit-policy"], reply.headers["x-ratelimit-limit"]) == (
        429,
        "daily",
        "1",
    )


# -- idempotency ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def idempotent(plane):
    await plane.records.set_app("3", {"idempotency": True})


@pytest.mark.usefixtures("idempotent")
async def test_a_repeated_request_gets_the_same_response_and_publishes_nothing(plane, hear, occupy, wait_until):
    listener = await hear("a", "b")
    await occupy("a", {"w1": 1})
    event = {"channels": ["a", "b"], "info": "subscription_count", "correlation_id": "order 7"}
    first = await plane.trigger(**event)
    await occupy("a", {"w2": 5})
    again = await plane.trigger(**event)
    assert (first.status, again.status, again.body) == (200, 200, first.body)
    assert again.headers["x-service-correlation-id"] == "order 7"
    assert again.headers["x-service-trace-id"] != first.headers["x-service-trace-id"]
    # The same request under the other path prefix, with another credential.
    pair = {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": SECRET}
    body = json.dumps({"name": "e", "data": "{}", **event}).encode()
    reply = await plane.ask("POST", "/api/v1/apps/3/events", body, pair)
    assert (reply.status, reply.body) == (200, first.body)
    assert (await plane.trigger(channels=["a"], name="end")).status == 200
    await wait_until(lambda: len(listener.heard) == 3)
    assert [parsed(message)[0] for message in listener.heard] == ["e", "e", "end"]


@pytest.mark.usefixtures("idempotent")
async def test_the_id_of_a_request_of_which_nothing_was_published_is_free_again(plane):
    await plane.records.add_history_rule("3", HistoryRule(id="00000a", name="h-", prefix=True, keep=9, seconds=60))
    for channel in ("h-1", "h-2"):
        assert (await plane.trigger(channels=[channel], end=True)).status == 200
    for channels, published in ((["h-1", "h-2"], 0), (["h-1", "a"], 1)):
        refused = await plane.trigger(channels=channels, correlation_id="1")
        assert (refused.status, refused.json()["code"]) == (409, "channel_ended")
        assert ("were published" in refused.json()["error"]) is (published > 0)
    # Of the last one, something was published.
    assert (await plane.trigger(channels=["a"], correlation_id="1")).json()["code"] == "idempotency_conflict"


@pytest.mark.usefixtures("idempotent")
@pytest.mark.parametrize("other", [{"name": "f"}, {"data": "x"}, {"channels": ["d"]}, {"info": "user_count"}])
async def test_the_same_id_with_another_body_is_409_and_publishes_nothing(plane, hear, wait_until, other):
    listener = await hear("c", "d")
    assert (await plane.trigger(correlation_id="1")).status == 200
    reply = await plane.trigger(correlation_id="1", **other)
    assert (reply.status, reply.json()["code"]) == (409, "idempotency_conflict")
    assert (await plane.trigger(name="end")).status == 200
    await wait_until(lambda: len(listener.heard) == 2)
    assert [parsed(message)[0] for message in listener.heard] == ["e", "end"]


@pytest.mark.usefixtures("idempotent")
async def test_parameters_in_the_query_are_part_of_the_request(plane):
    body = {"data": "d", "channel": "c", "correlation_id": "1"}
    assert (await plane.call("POST", "/apps/3/events", body, {"name": "one"})).status == 200
    assert (await plane.call("POST", "/apps/3/events", body, {"name": "one"}, timestamp="")).status == 401
    assert (await plane.call("POST", "/apps/3/events", body, {"name": "one"})).status == 200
    assert (await plane.call("POST", "/apps/3/events", body, {"name": "two"})).status == 409


@pytest.mark.usefixtures("idempotent")
async def test_a_batch_can_be_repeated_like_a_trigger(plane, hear, wait_until):
    listener = await hear("c")
    batch = {"batch": [{"name": f"e{number}", "channel": "c", "data": ""} for number in range(3)]}
    for _ in range(3):
        reply = await plane.call("POST", "/apps/3/batch_events", {**batch, "correlation_id": "1"})
        assert (reply.status, reply.headers["x-service-correlation-id"]) == (200, "1")
    assert (await plane.trigger(name="end")).status == 200
    await wait_until(lambda: len(listener.heard) == 4)
    assert [parsed(message)[0] for message in listener.heard] == ["e0", "e1", "e2", "end"]
    # An id is used once per app, not once per endpoint.
    assert (await plane.trigger(correlation_id="1")).status == 409


@pytest.mark.usefixtures("idempotent")
async def test_the_same_request_many_times_at_once_is_published_once(plane, hear, connect, wait_until, sign):
    from redpoll import _frame

    listener = await hear("c")
    body = json.dumps({"name": "e", "channel": "c", "data": "", "correlation_id": "1"}).encode()
    head = f"POST {sign('POST', '/apps/3/events', body)} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    wires = [await connect(plane.port) for _ in range(10)]
    replies = await asyncio.gather(*(wire.ask(head.encode() + body) for wire in wires))
    assert {(reply.status, reply.body) for reply in replies} == {(200, b"{}")}
    assert (await plane.trigger(name="end")).status == 200
    await wait_until(lambda: len(listener.heard) >= 2)
    assert [_frame.envelope(message)[6] for message in listener.heard] == [b"e", b"end"]


@pytest.mark.usefixtures("idempotent")
async def test_a_repeated_request_is_not_counted_and_a_refused_one_may_be_repeated(plane, limited):
    await limited(2)
    await plane.trigger(correlation_id="1")
    await plane.trigger(correlation_id="1")
    assert (await plane.trigger(channels=["a", "b"], correlation_id="2")).status == 429
    await limited(3)
    assert (await plane.trigger(channels=["a", "b"], correlation_id="2")).status == 200
    assert (await plane.trigger()).status == 429


@pytest.mark.usefixtures("idempotent")
async def test_a_repetition_whose_first_answer_was_lost_is_not_counted_again(plane, limited, monkeypatch):
    async def lost(*_):
        raise Unavailable("no answer from Redis")

    await limited(2)
    with monkeypatch.context() as patched:
        patched.setattr(Idempotency, "settle", lost)
        assert (await plane.trigger(channels=["a", "b"], correlation_id="1")).status == 200
    reply = await plane.trigger(channels=["a", "b"], correlation_id="1")
    assert (reply.status, reply.headers["x-ratelimit-remaining"]) == (200, "0")
    assert (await plane.trigger(channels=["a"], correlation_id="2")).status == 429


async def test_without_idempotency_the_id_is_only_echoed(plane, hear, wait_until):
    listener = await hear("c")
    for event in ({}, {}, {"name": "other"}):
        assert (await plane.trigger(correlation_id="1", **event)).status == 200
    await wait_until(lambda: len(listener.heard) == 3)


async def test_a_publish_that_got_503_can_be_repeated_and_is_published_once(make_plane, own_redis, wait_until):
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link

    plane = await make_plane(own_redis.url)
    await plane.records.set_app("3", {"idempotency": True})
    link, heard = Link(own_redis.url), []
    link.on_push = lambda topic, payload: heard.append(parsed(payload)[0])
    link.start()
    await link.wait_up()
    subscribed = asyncio.get_running_loop().create_future()
    link.subscribe([Keys("rp").topic("3", "c")], subscribed.set_result)
    await subscribed
    own_redis.pause()
    try:
        assert (await plane.trigger(correlation_id="1")).status == 503
    finally:
        own_redis.resume()
    await wait_until(lambda: plane.plane.publishing.publisher.open)
    assert (await plane.trigger(correlation_id="1")).status == 200
    assert (await plane.trigger(correlation_id="1")).status == 200
    assert (await plane.trigger(name="end")).status == 200
    await wait_until(lambda: "end" in heard)
    assert heard == ["e", "end"]
    await link.close()


# -- users ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def answering(redis, wait_until):
    """`await answering(…)`: live workers; the named ones answer, and `.asked` has the questions to all of them."""

    from redpoll.cluster.directory import DirectoryChanged
    from redpoll.cluster.questions import TerminateUser
    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.cluster.survey import Answerers

    keys, links = Keys("rp"), []

    class Workers:
        def __init__(self):
            self.asked = []

    async def start(alive, who_answer):
        link = Link(redis.url)
        links.append(link)
        workers = Workers()

        def hears(topic, payload):
            for answerers in table:
                answerers.received(payload)

        table = [Answerers(link, keys, lambda w=w: w) for w in who_answer]
        table[0].hear(DirectoryChanged, lambda change: None)
        for answerers in table:
            answerers.answer(TerminateUser, workers.asked.append)
        link.on_push = hears
        link.start()
        await link.wait_up()
        for w in alive:
            await link.ask(b"HSET", keys.beat, w, 1)
        subscribed = asyncio.get_running_loop().create_future()
        link.subscribe([keys.sys], subscribed.set_result)
        await subscribed
        return workers

    yield start
    for link in links:
        await link.close()


@pytest.mark.parametrize("path", ["/apps/3", "/api/v1/apps/3", ""])
async def test_terminate_asks_every_worker_for_the_user_of_this_app(plane, answering, path):
    workers = await answering(["r.1.1", "r.2.1"], ["r.1.1", "r.2.1"])
    reply = await plane.call("POST", path + "/users/u%201/terminate_connections", {})
    assert (reply.status, reply.body) == (200, b"{}")
    assert [(question.app, question.user) for question in workers.asked] == [("3", "u 1")] * 2


async def test_terminate_is_503_if_a_worker_does_not_answer(plane, answering):
    await answering(["r.1.1", "r.2.1"], ["r.1.1"])
    reply = await plane.call("POST", "/apps/3/users/u/terminate_connections", {})
    assert (reply.status, reply.json()["code"]) == (503, "unavailable")
    assert "r.2" in reply.json()["error"]


async def test_terminate_refuses_an_id_that_is_too_long(plane):
    reply = await plane.call("POST", f"/apps/3/users/{'u' * 129}/terminate_connections", {})
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")


# -- the official library ---------------------------------------------------------------------------------------


@pytest.fixture
def library(plane):
    """pusher-http-python as a client of the plane. Its calls block, so they run in a thread."""
    client = pusher.Pusher(
        app_id="3", key="278d425bdf160c739803", secret=SECRET, host="127.0.0.1", port=plane.port, ssl=False, timeout=60
    )

    async def call(method, *args, **kwargs):
        return await asyncio.to_thread(getattr(client, method), *args, **kwargs)

    return call


async def test_the_python_library_triggers_and_reads_channels(plane, library, hear, occupy, wait_until):
    listener = await hear("my-channel", "b")
    await occupy("presence-a", {"w1": 2}, users=["1", "2"])
    assert await library("trigger", "my-channel", "e", {"message": "hällo"}, "1.2") == {}
    assert await library("trigger", ["my-channel", "b"], "e", "text") == {}
    batch = [{"channel": "b", "name": "batched", "data": {"n": 1}}]
    assert await library("trigger_batch", batch) == {}
    await wait_until(lambda: len(listener.heard) == 4)
    heard = [parsed(message)[:3] for message in listener.heard]
    assert heard[0] == ("e", '{"message": "hällo"}', "1.2")
    assert heard[-1] == ("batched", '{"n": 1}', None)
    everything = ["user_count", "subscription_count"]
    assert await library("channels_info", "presence-", ["user_count"]) == {
        "channels": {"presence-a": {"user_count": 2}}
    }
    assert await library("channel_info", "presence-a", everything) == {
        "occupied": True,
        "user_count": 2,
        "subscription_count": 2,
    }
    assert await library("users_info", "presence-a") == {"users": [{"id": "1"}, {"id": "2"}]}


async def test_the_python_library_terminates_the_connections_of_a_user(plane, library, answering):
    workers = await answering(["r.1.1"], ["r.1.1"])
    assert await library("terminate_user_connections", "u1") == {}
    assert [(question.app, question.user) for question in workers.asked] == [("3", "u1")]


async def test_the_python_library_raises_its_own_errors(plane, library):
    with pytest.raises(pusher.errors.PusherBadRequest, match="presence channel"):
        await library("channel_info", "b", ["user_count"])
    wrong = pusher.Pusher(
        "3", "278d425bdf160c739803", "0" * 20, host="127.0.0.1", port=plane.port, ssl=False, timeout=60
    )
    with pytest.raises(pusher.errors.PusherBadAuth, match="Invalid signature"):
        await asyncio.to_thread(wrong.trigger, "c", "e", "d")
