import json
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll.protocol.apps import HistoryRule
from redpoll.protocol.auth import parse_query
from redpoll.protocol.channels import CONSOLE, MAX_NAME_CHARS, OWN_PREFIX, SERVER_TO_USER, valid_name
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import (
    CHANNEL_INFO,
    EVENT_INFO,
    check_channel,
    decode_auth,
    decode_batch,
    decode_event,
    parse_channel_info,
    parse_info,
)

EVENT = {"name": "foo", "channels": ["project-3"], "data": '{"some":"data"}'}
ITEM = {"name": "foo", "channel": "project-3", "data": "{}"}


class Event(NamedTuple):
    """What a call says of an event."""

    name: str
    data: str
    channels: tuple[str, ...]
    socket_id: str | None = None
    info: tuple[str, ...] = ()
    correlation_id: str | None = None


def events_of(call) -> list[Event]:
    infos = call.infos or [()] * len(call.events_of())
    return [
        Event(name, data, tuple(channels), socket_id, info, call.correlation_id)
        for (name, data, channels, socket_id), info in zip(call.events_of(), infos, strict=True)
    ]


def event_of(*arguments) -> Event:
    (found,) = events_of(decode_event(*arguments))
    return found


def event(app, query="", **fields) -> Event:
    """The event of a good body with `fields` put in; None takes a field out."""
    body = {name: value for name, value in {**EVENT, **fields}.items() if value is not None}
    return event_of(json.dumps(body).encode(), parse_query(query), app)


def refusal(decode, *arguments, **fields) -> ApiError:
    with pytest.raises(ApiError) as refused:
        decode(*arguments, **fields)
    refused.value.message.encode()
    return refused.value


# -- one event -----------------------------------------------------------------------------------------------


def test_all_members_of_an_event_are_decoded(app):
    read = event(app, socket_id="123.456", info="user_count,subscription_count", correlation_id="order 7")
    assert read == Event(
        name="foo",
        data='{"some":"data"}',
        channels=("project-3",),
        socket_id="123.456",
        info=("user_count", "subscription_count"),
        correlation_id="order 7",
    )


def test_optional_members_may_be_null_and_unknown_members_are_ignored(app):
    body = {
        **EVENT,
        "socket_id": None,
        "info": None,
        "correlation_id": None,
        "channel": None,
        "tags": {"a": [1]},
    }
    assert event_of(json.dumps(body).encode(), [], app) == Event(
        name="foo", data='{"some":"data"}', channels=("project-3",)
    )


def test_one_channel_may_be_given_as_channel(app):
    assert event(app, channels=None, channel="a").channels == ("a",)


def test_users_may_be_published_to(app):
    assert event(app, channels=["#server-to-user-7", "a"]).channels == ("#server-to-user-7", "a")
    assert batch(app, {**ITEM, "channel": "#server-to-user-a@b.c"})[0].channels == ("#server-to-user-a@b.c",)


@pytest.mark.parametrize("channel", ["private-encrypted-a", "private-encrypted-cache-a"])
def test_an_encrypted_channel_is_published_to_alone_and_its_data_untouched(app, channel):
    data = '{ "nonce":"b64","ciphertext":"b64" }'
    read = event(app, channels=[channel, channel], data=data)
    assert (read.channels, read.data) == ((channel,), data)
    assert [item.channels for item in batch(app, {**ITEM, "channel": channel}, ITEM)] == [(channel,), ("project-3",)]
    assert "encrypted" in refusal(event, app, channels=["a", channel]).message


def test_names_that_only_look_encrypted_go_together(app):
    assert len(event(app, channels=["my-private-encrypted-a", "presence-encrypted-a", "private-a"]).channels) == 3


@pytest.mark.parametrize("user", ["7", "a_b=c@d,e.f;g-h", "x" * (MAX_NAME_CHARS - len(SERVER_TO_USER))])
def test_users_and_channels_can_be_published_to(app, user):
    assert event(app, channels=[user, SERVER_TO_USER + user]).channels == (user, SERVER_TO_USER + user)
    assert not valid_name(SERVER_TO_USER + user)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "#x",
        "#server-to-user",
        "#server-to-user-",
        "#server-to-user-a b",
        "#server-to-user-#7",
        "#server-to-user-é",
        "#server-to-user-7\n",
        " #server-to-user-7",
        "x#server-to-user-7",
        SERVER_TO_USER + "x" * 185,
        "x" * 201,
        CONSOLE,
        OWN_PREFIX,
        OWN_PREFIX + "x",
    ],
)
def test_other_and_reserved_names_cannot_be_published_to(app, name):
    assert refusal(event, app, channels=["a", name]).code == "invalid_channel"


