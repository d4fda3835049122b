import pytest
from msgspec.structs import replace

from redpoll.protocol.tokens import MANAGE, SCOPES, Token, fault_of_token

NOW = 1_800_000_000.0
TOKEN = Token(
    id="9", app_id="3", name="deploy", hash="ab" * 32, prefix="rp_12345", scopes=("publish", "read"), created_at=1.0
)


def code_of(token: Token | None, scope: str = "read", app_id: str = "3", now_s: float = NOW) -> tuple[str, int] | None:
    fault = fault_of_token(token, scope, app_id, now_s)
    return None if fault is None else (fault.code, fault.status)


def test_a_token_authorises_its_scopes_in_its_app():
    assert code_of(TOKEN, "publish") is None
    assert code_of(TOKEN, "read") is None
    assert code_of(replace(TOKEN, expires_at=NOW + 0.001)) is None


@pytest.mark.parametrize("scope", SCOPES)
def test_the_scope_all_includes_every_scope(scope):
    assert code_of(replace(TOKEN, scopes=("all",)), scope) is None


def test_a_missing_scope_is_403_and_named_with_the_present_ones():
    assert code_of(TOKEN, "auth") == ("insufficient_scope", 403)
    assert code_of(TOKEN, "all") == ("insufficient_scope", 403)
    assert fault_of_token(TOKEN, "auth", "3", NOW).message == "the token lacks the scope auth; it has publish, read"
    assert code_of(replace(TOKEN, scopes=())) == ("insufficient_scope", 403)


def test_an_unknown_token_is_refused():
    assert code_of(None) == ("unauthorized", 401)


def test_a_token_is_for_its_app_or_for_all():
    assert code_of(TOKEN, app_id="4") == ("unauthorized", 401)
    assert "3" not in fault_of_token(TOKEN, "read", "4", NOW).message
    assert code_of(replace(TOKEN, app_id=None), app_id="4") is None


def test_an_expired_token_is_refused_with_its_end_and_the_present_time():
    old = replace(TOKEN, expires_at=NOW)
    assert code_of(old) == ("token_expired", 401)
    assert code_of(old, now_s=NOW - 0.001) is None
    assert fault_of_token(old, "read", "3", NOW + 60).message == (
        "the token expired 60 s ago, at Unix time 1800000000; the server's time is 1800000060"
    )


def test_a_revoked_token_is_refused_as_revoked_first():
    for more in ({}, {"expires_at": NOW + 1}, {"expires_at": NOW - 1}, {"scopes": ("all",)}, {"app_id": None}):
        assert code_of(replace(TOKEN, revoked_at=NOW - 5, **more)) == ("token_revoked", 401)


def test_the_scope_manage_is_apart_from_all_others():
    manager = replace(TOKEN, app_id=None, scopes=(MANAGE,))
    assert fault_of_token(manager, MANAGE, None, NOW) is None
    for scope in SCOPES:
        assert code_of(manager, scope) == ("insufficient_scope", 403)
        for app_id in ("3", None):
            other = replace(TOKEN, app_id=app_id, scopes=(scope,))
            assert fault_of_token(other, MANAGE, None, NOW).code == "insufficient_scope"
