import json
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redpoll.protocol.apps import App, CurrentApp, Key
from redpoll.protocol.channels import CONSOLE, MAX_NAME_CHARS, Kind, kind_of, needs_auth, valid_name
from redpoll.protocol.effects import Acknowledge, AskHistory, Close, Join, Leave, Publish, Send, SendUrgent, SignedIn
from redpoll.protocol.history import Position, Rewind
from redpoll.protocol.limits import Limits
from redpoll.protocol.presence import Member
from redpoll.protocol.session import Session

KEY = "278d425bdf160c739803"
SID = (1234, 1234)
SOCKET_ID = "1234.1234"
AWKWARD_PREFIXES = [
    "private-",
    "private-cache-",
    "private-encrypted-",
    "private-encrypted-cache-",
    "private-cache-encrypted-",
    "presence-",
    "presence-cache-",
    "presence-encrypted-",
    "presence-encrypted-cache-",
]


class Client:
    """A session with helpers: messages as Python values, and a clock that the test sets."""

    def __init__(self, app: App, read_frame, sign, limits: Limits = Limits()) -> None:  # noqa: B008
        self.current_app = CurrentApp(app)
        self.session = Session(SID, self.current_app, limits)
        self.now = 1000.0
        self._read_frame = read_frame
        self._sign = sign

    def send(self, event: object, data: object = ..., **more: object) -> list[Any]:
        message = {"event": event, **({} if data is ... else {"data": data}), **more}
        return self.session.receive(json.dumps(message).encode(), self.now)

    def auth(self, channel: str, channel_data: str | None = None) -> str:
        text = f"{SOCKET_ID}:{channel}" + ("" if channel_data is None else f":{channel_data}")
        return f"{KEY}:{self._sign(text)}"

    def subscribe(self, channel: str, channel_data: str | None = None) -> list[Any]:
        data = {"channel": channel}
        if needs_auth(channel):
            data["auth"] = self.auth(channel, channel_data)
        if channel_data is not None:
            data["channel_data"] = channel_data
        return self.send("pusher:subscribe", data)

    def unsubscribe(self, channel: str) -> list[Any]:
        return self.send("pusher:unsubscribe", {"channel": channel})

    def join(self, channel: str, channel_data: str | None = None) -> None:
        """Subscribe, and report success as the worker does."""
        (join,) = self.subscribe(channel, channel_data)
        assert type(join) is Join
        assert self.session.joined(channel) == []

    def sign_in(self, user_data: str, auth: str | None = None) -> list[Any]:
        if auth is None:
            auth = f"{KEY}:{self._sign(f'{SOCKET_ID}::user::{user_data}')}"
        return self.send("pusher:signin", {"auth": auth, "user_data": user_data})

    def frames(self, effects: list[Any]) -> list[dict[str, Any]]:
        assert all(type(effect) is Send for effect in effects)
        return [self._read_frame(effect.payload) for effect in effects]

    def error_of(self, effects: list[Any]) -> tuple[int | None, str]:
        """Code and text of the one `pusher:error`."""
        (frame,) = self.frames(effects)
        assert frame["event"] == "pusher:error"
        return frame["data"]["code"], frame["data"]["message"]

    def refusal_of(self, effects: list[Any], channel: str) -> tuple[str, int, str]:
        """Type, status and text of a refused subscribe. Both frames must have the same text."""
        on_channel, error = self.frames(effects)
        assert on_channel["event"] == "pusher:subscription_error"
        assert on_channel["channel"] == channel
        data = json.loads(on_channel["data"])
        assert set(data) == {"type", "error", "status"}
        assert error == {"event": "pusher:error", "data": {"code": None, "message": data["error"]}}
        return data["type"], data["status"], data["error"]


@pytest.fixture
def make_client(app, read_frame, sign):
    def make(app: App = app, limits: Limits = Limits()) -> Client:  # noqa: B008
        return Client(app, read_frame, sign, limits)

    return make


@pytest.fixture
def client(make_client) -> Client:
    return make_client()


def test_the_socket_id_is_two_numbers_and_a_dot(app):
    assert Session((1, 2), CurrentApp(app)).socket_id == "1.2"
    assert Session((2**63 - 1, 0), CurrentApp(app)).socket_id == "9223372036854775807.0"
    assert Session((0, 2**64 - 1), CurrentApp(app)).socket_id == "0.18446744073709551615"


# -- ping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [{}, "{}", None, ..., 7])
def test_a_ping_is_answered_urgently(client, data):
    (pong,) = client.send("pusher:ping", data)
    assert pong == SendUrgent(b'{"event":"pusher:pong","data":"{}"}')


def test_a_pong_needs_no_answer(client):
    assert client.send("pusher:pong", {}) == []


def test_pings_are_answered_however_many_come(client):
    assert all(client.send("pusher:ping") for _ in range(100_000))


# -- subscribing ---------------------------------------------------------------------------------------------


def test_a_public_subscribe_asks_the_cluster(client):
    assert client.send("pusher:subscribe", {"auth": "", "channel": "my-channel"}) == [Join("my-channel", None)]
    assert client.session.channels["my-channel"].pending
    assert client.session.joined("my-channel") == []
    assert not client.session.channels["my-channel"].pending


@pytest.mark.parametrize(
    "data",
    [
        {"channel": "c"},
        {"channel": "c", "auth": None, "channel_data": None, "more": {"deep": [1]}},
        '{"channel":"c"}',
        ' {"auth":"", "channel" : "c"} ',
    ],
)
def test_data_may_be_an_object_or_a_string_of_one(client, data):
    assert client.send("pusher:subscribe", data, more=[1], channel="other") == [Join("c", None)]


@pytest.mark.parametrize("channel", ["private-foobar", "private-cache-x", "private-encrypted-x"])
def test_a_signed_private_subscribe_asks_the_cluster(client, channel):
    assert client.subscribe(channel) == [Join(channel, None)]


def test_the_vector_of_the_protocol_is_accepted(client):
    auth = f"{KEY}:58df8b0c36d6982b82c3ecf6b4662e34fe8c25bba48f5369f135bf843651c3a4"
    data = {"channel": "private-foobar", "auth": auth}
    assert client.send("pusher:subscribe", data) == [Join("private-foobar", None)]


@pytest.mark.parametrize("channel", ["presence-foobar", "presence-cache-x"])
def test_a_signed_presence_subscribe_carries_its_member(client, channel):
    joins = client.subscribe(channel, '{"user_id":10,"user_info":{"name":"Mr. Channels"}}')
    assert joins == [Join(channel, Member("10", b'{"name":"Mr. Channels"}'))]
    assert client.session.channels[channel].user_id == "10"


@pytest.mark.parametrize(
    "channel",
    [
        "my-private-x",
        "my-private-cache-x",
        "my-private-encrypted-cache-x",
        "cache-private-x",
        "cache-private-encrypted-x",
        "cache-presence-y",
        "x.presence-y",
        "encrypted-private-x",
        "private",
        "presence",
        "PRIVATE-x",
    ],
)
def test_a_prefix_elsewhere_in_the_name_needs_no_signature(client, channel):
    assert client.send("pusher:subscribe", {"channel": channel}) == [Join(channel, None)]


