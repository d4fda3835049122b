import json

import msgspec
import pytest

from redpoll.protocol import frames
from redpoll.protocol.frames import SignIn, Subscribe
from redpoll.protocol.history import StoredMessage

AWKWARD = 'a"b\\c\n\x00 é\U0001f600</script>'


def test_the_first_frame_is_exactly_as_the_protocol_says():
    assert frames.connection_established("123456.7890123", 120) == (
        b'{"event":"pusher:connection_established",'
        b'"data":"{\\"socket_id\\":\\"123456.7890123\\",\\"activity_timeout\\":120}"}'
    )


@pytest.mark.parametrize(("given", "sent"), [(120.0, 120), (0.2, 1), (1.5, 2), (0, 1)])
def test_the_activity_timeout_is_a_whole_number_and_never_zero(given, sent, read_frame):
    frame = read_frame(frames.connection_established("1.2", given))
    assert json.loads(frame["data"])["activity_timeout"] == sent


def test_the_first_frame_confirms_recovery():
    assert frames.connection_established("1.2", 120, recover=True) == (
        b'{"event":"pusher:connection_established",'
        b'"data":"{\\"socket_id\\":\\"1.2\\",\\"activity_timeout\\":120,\\"recover\\":true}"}'
    )


def test_ping_and_pong_carry_a_string():
    assert frames.ping() == b'{"event":"pusher:ping","data":"{}"}'
    assert frames.pong() == b'{"event":"pusher:pong","data":"{}"}'


@pytest.mark.parametrize("code", [4301, None])
def test_an_errors_data_is_an_object(code, read_frame):
    assert read_frame(frames.error(code, AWKWARD))["data"] == {"code": code, "message": AWKWARD}


def test_success_without_presence_has_empty_data():
    assert frames.subscription_succeeded("my-channel") == (
        b'{"event":"pusher_internal:subscription_succeeded","channel":"my-channel","data":"{}"}'
    )


def test_success_on_presence_carries_the_snapshot_as_a_string(read_frame):
    snapshot = json.dumps({"presence": {"count": 1, "ids": [AWKWARD], "hash": {AWKWARD: {}}}})
    frame = read_frame(frames.subscription_succeeded("presence-x", snapshot.encode()))
    assert frame["channel"] == "presence-x"
    assert frame["data"] == snapshot


def test_success_for_a_recovering_client_has_its_position(read_frame):
    frame = read_frame(frames.subscription_succeeded("x", epoch="e1", offset=7))
    assert json.loads(frame["data"]) == {"epoch": "e1", "offset": 7}
    frame = read_frame(frames.subscription_succeeded("x", epoch="e1", offset=0, recovered=False))
    assert json.loads(frame["data"]) == {"epoch": "e1", "offset": 0, "recovered": False}
    frame = read_frame(frames.subscription_succeeded("x", recovered=False))
    assert json.loads(frame["data"]) == {"recovered": False}


def test_success_for_a_recovering_client_has_the_snapshot_too(read_frame):
    snapshot = {"presence": {"count": 1, "ids": [AWKWARD], "hash": {AWKWARD: {}}}}
    payload = frames.subscription_succeeded(
        "presence-x", json.dumps(snapshot).encode(), epoch="e", offset=2**53 - 1, recovered=True
    )
    frame = read_frame(payload)
    assert json.loads(frame["data"]) == {**snapshot, "epoch": "e", "offset": 2**53 - 1, "recovered": True}


def test_a_position_is_sent_on_its_channel(read_frame):
    frame = read_frame(frames.position(AWKWARD, "e2", 9, False))
    assert (frame["event"], frame["channel"]) == ("pusher:position", AWKWARD)
    assert json.loads(frame["data"]) == {"epoch": "e2", "offset": 9, "recovered": False}


def test_a_page_of_history_has_the_one_shape_of_messages(read_frame):
    messages = [
        StoredMessage(5, "news", AWKWARD, 1_700_000_000_000),
        StoredMessage(6, AWKWARD, "{}", 1_700_000_000_001),
    ]
    frame = read_frame(frames.history("x", "e", messages, "e:5"))
    assert (frame["event"], frame["channel"]) == ("pusher:history", "x")
    assert json.loads(frame["data"]) == {
        "epoch": "e",
        "messages": [
            {"offset": 5, "event": "news", "data": AWKWARD, "time_ms": 1_700_000_000_000},
            {"offset": 6, "event": AWKWARD, "data": "{}", "time_ms": 1_700_000_000_001},
        ],
        "next": "e:5",
    }
    assert json.loads(read_frame(frames.history("x", "e", [], None))["data"])["next"] is None


def test_the_console_gets_an_event_with_all_its_details():
    frame = json.loads(frames.console("a", AWKWARD, AWKWARD, "7", None))
    assert (frame["event"], frame["channel"]) == ("event", "private-redpoll.console")
    assert json.loads(frame["data"]) == {
        "channel": "a",
        "event": AWKWARD,
        "data": AWKWARD,
        "user_id": "7",
        "skip": None,
    }


def test_a_refusal_has_type_error_status_and_additions(read_frame):
    frame = read_frame(frames.subscription_error(AWKWARD, "AuthError", AWKWARD, 401, reason="auth_required"))
    assert frame["event"] == "pusher:subscription_error"
    assert frame["channel"] == AWKWARD
    assert json.loads(frame["data"]) == {
        "type": "AuthError",
        "error": AWKWARD,
        "status": 401,
        "reason": "auth_required",
    }


