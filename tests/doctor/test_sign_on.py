"""What `redpoll doctor` says of an OpenID Connect provider."""

import json

import pytest

from helpers.ports import reserved_ports
from redpoll.config.settings import Settings
from redpoll.doctor.report import Verdict
from redpoll.doctor.sign_on import examine, judged

ISSUER = "https://login.example.com"
DOCUMENT = {
    "issuer": ISSUER,
    "authorization_endpoint": f"{ISSUER}/auth",
    "token_endpoint": f"{ISSUER}/token",
    "jwks_uri": f"{ISSUER}/jwks",
    "id_token_signing_alg_values_supported": ["RS256"],
    "code_challenge_methods_supported": ["S256"],
}


def verdict(*, status=200, difference_s=0.0, **changes):
    return judged(ISSUER, status, json.dumps(DOCUMENT | changes).encode(), difference_s)


def test_good_provider():
    finding = verdict()
    assert (finding.verdict, finding.check) == (Verdict.OK, "Sign-on")


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"issuer": ISSUER + "/"}, f"the document is of the issuer '{ISSUER}/', oidc_issuer is '{ISSUER}'"),
        ({"token_endpoint": "http://login.example.com/token"}, "token_endpoint must be https, except on this machine"),
        ({"jwks_uri": None}, "jwks_uri is no URL"),
        ({"response_types_supported": ["id_token"]}, "the provider doesn't offer the authorization code flow"),
        ({"code_challenge_methods_supported": ["plain"]}, "the provider doesn't offer PKCE with S256"),
        ({"id_token_signing_alg_values_supported": ["HS256"]}, "the provider signs ID tokens with none of "),
        ({"status": 404}, "the provider answers 404"),
        ({"difference_s": 300.0}, "this machine's clock is 300 s ahead of the provider's"),
        ({"difference_s": -300.0}, "this machine's clock is 300 s behind the provider's"),
    ],
)
def test_fault_is_named(changes, seen):
    finding = verdict(**changes)
    assert finding.verdict is Verdict.FAILED
    assert finding.seen.startswith(seen)
    assert finding.remedy


def test_no_document():
    assert judged(ISSUER, 200, b"<html>", 0.0).seen == "the document is no JSON object"


async def test_provider_that_is_away():
    with reserved_ports(1) as (port,):
        finding = await examine(Settings(oidc_issuer=f"http://127.0.0.1:{port}"))
    assert finding.verdict is Verdict.FAILED
    assert f"http://127.0.0.1:{port}/.well-known/openid-configuration" in finding.seen


async def test_nothing_to_check_without_an_issuer():
    assert (await examine(Settings())).verdict is Verdict.SKIPPED