@pytest.mark.parametrize("prefix", AWKWARD_PREFIXES)
@pytest.mark.parametrize("data", [{}, {"auth": ""}, {"auth": None}])
def test_without_auth_three_frames_say_so(client, prefix, data):
    channel = prefix + "x"
    required, on_channel, error = client.frames(client.send("pusher:subscribe", {"channel": channel, **data}))
    assert required["event"] == "auth_required"
    assert required["channel"] == channel
    assert json.loads(required["data"]) == {"channel": channel, "socket_id": SOCKET_ID}
    assert on_channel["event"] == "pusher:subscription_error"
    assert on_channel["channel"] == channel
    refusal = json.loads(on_channel["data"])
    assert (refusal["type"], refusal["status"], refusal["reason"]) == ("AuthError", 401, "auth_required")
    assert error["data"] == {"code": None, "message": refusal["error"]}
    assert client.session.channels == {}


@pytest.mark.parametrize("prefix", AWKWARD_PREFIXES)
def test_a_bad_signature_is_refused_on_every_prefix(client, prefix):
    channel, data = prefix + "x", '{"user_id":"7"}'
    for auth in (f"{KEY}:{'0' * 64}", client.auth(prefix + "y", data), client.auth(channel), "x", ":", KEY):
        effects = client.send("pusher:subscribe", {"channel": channel, "auth": auth, "channel_data": data + " "})
        kind, status, text = client.refusal_of(effects, channel)
        assert (kind, status) == ("AuthError", 401)
        assert text.startswith("Invalid ")
    assert client.session.channels == {}


@pytest.mark.parametrize("prefix", AWKWARD_PREFIXES)
def test_no_prefix_takes_a_signature_made_for_something_else(client, sign, prefix):
    """Another socket, another channel, a channel without the prefix, another secret, a sign-in, one digit off."""
    channel, data = prefix + "x", '{"user_id":"7"}'
    text = f"{SOCKET_ID}:{channel}:{data}"
    right = sign(text)
    for digest in (
        sign(f"1234.1235:{channel}:{data}"),
        sign(f"{SOCKET_ID}:{prefix}y:{data}"),
        sign(f"{SOCKET_ID}:x:{data}"),
        sign(f"{SOCKET_ID}:cache-x:{data}"),
        sign(f"{SOCKET_ID}:{channel}"),
        sign(f"{SOCKET_ID}::user::{data}"),
        sign(text, "another secret"),
        ("1" if right[0] == "0" else "0") + right[1:],
        right[:-1] + ("1" if right[-1] == "0" else "0"),
        right.upper(),
        right + "0",
    ):
        asked = {"channel": channel, "auth": f"{KEY}:{digest}", "channel_data": data}
        kind, status, text = client.refusal_of(client.send("pusher:subscribe", asked), channel)
        assert (kind, status) == ("AuthError", 401)
        assert f"'{KEY}'" in text
        assert right not in text
    assert client.session.channels == {}
    assert not client.session.authorised
    asked = {"channel": channel, "auth": f"{KEY}:{right}", "channel_data": data}
    assert type(client.send("pusher:subscribe", asked)[0]) is Join


def test_the_signature_is_checked_before_the_member_is_read(client):
    effects = client.send(
        "pusher:subscribe", {"channel": "presence-x", "auth": f"{KEY}:{'0' * 64}", "channel_data": "[" * 9999}
    )
    assert client.refusal_of(effects, "presence-x")[0] == "AuthError"


@pytest.mark.parametrize(
    "channel_data",
    [None, "", "{}", "[]", '{"user_id":null}', '{"user_id":""}', '{"user_id":"' + "x" * 129 + '"}'],
)
def test_signed_data_that_is_no_member_is_refused(client, channel_data):
    kind, status, _ = client.refusal_of(client.subscribe("presence-x", channel_data), "presence-x")
    assert (kind, status) == ("InvalidMember", 400)
    assert client.session.channels == {}


@pytest.mark.parametrize(
    ("fields", "kind", "status"),
    [
        ({"channel_data": {"user_id": "7"}}, "InvalidMember", 400),
        ({"channel_data": 7}, "InvalidMember", 400),
        ({"auth": 7}, "AuthError", 401),
        ({"auth": {}, "channel_data": []}, "AuthError", 401),
    ],
)
def test_wrong_types_beside_a_channel_are_refused_on_the_channel(client, fields, kind, status):
    for data in ({"channel": "presence-x", **fields}, json.dumps({"channel": "presence-x", **fields})):
        refusal = client.refusal_of(client.send("pusher:subscribe", data), "presence-x")
        assert refusal[:2] == (kind, status)


@pytest.mark.parametrize("channel", ["", "a b", "private-x:y", "#x", "é", "x" * (MAX_NAME_CHARS + 1), 'q"\\\n\x00'])
def test_a_bad_name_is_refused(client, channel):
    kind, status, _ = client.refusal_of(client.subscribe(channel), channel)
    assert (kind, status) == ("InvalidChannel", 400)


def test_another_users_channel_is_refused(client):
    refusal = client.refusal_of(client.subscribe("#server-to-user-7"), "#server-to-user-7")
    assert refusal == ("AuthError", 401, "not signed in as user '7'")


def test_refused_subscribes_are_all_answered(client):
    for number in range(2_000):
        assert len(client.send("pusher:subscribe", {"channel": f"private-{number}"})) == 3


def test_a_connection_has_a_limit_of_channels_and_a_left_one_makes_room(make_client):
    client = make_client(limits=Limits(max_channels=2))
    client.join("a")
    client.subscribe("b")
    refusal = client.refusal_of(client.subscribe("c"), "c")
    assert refusal[:2] == ("LimitReached", 413)
    assert client.subscribe("a") == [Acknowledge("a")]
    client.unsubscribe("b")
    assert client.subscribe("c") == [Join("c", None)]


def test_the_refusal_of_a_full_presence_channel_names_the_limit(make_client, changed, app):
    client = make_client(changed(app, max_presence_members=3))
    client.subscribe("presence-x", '{"user_id":"7"}')
    kind, status, text = client.refusal_of(client.session.refused("presence-x", "members", client.now), "presence-x")
    assert (kind, status) == ("LimitReached", 413)
    assert "3" in text
    assert client.session.channels == {}
    assert len(client.subscribe("presence-x", '{"user_id":"7"}')) == 1


def test_a_join_that_could_not_be_confirmed_is_forgotten(client):
    client.subscribe("a")
    assert client.session.refused("a", "unavailable", client.now) == []
    assert client.session.channels == {}


def test_an_address_that_subscribes_too_fast_is_refused_like_a_connection_that_does(client):
    client.subscribe("a")
    refusal = client.refusal_of(client.session.refused("a", "address", client.now), "a")
    assert refusal[:2] == ("LimitReached", 429)
    assert "your address" in refusal[2]
    assert client.subscribe("a") == [Join("a", None)]


def test_a_changed_app_record_applies_at_once(client, app, changed):
    old = client.auth("private-x")
    client.current_app.record = changed(app, keys=())
    refusal = client.refusal_of(client.send("pusher:subscribe", {"channel": "private-x", "auth": old}), "private-x")
    assert refusal[0] == "AuthError"
    assert "no enabled key" in refusal[2]


# -- again, and out ------------------------------------------------------------------------------------------


def test_a_second_subscribe_is_acknowledged_without_a_join(client):
    client.join("a")
    assert client.subscribe("a") == [Acknowledge("a")]
    client.join("presence-x", '{"user_id":7}')
    assert client.subscribe("presence-x", '{"user_id":"7","user_info":{"new":1}}') == [Acknowledge("presence-x")]


def test_a_second_subscribe_needs_a_valid_signature_too(client):
    client.join("private-x")
    effects = client.send("pusher:subscribe", {"channel": "private-x", "auth": f"{KEY}:{'0' * 64}"})
    assert client.refusal_of(effects, "private-x")[0] == "AuthError"
    assert not client.session.channels["private-x"].pending