def test_auth_required_names_channel_and_socket_twice_over(read_frame):
    assert frames.auth_required("private-x", "1.2") == (
        b'{"event":"auth_required","channel":"private-x",'
        b'"data":"{\\"channel\\":\\"private-x\\",\\"socket_id\\":\\"1.2\\"}"}'
    )


def test_member_frames_carry_id_and_info(read_frame):
    added = read_frame(frames.member_added("presence-x", AWKWARD, b'{"name":"A"}'))
    assert added["event"] == "pusher_internal:member_added"
    assert json.loads(added["data"]) == {"user_id": AWKWARD, "user_info": {"name": "A"}}
    removed = read_frame(frames.member_removed("presence-x", AWKWARD))
    assert removed["event"] == "pusher_internal:member_removed"
    assert json.loads(removed["data"]) == {"user_id": AWKWARD}


def test_a_member_without_info_gets_an_empty_object(read_frame):
    assert json.loads(read_frame(frames.member_added("presence-x", "7", b""))["data"])["user_info"] == {}


def test_a_miss_and_a_count_have_the_protocols_exact_frames(read_frame):
    assert frames.cache_miss("cache-x") == b'{"event":"pusher:cache_miss","channel":"cache-x","data":"{}"}'
    assert frames.subscription_count("x", 42) == (
        b'{"event":"pusher_internal:subscription_count","channel":"x","data":"{\\"subscription_count\\":42}"}'
    )
    for frame in (frames.cache_miss(AWKWARD), frames.subscription_count(AWKWARD, 0)):
        assert read_frame(frame)["channel"] == AWKWARD


def test_a_sign_in_is_answered_with_the_signed_text(read_frame):
    assert frames.signin_success('{"id":"7"}') == (
        b'{"event":"pusher:signin_success","data":"{\\"user_data\\":\\"{\\\\\\"id\\\\\\":\\\\\\"7\\\\\\"}\\"}"}'
    )
    user_data = json.dumps({"id": AWKWARD, "user_info": {"n": 1.50}}, indent=1)
    assert json.loads(read_frame(frames.signin_success(user_data))["data"]) == {"user_data": user_data}


def test_watchlist_events_come_in_the_one_frame_that_pusher_js_routes(read_frame):
    both = read_frame(frames.watchlist_events(["8", AWKWARD], {"9": None}))
    assert both["event"] == "pusher_internal:watchlist_events"
    assert json.loads(both["data"]) == {
        "events": [{"name": "online", "user_ids": ["8", AWKWARD]}, {"name": "offline", "user_ids": ["9"]}]
    }


def test_a_group_without_users_is_left_out(read_frame):
    for online, offline, name in ((["8"], [], "online"), ((), ("8",), "offline")):
        data = json.loads(read_frame(frames.watchlist_events(online, offline))["data"])
        assert data == {"events": [{"name": name, "user_ids": ["8"]}]}


def raw(json: bytes) -> msgspec.Raw:
    return frames.decode_message(b'{"event":"x","data":' + json + b"}").data


@pytest.mark.parametrize(
    "data",
    [b'{"channel":"c","auth":"a"}', b'"{\\"channel\\":\\"c\\",\\"auth\\":\\"a\\"}"', b' {"auth":"a","channel":"c"}'],
)
def test_data_of_a_control_event_may_be_an_object_or_a_string_of_one(data):
    assert frames.decode_subscribe(frames.data_of(raw(data))) == Subscribe("c", "a")


def test_an_invalid_history_request_does_not_make_the_message_malformed():
    asked = frames.decode_subscribe(b'{"channel":"c","rewind":7,"since":[],"recover":"x"}')
    assert (asked.channel, asked.rewind, asked.since, asked.recover) == ("c", 7, [], "x")
    page = frames.decode_history(b'{"channel":"c","limit":"x","before":{}}')
    assert (page.channel, page.limit, page.before, page.since) == ("c", "x", {}, None)
    for data in (b"{}", b'{"channel":7}', b'{"limit":1}'):
        with pytest.raises(msgspec.ValidationError):
            frames.decode_history(data)


def test_a_sign_in_needs_both_its_strings():
    assert frames.decode_sign_in(b'{"auth":"a","user_data":"u","more":1}') == SignIn("a", "u")
    for data in (
        b"{}",
        b'{"auth":"a"}',
        b'{"user_data":"u"}',
        b'{"auth":"a","user_data":{}}',
        b'{"auth":null,"user_data":"u"}',
    ):
        with pytest.raises(msgspec.ValidationError):
            frames.decode_sign_in(data)


def test_missing_data_is_an_error_of_a_control_event_and_empty_in_a_client_event():
    missing = frames.decode_message(b'{"event":"x"}').data
    with pytest.raises(msgspec.ValidationError, match="data"):
        frames.data_of(missing)
    assert frames.text_of(missing) == "{}"


@pytest.mark.parametrize(
    ("data", "text"), [(b'"a\\u00e9"', "a\u00e9"), (b'{ "a":1.50 }', '{ "a":1.50 }'), (b"null", "null"), (b'""', "")]
)
def test_data_of_a_client_event_keeps_its_senders_spelling(data, text):
    assert frames.text_of(raw(data)) == text
