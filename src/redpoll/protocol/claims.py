"""Reads grants: makes a `Grant` of a JWT's header and claims (RFC 7519; protocol/README.md "Grants").

auth.py verifies the signature first; nothing here reads a token before that, but to explain a refusal.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from redpoll.protocol.channels import MAX_NAME_CHARS, NAME_CHARS, valid_name
from redpoll.protocol.errors import ClientError, fault_of
from redpoll.protocol.grants import LEEWAY_S, MAX_LIFETIME_S, Grant
from redpoll.protocol.presence import MAX_USER_ID_CHARS, info_of

__all__ = [
    "ALGORITHM",
    "MAX_GRANT_BYTES",
    "algorithm_of",
    "base64url",
    "digest_of",
    "read_grant",
    "unsigned_grant",
    "word_fault",
]

ALGORITHM = "HS256"
MAX_GRANT_BYTES = 4_096
MAX_PATTERNS = 100
# What `may` may contain. Without it a grant may only subscribe.
_RIGHTS = frozenset(("subscribe", "client_events"))
_MAX_QUOTED_CHARS = 64


class _Header(msgspec.Struct, gc=False):
    alg: str
    crit: Any = None


class _Claims(msgspec.Struct, gc=False):
    exp: float
    sub: str | int | None = None
    iat: float = 0.0
    nbf: float = 0.0
    jti: str | None = None
    aud: str | list[str] | None = None
    channels: tuple[str, ...] = ()
    may: tuple[str, ...] = ("subscribe",)
    info: Any = None


# All patterns at a time, with line feeds between them, because a match for each takes as long as all else.
_PATTERN = rf"(?:\*|[{re.escape(NAME_CHARS)}]{{1,{MAX_NAME_CHARS}}}\*?)"
_PATTERNS = re.compile(rf"(?:{_PATTERN}(?:\n{_PATTERN})*)?").fullmatch
_decode_header = msgspec.json.Decoder(_Header).decode
_decode_claims = msgspec.json.Decoder(_Claims).decode


def base64url(data: bytes) -> bytes:
    """Without padding, as in a JWT (RFC 7515 section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def digest_of(auth: str) -> bytes:
    return hashlib.sha256(auth.encode("utf-8", "replace")).digest()


def unsigned_grant(claims: Mapping[str, Any]) -> str:
    """`HEADER.CLAIMS` of a JWT, for `auth.sign_grant`."""
    header = base64url(msgspec.json.encode({"alg": ALGORITHM, "typ": "JWT"}))
    return (header + b"." + base64url(msgspec.json.encode(claims))).decode()


def algorithm_of(token: str) -> str | None:
    """What an unverified token says of its algorithm, to explain why it is refused. None: it is no JWT."""
    try:
        return _decode_header(_unpacked(token.partition(".")[0])).alg[:_MAX_QUOTED_CHARS]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def read_grant(app_id: str, key: str, signed: str, digest: bytes) -> Grant:
    """The grant whose signed part this is (`HEADER.CLAIMS`). Call it only after the signature was verified. Raises
    ClientError."""
    header_text, _, claims_text = signed.partition(".")
    try:
        header = _decode_header(_unpacked(header_text))
        claims = _decode_claims(_unpacked(claims_text))
        info = info_of(claims.info)
    except (msgspec.DecodeError, ValueError, RecursionError) as fault:
        raise _invalid(fault_of(fault)) from None
    # The signature was right for HS256, whatever the header says: what says something else isn't ours.
    if header.alg != ALGORITHM:
        raise _invalid(f"its alg is {header.alg[:_MAX_QUOTED_CHARS]!r}; only {ALGORITHM} is accepted")
    if header.crit is not None:
        # RFC 7515 section 4.1.11.
        raise _invalid("its header has crit, and no extension is understood")
    user_id = None if claims.sub is None else str(claims.sub)
    fault_text = _fault(claims, user_id, app_id)
    if fault_text is not None:
        raise _invalid(fault_text)
    may = frozenset(claims.may)
    prefixes = [one[:-1] for one in claims.channels if one[-1] == "*"]
    return Grant(
        key=key,
        digest=digest,
        user_id=user_id,
        user_info=info,
        id=claims.jti,
        expires_at=claims.exp,
        issued_at=claims.iat,
        not_before=max(claims.iat, claims.nbf),
        names=" ".join(("", *[one for one in claims.channels if one[-1] != "*"], "")),
        prefixes=" ".join(prefixes) if prefixes else None,
        subscribes="subscribe" in may,
        client_events="client_events" in may,
    )


def _fault(claims: _Claims, user_id: str | None, app_id: str) -> str | None:
    unknown = [right for right in claims.may if right not in _RIGHTS]
    if unknown:
        return f"its may has {unknown[0][:_MAX_QUOTED_CHARS]!r}; known are 'subscribe' and 'client_events'"
    if len(claims.channels) > MAX_PATTERNS:
        return f"it has {len(claims.channels)} channels; at most {MAX_PATTERNS} are allowed"
    joined = "\n".join(claims.channels)
    is_right = _PATTERNS(joined) is not None and joined.count("\n") == max(0, len(claims.channels) - 1)
    for pattern in () if is_right else claims.channels:
        if pattern != "*" and not valid_name(pattern.removesuffix("*")):
            return (
                f"{pattern[:_MAX_QUOTED_CHARS]!r} in its channels is neither a channel nor the beginning of one with * "
                f"at the end: 1 to {MAX_NAME_CHARS} of letters, digits and _-=@,.; are allowed"
            )
    for claim, word in (("sub", user_id), ("jti", claims.jti)):
        problem = None if word is None else word_fault(word)
        if problem is not None:
            return f"its {claim} {problem}"
    if claims.aud is not None and app_id not in ([claims.aud] if type(claims.aud) is str else claims.aud):
        # RFC 7519 section 4.1.3.
        return f"its aud doesn't name this app, {app_id}"
    if claims.iat and claims.exp - claims.iat > MAX_LIFETIME_S + LEEWAY_S:
        return f"its exp is {claims.exp - claims.iat:.0f} s after its iat; at most {MAX_LIFETIME_S} s are allowed"
    if claims.nbf > claims.exp or claims.iat > claims.exp:
        return "its exp is before its nbf or iat"
    return None


def word_fault(word: str) -> str | None:
    """Why this can't be a `sub` or `jti`; None if it can."""
    if not 0 < len(word) <= MAX_USER_ID_CHARS:
        return f"must have 1 to {MAX_USER_ID_CHARS} characters"
    return None if word.isprintable() else "must have printable characters only"


def _unpacked(text: str) -> bytes:
    """Raises ValueError unless `text` is base64url without padding."""
    if not text.isascii() or "=" in text:
        raise ValueError("not base64url")
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)


def _invalid(fault: str) -> ClientError:
    return ClientError(None, f"Invalid grant: {fault}")
