"""Single sign-on at a provider that answers over real sockets, and lies in one thing at a time. The flow with a real
provider and a browser: tests/browser/test_sign_on.py."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import web
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from redpoll.config import single_sign_on
from redpoll.config.settings import Settings
from redpoll.control.accounts import sign_on as module
from redpoll.control.accounts.sign_on import SignOn, SignOnError

CALLBACK = "http://127.0.0.1:9601/dashboard/sso/callback"
SECRET = "a client's secret of some length"
KEY = RSAKey.generate_key(2048, {"kid": "one"})
OTHER = RSAKey.generate_key(2048, {"kid": "one"})


class Provider:
    """Its answers: `claims` and `head` change the ID token, `document` what it says of itself."""

    def __init__(self) -> None:
        self.issuer = ""
        # By how much its clock is ahead, and how long its tokens last.
        self.ahead_s = 0
        self.lasts_s = 3_600
        self.ends = asyncio.Event()
        self.claims: dict[str, object] = {"roles": ["redpoll_admin"]}
        self.head: dict[str, str] = {}
        self.document: dict[str, object] = {}
        self.key: RSAKey | OctKey = KEY
        self.published: list[dict[str, object]] = [KEY.as_dict(private=False)]
        self.answer: dict[str, object] | None = None
        self.silent = False
        self.asked: dict[str, str] = {}
        self.nonce = ""

    async def describe(self, request: web.Request) -> web.Response:
        if self.silent:
            await self.ends.wait()
        return web.json_response(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/auth",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/jwks",
                "end_session_endpoint": f"{self.issuer}/end",
                **self.document,
            }
        )

    async def keys(self, request: web.Request) -> web.Response:
        return web.json_response({"keys": self.published})

    async def token(self, request: web.Request) -> web.Response:
        self.asked = {name: str(value) for name, value in (await request.post()).items()}
        self.asked["authorization"] = request.headers.get("Authorization", "")
        now = int(time.time()) + self.ahead_s
        claims = {
            "iss": self.issuer,
            "sub": "42",
            "aud": "redpoll",
            "iat": now,
            "exp": now + self.lasts_s,
            "nonce": self.nonce,
            "preferred_username": "ann",
            **self.claims,
        }
        token = jwt.encode({"alg": "RS256", "kid": "one", **self.head}, claims, self.key, algorithms=["RS256", "HS256"])
        return web.json_response(self.answer if self.answer is not None else {"id_token": token})


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", made.describe)
    app.router.add_get("/jwks", made.keys)
    app.router.add_post("/token", made.token)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.ends.set()
    await runner.cleanup()


def sign_on_of(provider: Provider, limits: dict[str, Any] | None = None, **settings) -> SignOn:
    """`limits` are arguments of SignOn."""
    given = {"oidc_client_id": "redpoll", "oidc_client_secret": SECRET, **settings}
    return SignOn(Settings(oidc_issuer=provider.issuer, **given), **(limits or {}))


async def log_in(sign_on: SignOn, provider: Provider, *, query: str = "", cookie: str | None = None):
    """Goes to the provider and comes back at once."""
    begun = await sign_on.begin(CALLBACK, "/dashboard/apps")
    asked = {name: values[0] for name, values in parse_qs(urlsplit(begun.url).query).items()}
    provider.nonce = asked["nonce"]
    back = query or f"code=c&state={asked['state']}"
    return await finish(sign_on, back, begun.cookie if cookie is None else cookie)


async def finish(sign_on: SignOn, query: str, cookie: str):
    returned = sign_on.returned(query, cookie)
    return await sign_on.finish(returned, CALLBACK), returned.following


async def refused(sign_on: SignOn, provider: Provider, **more: str) -> SignOnError:
    with pytest.raises(SignOnError) as raised:
        await log_in(sign_on, provider, **more)
    assert raised.value.check
    return raised.value


async def test_code_is_exchanged_with_pkce_and_the_secret(provider):
    sign_on = sign_on_of(provider)
    identity, following = await log_in(sign_on, provider)
    assert (identity.subject, identity.name, identity.role) == (f"{provider.issuer} 42", "ann", "admin")
    assert (identity.apps, following) == (None, "/dashboard/apps")
    begun = await sign_on.begin(CALLBACK, "/dashboard")
    asked = parse_qs(urlsplit(begun.url).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert len(provider.asked["code_verifier"]) >= 43
    assert provider.asked["authorization"].startswith("Basic ")
    assert "client_secret" not in provider.asked


@pytest.mark.parametrize(
    ("claims", "head", "reason"),
    [
        ({"iss": "https://other.example.com"}, {}, "wrong issuer of the ID token"),
        ({"aud": "other"}, {}, "wrong audience of the ID token"),
        ({"aud": ["redpoll", "other"]}, {}, "wrong audience of the ID token"),
        ({"azp": "other"}, {}, "wrong audience of the ID token"),
        ({"nonce": "other"}, {}, "wrong nonce of the ID token"),
        ({"roles": ["other"]}, {}, "the user '42' has no role here: roles other"),
        ({}, {"kid": "unknown"}, "wrong signature of the ID token"),
    ],
)
async def test_wrong_token_is_refused(provider, claims, head, reason):
    provider.claims |= claims
    provider.head = head
    error = await refused(sign_on_of(provider), provider)
    assert error.reason.startswith(reason)
    # Sessions are ended for a user of whom the provider says so, and for nobody else.
    assert error.without_role == (f"{provider.issuer} 42" if "no role" in reason else "")


@pytest.mark.parametrize(("ahead_s", "lasts_s"), [(300, 3_600), (-300, 3_600), (0, -300)])
async def test_clock_five_minutes_off_is_refused(provider, ahead_s, lasts_s):
    provider.ahead_s, provider.lasts_s = ahead_s, lasts_s
    error = await refused(sign_on_of(provider), provider)
    assert error.reason.startswith("a clock is wrong: this machine's is ")
    assert "NTP" in error.check


async def test_wrong_signature_and_algorithm_are_refused(provider):
    sign_on = sign_on_of(provider)
    provider.key = OTHER
    assert (await refused(sign_on, provider)).reason == "wrong signature of the ID token"
    # By the client's secret, which the token's reader has too.
    provider.key, provider.head = OctKey.import_key(SECRET), {"alg": "HS256"}
    assert (await refused(sign_on, provider)).reason == "wrong algorithm: the ID token is signed with 'HS256'"


async def test_keys_of_other_kinds_are_ignored(provider):
    provider.published += [{"kty": "EC", "crv": "P-999", "x": "aa", "y": "bb"}, {"kty": "AKP", "pub": "aa"}]
    await log_in(sign_on_of(provider), provider)


async def test_withdrawn_key_is_refused_when_the_keys_are_fetched_again(provider, monkeypatch):
    sign_on = sign_on_of(provider)
    await log_in(sign_on, provider)
    provider.published = [OTHER.as_dict(private=False)]
    await log_in(sign_on, provider)
    monkeypatch.setattr(module, "_KEYS_FOR_S", -1.0)
    assert (await refused(sign_on, provider)).reason == "wrong signature of the ID token"


async def test_wrong_state_and_cookie_are_refused(provider):
    sign_on = sign_on_of(provider)
    error = await refused(sign_on, provider, query="code=c&state=other")
    assert error.reason == "wrong state: the answer belongs to another login"
    assert (await refused(sign_on, provider, cookie="")).reason.startswith("the cookie of the login is missing")
    assert (await refused(sign_on, provider, query="a&" * 30)).reason.endswith("has more than 20 fields")
    foreign = await sign_on_of(provider, oidc_client_secret="another secret").begin(CALLBACK, "/dashboard")
    assert (await refused(sign_on, provider, cookie=foreign.cookie)).reason.startswith("the cookie of the login is")
    late = sign_on_of(provider, {"clock": lambda: time.time() - module.BEGUN_WITHIN_S - 1})
    begun = await late.begin(CALLBACK, "/dashboard")
    assert (await refused(sign_on, provider, cookie=begun.cookie)).reason == "the login took longer than ten minutes"


async def test_refusals_of_the_provider_are_named(provider):
    sign_on = sign_on_of(provider)
    begun = await sign_on.begin(CALLBACK, "/dashboard")
    state = parse_qs(urlsplit(begun.url).query)["state"][0]
    with pytest.raises(SignOnError, match="the provider refused the login: access_denied"):
        await finish(sign_on, f"error=access_denied&state={state}", begun.cookie)
    with pytest.raises(SignOnError, match="wrong issuer in the provider's answer"):
        await finish(sign_on, f"code=c&state={state}&iss=https%3A%2F%2Fother", begun.cookie)
    provider.answer = {"error": "invalid_client"}
    assert (await refused(sign_on, provider)).reason == "the provider gave no ID token: 200, invalid_client"


async def test_document_of_another_issuer_is_refused_and_not_kept(provider):
    sign_on = sign_on_of(provider, {"failed_for_s": 0.0})
    provider.document = {"issuer": "https://other.example.com"}
    assert (await refused(sign_on, provider)).reason.startswith(
        "the provider's document can't be used: the document is"
    )
    provider.document = {}
    await log_in(sign_on, provider)


async def test_silent_provider_is_refused(provider, monkeypatch):
    monkeypatch.setattr(module, "WITHIN_S", 0.05)
    assert single_sign_on.WITHIN_S == 10.0
    provider.silent = True
    sign_on = sign_on_of(provider)
    error = await refused(sign_on, provider)
    assert error.reason.startswith("the provider can't be reached: ")
    assert await sign_on.logout_url("token", "http://127.0.0.1/") is None


async def test_viewer_sees_the_apps_of_the_claim(provider):
    sign_on = sign_on_of(provider, oidc_role_claim="realm_access.roles", oidc_apps_claim="shops")
    provider.claims = {"realm_access": {"roles": ["redpoll_viewer"]}, "shops": "one, two", "sub": "7"}
    identity, _ = await log_in(sign_on, provider)
    assert (identity.role, identity.apps) == ("viewer", {"one", "two"})
    provider.claims["shops"] = []
    assert (await log_in(sign_on, provider))[0].apps == frozenset()


async def test_apps_of_the_claim_may_be_numbers(provider):
    sign_on = sign_on_of(provider)
    provider.claims = {"roles": "redpoll_viewer", "sub": "7"}
    for sent, apps in (([1234567, "two", True, None], {"1234567", "two"}), (1234567, {"1234567"}), (True, set())):
        provider.claims["redpoll_apps"] = sent
        assert (await log_in(sign_on, provider))[0].apps == apps


async def test_logout_at_the_provider(provider):
    url = await sign_on_of(provider).logout_url("the-token", "http://127.0.0.1/dashboard/login")
    assert url is not None
    assert url.startswith(f"{provider.issuer}/end?id_token_hint=the-token&client_id=redpoll&post_logout_redirect_uri=")
