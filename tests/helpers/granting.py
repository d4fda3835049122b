"""Grants as a back end would make them: JWTs by the standard library alone, without code of src/redpoll."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import Any

__all__ = ["base64url", "grant_key", "jwt", "mint"]


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def grant_key(secret: str) -> str:
    """The key of the JWT: protocol/README.md "Grants"."""
    return hmac.new(secret.encode(), b"redpoll-grant", hashlib.sha256).hexdigest()


def jwt(key: str, claims: object, header: object = None) -> str:
    """A JWT, signed by HMAC-SHA256 whatever `header` says."""
    head = {"alg": "HS256", "typ": "JWT"} if header is None else header
    signed = ".".join(base64url(json.dumps(part).encode()) for part in (head, claims))
    return f"{signed}.{base64url(hmac.new(key.encode(), signed.encode(), hashlib.sha256).digest())}"


def mint(
    key: str, secret: str, *channels: str, lasts_s: float = 3600, now_s: float | None = None, **claims: Any
) -> str:
    """`auth` of a grant, made at `now_s`, by default now. A claim that is None is left out."""
    made_s = int(time.time() if now_s is None else now_s)
    made = {"iat": made_s, "exp": made_s + lasts_s, "channels": channels, **claims}
    return f"{key}:{jwt(grant_key(secret), {name: value for name, value in made.items() if value is not None})}"