def test_a_name_that_only_looks_reserved_can_be_published_to(app):
    assert event(app, channels=["private-redpoll"]).channels == ("private-redpoll",)


def test_duplicate_channels_count_once_and_keep_their_order(app):
    assert event(app, channels=["b", "a", "b", "c", "a"]).channels == ("b", "a", "c")


def test_data_is_passed_byte_for_byte(app):
    data = ' { "a" : 1e400, "b":"\\ud800 \\u00e9", } \x00'
    assert event(app, data=data).data == data


def test_empty_data_is_data(app):
    assert event(app, data="").data == ""


def test_data_may_have_exactly_the_limit_in_bytes(app):
    assert event(app, data="x" * 10_240)
    assert event(app, data="é" * 5_120)
    for data in ("x" * 10_241, "é" * 5_120 + "x"):
        refused = refusal(event, app, data=data)
        assert (refused.code, refused.status) == ("payload_too_large", 413)
        assert "(10240 bytes)" in refused.message


def test_a_hundred_channels_are_allowed_and_duplicates_count(app):
    assert len(event(app, channels=[f"c{n}" for n in range(100)]).channels) == 100
    refused = refusal(event, app, channels=["c"] * 101)
    assert (refused.code, refused.status) == ("too_many_channels", 400)


def test_a_name_may_have_200_characters(app):
    assert event(app, name="é" * 200).name == "é" * 200


def test_the_apps_own_limits_hold(app, changed):
    strict = changed(app, max_event_name_chars=3, max_channels=1, max_data_bytes=2)
    assert event(strict, name="abc", data="é")
    assert refusal(event, strict, name="abcd", data="").code == "invalid_event_name"
    assert refusal(event, strict, data="", channels=["a", "b"]).code == "too_many_channels"
    assert refusal(event, strict, data="abc").code == "payload_too_large"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": None}, "bad_request"),
        ({"name": 7}, "bad_request"),
        ({"name": ""}, "invalid_event_name"),
        ({"name": "x" * 201}, "invalid_event_name"),
        ({"name": "pusher:x"}, "invalid_event_name"),
        ({"name": "pusher_internal:subscription_succeeded"}, "invalid_event_name"),
        ({"name": "svc:x"}, "invalid_event_name"),
        ({"name": "\ud800"}, "bad_request"),
        ({"data": None}, "bad_request"),
        ({"data": {}}, "bad_request"),
        ({"data": 7}, "bad_request"),
        ({"data": ["x"]}, "bad_request"),
        ({"data": "\ud800"}, "bad_request"),
        ({"channels": None}, "bad_request"),
        ({"channels": []}, "bad_request"),
        ({"channels": "project-3"}, "bad_request"),
        ({"channels": [7]}, "bad_request"),
        ({"channels": {"a": 1}}, "bad_request"),
        ({"channel": "also"}, "bad_request"),
        ({"channels": ["ok", "not ok"]}, "invalid_channel"),
        ({"channels": [""]}, "invalid_channel"),
        ({"channels": ["x" * 201]}, "invalid_channel"),
        ({"channels": ["#server-to-user-"]}, "invalid_channel"),
        ({"channels": ["#server-to-user-a b"]}, "invalid_channel"),
        ({"channels": ["#other-7"]}, "invalid_channel"),
        ({"channels": ["private-redpoll.console"]}, "invalid_channel"),
        ({"channels": ["private-encrypted-a", "b"]}, "bad_request"),
        ({"channels": ["b", "private-encrypted-cache-a"]}, "bad_request"),
        ({"channels": ["private-encrypted-a", "private-encrypted-b"]}, "bad_request"),
        ({"channels": ["\n"]}, "invalid_channel"),
        ({"socket_id": "12"}, "invalid_socket_id"),
        ({"socket_id": ""}, "invalid_socket_id"),
        ({"socket_id": "1.2.3"}, "invalid_socket_id"),
        ({"socket_id": "1.2\n"}, "invalid_socket_id"),
        ({"socket_id": "١.٢"}, "invalid_socket_id"),
        ({"socket_id": 1.2}, "bad_request"),
        ({"info": "users"}, "invalid_info"),
        ({"info": "user_count,"}, "invalid_info"),
        ({"info": "cache"}, "invalid_info"),
        ({"info": ["user_count"]}, "bad_request"),
        ({"correlation_id": "x" * 129}, "bad_request"),
        ({"correlation_id": "é"}, "bad_request"),
        ({"correlation_id": "a\r\nX-Evil: 1"}, "bad_request"),
        ({"correlation_id": 7}, "bad_request"),
    ],
)
def test_every_fault_has_its_code(app, fields, code):
    assert refusal(event, app, **fields).code == code


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"x"',
        b"{",
        b"\xff",
        b'{"name":"\xff","channels":["a"],"data":""}',
        b"name=foo&channels=a&data=",
        b"\xef\xbb\xbf" + json.dumps(EVENT).encode(),
        b'{"x":' + b"[" * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"name":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"name":' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: ascii(body[:20]),
)
def test_a_malformed_body_is_refused(app, body):
    assert refusal(decode_event, body, [], app).code == "bad_request"
    assert refusal(decode_batch, body, app).code == "bad_request"
    assert refusal(decode_auth, body, app).code == "bad_request"