def test_subscribes_repeated_while_pending_are_acknowledged_once_joined(client):
    client.subscribe("presence-x", '{"user_id":"7"}')
    assert client.subscribe("presence-x", '{"user_id":"7"}') == []
    assert client.subscribe("presence-x", '{"user_id":"7"}') == []
    assert client.session.joined("presence-x") == [Acknowledge("presence-x")] * 2
    held = client.session.channels["presence-x"]
    assert (held.pending, held.user_id) == (False, "7")


def test_subscribes_repeated_while_pending_are_refused_as_often(client):
    client.subscribe("presence-x", '{"user_id":"7"}')
    client.subscribe("presence-x", '{"user_id":"7"}')
    assert len(client.session.refused("presence-x", "members", client.now)) == 4


def test_subscribing_and_unsubscribing_is_limited_per_connection(make_client):
    """One socket sent 62,000 pairs in 1.5 s, and each of them cost Redis two commands."""
    limits = Limits(max_channels=100, subscribes_per_s=10)
    client = make_client(limits=limits)
    joins = 0
    while effects := client.subscribe("a"):
        if type(effects[0]) is not Join:
            break
        joins += 1
        assert [type(effect) for effect in client.unsubscribe("a")] == [Leave]
    assert joins == 100
    assert client.refusal_of(effects, "a")[:2] == ("LimitReached", 429)
    assert limits.refusals.subscribes == 1
    client.now += 0.1
    assert client.subscribe("a") == [Join("a", None)]


def test_unsubscribes_beyond_the_rate_take_effect_and_delay_later_subscribes(make_client):
    client = make_client(limits=Limits(max_channels=10, subscribes_per_s=10))
    for _ in range(3):
        for name in "abcdefghij":
            client.subscribe(name)
        assert all(client.unsubscribe(name) for name in list(client.session.channels))
        client.now += 0.1
    assert client.refusal_of(client.subscribe("a"), "a")[:2] == ("LimitReached", 429)
    client.now += 1.0
    assert client.subscribe("a") == [Join("a", None)]


def test_client_that_ignores_the_limit_of_subscribes_is_closed(make_client):
    client = make_client(limits=Limits(max_channels=1, subscribes_per_s=1))
    client.subscribe("a")
    client.unsubscribe("a")
    answers = [client.subscribe("a") for _ in range(1_000)]
    assert all(len(effects) == 2 for effects in answers[:-1])
    (close,) = answers[-1]
    assert (type(close), close.code) == (Close, 4100)


def test_a_connection_may_have_all_its_channels_at_once_and_replace_them_all_once(client):
    for number in range(1_000):
        client.join(f"room-{number}")
    for number in range(1_000):
        client.unsubscribe(f"room-{number}")
    client.now += 0.1
    for number in range(1_000):
        client.join(f"other-{number}")


def test_repeated_subscribes_are_limited_too(make_client):
    client = make_client(limits=Limits(max_channels=10, subscribes_per_s=1))
    client.join("a")
    assert [client.subscribe("a") for _ in range(10)] == [[Acknowledge("a")]] * 10
    assert client.refusal_of(client.subscribe("a"), "a")[:2] == ("LimitReached", 429)


@pytest.mark.parametrize("user", [None, "7"])
def test_subscribes_repeated_while_pending_are_limited_as_well(make_client, user):
    client = make_client(limits=Limits(max_channels=200, subscribes_per_s=1))
    channel, data = ("a", None) if user is None else ("presence-a", json.dumps({"user_id": user}))
    client.subscribe(channel, data)
    # More of them than are answered.
    assert [client.subscribe(channel, data) for _ in range(200)] == [[]] * 200
    assert client.refusal_of(client.subscribe(channel, data), channel)[:2] == ("LimitReached", 429)
    assert client.session.channels[channel].pending
    assert len(client.session.joined(channel)) == 100
    client.now += 1.0
    assert client.subscribe(channel, data) == [Acknowledge(channel)]


def test_repeated_subscribe_is_refused_for_its_address_and_the_subscription_stays(client):
    client.join("a")
    effects = client.session.refused("a", "address", client.now)
    assert client.refusal_of(effects, "a")[:2] == ("LimitReached", 429)
    assert client.subscribe("a") == [Acknowledge("a")]
    assert client.session.refused("b", "address", client.now) == []


def test_without_a_rate_subscribes_are_not_limited(make_client):
    client = make_client(limits=Limits(max_channels=2, subscribes_per_s=0))
    for _ in range(5_000):
        assert client.subscribe("a") == [Join("a", None)]
        client.unsubscribe("a")


def test_repeats_without_end_do_not_pile_up(make_client):
    client = make_client(limits=Limits(subscribes_per_s=0))
    client.subscribe("a")
    for _ in range(5_000):
        assert client.subscribe("a") == []
    assert len(client.session.joined("a")) <= 100


@pytest.mark.parametrize("attached", [False, True])
def test_another_user_on_the_same_channel_is_refused_and_the_first_stays(client, attached):
    client.subscribe("presence-x", '{"user_id":"7"}')
    if attached:
        client.session.joined("presence-x")
    code, text = client.error_of(client.subscribe("presence-x", '{"user_id":"8"}'))
    assert code is None
    assert text == "Existing subscription to channel presence-x as another user"
    assert client.session.channels["presence-x"].user_id == "7"


def test_unsubscribing_leaves_with_the_user(client):
    client.join("a")
    client.join("presence-x", '{"user_id":7}')
    assert client.unsubscribe("a") == [Leave("a", None)]
    assert client.send("pusher:unsubscribe", '{"channel":"presence-x"}') == [Leave("presence-x", "7")]
    assert client.session.channels == {}


def test_unsubscribing_without_a_subscription_is_ignored(client):
    assert client.unsubscribe("a") == []
    assert client.unsubscribe("") == []


def test_leaving_while_pending_and_subscribing_again_is_a_new_join(client):
    assert client.subscribe("a") == [Join("a", None)]
    assert client.unsubscribe("a") == [Leave("a", None)]
    assert client.subscribe("a") == [Join("a", None)]
    assert client.session.joined("a") == []
    assert not client.session.channels["a"].pending


def test_answers_for_channels_that_were_left_are_ignored(client):
    client.subscribe("a")
    client.unsubscribe("a")
    assert client.session.joined("a") == []
    assert client.session.refused("a", "members", client.now) == []
    client.join("b")
    assert client.session.joined("b") == []
    assert client.session.refused("b", "members", client.now) == []
    assert list(client.session.channels) == ["b"]


# -- the dashboard's console ---------------------------------------------------------------------------------


def test_the_console_accepts_only_its_own_key_and_no_other_channel_does(app, changed, sign, make_client):
    client = make_client(changed(app, console_key=Key(key="c0", secret="5ec")))
    secret = app.keys[0].secret
    opens = {(CONSOLE, "c0", "5ec"), ("private-x", KEY, secret)}
    for channel in (CONSOLE, "private-x"):
        for key, signed_with in ((KEY, secret), ("c0", "5ec"), ("c0", secret), ("c1", "5ec")):
            auth = f"{key}:{sign(f'{SOCKET_ID}:{channel}', signed_with)}"
            effects = client.send("pusher:subscribe", {"channel": channel, "auth": auth})
            if (channel, key, signed_with) in opens:
                assert effects == [Join(channel, None)]
            else:
                assert client.refusal_of(effects, channel)[:2] == ("AuthError", 401)


