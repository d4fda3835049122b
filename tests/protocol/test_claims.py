"""Which JWTs are grants: one test for each reason to refuse one (protocol/README.md "Grants")."""

import base64
import hashlib
import hmac
import json
from pathlib import Path

import jwt as pyjwt
import pytest
from joserfc.jwk import OctKey
from joserfc.jwt import encode

import redpoll
from helpers.granting import base64url, grant_key, jwt, mint
from redpoll.protocol import auth
from redpoll.protocol.auth import check_grant, sign_grant
from redpoll.protocol.claims import MAX_GRANT_BYTES, algorithm_of, unsigned_grant
from redpoll.protocol.errors import ClientError

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
NOW_S = 1_700_000_000
CLAIMS = {"sub": "7", "iat": NOW_S, "exp": NOW_S + 3600, "channels": ["private-a", "presence-org-3-*"]}


@pytest.fixture
def granting(app, changed):
    return changed(app, grants=True)


def token(claims: object = CLAIMS, header: object = None, secret: str = SECRET) -> str:
    return f"{KEY}:{jwt(grant_key(secret), claims, header)}"


def fault(app, text: str, now_s: float = NOW_S) -> str:
    with pytest.raises(ClientError) as refused:
        check_grant(app, text, now_s)
    assert refused.value.code is None
    return refused.value.message


def test_a_grant_says_who_may_do_what_where_and_until_when(granting):
    more = {"jti": "j1", "may": ["client_events", "subscribe"], "info": {"name": "Å"}, "aud": ["x", "3"], "iss": "any"}
    text = token({**CLAIMS, **more})
    grant = check_grant(granting, text, NOW_S)
    assert (grant.key, grant.user_id, grant.id, grant.user_info) == (KEY, "7", "j1", '{"name":"Å"}'.encode())
    assert (grant.issued_at, grant.expires_at) == (NOW_S, NOW_S + 3600)
    assert grant.patterns == CLAIMS["channels"]
    assert (grant.subscribes, grant.client_events) == (True, True)
    assert grant.digest == hashlib.sha256(text.encode()).digest()


def test_without_may_a_grant_only_subscribes_and_a_number_is_a_user_id(granting):
    grant = check_grant(granting, token({"exp": NOW_S + 60, "sub": 7}), NOW_S)
    assert (grant.subscribes, grant.client_events, grant.user_id, grant.patterns) == (True, False, "7", [])


def test_the_vector_of_the_readme(granting):
    """protocol/README.md "Grants"."""
    key = "e05119f9ed8b49b864720cd24d435246a8047e61a9111173ee9105f71af8834e"
    vector = (
        "eyJhbGciOiAiSFMyNTYiLCAidHlwIjogIkpXVCJ9"
        ".eyJzdWIiOiAiNyIsICJpYXQiOiAxNzAwMDAwMDAwLCAiZXhwIjogMTcwMDAwMzYwMCwgImNoYW5uZWxzIjogWyJwcml2YXRlLWEiXX0"
        ".frigrnZt_W95WDnhf8aOuqk4HbtSWWY771APQpSt_68"
    )
    assert auth.grant_key(SECRET) == grant_key(SECRET) == key
    assert check_grant(granting, f"{KEY}:{vector}", NOW_S).patterns == ["private-a"]
    readme = (Path(redpoll.__file__).parent / "protocol" / "README.md").read_text()
    assert key in readme
    assert all(part in readme for part in vector.split("."))


def test_libraries_mint_what_is_accepted(granting):
    key = grant_key(SECRET)
    for minted in (encode({"alg": "HS256"}, CLAIMS, OctKey.import_key(key)), pyjwt.encode(CLAIMS, key, "HS256")):
        assert check_grant(granting, f"{KEY}:{minted}", NOW_S).user_id == "7"
    signed = unsigned_grant(CLAIMS)
    assert check_grant(granting, f"{KEY}:{sign_grant(SECRET, signed)}", NOW_S).user_id == "7"


def test_off_until_asked_for(app):
    assert "its setting `grants`" in fault(app, token()).replace("the app's", "its")


def test_a_forged_grant(granting):
    text = token()
    head, claims, signature = text.split(".")
    other = base64url(json.dumps({**CLAIMS, "sub": "8"}).encode())
    assert "signature is wrong" in fault(granting, f"{head}.{other}.{signature}")
    assert "signature is wrong" in fault(granting, f"{head}.{claims}.{signature[:-1]}")
    assert "signature is wrong" in fault(granting, f"{head}.{claims}.")
    # Padding, and another spelling of the last bits, are no second form of the same token.
    assert "signature is wrong" in fault(granting, text + "=")
    # The secret itself isn't the key.
    assert "signature is wrong" in fault(granting, f"{KEY}:{jwt(SECRET, CLAIMS)}")


def test_a_widened_grant(granting):
    """Nobody can add a channel, and other words than patterns are refused."""
    head, _, signature = token().split(".")
    wide = base64url(json.dumps({**CLAIMS, "channels": ["*"]}).encode())
    assert "signature is wrong" in fault(granting, f"{head}.{wide}.{signature}")
    for pattern in ("private-*-a", "**", "*a", "private a", "private-a\nprivate-b", "", "private-" + "x" * 200):
        assert "with * at the end" in fault(granting, token({**CLAIMS, "channels": ["private-a", pattern]}))
    assert "at most 100" in fault(granting, token({**CLAIMS, "channels": [f"a{n}" for n in range(101)]}))
    assert "'publish'" in fault(granting, token({**CLAIMS, "may": ["subscribe", "publish"]}))