@pytest.mark.parametrize("socket_id", ["007.1", "1.007", "9" * 40 + ".1", "1.18446744073709551616", "1." + "9" * 19])
def test_an_id_that_no_connection_can_have_excludes_no_connection(app, socket_id):
    """It is well formed, so it is accepted; it never reaches the bus, where ids are two 64-bit numbers."""
    assert event(app, socket_id=socket_id).socket_id is None


def test_server_events_may_have_any_other_name(app):
    for name in ("client-x", "pusher", "Pusher:x", "x pusher:", "\x00\n", "😀"):
        assert event(app, name=name).name == name


# -- parameters in the query ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    ["channels=a,b", "channels[]=a&channels[]=b", "channels%5B%5D=a&channels[1]=b", "channels=a&channels=b"],
)
def test_channels_may_be_in_the_query(app, query):
    assert event(app, query, channels=None).channels == ("a", "b")


def test_all_members_but_data_may_be_in_the_query(app):
    query = "name=q&channel=c&socket_id=1.2&info=user_count&correlation_id=7&data=evil&auth_key=x"
    assert event(app, query, name=None, channels=None) == Event(
        name="q",
        data='{"some":"data"}',
        channels=("c",),
        socket_id="1.2",
        info=("user_count",),
        correlation_id="7",
    )
    assert refusal(event, app, query, name=None, channels=None, data=None).message == "data is missing"


def test_the_body_wins_over_the_query(app):
    read = event(app, "name=q&channels=q&socket_id=9.9", socket_id="1.2")
    assert (read.name, read.channels, read.socket_id) == ("foo", ("project-3",), "1.2")


def test_members_from_the_query_are_validated_too(app):
    assert refusal(event, app, "socket_id=x").code == "invalid_socket_id"
    assert refusal(event, app, "name=pusher:x", name=None).code == "invalid_event_name"
    assert refusal(event, app, "channels=a,b,", channels=None).code == "invalid_channel"


# -- batches -------------------------------------------------------------------------------------------------


def batch(app, *items) -> list[Event]:
    return events_of(decode_batch(json.dumps({"batch": items}).encode(), app))


def test_a_batch_keeps_its_order(app):
    items = [{**ITEM, "name": str(number), "socket_id": None} for number in range(10)]
    items[3] |= {"info": "user_count", "socket_id": "1.2"}
    read = batch(app, *items)
    assert [item.name for item in read] == [str(number) for number in range(10)]
    assert (read[3].info, read[3].socket_id, read[3].channels) == (("user_count",), "1.2", ("project-3",))
    assert read[4].info == ()


def test_a_batch_has_at_most_ten_events(app):
    assert len(batch(app, *[ITEM] * 10)) == 10
    refused = refusal(batch, app, *[ITEM] * 11)
    assert (refused.code, refused.status) == ("batch_too_large", 400)
    assert batch(app) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "pusher:x"}, "invalid_event_name"),
        ({"name": "svc:x"}, "invalid_event_name"),
        ({"channel": "a b"}, "invalid_channel"),
        ({"channel": None}, "bad_request"),
        ({"data": "x" * 10_241}, "payload_too_large"),
        ({"socket_id": "x"}, "invalid_socket_id"),
        ({"info": "x"}, "invalid_info"),
    ],
)
def test_one_invalid_item_refuses_the_batch_and_its_index_is_named(app, fields, code):
    refused = refusal(batch, app, ITEM, {**ITEM, **fields})
    assert refused.code == code
    assert refused.message.startswith("batch[1]: ")


@pytest.mark.parametrize("body", [b"{}", b'{"batch":{}}', b'{"batch":null}', b'{"batch":[[]]}', b'{"batch":["x"]}'])
def test_a_malformed_batch_is_refused(app, body):
    assert refusal(decode_batch, body, app).code == "bad_request"


