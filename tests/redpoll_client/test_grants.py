"""Grants that a back end makes with redpoll-client."""

import pytest

from helpers.granting import grant_key, jwt
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import check_grant
from redpoll_client import grants, mint_grant

KEY, SECRET, NOW_S = "k" * 20, "s" * 20, 1_700_000_000
APP = App(id="1", name="x", keys=(Key(key=KEY, secret=SECRET),), grants=True)


def test_the_server_accepts_it():
    assert grants.grant_key(SECRET) == grant_key(SECRET)
    auth = mint_grant(
        KEY,
        SECRET,
        ["private-a", "presence-*"],
        user_id="é",
        user_info={"name": "Å"},
        client_events=True,
        lasts_s=86_400,
        now_s=NOW_S,
    )
    grant = check_grant(APP, auth, NOW_S)
    assert (grant.user_id, grant.user_info) == ("é", '{"name":"Å"}'.encode())
    assert (grant.patterns, grant.client_events) == (["private-a", "presence-*"], True)
    assert grant.id is not None
    least = check_grant(APP, mint_grant(KEY, SECRET, [], jti="j", now_s=NOW_S), NOW_S)
    assert (least.user_id, least.id, least.client_events, least.expires_at) == (None, "j", False, NOW_S + 3600)


def test_it_is_an_ordinary_jwt():
    auth = mint_grant(KEY, SECRET, ["a"], jti="j", now_s=NOW_S)
    assert auth.count(".") == 2
    assert auth != f"{KEY}:{jwt(grant_key(SECRET), {})}"


@pytest.mark.parametrize(
    ("channels", "more"),
    [
        (["a"] * 101, {}),
        (["a*b"], {}),
        ([""], {}),
        (["a b"], {}),
        (["x" * 201], {}),
        # As letters it would have a *, and open every channel.
        ("private-*", {}),
        (["a"], {"lasts_s": 0}),
        (["a"], {"lasts_s": 86_401}),
        (["a"], {"user_id": ""}),
        (["a"], {"user_id": "x" * 129}),
        (["a"], {"user_id": "a\n"}),
        (["a"], {"jti": ""}),
        (["a"], {"user_info": "x" * 4096}),
        (["a"], {"user_info": float("nan")}),
    ],
)
def test_what_the_server_would_refuse_is_refused_here(channels, more):
    with pytest.raises(ValueError):  # noqa: PT011
        mint_grant(KEY, SECRET, channels, **more)
