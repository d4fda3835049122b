from urllib.parse import quote

import msgspec
import pytest

from redpoll.protocol.apps import App, Key
from redpoll.protocol.handshake import (
    Refusal,
    check,
    decrypts_all,
    host_of,
    origin_allowed,
    recovers,
    split_target,
)

APP = App(id="1", name="x", keys=(Key(key="aa", secret="01"), Key(key="off", secret="02", enabled=False)))
DISABLED = App(id="2", name="y", keys=(Key(key="bb", secret="01"),), enabled=False)
PICKY = App(id="3", name="z", keys=(Key(key="cc", secret="01"),), allowed_origins=("good.example", "*.wild.example"))
GUARDED = App(
    id="4",
    name="g",
    keys=(Key(key="dd", secret="01"), Key(key="old", secret="02", enabled=False)),
    tls_required=True,
)
BY_KEY = {"aa": APP, "off": APP, "bb": DISABLED, "cc": PICKY, "dd": GUARDED, "old": GUARDED}


def outcome(path, query=None, origin=None, secure=False):
    return check(path, query or {}, origin, BY_KEY.get, secure)


@pytest.mark.parametrize("path", ["/app/aa", "/app/aa/", "/ws/app/aa", "/a/b/app/aa", "/app/%61%61", "//app/aa"])
def test_any_prefix_leads_to_the_app(path):
    assert outcome(path) is APP


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/app/aa?b=%41&b=2&c#d?e=1", "/app/aa", {"b": "2", "c": ""}),
        ("//app/aa", "//app/aa", {}),
        ("http://h:1/app/aa?b=1", "/app/aa", {"b": "1"}),
        ("//[/app/aa", "//[/app/aa", {}),
        ("http://[x/app/aa", "/app/aa", {}),
        ("*", "/", {}),
        ("", "/", {}),
    ],
)
def test_a_target_is_split_whatever_its_form(target, path, query):
    assert split_target(target) == (path, query)


def test_no_more_than_a_hundred_parameters_are_decoded():
    """A stranger's 16 KiB of them took 45 ms of a worker's loop, before key and address were looked at."""
    query = "&".join(f"%41{number}=1" for number in range(4_000))
    assert list(split_target(f"/app/aa?{query}")[1]) == [f"A{number}" for number in range(100)]


@pytest.mark.parametrize(
    "path", ["/", "", "/app", "/app/", "/apps/aa", "/app/aa/more", "app/aa", "/xapp/aa", "/App/aa"]
)
def test_other_paths_are_not_found(path):
    assert outcome(path).code == 4005


@pytest.mark.parametrize("version", [None, "5", "6", "7"])
def test_protocols_5_to_7_are_accepted_and_7_is_the_default(version):
    assert outcome("/app/aa", {} if version is None else {"protocol": version, "client": "js"}) is APP


@pytest.mark.parametrize("version", ["", "x", "7.0", " 7", "7_0", "٧", "+7", "1e1", "9" * 5000])
def test_a_version_that_is_not_an_integer_is_malformed(version):
    assert outcome("/app/aa", {"protocol": version}).code == 4006


@pytest.mark.parametrize("version", ["4", "8", "0", "-7", "999999999"])
def test_other_versions_are_unsupported(version):
    assert outcome("/app/aa", {"protocol": version}).code == 4007


def test_checks_are_made_in_the_documented_order():
    """Path, key, app, version, origin: the first that fails decides (protocol/README.md "Connecting")."""
    bad = {"protocol": "x"}
    assert outcome("/nothing", bad, "null").code == 4005
    assert outcome("/app/zz", bad, "null").code == 4001
    assert outcome("/app/bb", bad, "null").code == 4003
    assert outcome("/app/cc", bad, "null").code == 4006
    assert outcome("/app/cc", {"protocol": "3"}, "null").code == 4007
    assert outcome("/app/cc", {"protocol": "7"}, "null").code == 4009
    assert outcome("/app/cc", {"protocol": "7"}, "https://good.example") is PICKY


def test_an_app_that_requires_tls_refuses_plain_connections_first():
    refusal = outcome("/app/dd", {"protocol": "x"})
    assert refusal.code == 4000
    assert "wss://" in refusal.message
    assert outcome("/app/old").code == 4001