def test_without_a_console_key_the_console_refuses_every_client(client):
    assert client.refusal_of(client.subscribe(CONSOLE), CONSOLE) == (
        "AuthError",
        401,
        "this channel is reserved for the dashboard",
    )


def test_other_reserved_names_are_refused(client):
    assert client.refusal_of(client.subscribe("private-redpoll.x"), "private-redpoll.x")[:2] == ("InvalidChannel", 400)


def test_the_console_takes_no_client_events(make_client, app, changed, sign):
    client = make_client(changed(app, console_key=Key(key="c0", secret="5ec")))
    auth = f"c0:{sign(f'{SOCKET_ID}:{CONSOLE}', '5ec')}"
    client.send("pusher:subscribe", {"channel": CONSOLE, "auth": auth})
    client.session.joined(CONSOLE)
    assert client.error_of(client.send("client-a", "{}", channel=CONSOLE))[0] == 4301


# -- history: rewind, recovery, pages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "rewind"),
    [
        ({"rewind": {"count": 3}}, Rewind(count=3)),
        ({"rewind": {"seconds": 60}}, Rewind(seconds=60)),
        ({"since": {"epoch": "e", "offset": 7}}, Rewind(epoch="e", offset=7)),
        ({"rewind": None, "since": None}, None),
    ],
)
def test_a_subscribe_carries_its_rewind(client, fields, rewind):
    assert client.send("pusher:subscribe", {"channel": "a", **fields}) == [Join("a", None, rewind)]


def test_javas_library_gets_nothing_that_it_would_decrypt(client, app):
    """On encrypted channels it decrypts each frame of the channel, and one that isn't ciphertext ends the app."""
    client.session = Session(SID, CurrentApp(app), decrypts_all=True)
    client.join("private-encrypted-in")
    taken_back, error = client.session.remove("private-encrypted-in")
    assert taken_back == Leave("private-encrypted-in", None)
    assert client.error_of([error]) == (None, "access was revoked")
    for auth in ({"auth": f"{KEY}:{'0' * 64}"}, {}, {"auth": 7}):
        for name in ("encrypted-a", "encrypted-cache-a"):
            assert client.error_of(client.send("pusher:subscribe", {"channel": f"private-{name}", **auth}))[0] is None
        refused = client.frames(client.send("pusher:subscribe", {"channel": "private-a", **auth}))
        assert [frame["event"] for frame in refused[-2:]] == ["pusher:subscription_error", "pusher:error"]
    # Still so after the connection was authorised and has signed in.
    client.join("private-b")
    client.sign_in('{"id":"7"}')
    client.error_of(client.send("pusher:subscribe", {"channel": "private-encrypted-a"}))


@pytest.mark.parametrize(
    "fields",
    [
        {"rewind": {"count": -1}},
        {"rewind": {"count": 10**30}},
        {"rewind": {"count": 1, "seconds": 1}},
        {"rewind": {"count": 1}, "since": {"epoch": "e", "offset": 1}},
        {"rewind": []},
        {"since": {"epoch": "e", "offset": -1}},
    ],
)
def test_a_malformed_rewind_is_a_refused_subscribe(client, fields):
    kind, status, _ = client.refusal_of(client.send("pusher:subscribe", {"channel": "a", **fields}), "a")
    assert (kind, status) == ("InvalidRewind", 400)
    assert client.session.channels == {}


def test_the_signature_is_checked_before_the_rewind(client):
    asked = {"channel": "private-a", "auth": f"{KEY}:{'0' * 64}", "rewind": {"count": -1}}
    assert client.refusal_of(client.send("pusher:subscribe", asked), "private-a")[0] == "AuthError"


def test_a_client_that_connected_with_recover_recovers_on_every_channel(app, read_frame, sign):
    client = Client(app, read_frame, sign)
    client.session = Session(SID, CurrentApp(app), recovers=True)
    assert client.subscribe("a") == [Join("a", None, None, recovers=True)]
    client.join("private-a")
    assert client.subscribe("b") == [Join("b", None, None, recovers=True)]
    client.sign_in(USER_7)
    assert client.subscribe("c") == [Join("c", None, None, recovers=True)]
    assert client.session.recovers
    assert client.session.authorised


def test_other_clients_recover_on_channels_that_they_name(client):
    assert client.send("pusher:subscribe", {"channel": "a", "recover": True}) == [Join("a", None, None, True)]
    for number, value in enumerate((False, None, 1, "true")):
        asked = {"channel": f"b{number}", "recover": value}
        assert client.send("pusher:subscribe", asked) == [Join(f"b{number}", None)]
    assert not client.session.recovers


@pytest.mark.parametrize("as_string", [False, True])
def test_history_may_be_requested_of_subscribed_channels(client, as_string):
    client.join("a")

    def ask(**fields: object) -> list[Any]:
        data = {"channel": "a", **fields}
        return client.send("pusher:history", json.dumps(data) if as_string else data)

    assert ask() == [AskHistory("a", 100, None, None)]
    assert ask(limit=5, before="e:7") == [AskHistory("a", 5, Position("e", 7), None)]
    assert ask(limit=1000, since={"epoch": "e", "offset": 7}) == [AskHistory("a", 1000, None, Position("e", 7))]


def test_history_of_other_channels_is_refused(client):
    code, text = client.error_of(client.send("pusher:history", {"channel": "a"}))
    assert (code, text) == (None, "No history of channel a: this connection is not subscribed to it")
    client.subscribe("a")
    code, text = client.error_of(client.send("pusher:history", {"channel": "a"}))
    assert (code, text) == (None, "No history of channel a: the subscription is in progress")


@pytest.mark.parametrize("fields", [{"limit": 0}, {"limit": 1001}, {"limit": -1}, {"before": 1, "since": 1}])
def test_a_malformed_page_is_an_error_without_a_code(client, fields):
    client.join("a")
    code, text = client.error_of(client.send("pusher:history", {"channel": "a", **fields}))
    assert code is None
    assert text.startswith("No history of channel a: ")


@pytest.mark.parametrize("data", [..., 7, {}, {"channel": 7}, "x"])
def test_a_history_request_without_a_channel_is_a_bad_frame(client, data):
    code, text = client.error_of(client.send("pusher:history", data))
    assert code is None
    assert text.startswith("Invalid message: ")


def test_history_requests_are_limited_but_a_whole_history_can_be_read(client):
    client.join("a")
    answers = [client.send("pusher:history", {"channel": "a"}) for _ in range(120)]
    assert all(type(answer[0]) is AskHistory for answer in answers[:100])
    assert all("more than 20 requests per second" in client.error_of(answer)[1] for answer in answers[100:])
    client.now += 1
    assert type(client.send("pusher:history", {"channel": "a"})[0]) is AskHistory


def test_every_failed_history_request_is_answered_until_there_are_too_many(client):
    for _ in range(999):
        code, text = client.error_of(client.session.history_refused("a", "unknown epoch", client.now))
        assert (code, text) == (None, "No history of channel a: unknown epoch")
    (closing,) = client.session.history_refused("a", "unknown epoch", client.now)
    assert type(closing) is Close
    assert client.session.history_refused("a", "unknown epoch", client.now) == []


# -- signing in ----------------------------------------------------------------------------------------------

USER_7 = '{"id":"7","user_info":{"name":"Mr. 7"},"watchlist":["8","9"]}'


