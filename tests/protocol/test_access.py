"""Sessions with grants, and subscriptions that are taken back (protocol/README.md "Grants")."""

import json
import time

import pytest

from helpers.granting import grant_key, jwt, mint
from redpoll.protocol import access
from redpoll.protocol.apps import CurrentApp
from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.effects import Acknowledge, Close, Join, Leave, Publish, Send, SignedIn
from redpoll.protocol.errors import ClientError
from redpoll.protocol.grants import AppGrants, of_channel, of_jti, of_user
from redpoll.protocol.limits import Limits
from redpoll.protocol.presence import Member
from redpoll.protocol.session import Session

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
SOCKET_ID = "1.2"
# A second in which all of a test happens: a later grant isn't covered by a revocation.
NOW_S = time.time()


class Client:
    def __init__(self, app, limits=None) -> None:
        self.now_s = NOW_S
        self.grants = AppGrants(lambda: self.now_s)
        self.current = CurrentApp(app, self.grants)
        self.session = Session((1, 2), self.current, limits or Limits())

    def send(self, event: str, data: object, **more: object) -> list:
        return self.session.receive(json.dumps({"event": event, "data": data, **more}).encode(), 1.0)

    def subscribe(self, channel: str, auth: str, channel_data: str | None = None) -> list:
        data = {"channel": channel, "auth": auth}
        if channel_data is not None:
            data["channel_data"] = channel_data
        return self.send("pusher:subscribe", data)

    def join(self, channel: str, auth: str, channel_data: str | None = None) -> Join:
        (join,) = self.subscribe(channel, auth, channel_data)
        assert type(join) is Join, join
        assert self.session.joined(channel) == []
        return join

    def refused(self, channel: str, auth: str, channel_data: str | None = None) -> str:
        return text_of(self.subscribe(channel, auth, channel_data), channel)


def text_of(effects: list, channel: str) -> str:
    """The text of a refusal with AuthError and 401, in both frames."""
    on_channel, error = (json.loads(effect.payload) for effect in effects if type(effect) is Send)
    data = json.loads(on_channel["data"])
    assert (on_channel["event"], on_channel["channel"]) == ("pusher:subscription_error", channel)
    assert (data["type"], data["status"]) == ("AuthError", 401)
    assert error["data"] == {"code": None, "message": data["error"]}
    return data["error"]


@pytest.fixture
def client(app, changed) -> Client:
    return Client(changed(app, grants=True))


def grant(*channels: str, **claims: object) -> str:
    return mint(KEY, SECRET, *channels, now_s=NOW_S, **claims)


def test_one_grant_opens_many_channels_and_is_checked_once(client, monkeypatch):
    checks = []
    check = access.check_grant
    monkeypatch.setattr(access, "check_grant", lambda *args: checks.append(args) or check(*args))
    auth = grant("private-org-3-*", sub="7")
    for number in range(40):
        assert client.join(f"private-org-3-{number}", auth).member is None
    assert len(checks) == 1
    assert len({id(one) for one in client.session.channels.values()}) == 1
    assert client.session.authorised
    # A second grant, and after four others the first one again.
    for number in range(5):
        client.join(f"private-{number}", grant(f"private-{number}"))
    client.join("private-org-3-x", auth)
    assert len(checks) == 7


def test_a_channel_that_it_does_not_name(client):
    assert client.refused("private-b", grant("private-a")) == (
        "Invalid grant: no pattern of its channels matches private-b"
    )
    assert client.session.channels == {}


def test_an_app_that_does_not_accept_grants(app):
    assert "setting `grants`" in Client(app).refused("private-a", grant("private-a"))


def test_a_remembered_grant_expires_and_its_key_may_be_disabled(client, app, changed):
    auth = grant("private-*", lasts_s=60)
    client.join("private-a", auth)
    client.now_s += 71
    assert "expired" in client.refused("private-b", auth)
    # What it opened stays, as with signatures.
    assert list(client.session.channels) == ["private-a"]
    client.now_s -= 71
    client.join("private-b", auth)
    client.current.record = changed(app, grants=True, keys=(changed(app.keys[0], enabled=False),))
    assert "Invalid key in grant" in client.refused("private-c", auth)
    client.current.record = changed(app, grants=False)
    assert "setting `grants`" in client.refused("private-c", auth)


def test_no_grant_opens_the_console(client):
    assert client.refused(CONSOLE, grant("*")) == "this channel is reserved for the dashboard"


def test_the_member_is_the_grants_user_with_its_info(client):
    auth = grant("presence-*", sub="7", info={"name": "Ann"})
    assert client.join("presence-a", auth).member == Member("7", b'{"name":"Ann"}')
    forged = '{"user_id":7,"user_info":{"name":"root"}}'
    assert client.join("presence-b", auth, forged).member == Member("7", b'{"name":"Ann"}')
    assert client.session.channels["presence-b"].user_id == "7"


