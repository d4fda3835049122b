"""Rules by name, and what an auth endpoint answers, without a framework."""

import asyncio
import base64
import json

import pytest

from redpoll_client import Publisher
from redpoll_client.rules import (
    BadAuthRequest,
    Rules,
    authorize,
    authorize_sync,
    grant,
    grant_sync,
    parse_auth,
    sign_in,
    sign_in_sync,
)

FORBIDDEN = {"error": "forbidden"}


@pytest.fixture
def rules():
    rules = Rules()

    @rules.channel("private-order-{order_id:int}")
    def order(user, order_id):
        if order_id == 13:
            raise LookupError("no order 13")
        return {7: True, 8: "yes", 9: None}.get(order_id, False)

    @rules.channel("presence-room-{room}-{door}")
    async def room(user, room, door):
        return {"name": f"{user} at {room} {door}"}

    return rules


@pytest.fixture
def signer():
    return Publisher("1", "k", "s", host="127.0.0.1", port=1)


@pytest.fixture(params=["blocking", "asyncio"])
def ask(request, rules, signer):
    """The answer for channels, as a blocking framework and as one on asyncio gives it."""

    def ask(*channels, several=False, user="anna"):
        body = json.dumps({"socket_id": "1.2", "channel_name": list(channels) if several else channels[0]}).encode()
        arguments = (rules, signer, parse_auth("application/json; charset=utf-8", body), user, user)
        if request.param == "blocking":
            return authorize_sync(arguments, asyncio.run)
        return asyncio.run(authorize(arguments, asyncio.to_thread))

    return ask


def test_the_rule_decides(ask, signer):
    assert ask("private-order-7") == (200, signer.authenticate("private-order-7", "1.2"))
    member = {"user_id": "anna", "user_info": {"name": "anna at a 1"}}
    assert ask("presence-room-a-1") == (200, signer.authenticate("presence-room-a-1", "1.2", member))


@pytest.mark.parametrize(
    "channel",
    [
        "private-order-6",  # False
        "private-order-8",  # neither True nor False
        "private-order-9",  # None
        "private-order-13",  # raises
        "private-order-07",
        "private-order-7-8",
        "private-order-7\n",
        "private-order-٧",
        "private-order-",
        "private-encrypted-order-7",
        "private-other",
        "presence-room-a-b-c",
        "news",
        "#server-to-user-anna",
    ],
)
def test_everything_else_is_forbidden(ask, channel):
    assert ask(channel) == (403, FORBIDDEN)


def test_nobody_gets_nothing(ask):
    assert ask("private-order-7", user=None) == (403, FORBIDDEN)


def test_several_channels_in_one_request(ask, signer):
    status, answer = ask("private-order-7", "private-order-13", "private-order-7", several=True)
    assert status == 200
    assert answer == {
        "private-order-7": {"status": 200, "data": signer.authenticate("private-order-7", "1.2")},
        "private-order-13": {"status": 403, "data": FORBIDDEN},
    }


def test_sign_in(rules, signer):
    asked = parse_auth("application/x-www-form-urlencoded", b"socket_id=1.2")
    assert sign_in_sync((rules, signer, asked, None, None), asyncio.run) == (403, FORBIDDEN)

    @rules.user
    async def user(user):
        return {"id": "somebody else", "watchlist": ["bert"]}

    signed = (200, signer.authenticate_user("1.2", {"id": "anna", "watchlist": ["bert"]}))
    assert sign_in_sync((rules, signer, asked, "anna", "anna"), asyncio.run) == signed
    assert asyncio.run(sign_in((rules, signer, asked, "anna", "anna"), asyncio.to_thread)) == signed


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("private-order-{order_id:int}", "has a function already"),
        ("private-order-{number}", "has a function already"),
        ("private-{any:any}", "has a function already"),
        ("private-order-7", "has a function already"),
        ("presence-room-{a:any}", "has a function already"),
        ("news-{a}", "anybody may join"),
        ("private-{a:float}", "a kind of"),
        ("private-{a}-{a}", "a name of its own"),
        ("private-{a} b", "channel name"),
        ("private-{b:int}-x", "doesn't take these parts"),
    ],
)
def test_a_wrong_rule_is_refused_at_import(rules, pattern, text):
    with pytest.raises(ValueError, match=text):

        @rules.channel(pattern)
        def rule(user, a="", any="", number="", order_id=""):
            return True


def test_rules_beside_each_other(rules):
    for pattern in (
        "private-orders-{a}",
        "private-order-{a:int}-lines",
        "presence-room-{a}",
        "private-encrypted-{a:uuid}",
    ):
        rules.channel(pattern)(lambda user, a: True)
    uuid = "12345678-1234-1234-1234-123456789abc"
    assert str(rules.find(f"private-encrypted-{uuid}")[1]["a"]) == uuid
    assert rules.find(f"private-encrypted-{uuid.upper()}") is None