def test_a_sign_in_succeeds_with_the_protocols_vector(client):
    auth = f"{KEY}:4708d583dada6a56435fb8bc611c77c359a31eebde13337c16ab43aa6de336ba"
    send, signed_in = client.sign_in('{"id":"12345"}', auth)
    (frame,) = client.frames([send])
    assert frame["event"] == "pusher:signin_success"
    assert json.loads(frame["data"]) == {"user_data": '{"id":"12345"}'}
    assert signed_in == SignedIn("12345", ())


def test_a_signed_in_connection_has_its_user_id(client):
    assert (client.session.user_id, client.session.authorised) == (None, False)
    _, signed_in = client.sign_in(USER_7)
    assert signed_in == SignedIn("7", ("8", "9"))
    assert (client.session.user_id, client.session.authorised) == ("7", True)


def test_data_of_a_sign_in_may_be_a_string(client, sign):
    data = {"auth": f"{KEY}:{sign(f'{SOCKET_ID}::user::{USER_7}')}", "user_data": USER_7}
    assert client.send("pusher:signin", json.dumps(data))[1] == SignedIn("7", ("8", "9"))


@pytest.mark.parametrize("user_data", ["{}", '{"id":7}', '{"id":""}', "x", '{"id":"7","watchlist":[{}]}', ""])
def test_signed_data_that_is_no_user_is_refused(client, user_data):
    code, text = client.error_of(client.sign_in(user_data))
    assert code == 4009
    assert text.startswith("Invalid user_data: ")
    assert (client.session.user_id, client.session.authorised) == (None, False)


@pytest.mark.parametrize("auth", ["", ":", "x", KEY, f"{KEY}:{'0' * 64}", f"other:{'0' * 64}"])
def test_a_sign_in_with_a_wrong_signature_is_refused_and_lists_the_keys(client, auth):
    code, text = client.error_of(client.sign_in(USER_7, auth))
    assert code == 4009
    assert text.startswith("Invalid ")
    assert f"the app has the keys '{KEY}'" in text
    assert client.session.user_id is None


def test_a_sign_in_signature_is_for_this_socket_only(client, sign):
    for text in (f"1234.1235::user::{USER_7}", f"{SOCKET_ID}:private-x:{USER_7}", f"{SOCKET_ID}:{USER_7}", USER_7):
        assert client.error_of(client.sign_in(USER_7, f"{KEY}:{sign(text)}"))[0] == 4009
    assert client.session.user_id is None


@pytest.mark.parametrize(
    "data", [..., None, 7, "", "x", [], {}, {"auth": "a"}, {"user_data": USER_7}, {"auth": 7, "user_data": USER_7}]
)
def test_an_incomplete_sign_in_is_refused(client, data):
    code, text = client.error_of(client.send("pusher:signin", data))
    assert code == 4009
    assert text.startswith("Invalid signin: ")
    assert client.session.user_id is None


def test_refused_sign_ins_are_all_answered(client):
    assert all(len(client.sign_in(USER_7, f"{KEY}:{'0' * 64}")) == 1 for _ in range(2_000))


def test_the_same_user_again_succeeds_and_replaces_the_watchlist(client):
    client.sign_in(USER_7)
    send, signed_in = client.sign_in('{"id":"7","watchlist":["10"]}')
    assert client.frames([send])[0]["event"] == "pusher:signin_success"
    assert signed_in == SignedIn("7", ("10",))


def test_another_user_is_refused_and_the_first_stays(client):
    client.sign_in(USER_7)
    assert client.error_of(client.sign_in('{"id":"8"}')) == (4009, "Already signed in as another user")
    assert client.session.user_id == "7"
    assert client.subscribe("#server-to-user-7") == [Join("#server-to-user-7", None)]


def test_a_refused_sign_in_closes_connections_that_must_authorise_themselves(make_client, app, changed):
    client = make_client(changed(app, user_authentication_timeout_s=30.0))
    (close,) = client.sign_in(USER_7, f"{KEY}:{'0' * 64}")
    assert type(close) is Close
    assert close.code == 4009
    assert close.message.startswith("Invalid signature: ")
    assert client.sign_in("{}") == []
    assert type(make_client(client.session.app).sign_in(USER_7)[1]) is SignedIn


def test_a_watchlist_over_the_limit_succeeds_with_its_first_hundred_and_an_error(make_client, app, changed):
    client = make_client(changed(app, watchlist=True))
    ids = [str(number) for number in range(101)]
    send, signed_in, more = client.sign_in(json.dumps({"id": "7", "watchlist": ids}))
    assert signed_in == SignedIn("7", tuple(ids[:100]))
    success, error = client.frames([send, more])
    assert json.loads(json.loads(success["data"])["user_data"])["watchlist"] == ids
    assert error["event"] == "pusher:error"
    assert error["data"]["code"] == 4302
    assert "first 100" in error["data"]["message"]
    assert len(client.sign_in(json.dumps({"id": "7", "watchlist": ids[:100]}))) == 2


def test_without_the_watchlist_setting_its_length_does_not_matter(client):
    assert len(client.sign_in(json.dumps({"id": "7", "watchlist": [str(number) for number in range(101)]}))) == 2


@pytest.mark.parametrize("user_id", ["7", "a b", "é\U0001f600", 'q"\\\n\x00', "x" * 128, "a:b#c"])
def test_only_the_own_user_channel_is_accepted(client, user_id):
    channel = f"#server-to-user-{user_id}"
    assert client.refusal_of(client.subscribe(channel), channel)[:2] == ("AuthError", 401)
    client.sign_in(json.dumps({"id": user_id}))
    for other in (f"#server-to-user-{user_id}x", "#server-to-user-8", "#server-to-user-"):
        assert client.refusal_of(client.subscribe(other), other)[:2] == ("AuthError", 401)
    assert client.send("pusher:subscribe", {"auth": "", "channel": channel}) == [Join(channel, None)]
    assert client.session.joined(channel) == []
    assert client.subscribe(channel) == [Acknowledge(channel)]
    assert client.error_of(client.send("client-a", {}, channel=channel))[0] == 4301
    assert client.unsubscribe(channel) == [Leave(channel, None)]


def test_a_user_channel_counts_against_the_limit_of_channels(make_client):
    client = make_client(limits=Limits(max_channels=1))
    client.sign_in(USER_7)
    client.join("a")
    assert client.refusal_of(client.subscribe("#server-to-user-7"), "#server-to-user-7")[0] == "LimitReached"


@pytest.mark.parametrize("channel", ["presence-x", "presence-cache-x"])
def test_presence_without_channel_data_is_joined_as_the_signed_in_user(client, channel):
    refusal = client.refusal_of(client.subscribe(channel), channel)
    assert refusal == ("InvalidMember", 400, "channel_data is missing, and this connection is not signed in")
    client.sign_in(USER_7)
    assert client.subscribe(channel) == [Join(channel, Member("7", b'{"name":"Mr. 7"}'))]
    client.session.joined(channel)
    assert client.session.channels[channel].user_id == "7"
    assert client.subscribe(channel) == [Acknowledge(channel)]
    assert client.subscribe(channel, '{"user_id":"7"}') == [Acknowledge(channel)]
    assert client.error_of(client.subscribe(channel, '{"user_id":"8"}'))[0] is None


def test_presence_of_a_signed_in_user_still_needs_a_signature(client, sign):
    client.sign_in(USER_7)
    assert client.frames(client.send("pusher:subscribe", {"channel": "presence-x"}))[0]["event"] == "auth_required"
    auth = f"{KEY}:{sign(f'{SOCKET_ID}:presence-y')}"
    effects = client.send("pusher:subscribe", {"channel": "presence-x", "auth": auth})
    assert client.refusal_of(effects, "presence-x")[:2] == ("AuthError", 401)


