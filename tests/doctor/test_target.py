import time

import pytest

from redpoll.doctor.target import Target, TargetError, parse
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import check_query


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("ws://localhost:6001/app/KEY", Target("localhost", 6001, False, "KEY")),
        ("wss://example.com/app/KEY", Target("example.com", 443, True, "KEY")),
        ("wss://example.com/realtime/app/KEY", Target("example.com", 443, True, "KEY", prefix="/realtime")),
        ("http://K:S@localhost:6001/apps/1", Target("localhost", 6001, False, "K", "S", "1")),
        ("https://K@example.com/apps/1", Target("example.com", 443, True, "K")),
        ("http://K:S@[::1]:6001/apps/1", Target("::1", 6001, False, "K", "S", "1")),
    ],
)
def test_an_address_is_read(url, target):
    assert parse(url) == target


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6001", "isn't the address of an app"),
        ("ftp://x/app/KEY", "isn't the address of an app"),
        ("ws://:6001/app/KEY", "no host"),
        ("ws://localhost/apps/1", "/app/KEY"),
        ("http://K:S@localhost/app/KEY", "/apps/ID"),
        ("http://localhost/apps/1", "names no key"),
        ("wss://ws..example.com/app/KEY", "empty part"),
        (f"wss://{'a' * 64}.example.com/app/KEY", "empty part"),
        ("ws://localhost:99999/app/KEY", "isn.t a number from 1 to 65535"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(url, says):
    with pytest.raises(TargetError, match=says):
        parse(url)


def test_the_signature_is_one_that_the_server_accepts():
    app = App(id="1", name="a", keys=(Key(key="K", secret="S"),))
    path, _, query = parse("http://K:S@localhost/apps/1").signed_path(b"{}").partition("?")
    assert dict(check_query(app, "POST", path, query, b"{}", time.time()))["auth_key"] == "K"


def test_a_signed_request_may_have_parameters_and_an_encoded_path():
    app = App(id="1", name="a", keys=(Key(key="K", secret="S"),))
    target = parse("http://K:S@localhost/realtime/apps/1")
    signed = target.signed_path(None, method="GET", path="/channels/a%2Cb", params={"filter_by_prefix": "a b&c="})
    path, _, query = signed.partition("?")
    assert path == "/realtime/apps/1/channels/a%2Cb"
    found = check_query(app, "GET", path.removeprefix("/realtime"), query, None, time.time())
    assert dict(found)["filter_by_prefix"] == "a b&c="


@pytest.mark.parametrize(
    "url",
    [
        "https://KEY:S3CRET@ws.example.com:99999/apps/1",
        "https://KEY:S3CRET@:6001/apps/1",
        "https://KEY:S3CRET@ws.example.com/app/1",
        "ftp://KEY:S3CRET@ws.example.com/apps/1",
        "https://KEY:S3CRET@[ws.example.com/apps/1",
        # Unencoded characters move the secret to other parts of the address.
        "https://KEY:x/S3CRET@ws.example.com/apps/",
        "https://KEY:S3CRET",
        "S3CRET",
    ],
)
def test_no_fault_quotes_a_secret(url):
    with pytest.raises(TargetError) as caught:
        parse(url)
    assert "S3CRET" not in str(caught.value)