def test_an_expired_grant_and_one_from_the_future(granting):
    assert check_grant(granting, token(), NOW_S + 3610)
    assert "expired 11 s ago" in fault(granting, token(), NOW_S + 3611)
    assert check_grant(granting, token(), NOW_S - 10)
    assert "ahead of the server's clock" in fault(granting, token(), NOW_S - 11)
    assert "ahead of the server's clock" in fault(granting, token({**CLAIMS, "nbf": NOW_S + 60}), NOW_S)
    assert "before its nbf or iat" in fault(granting, token({**CLAIMS, "iat": NOW_S + 7200}))


def test_a_grant_without_exp_or_with_one_beyond_a_day(granting):
    claims = {name: value for name, value in CLAIMS.items() if name != "exp"}
    assert "exp" in fault(granting, token(claims))
    assert "at most 86400 s" in fault(granting, token({**CLAIMS, "exp": NOW_S + 90_000}))
    assert "at most 86400 s" in fault(granting, token({"sub": "7", "exp": NOW_S + 90_000}))
    assert check_grant(granting, token({**CLAIMS, "exp": NOW_S + 86_400}), NOW_S)


@pytest.mark.parametrize("algorithm", ["none", "None", "RS256", "HS512", "hs256"])
def test_another_algorithm(granting, algorithm):
    # Signed as HS256, and with what the algorithm would leave: nothing.
    text = token(header={"alg": algorithm, "typ": "JWT"})
    assert f"alg is {algorithm!r}; only HS256" in fault(granting, text)
    assert f"alg is {algorithm!r}; only HS256" in fault(granting, text.rpartition(".")[0] + ".")


def test_an_extension_that_must_be_understood(granting):
    assert "crit" in fault(granting, token(header={"alg": "HS256", "crit": ["b64"], "b64": False}))


def test_a_grant_of_another_app_or_key(granting, changed):
    other = changed(granting, keys=(granting.keys[0].__class__(key="otherkey", secret="s" * 40),))
    assert "Invalid key in grant" in fault(other, token())
    assert "signature is wrong" in fault(granting, token(secret="f" * 20))
    assert "aud doesn't name this app, 3" in fault(granting, token({**CLAIMS, "aud": "4"}))
    disabled = changed(granting, keys=(changed(granting.keys[0], enabled=False),))
    assert "the app has no enabled key" in fault(disabled, token())


def test_a_grant_of_100_kb(granting):
    text = mint(KEY, SECRET, *["private-" + "x" * 190] * 500)
    assert len(text) > 100_000
    assert f"at most {MAX_GRANT_BYTES}" in fault(granting, text)


@pytest.mark.parametrize("text", ["", ".", "..", "a.b", "a.b.c.d", "a.b.c", "é.é.é", "." * 4000, "\ud800.a.b"])
def test_what_is_no_jwt(granting, text):
    assert "a JWT: three parts" in fault(granting, f"{KEY}:{text}")


@pytest.mark.parametrize(
    "claims",
    [
        [],
        "x",
        {**CLAIMS, "sub": ""},
        {**CLAIMS, "sub": "x" * 129},
        {**CLAIMS, "sub": "a\x00"},
        {**CLAIMS, "sub": True},
        {**CLAIMS, "jti": "x" * 129},
        {**CLAIMS, "jti": 5},
        {**CLAIMS, "exp": "1"},
        {**CLAIMS, "exp": True},
        {**CLAIMS, "channels": "private-a"},
        {**CLAIMS, "may": "subscribe"},
    ],
)
def test_claims_of_another_type_or_size(granting, claims):
    assert fault(granting, token(claims)).startswith("Invalid grant: ")


def test_signed_garbage_is_refused(granting):
    """Whatever a back end signs by mistake."""
    key = grant_key(SECRET)
    for signed in ("a.b", "a.b.c", "e30.e30", base64url(b'{"alg":"HS256"}') + "." + base64url(b"[" * 3000), "é.x"):
        digest = hmac.new(key.encode(), signed.encode(), hashlib.sha256).digest()
        assert fault(granting, f"{KEY}:{signed}.{base64url(digest)}").startswith("Invalid grant: ")


def test_no_other_signature_of_the_secret_is_a_grant(granting):
    """The key is derived: what is signed with the secret itself, such as a channel, can't be passed off as a grant."""
    signed = unsigned_grant(CLAIMS)
    direct = hmac.new(SECRET.encode(), signed.encode(), hashlib.sha256).digest()
    assert "signature is wrong" in fault(granting, f"{KEY}:{signed}.{base64url(direct)}")


def test_algorithm_of_reads_no_more_than_a_header():
    assert algorithm_of("x.y.z") is None
    assert algorithm_of(base64.b64encode(b'{"alg":"RS256"}').decode().rstrip("=") + ".a.b") == "RS256"