def test_4000_is_never_sent_to_clients_with_tls():
    """pusher-js would reconnect by TLS at once, without end."""
    assert outcome("/app/dd", secure=True) is GUARDED
    assert outcome("/app/dd", {"protocol": "x"}, secure=True).code == 4006
    assert outcome("/app/aa", secure=True) is APP


def test_a_disabled_key_admits_no_new_connection():
    assert outcome("/app/off").code == 4001
    assert outcome("/app/aa") is APP


@pytest.mark.parametrize(
    "key",
    ["x" * 10_000, quote("é" * 500), quote("\U0001f600" * 500), "%ff%fe", "%00", "\udc80" * 99],
    ids=lambda key: ascii(key[:12]),
)
def test_every_refusal_fits_a_close_frame(key):
    refusal = outcome(f"/app/{key}")
    assert isinstance(refusal, Refusal)
    assert refusal.code == 4001
    assert len(refusal.message.encode()) <= 123
    assert len(outcome(f"/{key}").message.encode()) <= 123
    assert len(outcome("/app/cc", {}, key).message.encode()) <= 123


ALLOWED = ("good.example", "*.wild.example", "dev.example:8080", "localhost")


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "https://good.example",
        "http://good.example",
        "https://good.example:443",
        "http://good.example:80",
        "https://a.wild.example",
        "https://a.b.wild.example",
        "http://dev.example:8080",
        "capacitor://localhost",
        "https://good.example/",
        "http://localhost/",
    ],
)
def test_allowed_origins_and_clients_without_origin_may_connect(origin):
    assert origin_allowed(origin, ALLOWED)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "good.example",
        "https://",
        "https://good.example.evil",
        "https://evilgood.example",
        "https://evil.example/good.example",
        "https://good.example//",
        "https://good.example/x",
        "http://localhost//",
        "https:///",
        "https://good.example#",
        "https://GOOD.example",
        "HTTPS://good.example",
        "https://good.example:8443",
        "http://good.example:443",
        "https://good.example:",
        "https://good.example:x",
        "https://good.example:99999",
        "https://wild.example",
        "https://.wild.example",
        "https://evilwild.example",
        "https://a.wild.example:8443",
        "http://dev.example",
        "https://user@good.example",
        "https://evil.example@good.example",
        "https://good.example, https://evil.example",
        "https://[good.example",
        "https://good.example\x00",
    ],
)
def test_other_origins_may_not(origin):
    assert not origin_allowed(origin, ALLOWED)


def test_an_app_without_a_list_takes_every_origin():
    assert origin_allowed("null", ())


def test_the_dashboards_console_connects_by_its_own_key_and_from_anywhere():
    watched = msgspec.structs.replace(PICKY, console_key=Key(key="ee", secret="03"))
    assert check("/app/ee", {}, "https://bad.example", lambda key: watched, False) is watched
    assert check("/app/cc", {}, "https://bad.example", lambda key: watched, False).code == 4009
    assert check("/app/ee", {}, None, lambda key: PICKY, False).code == 4001


def test_clients_that_send_the_servers_own_address_as_origin_are_admitted():
    """React Native, libPusher and websocket-client do. `public_url` says which address that is."""
    own_host = host_of("https://ws.example.com")
    for origin in ("https://ws.example.com", "https://ws.example.com:443", "http://ws.example.com"):
        assert check("/app/cc", {}, origin, BY_KEY.get, True, own_host) is PICKY
        assert check("/app/cc", {}, origin, BY_KEY.get, True, host_of("")).code == 4009
    for origin in ("https://ws.example.com:8443", "https://example.com", "https://ws.example.com.evil", "null", ""):
        assert check("/app/cc", {}, origin, BY_KEY.get, True, own_host).code == 4009
    with_port = "http://ws.example.com:6001"
    assert check("/app/cc", {}, with_port, BY_KEY.get, True, host_of(with_port)) is PICKY


def test_javas_library_is_known_by_its_name():
    assert decrypts_all({"client": "java-client", "protocol": "5"})
    assert not any(map(decrypts_all, ({}, {"client": "js"}, {"client": "pusher-websocket-swift"})))


def test_recover_is_requested_by_1():
    assert recovers({"protocol": "7", "recover": "1"})
    for query in ({}, {"recover": ""}, {"recover": "0"}, {"recover": "true"}, {"Recover": "1"}):
        assert not recovers(query)