def test_channel_data_wins_over_the_signed_in_user(client):
    client.sign_in(USER_7)
    assert client.subscribe("presence-x", '{"user_id":"8"}') == [Join("presence-x", Member("8", b""))]


def test_info_too_large_for_presence_signs_in_and_joins_no_presence_channel(client):
    assert len(client.sign_in(json.dumps({"id": "7", "user_info": "x" * 1_025}))) == 2
    kind, status, text = client.refusal_of(client.subscribe("presence-x"), "presence-x")
    assert (kind, status) == ("InvalidMember", 400)
    assert "user_info has 1027 bytes" in text
    assert client.subscribe("#server-to-user-7") == [Join("#server-to-user-7", None)]


@pytest.mark.parametrize(
    ("channel", "channel_data"),
    [("private-x", None), ("private-encrypted-cache-x", None), ("presence-x", '{"user_id":"7"}')],
)
def test_a_connection_is_authorised_by_a_signed_channel_and_stays_so(client, channel, channel_data):
    client.join("public")
    client.join("cache-x")
    client.subscribe(channel, channel_data)
    assert not client.session.authorised
    client.session.refused(channel, "members", client.now)
    assert not client.session.authorised
    client.join(channel, channel_data)
    assert client.session.authorised
    client.unsubscribe(channel)
    assert client.session.authorised
    assert client.session.user_id is None


def test_signing_in_after_a_channel_and_a_channel_after_signing_in_keep_the_user(client):
    client.join("private-x")
    client.sign_in(USER_7)
    client.join("private-y")
    assert (client.session.user_id, client.session.authorised) == ("7", True)


def test_sign_ins_need_an_enabled_key(make_client, app, changed, sign):
    """Key rotation: a new key is added, the old one is disabled; signed-in connections stay signed in."""
    text = f"{SOCKET_ID}::user::{USER_7}"
    client = make_client(changed(app, keys=(*app.keys, Key(key="new", secret="s2"))))
    assert type(client.sign_in(USER_7)[1]) is SignedIn
    assert type(client.sign_in(USER_7, f"new:{sign(text, 's2')}")[1]) is SignedIn
    old_off = changed(app.keys[0], enabled=False)
    client.current_app.record = changed(app, keys=(old_off, Key(key="new", secret="s2")))
    code, fault = client.error_of(client.sign_in(USER_7))
    assert code == 4009
    assert fault == f"Invalid key in signin auth data: '{KEY}'; the app has the keys 'new'"
    assert client.session.user_id == "7"
    assert type(client.sign_in(USER_7, f"new:{sign(text, 's2')}")[1]) is SignedIn


# -- client events -------------------------------------------------------------------------------------------


def test_a_client_event_is_published_with_the_signed_user(client):
    client.join("presence-x", '{"user_id":7}')
    effects = client.send("client-typing", {"at": 1}, channel="presence-x", user_id="8")
    assert effects == [Publish("presence-x", "client-typing", '{"at": 1}', "7")]


def test_client_events_on_private_channels_have_no_user_id(client):
    client.join("private-x", None)
    assert client.send("client-a", "text", channel="private-x", user_id="8") == [
        Publish("private-x", "client-a", "text", None)
    ]


@pytest.mark.parametrize(
    ("sent", "published"),
    [
        (b'"a string"', "a string"),
        (b'"{\\"n\\":1}"', '{"n":1}'),
        (
            b'{ "n" : 1.50 , "big":123456789012345678901234567890}',
            '{ "n" : 1.50 , "big":123456789012345678901234567890}',
        ),
        (b"[1,2]", "[1,2]"),
        (b"1e400", "1e400"),
        (b"null", "null"),
        (b'""', ""),
        (b'"\\u0000\\u00e9"', "\x00é"),
        (b'{"a":"\\u00e9"}', '{"a":"\\u00e9"}'),
    ],
)
def test_data_becomes_a_string_in_the_senders_own_spelling(client, sent, published):
    client.join("private-x")
    message = b'{"event":"client-a","channel":"private-x","data":' + sent + b"}"
    (publish,) = client.session.receive(message, client.now)
    assert publish.data == published


def test_missing_data_is_an_empty_object(client):
    client.join("private-x")
    assert client.send("client-a", channel="private-x")[0].data == "{}"


def test_the_eleventh_in_a_second_is_refused_and_the_socket_stays(client):
    client.join("private-x")
    sent = [client.send("client-a", {}, channel="private-x") for _ in range(11)]
    assert [type(effects[0]) for effects in sent] == [Publish] * 10 + [Send]
    code, text = client.error_of(sent[10])
    assert code == 4301
    assert "10 client events per second" in text
    client.now += 0.1
    assert type(client.send("client-a", {}, channel="private-x")[0]) is Publish


