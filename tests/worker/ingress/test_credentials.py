"""What a worker recognises as an app's request."""

import hashlib
import hmac

import msgspec
import pytest

from redpoll.http.messages import FIELDS, pack_fields
from redpoll.protocol.apps import App, Key
from redpoll.worker.ingress.credentials import Credentials

APP = App(id="7", name="a", keys=(Key(key="k", secret="s"), Key(key="off", secret="s", enabled=False)))
NOW = 1_800_000_000


def signed(path="/apps/7/events", key="k", secret="s", stamp=NOW, prefix="", unsigned_prefix=""):
    query = f"auth_key={key}&auth_timestamp={stamp}&auth_version=1.0&body_md5={'0' * 32}"
    text = f"POST\n{prefix}{path}\n{query}"
    signature = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
    return f"{unsigned_prefix}{prefix}{path}?{query}&auth_signature={signature}".encode()


def pair(key, secret):
    return pack_fields([(FIELDS.index("X-Service-Key"), key), (FIELDS.index("X-Service-Secret"), secret)])


@pytest.mark.parametrize(
    ("target", "fields", "right"),
    [
        (signed(), b"", True),
        (signed(prefix="/api/v1"), b"", True),
        (signed(unsigned_prefix="/api/v1"), b"", True),
        (signed(unsigned_prefix="/of/a/proxy"), b"", True),
        (signed(unsigned_prefix="/of", prefix="/a/proxy"), b"", False),
        (signed(unsigned_prefix="/api/v1", secret="wrong"), b"", False),
        (signed(secret="wrong"), b"", False),
        (signed(key="off"), b"", False),
        (signed(key="unknown"), b"", False),
        (signed(path="/apps/8/events"), b"", False),
        (signed(stamp=NOW - 601), b"", False),
        (b"/apps/7/events", b"", False),
        (b"/healthz", b"", False),
        (b"/apps/\xff/events?a=b", b"", False),
        (b"/apps/7/events", pair(b"k", b"s"), True),
        (b"/apps/7/events?a=b", pair(b"k", b"s"), True),
        (b"/apps/7/events", pair(b"k", b"wrong"), False),
        (b"/apps/7/events", pair(b"k", b"\xff"), False),
        (b"/apps/8/events", pair(b"k", b"s"), False),
    ],
)
def test_only_a_right_credential_of_the_app_is_right(target, fields, right):
    assert Credentials({"7": APP}, lambda: NOW).are_right(b"POST", target, fields) is right


def test_a_change_of_the_directory_counts_at_once():
    apps = {}
    credentials = Credentials(apps, lambda: NOW)
    assert not credentials.are_right(b"POST", signed(), b"")
    apps["7"] = APP
    assert credentials.are_right(b"POST", signed(), b"")
    apps["7"] = msgspec.structs.replace(APP, keys=())
    assert not credentials.are_right(b"POST", signed(), b"")