def test_another_user_is_no_member(client):
    auth = grant("presence-*", sub="7")
    assert "channel_data names another" in client.refused("presence-a", auth, '{"user_id":"8"}')
    assert "channel_data" in client.refused("presence-a", auth, "{}")
    assert "needs a sub" in client.refused("presence-a", grant("presence-*"))
    assert "the app allows" in client.refused("presence-a", grant("presence-*", sub="7", info="x" * 2000))


def test_a_signed_in_connection_uses_grants_of_its_user_only(client):
    client.send("pusher:signin", {"auth": grant(sub="7"), "user_data": '{"id":"7"}'})
    assert "is signed in as '7'" in client.refused("private-a", grant("private-a", sub="8"))
    assert "is signed in as '7'" in client.refused("private-a", grant("private-a"))
    client.join("private-a", grant("private-a", sub="7"))


def test_client_events_need_a_right(client):
    client.join("private-a", grant("private-a"))
    client.join("private-b", grant("private-b", may=["subscribe", "client_events"]))
    (error,) = client.send("client-x", {}, channel="private-a")
    assert json.loads(error.payload)["data"] == {
        "code": 4301,
        "message": "Client event rejected: the grant's may for channel private-a lacks 'client_events'",
    }
    (published,) = client.send("client-x", {}, channel="private-b")
    assert type(published) is Publish


def test_a_repeated_subscribe_changes_nothing(client):
    client.join("private-a", grant("private-a"))
    (again,) = client.subscribe("private-a", grant("private-*"))
    assert type(again) is Acknowledge


def test_a_grant_signs_its_user_in_and_nobody_else(client):
    auth = grant(sub="7", info={"name": "Ann"})
    (error,) = client.send("pusher:signin", {"auth": auth, "user_data": '{"id":"8"}'})
    assert json.loads(error.payload)["data"]["code"] == 4009
    (error,) = client.send("pusher:signin", {"auth": auth, "user_data": '{"id":"7","watchlist":["8"]}'})
    assert "can't sign a watchlist" in json.loads(error.payload)["data"]["message"]
    sent, signed_in = client.send(
        "pusher:signin", {"auth": auth, "user_data": '{"id":"7","user_info":{"name":"root"}}'}
    )
    frame = json.loads(sent.payload)
    assert frame["event"] == "pusher:signin_success"
    user_data = json.loads(json.loads(frame["data"])["user_data"])
    assert user_data == {"id": "7", "user_info": {"name": "Ann"}}
    assert signed_in == SignedIn("7", ())
    assert client.session.user_id == "7"
    (error,) = client.send("pusher:signin", {"auth": grant(sub="9"), "user_data": '{"id":"9"}'})
    assert "Already signed in" in json.loads(error.payload)["data"]["message"]


def test_what_a_revoked_grant_opened_is_found_and_ended(client, sign):
    first, second = grant("private-*", sub="7", jti="one"), grant("presence-*", sub="7", jti="two")
    client.join("private-a", first)
    client.join("presence-a", second)
    client.join("private-signed", f"{KEY}:{sign(f'{SOCKET_ID}:private-signed')}")
    assert client.session.revoked_channels() == []
    client.grants.revoke(of_jti("one"), int(client.now_s))
    assert client.session.revoked_channels() == ["private-a"]
    effects = client.session.remove("private-a")
    assert effects[0] == Leave("private-a", None)
    assert text_of(effects, "private-a") == "access was revoked"
    assert client.refused("private-a", first) == "access was revoked"
    assert client.refused("private-b", first) == "access was revoked"
    client.grants.revoke(of_user("7"), int(client.now_s))
    assert client.session.revoked_channels() == ["presence-a"]
    assert client.session.remove("presence-a")[0] == Leave("presence-a", "7")
    assert list(client.session.channels) == ["private-signed"]
    # A new grant opens it again, from the next second on.
    client.join("private-a", grant("private-a", sub="7", iat=int(client.now_s) + 1))
    assert client.session.remove("private-a", None) != []
    assert client.session.remove("private-a", None) == []


def test_a_revoked_sign_in_is_found(client, sign):
    auth = grant(sub="7", jti="one")
    client.send("pusher:signin", {"auth": auth, "user_data": '{"id":"7"}'})
    assert not client.session.sign_in_revoked
    client.grants.revoke(of_jti("one"), int(client.now_s))
    assert client.session.sign_in_revoked
    # A signature of the same user takes its place.
    user_data = '{"id":"7"}'
    signature = f"{KEY}:{sign(f'{SOCKET_ID}::user::{user_data}')}"
    client.send("pusher:signin", {"auth": signature, "user_data": user_data})
    assert not client.session.sign_in_revoked
    (error,) = client.send("pusher:signin", {"auth": auth, "user_data": user_data})
    assert json.loads(error.payload)["data"]["message"] == "access was revoked"