def test_a_batchs_correlation_id_belongs_to_every_event(app):
    body = json.dumps({"batch": [ITEM, ITEM], "correlation_id": "order 7"}).encode()
    assert [item.correlation_id for item in events_of(decode_batch(body, app))] == ["order 7"] * 2
    assert batch(app, ITEM)[0].correlation_id is None
    for wrong in ("x" * 129, "é", "a\r\nb", 7):
        body = json.dumps({"batch": [ITEM], "correlation_id": wrong}).encode()
        assert refusal(decode_batch, body, app).code == "bad_request"


def test_limits_are_the_apps(app, changed):
    tight = changed(app, max_channels=1, max_batch=1, max_data_bytes=3, max_event_name_chars=2)
    assert event(tight, name="ab", data="abc").name == "ab"
    assert refusal(event, tight, name="abc", data="abc").code == "invalid_event_name"
    assert refusal(event, tight, name="ab", data="abcd").code == "payload_too_large"
    assert refusal(event, tight, name="ab", data="", channels=["a", "b"]).code == "too_many_channels"
    assert refusal(batch, tight, ITEM, ITEM).code == "batch_too_large"


# -- info and names ------------------------------------------------------------------------------------------


def test_info_lists_each_attribute_once():
    assert parse_info("", EVENT_INFO) == ()
    assert parse_info("user_count, subscription_count,user_count", EVENT_INFO) == (
        "user_count",
        "subscription_count",
    )
    assert parse_info("cache", EVENT_INFO | {"cache"}) == ("cache",)
    for info in ("x", ",", "user_count,,", "USER_COUNT"):
        assert refusal(parse_info, info, EVENT_INFO).code == "invalid_info"


@pytest.mark.parametrize("channel", ["cache-x", "private-cache-x", "presence-cache-x", "private-encrypted-cache-x"])
def test_the_cached_event_may_be_asked_of_cache_channels(channel):
    assert parse_channel_info(channel, "cache,subscription_count") == ("cache", "subscription_count")


@pytest.mark.parametrize(
    ("channel", "info", "code"),
    [
        ("x", "cache", "invalid_info"),
        ("private-x", "cache", "invalid_info"),
        ("presence-x", "user_count,cache", "invalid_info"),
        ("my-cache-x", "cache", "invalid_info"),
        ("cache-x", "user_count", "not_presence_channel"),
        ("private-cache-x", "cache,user_count", "not_presence_channel"),
        ("presence-cache-x", "users", "invalid_info"),
    ],
)
def test_attributes_that_a_kind_of_channel_does_not_have_are_a_400(channel, info, code):
    refused = refusal(parse_channel_info, channel, info)
    assert (refused.code, refused.status) == (code, 400)


def test_all_attributes_of_a_channel_may_be_asked_at_once():
    assert parse_channel_info("presence-cache-x", "user_count,subscription_count,cache") == (
        "user_count",
        "subscription_count",
        "cache",
    )
    assert parse_channel_info("x", "") == ()
    assert parse_channel_info("cache-x", ",".join(sorted(CHANNEL_INFO - {"user_count"}))) == (
        "cache",
        "subscription_count",
    )


def test_a_refused_name_is_quoted_and_cut():
    message = refusal(check_channel, "a\n" * 1000).message
    assert "\n" not in message
    assert len(message) < 250


# -- requests to sign ----------------------------------------------------------------------------------------


def test_a_private_subscription_is_read_from_json_and_from_a_form(app):
    for body, form in (
        (b'{"socket_id":"1.2","channel_name":"private-x","extra":1}', False),
        (b"socket_id=1.2&channel_name=private-x&extra=1", True),
    ):
        asked = decode_auth(body, app, form=form)
        assert (asked.socket_id, asked.channel_name, asked.channel_data) == ("1.2", "private-x", None)