def test_an_encrypted_channel_needs_a_rule_that_says_so():
    rules = Rules()
    for pattern in ("private-{a}-{b}", "private-encrypted-{a}"):
        rules.channel(pattern)(lambda user, a, b=None: True)
    assert rules.find("private-encryptex-a")[1] == {"a": "encryptex", "b": "a"}
    assert rules.find("private-encrypted-a")[1] == {"a": "a"}
    assert rules.find("private-encrypted-a-b") is None
    with pytest.raises(ValueError, match="has a function already"):
        rules.channel("private-encrypted-{b:any}")(lambda user, b: True)
    others = Rules()
    others.channel("private-encrypted{a:any}")(lambda user, a: True)
    assert others.find("private-encrypted-a") is None


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"[]", 400),
        ("application/json", b"{", 400),
        ("application/json", b'{"socket_id":"1.2","channel_name":[1]}', 400),
        ("application/json", b'{"socket_id":"1.2:private-a","channel_name":"private-b"}', 400),
        ("application/json", json.dumps({"socket_id": "1.2", "channel_name": ["a"] * 101}).encode(), 400),
        ("", b"\xff", 400),
        ("", b"&".join(b"a%d=1" % number for number in range(300)), 400),
        ("", b"x" * 65537, 413),
    ],
)
def test_bad_requests(kind, body, status):
    with pytest.raises(BadAuthRequest) as caught:
        parse_auth(kind, body)
    assert caught.value.status == status


def test_forms_of_pushers_libraries():
    assert parse_auth("", b"socket_id=1.2&channel_name=private-a").channels == ("private-a",)
    several = parse_auth("", b"socket_id=1.2&channel_name%5B0%5D=private-a&channel_name%5B1%5D=private-b")
    assert (several.channels, several.several) == (("private-a", "private-b"), True)


def test_a_name_longer_than_a_channels_fits_no_rule():
    rules = Rules()
    rules.channel("private-{name:any}")(lambda user, name: True)
    assert rules.find("private-" + "a" * 192) is not None
    assert rules.find("private-" + "a" * 193) is None


@pytest.fixture(params=["blocking", "asyncio"])
def ask_grant(request):
    """The answer of a route for grants."""

    def ask(rules, signer, *channels, user="anna"):
        body = json.dumps({"channel_name": list(channels)}).encode()
        arguments = (rules, signer, parse_auth("application/json", body), user, user)
        if request.param == "blocking":
            return grant_sync(arguments, asyncio.run)
        return asyncio.run(grant(arguments, asyncio.to_thread))

    return ask


def claims_of(answer):
    packed = answer["auth"].split(".")[1]
    return json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))


def test_a_grant_opens_what_the_rules_allow(ask_grant):
    rules = Rules(grant_s=600)
    rules.channel("private-{name}")(lambda user, name: name == user)
    rules.channel("private-encrypted-{name}")(lambda user, name: name == user)
    rules.channel("presence-{kind}-{name}")(lambda user, kind, name: {"kind": kind})
    master = bytes(range(32))
    signer = Publisher(
        "1", "k", "s", host="127.0.0.1", port=1, encryption_master_key_base64=base64.b64encode(master).decode()
    )
    asked = ["private-bert", "private-anna", "presence-a-1", "presence-b-1", "presence-a-2", "private-encrypted-anna"]
    status, answer = ask_grant(rules, signer, *asked)
    # A grant has one user_info, so the second presence channel's doesn't fit.
    assert (status, answer["channels"]) == (200, ["private-anna", "presence-a-1", "presence-a-2", asked[-1]])
    assert (answer["user_id"], answer["seconds"]) == ("anna", 600)
    shared = signer.authenticate("private-encrypted-anna", "1.2")["shared_secret"]
    assert answer["shared_secrets"] == {"private-encrypted-anna": shared}
    claims = claims_of(answer)
    assert (claims["sub"], claims["info"], claims["channels"]) == ("anna", {"kind": "a"}, answer["channels"])
    assert claims["exp"] - claims["iat"] == 600
    assert claims["may"] == ["subscribe", "client_events"]


def test_grants_that_nobody_gets(ask_grant, rules, signer):
    assert ask_grant(rules, signer, "private-order-7")[0] == 404
    rules.grant_s = 600
    assert ask_grant(rules, signer, "private-order-7")[0] == 200
    for channel in ("private-order-13", "private-order-8", "private-order-9", "private-other", "news"):
        assert ask_grant(rules, signer, channel) == (403, FORBIDDEN)
    assert ask_grant(rules, signer, "private-order-7", user=None) == (403, FORBIDDEN)
    assert ask_grant(rules, signer)[0] == 400
    rules.channel("private-{name:any}-long")(lambda user, name: True)
    assert ask_grant(rules, signer, *(f"private-{'x' * 100}{number}-long" for number in range(60)))[0] == 400
    for seconds in (0, 86_401):
        with pytest.raises(ValueError, match="grant_s"):
            Rules(grant_s=seconds)


def test_a_signature_needs_a_socket(rules, signer):
    asked = parse_auth("", b"channel_name=private-order-7")
    assert authorize_sync((rules, signer, asked, "anna", "anna"), asyncio.run)[0] == 400
    assert sign_in_sync((rules, signer, asked, "anna", "anna"), asyncio.run)[0] == 400
