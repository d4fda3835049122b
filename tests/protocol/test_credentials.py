import hashlib
import hmac
from types import SimpleNamespace

import pytest

from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import token_hash
from redpoll.protocol.credentials import check_admitted, granted, key_of, manager
from redpoll.protocol.errors import ApiError
from redpoll.protocol.tokens import Token

APP = App(id="1", name="one", keys=(Key(key="k1", secret="s1"), Key(key="k2", secret="s2")))
NOW = 1_700_000_000.0
PAIR = {"X-Service-Key": "k2", "X-Service-Secret": "s2"}
RECORDS = SimpleNamespace(
    apps={"1": APP},
    by_key={"k1": APP, "k2": APP},
    tokens={
        token_hash("all"): Token(id="a", app_id=None, name="", hash="", prefix="", scopes=("all",), created_at=0.0),
        token_hash("reader"): Token(id="b", app_id="1", name="", hash="", prefix="", scopes=("read",), created_at=0.0),
    },
)


def query(secret: str = "s1") -> str:
    text = f"auth_key=k1&auth_timestamp={NOW:.0f}&auth_version=1.0"
    made = hmac.new(secret.encode(), f"GET\n/apps/1/channels\n{text}".encode(), hashlib.sha256).hexdigest()
    return f"{text}&auth_signature={made}"


def ask(headers: dict[str, str], query: str = "", app_id: str | None = "1", scope: str = "read"):
    return granted(RECORDS, headers, ("GET", "/apps/1/channels", query, b""), scope, app_id, NOW)


def test_each_credential_opens_its_app():
    assert ask({}, query()).app is APP
    assert ask(PAIR).app is APP
    assert ask({"Authorization": "Bearer reader"}).token.id == "b"
    for headers, text in (({}, query()), (PAIR, ""), ({"Authorization": "bearer reader"}, "")):
        assert ask(headers, text, app_id=None).app is APP


def test_the_first_credential_decides_alone():
    with pytest.raises(ApiError, match="unknown bearer token"):
        ask({"Authorization": "Bearer nobody", **PAIR}, query())
    with pytest.raises(ApiError, match="X-Service-Key 'k2'"):
        ask({**PAIR, "X-Service-Secret": "s1"}, query())


def test_only_a_token_for_every_app_learns_that_an_app_does_not_exist():
    for headers, text in (({}, query()), (PAIR, ""), ({"Authorization": "Bearer reader"}, "")):
        with pytest.raises(ApiError) as refused:
            ask(headers, text, app_id="2")
        assert refused.value.status == 401
    with pytest.raises(ApiError) as refused:
        ask({"Authorization": "Bearer all"}, app_id="2")
    assert refused.value.code == "unknown_app"
    with pytest.raises(ApiError, match="name the app in the path"):
        ask({"Authorization": "Bearer all"}, app_id=None)


def test_a_scope_that_the_token_lacks_is_refused():
    with pytest.raises(ApiError) as refused:
        ask({"Authorization": "Bearer reader"}, scope="publish")
    assert refused.value.code == "insufficient_scope"


def test_the_key_of_a_request_is_that_of_its_credential():
    assert key_of(APP, None, PAIR, []) == "k2"
    assert key_of(APP, None, {}, ask({}, query()).params) == "k1"
    assert key_of(APP, ask({"Authorization": "Bearer reader"}).token, {}, []) == "k1"


def test_a_right_credential_is_not_enough():
    with pytest.raises(ApiError) as refused:
        check_admitted(App(id="1", name="one", keys=(), enabled=False), {})
    assert refused.value.code == "app_disabled"
    with pytest.raises(ApiError) as refused:
        check_admitted(APP, {"Content-Encoding": "gzip"})
    assert refused.value.code == "unsupported_media_type"
    check_admitted(APP, {"Content-Encoding": "identity"})


def test_only_a_token_with_the_scope_manage_manages_apps():
    token = Token(id="m", app_id=None, name="", hash="", prefix="", scopes=("manage",), created_at=0.0)
    records = SimpleNamespace(**{**vars(RECORDS), "tokens": {**RECORDS.tokens, token_hash("manager"): token}})
    assert manager(records, {"Authorization": "bearer manager"}, NOW) is token
    for headers, code in (
        ({"Authorization": "Bearer all"}, "insufficient_scope"),
        ({"Authorization": "Bearer reader"}, "insufficient_scope"),
        ({"Authorization": "Bearer unknown"}, "unauthorized"),
        (PAIR, "unauthorized"),
        ({}, "unauthorized"),
    ):
        with pytest.raises(ApiError) as refused:
            manager(records, headers, NOW)
        assert refused.value.code == code