def test_channel_data_is_kept_byte_for_byte(app):
    channel_data = '{"user_id":"a b", "user_info":{"n":"é+"}}'
    form = b"socket_id=1.2&channel_name=presence-x&channel_data=%7B%22user_id%22%3A%22a+b%22%2C+"
    form += b"%22user_info%22%3A%7B%22n%22%3A%22%C3%A9%2B%22%7D%7D"
    assert decode_auth(form, app, form=True).channel_data == channel_data
    body = json.dumps({"socket_id": "1.2", "channel_name": "presence-x", "channel_data": channel_data}).encode()
    assert decode_auth(body, app).channel_data == channel_data


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"socket_id": None}, "bad_request"),
        ({"channel_name": None}, "bad_request"),
        ({"socket_id": "x"}, "invalid_socket_id"),
        ({"socket_id": "1.2:private-other"}, "invalid_socket_id"),
        ({"channel_name": "private-x:y"}, "invalid_channel"),
        ({"channel_name": "public"}, "invalid_channel"),
        ({"channel_name": "#server-to-user-7"}, "invalid_channel"),
        ({"channel_name": "presence-x"}, "bad_request"),
        ({"channel_name": "presence-x", "channel_data": "{}"}, "bad_request"),
        ({"channel_name": "presence-x", "channel_data": {"user_id": "7"}}, "bad_request"),
    ],
)
def test_a_subscription_that_would_be_refused_is_not_signed(app, fields, code):
    body = {"socket_id": "1.2", "channel_name": "private-x", **fields}
    assert refusal(decode_auth, json.dumps(body).encode(), app).code == code


@pytest.mark.parametrize("body", [b"\xff", b"socket_id=%ff&channel_name=private-x", b"a=1&" * 1000, b""])
def test_a_malformed_form_is_refused(app, body):
    assert refusal(decode_auth, body, app, form=True).code == "bad_request"


# -- anything at all -----------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a", "pusher:a", "client-a"]) | JSON,
        "data": st.text() | JSON,
        "channel": st.sampled_from(["a", "presence-a"]) | JSON,
        "channels": st.lists(st.sampled_from(["a", "private-b"]) | JSON, max_size=3) | JSON,
        "socket_id": st.sampled_from(["1.2", "01.2"]) | JSON,
        "info": st.sampled_from(["user_count", "cache"]) | JSON,
        "correlation_id": st.text() | JSON,
        "channel_name": st.sampled_from(["private-a", "presence-a"]) | JSON,
        "channel_data": st.sampled_from(['{"user_id":1}']) | JSON,
    },
)


def decoded(app, query: str, body: bytes) -> list[Event]:
    """The results of all decoders for `body`. A refusal is fine; any other exception fails the test."""
    read: list[Event] = []
    for decode in (
        lambda: read.append(event_of(body, parse_query(query), app)),
        lambda: read.extend(events_of(decode_batch(body, app))),
        lambda: decode_auth(body, app),
        lambda: decode_auth(body, app, form=True),
    ):
        try:
            decode()
        except ApiError as refused:
            if refused.status not in (400, 413):
                raise
            refused.message.encode()
    return read


@given(fields=FIELDS, query=st.text(st.characters(), max_size=30), raw=st.binary(max_size=40))
def test_any_input_is_a_valid_event_or_a_refusal(app, fields, query, raw):
    unescaped = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for body in (
        raw,
        unescaped,
        json.dumps(fields).encode(),
        json.dumps({"batch": [fields, ITEM]}).encode(),
    ):
        for item in decoded(app, query, body):
            assert 1 <= len(item.name.encode()) <= 4 * 200
            assert len(item.data.encode()) <= 10_240
            assert item.channels
            assert set(item.info) <= EVENT_INFO
            assert item.correlation_id is None or item.correlation_id.isprintable()


KEEPING = HistoryRule(id="0a0b0c", name="kept-", prefix=True, keep=10, seconds=60)


def test_event_may_end_channels_with_history(app):
    app = msgspec.structs.replace(app, history=(KEEPING,))
    body = {**EVENT, "channels": ["kept-a", "kept-b"]}
    assert decode_event(json.dumps(body).encode(), [], app).ends == ()
    assert decode_event(json.dumps({**body, "end": False}).encode(), [], app).ends == ()
    assert decode_event(json.dumps({**body, "end": True}).encode(), [], app).ends == (0,)
    items = [{**ITEM, "channel": "other"}, {**ITEM, "channel": "kept-a", "end": True}]
    assert decode_batch(json.dumps({"batch": items}).encode(), app).ends == (1,)


def test_channel_without_history_cannot_end(app):
    app = msgspec.structs.replace(app, history=(KEEPING,))
    body = {**EVENT, "channels": ["kept-a", "other"], "end": True}
    with pytest.raises(ApiError, match="'other' has no history") as refused:
        decode_event(json.dumps(body).encode(), [], app)
    assert refused.value.code == "no_history"
    with pytest.raises(ApiError, match=r"batch\[0\]") as refused:
        decode_batch(json.dumps({"batch": [{**ITEM, "end": True}]}).encode(), app)
    assert refused.value.code == "no_history"
