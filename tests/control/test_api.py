"""The endpoints, through real sockets and a real Redis: protocol.md 14.3 to 14.8 and 14.13."""

import asyncio
import hashlib
import hmac
import json

import pusher
import pytest

from redpoll import _frame

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
    assert trace == reply.headers["x-service-trace-id"]


async def test_a_trigger_to_many_channels_reaches_each_distinct_one_once(plane, hear, wait_until):
    listener = await hear("a", "b")
    assert (await plane.trigger(channels=["a", "b", "a"])).status == 200
    assert (await plane.trigger(channels=["a"], name="end")).status == 200
    await wait_until(lambda: len(listener.heard) == 3)
    assert [parsed(each)[0] for each in listener.heard] == ["e", "e", "end"]


async def test_requests_one_after_another_and_items_of_a_batch_keep_their_order(plane, hear, wait_until):
    listener = await hear("c", "d")
    expected = []
    for number in range(20):
        await plane.trigger(name=f"e{number}")
        items = [{"name": f"b{number}-{item}", "channel": "cd"[item % 2], "data": ""} for item in range(10)]
        assert (await plane.call("POST", "/apps/3/batch_events", {"batch": items})).status == 200
        expected += [f"e{number}", *(item["name"] for item in items)]
    await wait_until(lambda: len(listener.heard) == len(expected))
    assert [parsed(each)[0] for each in listener.heard] == expected


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
    assert [parsed(each)[0] for each in listener.heard] == [f"e{number}" for number in range(100)]


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


async def test_info_of_a_batch_is_told_by_index(plane, occupy):
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


async def test_one_bad_item_refuses_the_batch_whole(plane, hear, wait_until):
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
async def test_what_a_trigger_may_say(plane, event, status, code):
    reply = await plane.trigger(**event)
    assert reply.status == status
    assert reply.json().get("code") == code


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null", b"{", b"\xff", b"[" * 100_000, b'{"batch":{}}'])
@pytest.mark.parametrize("path", ["/apps/3/events", "/apps/3/batch_events", "/apps/3/auth"])
async def test_a_body_of_another_shape_is_400(plane, path, body):
    reply = await plane.call("POST", path, body)
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("field", ["name", "data", "channel", "socket_id", "info", "correlation_id"])
@pytest.mark.parametrize("value", [r"\ud800", r"\udfff\ud800", r"a\u0000b"])
async def test_text_that_is_no_unicode_is_no_error_of_ours(plane, field, value):
    fields = {"name": "e", "data": "d", "channel": "c", field: "VALUE"}
    body = json.dumps(fields).replace("VALUE", value).encode()
    reply = await plane.call("POST", "/apps/3/events", body)
    assert reply.status in (200, 400)


async def test_more_than_ten_items_are_refused(plane):
    items = [{"name": "e", "channel": "c", "data": ""}] * 11
    reply = await plane.call("POST", "/apps/3/batch_events", {"batch": items})
    assert (reply.status, reply.json()["code"]) == (400, "batch_too_large")


async def test_parameters_may_stand_in_the_query(plane, hear, wait_until):
    listener = await hear("c")
    reply = await plane.call("POST", "/apps/3/events", {"data": "d"}, {"name": "asked", "channel": "c"})
    assert reply.status == 200
    await wait_until(lambda: listener.heard)
    assert parsed(listener.heard[0])[0] == "asked"


# -- who is there -----------------------------------------------------------------------------------------------


async def test_channels_are_an_object_even_when_there_are_none(plane):
    reply = await plane.call("GET", "/apps/3/channels")
    assert (reply.status, reply.body) == (200, b'{"channels":{}}')


async def test_channels_lists_the_occupied_ones_with_what_was_asked(plane, occupy):
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


async def test_more_than_one_page_of_channels_are_all_listed(plane, occupy):
    for number in range(1_200):
        await occupy(f"c{number}", {"w": 1})
    reply = await plane.call("GET", "/apps/3/channels", params={"info": "subscription_count"})
    channels = reply.json()["channels"]
    assert len(channels) == 1_200
    assert channels["c1199"] == {"subscription_count": 1}


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


async def test_a_channel_nobody_is_in_has_zeros(plane):
    assert (await plane.call("GET", "/apps/3/channels/b")).json() == {"occupied": False, "subscription_count": 0}
    assert (await plane.call("GET", "/apps/3/channels/presence-a", params={"info": "cache"})).json() == {
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


async def test_users_are_of_presence_channels_only(plane, occupy):
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
async def test_auth_signs_nothing_that_a_subscribe_would_be_refused_for(plane, body):
    assert (await plane.call("POST", "/apps/3/auth", body)).status == 400


async def test_auth_answers_a_preflight_without_credentials_and_lets_the_page_read(plane, sign):
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


# -- the official library ---------------------------------------------------------------------------------------


@pytest.fixture
def library(plane):
    """pusher-http-python, pointed at the plane; its calls block, so they go to a thread."""
    client = pusher.Pusher(
        app_id="3", key="278d425bdf160c739803", secret=SECRET, host="127.0.0.1", port=plane.port, ssl=False
    )

    async def call(method, *args, **kwargs):
        return await asyncio.to_thread(getattr(client, method), *args, **kwargs)

    return call


async def test_the_python_library_triggers_and_asks(plane, library, hear, occupy, wait_until):
    listener = await hear("my-channel", "b")
    await occupy("presence-a", {"w1": 2}, users=["1", "2"])
    assert await library("trigger", "my-channel", "e", {"message": "hällo"}, "1.2") == {}
    assert await library("trigger", ["my-channel", "b"], "e", "text") == {}
    batch = [{"channel": "b", "name": "batched", "data": {"n": 1}}]
    assert await library("trigger_batch", batch) == {}
    await wait_until(lambda: len(listener.heard) == 4)
    heard = [parsed(each)[:3] for each in listener.heard]
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


async def test_the_python_library_meets_the_errors_it_knows(plane, library):
    with pytest.raises(pusher.errors.PusherBadRequest, match="presence channel"):
        await library("channel_info", "b", ["user_count"])
    wrong = pusher.Pusher("3", "278d425bdf160c739803", "0" * 20, host="127.0.0.1", port=plane.port, ssl=False)
    with pytest.raises(pusher.errors.PusherBadAuth, match="Invalid signature"):
        await asyncio.to_thread(wrong.trigger, "c", "e", "d")