def test_the_rate_of_client_events_is_a_setting(make_client):
    client = make_client(limits=Limits(client_events_per_s=2))
    client.join("private-x")
    assert [bool(client.send("client-a", {}, channel="private-x")) for _ in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    unlimited = make_client(limits=Limits(client_events_per_s=0))
    unlimited.join("private-x")
    assert all(type(unlimited.send("client-a", {}, channel="private-x")[0]) is Publish for _ in range(500))


def test_every_refusal_is_4301_with_its_own_text(make_client, app, changed):
    client = make_client()
    client.join("public")
    client.join("private-x")
    client.subscribe("private-pending")
    texts = set()
    for event, more in (
        ("client-a", {"channel": "public"}),
        ("client-a", {"channel": "my-private-x"}),
        ("client-a", {"channel": "private-other"}),
        ("client-a", {"channel": "private-pending"}),
        ("client-a", {"channel": "#server-to-user-7"}),
        ("client-a", {"channel": 7}),
        ("client-a", {"channel": None}),
        ("client-a", {}),
        ("client-" + "x" * 194, {"channel": "private-x"}),
    ):
        client.now += 10
        code, text = client.error_of(client.send(event, {}, **more))
        assert code == 4301
        texts.add(text)
    client.now += 10
    code, text = client.error_of(client.send("client-a", "x" * 10_241, channel="private-x"))
    assert code == 4301
    assert "10241 bytes" in text
    silent = make_client(changed(app, client_events=False))
    silent.join("private-x")
    code, disabled = silent.error_of(silent.send("client-a", {}, channel="private-x"))
    assert code == 4301
    assert len(texts | {text, disabled}) == 7


@pytest.mark.parametrize("channel", ["private-cache-x", "private-encrypted-x", "private-encrypted-cache-x"])
def test_cache_and_encrypted_channels_take_client_events(client, channel):
    client.join(channel)
    assert client.send("client-a", "x", channel=channel) == [Publish(channel, "client-a", "x", None)]


def test_events_that_the_worker_rejected_are_answered_once_a_second(client):
    refusal = client.error_of(client.session.rejected("the daily limit of 200000 messages is reached", client.now))
    assert refusal == (4301, "Client event rejected: the daily limit of 200000 messages is reached")
    assert client.session.rejected("the same", client.now + 0.5) == []
    assert len(client.session.rejected("the same", client.now + 1)) == 1


def test_the_size_of_data_is_counted_in_bytes_of_what_is_delivered(client):
    client.join("private-x")
    for data in ("x" * 10_240, "é" * 5_120):
        assert type(client.send("client-a", data, channel="private-x")[0]) is Publish
    client.now += 10
    assert client.error_of(client.send("client-a", "é" * 5_120 + "x", channel="private-x"))[0] == 4301


def test_a_name_of_200_characters_is_published(client):
    client.join("private-x")
    assert type(client.send("client-" + "x" * 193, {}, channel="private-x")[0]) is Publish


# -- invalid messages ----------------------------------------------------------------------------------------

BAD_FRAMES = [
    b"",
    b"hello",
    b"{",
    b"null",
    b"7",
    b'"pusher:ping"',
    b"[]",
    b'["pusher:ping"]',
    b"{}",
    b'{"data":{}}',
    b'{"event":null}',
    b'{"event":7}',
    b'{"event":{}}',
    b'{"event":["pusher:ping"]}',
    b'{"event":"pusher:ping"} x',
    b'{"event":"pusher:ping",}',
    b'{"event":"pusher:ping","data":{"a":01}}',
    b'{"event":"pusher:ping","data":"\\ud800"}',
    b'{"event":"pusher:ping","x":"\\ud800abcdefgh"}',
    b'{"event":"\\ud800"}',
    b'{"event":"\xff"}',
    b'{"event":"pusher:ping","channel":' + b"9" * 10_000 + b"}",
    b'{"event":"x","data":' + b"[" * 60_000,
    b'{"event":"x","data":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    b'{"event":"x","y":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    b'{"event":' + b"[" * 60_000,
    b"[" * 65_000,
    b'{"event":"pusher:subscribe"}',
    b'{"event":"pusher:subscribe","data":{}}',
    b'{"event":"pusher:subscribe","data":null}',
    b'{"event":"pusher:subscribe","data":7}',
    b'{"event":"pusher:subscribe","data":[]}',
    b'{"event":"pusher:subscribe","data":""}',
    b'{"event":"pusher:subscribe","data":"x"}',
    b'{"event":"pusher:subscribe","data":"\\"{}\\""}',
    b'{"event":"pusher:subscribe","data":{"channel":7}}',
    b'{"event":"pusher:subscribe","data":{"channel":null}}',
    b'{"event":"pusher:subscribe","data":{"channel":"\xff"}}',
    b'{"event":"pusher:subscribe","data":{"channel":["a"]}}',
    b'{"event":"pusher:subscribe","data":{"channel":"a","auth":' + b"[" * 30_000 + b"]" * 30_000 + b"}}",
    b'{"event":"pusher:unsubscribe"}',
    b'{"event":"pusher:unsubscribe","data":{}}',
    b'{"event":"pusher:unsubscribe","data":{"channel":{}}}',
    b'{"event":"client-a","channel":"private-x","data":"\xff"}',
    b'{"event":"client-a","channel":"private-x","data":["\xff"]}',
    b'{"event":"client-a","channel":"private-x","data":{"a":\x01}}',
    b'\xef\xbb\xbf{"event":"pusher:ping"}',
    b'{"event":"pusher:sign_in","data":{}}',
    b'{"event":"pusher:signin_success","data":{}}',
    b'{"event":"pusher:error","data":{}}',
    b'{"event":"pusher:connection_established","data":"{}"}',
    b'{"event":"pusher_internal:subscription_succeeded","channel":"a","data":"{}"}',
    b'{"event":"pusher_internal:member_added","channel":"presence-x","data":"{}"}',
    b'{"event":"subscribe"}',
    b'{"event":""}',
    b'{"event":"Client-a","channel":"private-x"}',
    b'{"event":"client_a","channel":"private-x"}',
    b'{"event":"my-event","channel":"private-x","data":{}}',
    b'{"event":"\\u0000\\n\\"","channel":"private-x","data":{}}',
]


@pytest.mark.parametrize("message", BAD_FRAMES, ids=lambda message: ascii(message[:60]))
def test_invalid_messages_get_an_error_without_a_code_and_the_socket_stays(client, message):
    client.join("private-x")
    code, text = client.error_of(client.session.receive(message, client.now))
    assert code is None
    assert text.startswith(("Invalid message: ", "Invalid subscribe: ", "Unsupported event received on socket: "))
    assert list(client.session.channels) == ["private-x"]
    assert client.send("pusher:ping") == [SendUrgent(b'{"event":"pusher:pong","data":"{}"}')]


@pytest.mark.parametrize("rest", ["", "and more than the other half"], ids=["end", "middle"])
def test_a_cut_emoji_is_named(client, rest):
    """As JavaScript writes what `slice` has cut."""
    client.join("private-x")
    code, text = client.error_of(client.send("client-typing", {"t": f"hello \ud83d{rest}"}, channel="private-x"))
    assert (code, text) == (None, "Invalid message: a text has half of a surrogate pair, such as a cut emoji")


def test_a_binary_message_is_an_invalid_message(client):
    code, text = client.error_of(client.session.receive_binary(client.now))
    assert code is None
    assert "binary" in text


def test_a_long_event_name_is_cut_in_the_error(client):
    _, text = client.error_of(client.send("x" * 60_000))
    assert len(text) < 200


def test_errors_are_sent_once_a_second(client):
    client.join("public")
    sent = 0
    for tenth in range(50):
        client.now = 1000 + tenth / 10
        sent += len(client.send("nonsense"))
        sent += len(client.send("client-a", {}, channel="public"))
        sent += len(client.session.receive(b"{", client.now))
        sent += len(client.session.receive_binary(client.now))
    assert sent == 5


def test_a_hundred_bad_frames_in_ten_seconds_close_the_connection(client):
    effects = []
    for frame in range(100):
        client.now = 1000 + frame * 0.099
        effects.append(client.session.receive(b"{", client.now))
    assert effects[99] == [Close(4100, "Too many invalid messages")]
    assert not any(type(effect) is Close for before in effects[:99] for effect in before)
    assert client.session.receive(b"{", client.now + 100) == []


def test_a_hundred_bad_frames_in_a_minute_do_not_close_the_connection(client):
    for frame in range(500):
        effects = client.session.receive(b"{", 1000 + frame * 0.2)
        assert not any(type(effect) is Close for effect in effects)


def test_an_eager_page_stays_connected_and_a_flood_is_closed(client):
    """60 a second may be a mouse that moves; thousands are an attack."""
    client.join("private-x")
    for _ in range(60 * 30):
        effects = client.send("client-mouse", {}, channel="private-x")
        assert not any(type(effect) is Close for effect in effects)
        client.now += 1 / 60
    closed = [client.send("client-mouse", {}, channel="private-x") for _ in range(1_100)]
    assert [Close(4100, "Too many invalid messages")] in closed


def test_no_effects_follow_a_close_for_faults(client):
    while client.session.receive(b"{", client.now) != [Close(4100, "Too many invalid messages")]:
        pass
    assert client.session.receive(b"{", client.now + 1_000) == []
    assert client.session.receive_binary(client.now + 1_000) == []


# -- anything at all -----------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
CHANNELS = [
    "public",
    "private-x",
    "presence-x",
    "presence-cache-y",
    "private-cache-y",
    "#server-to-user-7",
    "a b",
]
EVENTS = [
    "pusher:subscribe",
    "pusher:unsubscribe",
    "pusher:ping",
    "pusher:pong",
    "client-a",
    "pusher:signin",
    "pusher:history",
]
USER_DATA = ['{"id":"7"}', '{"id":"8","user_info":{"a":1},"watchlist":["7"]}', '{"id":7}', ""]
CHANNEL_DATA = ['{"user_id":"7"}', '{"user_id":8,"user_info":{"a":1}}', "{}", None]


@st.composite
def subscribes(draw):
    """Marks stand for signatures, which depend on the socket: True a good one, False a bad one."""
    channel = draw(st.sampled_from(CHANNELS))
    return (
        "subscribe",
        channel,
        draw(st.sampled_from(CHANNEL_DATA)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "event": st.sampled_from(EVENTS) | JSON,
        "data": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "channel": st.sampled_from(CHANNELS) | JSON,
                "auth": st.sampled_from(["", f"{KEY}:{'0' * 64}"]) | JSON,
                "channel_data": st.sampled_from(CHANNEL_DATA) | JSON,
                "user_data": st.sampled_from(USER_DATA) | JSON,
                "rewind": st.fixed_dictionaries({}, optional={"count": JSON, "seconds": JSON}) | JSON,
                "since": st.fixed_dictionaries({"epoch": JSON, "offset": JSON}) | JSON,
                "limit": JSON,
                "before": JSON,
            },
        ),
        "channel": st.sampled_from(CHANNELS) | JSON,
        "user_id": JSON,
    },
)
STEPS = st.one_of(
    st.tuples(st.just("value"), JSON),
    st.tuples(st.just("value"), MESSAGES),
    st.tuples(st.just("value"), MESSAGES),
    st.tuples(st.just("bytes"), st.binary(max_size=60)),
    st.tuples(st.just("event"), st.sampled_from(["client-a", "client-b"]), st.sampled_from(CHANNELS), JSON),
    st.tuples(st.just("unsubscribe"), st.sampled_from(CHANNELS)),
    st.tuples(st.just("joined"), st.sampled_from(CHANNELS)),
    st.tuples(st.just("refused"), st.sampled_from(CHANNELS), st.sampled_from(["members", "unavailable"])),
    st.tuples(st.just("wait"), st.floats(0, 3)),
    st.tuples(st.just("binary")),
    st.tuples(st.just("sign in"), st.sampled_from(USER_DATA), st.booleans()),
    subscribes(),
)