def test_after_a_removal_only_a_later_grant_opens_the_channel(client, sign):
    signature = f"{KEY}:{sign(f'{SOCKET_ID}:private-a')}"
    other = '{"any":"data"}'
    client.join("private-a", signature)
    at_s = int(client.now_s)
    effects = client.session.remove("private-a", at_s)
    assert text_of(effects, "private-a") == "access was revoked"
    # Nobody knows when a signature was made, so none counts.
    assert client.refused("private-a", signature) == "access was revoked"
    assert client.refused("private-a", f"{KEY}:{sign(f'{SOCKET_ID}:private-a:{other}')}", other) == "access was revoked"
    assert client.refused("private-a", grant("private-a")) == "access was revoked"
    assert client.refused("private-a", grant("private-a", iat=None)) == "access was revoked"
    client.join("private-b", f"{KEY}:{sign(f'{SOCKET_ID}:private-b')}")
    client.join("private-a", grant("private-a", iat=at_s + 1))


def test_a_pending_subscription_is_removed_too(client):
    auth = grant("private-a")
    (join,) = client.subscribe("private-a", auth)
    assert type(join) is Join
    assert type(client.session.remove("private-a", 5)[0]) is Leave
    assert client.session.joined("private-a") == []
    assert client.session.channels == {}


def test_the_list_of_removals_is_bounded(app):
    client = Client(app, Limits(max_channels=3))
    for number in range(3):
        assert client.session.remove(f"private-{number}", 1) == []
    (close,) = client.session.remove("private-3", 1)
    assert type(close) is Close
    # The client may come back: nothing that was signed for this connection counts then.
    assert close.code == 4100


# -- readers over HTTP -----------------------------------------------------------------------------------------------


def read(client, channel: str, auth: str):
    return access.reading_grant(client.current.record, client.grants, channel, auth)


def test_a_grant_opens_to_readers_what_it_opens_to_subscribers(client):
    auth = grant("private-*", "presence-a", "news", "private-encrypted-*", sub="7")
    for channel in ("private-a", "presence-a", "news", "private-encrypted-a"):
        assert read(client, channel, auth).user_id == "7"
    # Nobody is named, and a private channel has no members.
    assert read(client, "private-a", grant("private-*")).user_id is None


@pytest.mark.parametrize(
    ("channel", "claims", "text"),
    [
        ("news", {}, "no pattern"),
        ("presence-a", {}, "needs a sub"),
        ("presence-a", {"sub": "7", "info": "x" * 2000}, "info"),
        ("private-encrypted-a", {}, "is encrypted"),
        ("private-a", {"may": ["client_events"]}, "lacks 'subscribe'"),
        ("private-a", {"exp": 1}, "exp is before"),
        ("private-a", {"exp": None}, "exp"),
        ("private-a", {"iat": 1000, "exp": 2000}, "expired"),
        ("private-a", {"aud": "9"}, "aud"),
        ("private-a", {"jti": "x" * 129}, "jti must have"),
    ],
)
def test_a_reader_is_refused_what_a_subscriber_is_refused(client, channel, claims, text):
    with pytest.raises(ClientError, match=text):
        read(client, channel, grant("private-*", "presence-*", **claims))


def test_a_reader_needs_a_signature_of_the_app(client, changed):
    auth = grant("private-*")
    for wrong, text in (
        (mint(KEY, SECRET + "x", "private-*", now_s=NOW_S), "signature is wrong"),
        (auth + "x", "signature is wrong"),
        (f"{KEY}:{jwt(grant_key(SECRET), {'exp': client.now_s + 60}, {'alg': 'none'})}", "alg is 'none'"),
        (f"{auth}{'x' * 5000}", "at most 4096"),
    ):
        with pytest.raises(ClientError, match=text):
            read(client, "private-a", wrong)
    # The same for an app that doesn't exist and a key that it hasn't.
    unknown = mint("nokey", SECRET, "private-*", now_s=NOW_S)
    texts = set()
    for app in (None, client.current.record, changed(client.current.record, grants=False)):
        with pytest.raises(ClientError) as refusal:
            access.reading_grant(app, client.grants, "private-a", unknown)
        texts.add(refusal.value.message)
    assert texts == {"Invalid key in grant: 'nokey' is not an enabled key of this app"}
    with pytest.raises(ClientError, match="grants are off"):
        access.reading_grant(changed(client.current.record, grants=False), client.grants, "private-a", auth)


@pytest.mark.parametrize("subject", [of_jti("one"), of_user("7"), of_channel("private-a", "7")])
def test_a_revoked_grant_opens_nothing_to_readers(client, subject):
    auth = grant("private-*", sub="7", jti="one")
    assert read(client, "private-a", auth).id == "one"
    client.grants.revoke(subject, int(client.now_s))
    with pytest.raises(ClientError, match="access was revoked"):
        read(client, "private-a", auth)
