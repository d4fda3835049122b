"""Signed channel grants, for back ends (redpoll only): one JWT opens many channels, also after a reconnect.

The format: protocol/README.md "Grants". Any JWT library can make it; this module needs none.
"""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from redpoll_client.signatures import hex_hmac, to_json

__all__ = ["MAX_GRANT_S", "grant_key", "mint_grant"]

MAX_GRANT_S = 86_400
_MAX_BYTES = 4_096
_MAX_PATTERNS = 100
_PATTERN = re.compile(r"\*|[-_=@,.;0-9A-Za-z]{1,200}\*?").fullmatch


def grant_key(secret: str) -> str:
    """The key of the JWT, 64 hex digits, which are used as text: the HMAC-SHA256 of `redpoll-grant` under the secret of
    the app's key."""
    return hex_hmac(secret, b"redpoll-grant")


def mint_grant(
    key: str,
    secret: str,
    channels: Iterable[str],
    *,
    user_id: str | None = None,
    user_info: Any = None,
    client_events: bool = False,
    lasts_s: int = 3_600,
    jti: str | None = None,
    now_s: float | None = None,
) -> str:
    """A grant as `auth` (`KEY:JWT`), to be returned for each of these channels and for the sign-in of this user.

    `channels` are names, or beginnings of names with `*` at the end, at most 100. Presence channels and sign-in need
    `user_id`; members get `user_info`, any JSON. `lasts_s` is at most a day. `jti` is its id, by which it can be
    revoked; by default a random one. Raises ValueError for what the server would refuse.

    Whether the user may join is for the caller to decide first: anyone who has the grant can join until it ends.
    """
    if isinstance(channels, str):
        # Its letters would be the patterns, and a * among them opens every channel.
        raise ValueError(f"channels must be several, as a list, not the text {channels!r:.80}")
    patterns = list(channels)
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} channels; at most {_MAX_PATTERNS} are allowed")
    for pattern in patterns:
        if _PATTERN(pattern) is None:
            raise ValueError(f"{pattern!r} must be a channel, or the beginning of channels with * at the end")
    if not 0 < lasts_s <= MAX_GRANT_S:
        raise ValueError(f"a grant lasts 1 to {MAX_GRANT_S} s, not {lasts_s}")
    for name, word in (("user_id", user_id), ("jti", jti)):
        if word is not None and not (1 <= len(word) <= 128 and word.isprintable()):
            raise ValueError(f"{name} must be a string of 1 to 128 printable characters, not {word!r:.80}")
    issued_at = int(time.time() if now_s is None else now_s)
    claims: dict[str, Any] = {
        "iat": issued_at,
        "exp": issued_at + int(lasts_s),
        "jti": secrets.token_hex(8) if jti is None else jti,
        "channels": patterns,
        "may": ["subscribe", "client_events"] if client_events else ["subscribe"],
    }
    if user_id is not None:
        claims["sub"] = user_id
    if user_info is not None:
        claims["info"] = user_info
    signed = f"{_packed(to_json({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{_packed(to_json(claims).encode())}"
    digest = bytes.fromhex(hex_hmac(grant_key(secret), signed.encode()))
    auth = f"{key}:{signed}.{_packed(digest)}"
    if len(auth) > _MAX_BYTES:
        raise ValueError(f"the grant has {len(auth)} bytes; at most {_MAX_BYTES} are allowed: use fewer channels")
    return auth


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
