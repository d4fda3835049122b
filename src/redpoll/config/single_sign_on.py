"""Rules for single sign-on by OpenID Connect: the settings, and the document in which a provider describes itself.

The control plane and `redpoll doctor` read that document by the same rules (OpenID Connect Discovery 1.0).
"""

import ipaddress
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

__all__ = ["ALGORITHMS", "MAX_BYTES", "WITHIN_S", "document_faults", "document_url", "faults_of"]

# Signatures of ID tokens that are accepted: by a key that the provider publishes. `none`, and HMAC with the client's
# secret, are not.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
# Of each answer of a provider.
MAX_BYTES = 1 << 20
WITHIN_S = 10.0
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


def faults_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with the settings, as pairs of name and sentence. `values` has those that were set."""
    issuer = values.get("oidc_issuer", "")
    if not issuer:
        if values.get("oidc_client_id"):
            yield "oidc_issuer", "missing: oidc_client_id is set"
        return
    text = _url_fault(issuer)
    if text:
        yield "oidc_issuer", f"{text}; got {issuer!r}"
    elif urlsplit(issuer).query or urlsplit(issuer).fragment:
        yield "oidc_issuer", f"must have no query and no fragment; got {issuer!r}"
    if not values.get("oidc_client_id"):
        yield "oidc_client_id", "missing: the provider gives it when redpoll is registered there"
    if "openid" not in values.get("oidc_scope", "openid").split():
        yield "oidc_scope", "must contain openid"
    if find_spec("joserfc") is None:
        yield "oidc_issuer", "needs a library that isn't installed: pip install 'redpoll[oidc]'"


def document_url(issuer: str) -> str:
    """Where the provider's document is."""
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


def document_faults(document: object, issuer: str) -> list[str]:
    """Why redpoll can't use a provider with this document, as sentences."""
    if not isinstance(document, dict):
        return ["the document is no JSON object"]
    if document.get("issuer") != issuer:
        return [f"the document is of the issuer {document.get('issuer')!r}, oidc_issuer is {issuer!r}"]
    faults = []
    for name in _ENDPOINTS:
        text = _url_fault(document.get(name))
        if text:
            faults.append(f"{name} {text}")
    if "code" not in _words(document, "response_types_supported", "code"):
        faults.append("the provider doesn't offer the authorization code flow")
    if "S256" not in _words(document, "code_challenge_methods_supported", "S256"):
        faults.append("the provider doesn't offer PKCE with S256")
    if not set(_words(document, "id_token_signing_alg_values_supported", "RS256")) & set(ALGORITHMS):
        faults.append(f"the provider signs ID tokens with none of {', '.join(ALGORITHMS)}")
    return faults


def _words(document: Mapping[str, Any], name: str, without: str) -> list[str]:
    """A list of the document. Without it the provider supports `without`: many leave out what everybody supports."""
    value = document.get(name, [without])
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _url_fault(url: object) -> str:
    """Why this can't be an address of a provider; "" if it can. Without TLS only on this machine."""
    if not isinstance(url, str) or not url.isprintable() or len(url) > 2_000:
        return "is no URL"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return "is no URL"
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        return "must be an https:// URL without a user"
    return "" if parts.scheme == "https" or _is_loopback(host) else "must be https, except on this machine"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