class Cluster:
    """What the worker knows of one session: it believes the effects, and checks that they make sense."""

    def __init__(self, client: Client, limits: Limits) -> None:
        self.client = client
        self.limits = limits
        self.pending: dict[str, str | None] = {}
        self.attached: dict[str, str | None] = {}
        self.user: str | None = None
        self.authorised = False
        self.error_times: list[float] = []
        self.closed = False

    def take(self, effects: list[Any], unlimited: bool = False) -> None:
        assert type(effects) is list
        for effect in effects:
            match effect:
                case Send(payload):
                    (frame,) = self.client.frames([effect])
                    assert type(payload) is bytes
                    if frame["event"] == "pusher:error" and len(effects) == 1 and not unlimited:
                        self.error_times.append(self.client.now)
                case SendUrgent(payload):
                    assert payload == b'{"event":"pusher:pong","data":"{}"}'
                case Join(channel, member):
                    assert channel not in self.pending | self.attached
                    assert valid_name(channel) or channel == f"#server-to-user-{self.user}"
                    assert (member is not None) == (kind_of(channel) is Kind.PRESENCE)
                    self.pending[channel] = member and member.user_id
                case AskHistory(channel, limit):
                    assert channel in self.attached
                    assert 1 <= limit <= 1000
                case Leave(channel, user_id):
                    held = self.pending if channel in self.pending else self.attached
                    assert held.pop(channel) == user_id
                case Acknowledge(channel):
                    assert channel in self.attached
                case Publish(channel, event, data, user_id):
                    assert self.attached[channel] == user_id
                    assert kind_of(channel) in (Kind.PRIVATE, Kind.PRESENCE)
                    assert event.startswith("client-")
                    data.encode()
                case SignedIn(user_id, watchlist):
                    assert self.user in (None, user_id)
                    assert len(watchlist) <= 100
                    self.user = user_id
                    self.authorised = True
                case Close(code, message):
                    assert len(effects) == 1
                    assert code == 4100 or (code == 4009 and self.client.session.app.user_authentication_timeout_s)
                    assert message
                    assert not self.closed
                    self.closed = True
                case _:
                    raise AssertionError(f"{effect!r} is no effect")
        held = self.pending | self.attached
        assert {name: subscription.user_id for name, subscription in self.client.session.channels.items()} == held
        assert {name for name, one in self.client.session.channels.items() if one.pending} == set(self.pending)
        assert len(held) <= self.limits.max_channels
        assert (self.client.session.user_id, self.client.session.authorised) == (self.user, self.authorised)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, max_size=30), strict=st.booleans())
def test_any_sequence_of_messages_has_consistent_effects(steps, strict, app, read_frame, sign, changed):
    limits = Limits(max_channels=3)
    client = Client(changed(app, user_authentication_timeout_s=30.0 * strict), read_frame, sign, limits)
    cluster = Cluster(client, limits)
    for step in steps:
        match step:
            case ("value", value):
                for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
                    cluster.take(client.session.receive(text.encode("utf-8", "surrogatepass"), client.now), True)
            case ("bytes", raw):
                cluster.take(client.session.receive(raw, client.now))
            case ("binary",):
                cluster.take(client.session.receive_binary(client.now))
            case ("event", event, channel, data):
                cluster.take(client.send(event, data, channel=channel))
            case ("unsubscribe", channel):
                cluster.take(client.unsubscribe(channel))
            case ("subscribe", channel, channel_data, good, as_string):
                auth = client.auth(channel, channel_data) if good else f"{KEY}:{'0' * 64}"
                data = {"channel": channel, "auth": auth, "channel_data": channel_data}
                cluster.take(client.send("pusher:subscribe", json.dumps(data) if as_string else data), True)
            case ("sign in", user_data, good):
                cluster.take(client.sign_in(user_data, None if good else f"{KEY}:{'0' * 64}"), True)
            case ("joined", channel):
                if channel in cluster.pending:
                    cluster.attached[channel] = cluster.pending.pop(channel)
                    cluster.authorised |= needs_auth(channel)
                cluster.take(client.session.joined(channel))
            case ("refused", channel, reason):
                cluster.pending.pop(channel, None)
                cluster.take(client.session.refused(channel, reason, client.now), True)
            case ("wait", seconds):
                client.now += seconds
    times = cluster.error_times
    assert all(later - earlier > 0.99 for earlier, later in pairwise(times))


@given(message=st.binary() | st.text(st.characters()).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes_of_any_kind_are_answered(message, app, read_frame, sign):
    client = Client(app, read_frame, sign)
    Cluster(client, Limits()).take(client.session.receive(message, 1.0))


# -- what it costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-channel", "private-channel"])
def test_an_idle_session_with_one_channel_takes_350_bytes(name, app, sign):
    """As in a worker, where all sessions share the registry's string of the channel's name."""
    current_app = CurrentApp(app)
    sessions: list[Session] = [Session((1, 1), current_app)] * 2_000
    sids = [(1 << 39 | number, 1 << 39 | number) for number in range(len(sessions))]
    data = [{"channel": name, "auth": f"{KEY}:{sign(f'{sid[0]}.{sid[1]}:{name}')}"} for sid in sids]
    messages = [json.dumps({"event": "pusher:subscribe", "data": fields}).encode() for fields in data]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, (sid, message) in enumerate(zip(sids, messages, strict=True)):
            session = Session((sid[0], sid[1]), current_app)
            assert type(session.receive(message, 0.0)[0]) is Join
            session.joined(name)
            sessions[number] = session
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(sessions) <= 350
    assert len({id(next(iter(session.channels))) for session in sessions}) == 1
    assert {session.authorised for session in sessions} == {needs_auth(name)}
