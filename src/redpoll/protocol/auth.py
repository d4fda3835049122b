"""Signatures: makes and verifies those of channel subscriptions, sign-ins and HTTP requests.

Also hashes app tokens and derives the keys of encrypted channels. Refusals show the string that should have been
signed, because that is what developers get wrong, and never the digest. All digests are compared in constant time,
and an unknown key costs the same work as a known one.
The rules: protocol/README.md "Authentication of channels" and "Request signing".
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from redpoll.protocol.apps import App
from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.claims import ALGORITHM, MAX_GRANT_BYTES, algorithm_of, base64url, digest_of, read_grant
from redpoll.protocol.errors import ApiError, ClientError
from redpoll.protocol.grants import Grant

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "AUTH_NAMES",
    "MAX_QUERY_PARAMS",
    "MAX_SKEW_S",
    "NO_SECRET",
    "PREFIX",
    "Params",
    "channel_fault",
    "check_grant",
    "check_pair",
    "check_query",
    "check_size",
    "encryption_secret",
    "grant_key",
    "grant_key_fault",
    "hashes_of",
    "parse_query",
    "sign_channel",
    "sign_grant",
    "signin_fault",
    "token_hash",
]

# Query parameters in the order sent, with repeats; names in lower case, values percent-decoded.
Params = list[tuple[str, str]]

PREFIX = "/api/v1"
MAX_SKEW_S = 600
# The libraries send fewer than ten. The bound limits the work for a request that nobody has signed.
MAX_QUERY_PARAMS = 100
# With more parameters only the usual layout is tried, and the one without the prefix.
_MAX_LAYOUT_PARAMS = 20

# The secret of an unknown key, so that checking it takes as long. As long as the secrets that redpoll makes.
NO_SECRET = "0" * 64
# How much of a caller's input a refusal repeats.
_MAX_QUOTED_CHARS = 4096
_MAX_KEY_CHARS = 64

# The query parameters of the signature itself; none may be repeated.
AUTH_NAMES = frozenset(("auth_key", "auth_timestamp", "auth_version", "auth_signature", "body_md5"))
_DIGEST = re.compile(r"[0-9a-f]{64}").fullmatch
_SECONDS = re.compile(r"[0-9]{1,15}").fullmatch
# Letters, digits and -._~ need no escape anywhere (RFC 3986 section 2.3).
_NEEDLESS_ESCAPE = re.compile(r"%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE).search


# -- the digest ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _keyed_hashes(secret: str) -> "tuple[_Hash, _Hash]":
    """HMAC's inner and outer hash after the secret (RFC 2104 section 2), to be copied. Cached because `hmac.digest`
    repeats this work on every call: 1 us, a twelfth of a publish request."""
    key = secret.encode()
    if len(key) > 64:
        key = hashlib.sha256(key).digest()
    block = key.ljust(64, b"\0")
    inner = bytes(byte ^ 0x36 for byte in block)
    outer = bytes(byte ^ 0x5C for byte in block)
    return hashlib.sha256(inner), hashlib.sha256(outer)


def hashes_of(app: App | None, key: str) -> "tuple[_Hash, _Hash, bool]":
    """HMAC's two hashes of the secret of an app's key, to be copied, and True; those of no secret and False where there
    is no such app or it has no such enabled key."""
    secret = app.secret_of(key) if app is not None else None
    inner, outer = _keyed_hashes(NO_SECRET if secret is None else secret)
    return inner, outer, secret is not None


def _digest(secret: str, text: str) -> str:
    """HMAC-SHA256 in lowercase hex."""
    inner, outer = _keyed_hashes(secret)
    message_hash = inner.copy()
    message_hash.update(text.encode("utf-8", "replace"))
    result = outer.copy()
    result.update(message_hash.digest())
    return result.hexdigest()


def _verify(secret: str, text: str, claimed: bytes) -> bool:
    """Whether `claimed` is the digest of `text`, in constant time."""
    return hmac.compare_digest(_digest(secret, text).encode(), claimed)


# -- channels ----------------------------------------------------------------------------------------------


def sign_channel(secret: str, socket_id: str, channel: str, channel_data: str | None = None) -> str:
    """The hex digest of a subscription, which follows `KEY:` in `auth`."""
    return _digest(secret, _channel_text(socket_id, channel, channel_data))


def channel_fault(app: App, socket_id: str, channel: str, auth: str, channel_data: str | None) -> str | None:
    """Why `auth` (`KEY:HEX`) doesn't authorise this connection for the channel; None if it does.

    `channel_data` is signed byte for byte as sent, on private channels as well if it was sent. The dashboard's console
    channel accepts only its own key, and no other channel accepts that key. It has no `channel_data`: a text that was
    signed for another socket could contain it.
    """
    if channel == CONSOLE:
        own = app.console_key
        key, _, signature = auth.partition(":")
        secret = own.secret if own is not None and own.key == key else None
        text = _channel_text(socket_id, channel, channel_data)
        right = _verify(secret or NO_SECRET, text, signature.encode("utf-8", "replace"))
        is_granted = right and secret is not None and channel_data is None
        return None if is_granted else "this channel is reserved for the dashboard"
    return _auth_fault(app, _channel_text(socket_id, channel, channel_data), auth, "subscription")


def signin_fault(app: App, socket_id: str, auth: str, user_data: str) -> str | None:
    """Why `auth` (`KEY:HEX`) doesn't sign this connection in as the user of `user_data`, which is signed byte for
    byte as sent; None if it does."""
    return _auth_fault(app, f"{socket_id}::user::{user_data}", auth, "signin")


def _auth_fault(app: App, text: str, auth: str, what: str) -> str | None:
    """A text that names the key used, the app's keys and the string to sign; None if the signature is right."""
    key, _, signature = auth.partition(":")
    secret = app.secret_of(key)
    right = _verify(secret or NO_SECRET, text, signature.encode("utf-8", "replace"))
    if right and secret is not None:
        return None
    key = key[:_MAX_KEY_CHARS]
    if secret is None:
        return f"Invalid key in {what} auth data: '{key}'; the app has {_keys_of(app)}"
    signed_by = f"signed for the key '{key}', the app has {_keys_of(app)}"
    text = text[:_MAX_QUOTED_CHARS]
    if _DIGEST(signature) is None:
        return (
            "Invalid signature: auth must be the key, a colon and 64 lowercase hex digits, "
            f"the HMAC SHA256 of {text}; {signed_by}"
        )
    return f"Invalid signature: Expected HMAC SHA256 hex digest of {text}, but got {signature}; {signed_by}"


def _channel_text(socket_id: str, channel: str, channel_data: str | None) -> str:
    if channel_data is None:
        return f"{socket_id}:{channel}"
    return f"{socket_id}:{channel}:{channel_data}"


def _keys_of(app: App) -> str:
    """The app's enabled keys, for a refusal. Keys are public: every page that connects contains one."""
    names = ", ".join(f"'{key.key}'" for key in app.keys if key.enabled)
    return f"the keys {names}" if names else "no enabled key"


# -- grants -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def grant_key(secret: str) -> str:
    """The key of an app key's grants, 64 hex digits: derived, because JWT libraries refuse secrets as short as
    Pusher's, and so that no other signature of the secret is a grant (protocol/README.md "Grants")."""
    return _digest(secret, "redpoll-grant")


def sign_grant(secret: str, signed: str) -> str:
    """The JWT whose header and claims are `signed` (`HEADER.CLAIMS` in base64url), signed for a key's secret."""
    return f"{signed}.{_grant_signature(secret, signed).decode()}"


def _grant_signature(secret: str, signed: str) -> bytes:
    return base64url(bytes.fromhex(_digest(grant_key(secret), signed)))


def check_grant(app: App, auth: str, now_s: float) -> Grant:
    """The grant in `auth` (`KEY:JWT`), verified: signature first, then claims and time. `now_s` is Unix time. Raises
    ClientError with the reason. What it is for (`Grant.channel_fault`) and whether it is revoked (`AppGrants`) is for
    the caller to ask."""
    if not app.grants:
        raise ClientError(None, "Invalid grant: grants are off; the app's setting `grants` turns them on")
    if len(auth) > MAX_GRANT_BYTES:
        raise ClientError(None, f"Invalid grant: it has {len(auth)} bytes; at most {MAX_GRANT_BYTES} are allowed")
    key, _, token = auth.partition(":")
    secret = app.secret_of(key)
    signed, _, signature = token.rpartition(".")
    right = hmac.compare_digest(_grant_signature(secret or NO_SECRET, signed), signature.encode("utf-8", "replace"))
    if secret is None:
        raise ClientError(None, f"Invalid key in grant: '{key[:_MAX_KEY_CHARS]}'; the app has {_keys_of(app)}")
    if not right:
        raise ClientError(None, f"Invalid grant: {_unsigned_fault(token, key)}")
    grant = read_grant(app.id, key, signed, digest_of(auth))
    fault = grant.time_fault(now_s)
    if fault is not None:
        raise ClientError(None, f"Invalid grant: {fault}")
    return grant


def grant_key_fault(app: App | None, auth: str) -> str | None:
    """Why the key in `auth` (`KEY:JWT`) isn't an enabled one of the app; None if it is. An unknown app (None) is
    answered like an unknown key, and both cost what a wrong signature costs."""
    key, _, token = auth[:MAX_GRANT_BYTES].partition(":")
    if app is not None and app.secret_of(key) is not None:
        return None
    _grant_signature(NO_SECRET, token.rpartition(".")[0])
    return f"Invalid key in grant: '{key[:_MAX_KEY_CHARS]}' is not an enabled key of this app"


def _unsigned_fault(token: str, key: str) -> str:
    algorithm = algorithm_of(token) if token.count(".") == 2 else None
    if algorithm is None:
        return "auth must be the key, a colon and a JWT: three parts in base64url with dots between them"
    if algorithm != ALGORITHM:
        return f"its alg is {algorithm!r}; only {ALGORITHM} is accepted"
    return (
        f"its signature is wrong for the key '{key}'. The JWT's key is the hex HMAC SHA256 of 'redpoll-grant' under "
        "the secret, as text"
    )


# -- encrypted channels, tokens ------------------------------------------------------------------------------


def encryption_secret(master_key: bytes, channel: str) -> str:
    """The `shared_secret` of an encrypted channel, base64; `master_key` has 32 bytes
    (protocol/README.md "Encrypted channels")."""
    return base64.b64encode(hashlib.sha256(channel.encode() + master_key).digest()).decode()


def token_hash(token: str) -> str:
    """SHA-256 in lowercase hex: all that is stored of an app token. Tokens are random, so they need no salt."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


# -- HTTP --------------------------------------------------------------------------------------------------


def parse_query(query: str, plus_is_space: bool = False) -> Params:
    """The parameters of a raw query string, in order. `+` stays `+`, unless `plus_is_space`: libraries that sign
    unescaped values also send them so."""
    query = _utf8(query)
    if plus_is_space:
        query = query.replace("+", " ")
    escaped = "%" in query
    params: Params = []
    for field in query.split("&"):
        name, _, value = field.partition("=")
        if escaped:
            name, value = unquote(name), unquote(value)
        if field:
            params.append((name.lower(), value))
    return params


def check_size(query: str) -> None:
    """Refuse a raw query string with too many parameters, before anything parses it. Raises ApiError."""
    if query.count("&") >= MAX_QUERY_PARAMS:
        raise ApiError("bad_request", f"the query has more than {MAX_QUERY_PARAMS} parameters")


def check_query(
    app: App | None, method: str, path: str, query: str, body: bytes | None, now_s: float, prefix: str = PREFIX
) -> Params:
    """Verify a request that is signed in its query, and return its parameters. Raises ApiError, always 401.

    `app` is the app that the path names; None if it doesn't exist, which is answered like a wrong key, so that the
    answer doesn't reveal which ids exist. `path` and `query` are as requested, not decoded; `now_s` is Unix time;
    `prefix` is the part of the path that the PHP library doesn't sign. `body` must not be parsed before this returns;
    None if it was refused unread, and then its digest isn't checked.
    """
    params = parse_query(query)
    fields = dict(params)
    if len(fields) < len(params) or "[" in query or "%" in query:
        _refuse_repeats(params)
    key = fields.get("auth_key")
    stamp = fields.get("auth_timestamp")
    signature = fields.get("auth_signature")
    if key is None or stamp is None or signature is None or fields.get("auth_version") != "1.0":
        raise ApiError("unauthorized", _missing(fields))
    secret = app.secret_of(key) if app is not None else None
    secret_or_stand_in = secret or NO_SECRET
    claimed = signature.encode("utf-8", "replace")
    text = _request_text(method, path, params)
    read: Params | None = params
    if not _verify(secret_or_stand_in, text, claimed):
        layouts = _other_layouts(method, path, query, params, prefix)
        read = next((by for by, one in layouts if one != text and _verify(secret_or_stand_in, one, claimed)), None)
    if secret is None:
        raise ApiError("unauthorized", f"auth_key '{key[:_MAX_KEY_CHARS]}' is not an enabled key of this app")
    if read is None:
        raise ApiError("invalid_signature", _signature_fault(text, signature))
    _check_time(stamp, now_s)
    if body is not None:
        _check_body(fields.get("body_md5"), body)
    return _without_arrays(read) if "[" in query or "%" in query else read


def check_pair(app: App | None, key: str, secret: str) -> None:
    """Verify the headers `X-Service-Key` and `X-Service-Secret`. Raises ApiError, always 401."""
    expected = app.secret_of(key) if app is not None else None
    right = hmac.compare_digest((expected or NO_SECRET).encode(), secret.encode("utf-8", "replace"))
    if expected is None or not right:
        raise ApiError(
            "unauthorized",
            f"X-Service-Key '{key[:_MAX_KEY_CHARS]}' with this X-Service-Secret is not an enabled key of this app",
        )


def _request_text(method: str, path: str, params: Params) -> str:
    return f"{method}\n{path}\n{_joined(sorted(params))}"


def _joined(params: Params) -> str:
    return "&".join([f"{name}={value}" for name, value in params if name != "auth_signature"])


def _other_layouts(method: str, path: str, query: str, params: Params, prefix: str) -> Iterator[tuple[Params, str]]:
    """The strings that other libraries sign for the same request, each with the parameters as it reads them: the path
    without the prefix, or unescaped, repeated `name[]=` joined by commas as one `name=` or in the order sent, `+` read
    as a space (protocol/README.md "Request signing"). A query of many parameters has the first of these alone, because
    each layout takes time that nobody has signed for."""
    paths = [path]
    if prefix and path.startswith(prefix + "/"):
        paths.append(path[len(prefix) :])
    if len(params) > _MAX_LAYOUT_PARAMS:
        for signed_path in paths:
            yield params, _request_text(method, signed_path, params)
        return
    if "%" in path:
        paths += [plain for signed_path in paths if (plain := _unescaped(signed_path)) is not None]
    param_lists = [params]
    if "+" in query:
        param_lists.append(parse_query(query, plus_is_space=True))
    for param_list in param_lists:
        for layout in _array_layouts(param_list):
            for signed_path in paths:
                yield param_list, f"{method}\n{signed_path}\n{_joined(layout)}"


def _array_layouts(params: Params) -> Iterator[Params]:
    yield sorted(params)
    without_arrays = _without_arrays(params)
    if without_arrays is not params:
        yield sorted(params, key=lambda param: param[0])
        yield sorted(without_arrays)


def _without_arrays(params: Params) -> Params:
    """With `name[]=` or `name[0]=` as one `name`, joined by commas. Whichever was signed, it means the same."""
    if not any(name.endswith("]") for name, _ in params):
        return params
    joined: dict[str, str] = {}
    for name, value in params:
        bare = name.partition("[")[0]
        joined[bare] = f"{joined[bare]},{value}" if bare in joined else value
    return list(joined.items())


def _unescaped(path: str) -> str | None:
    """The path decoded, as libraries sign it that leave escaping to their HTTP client; None if no such client escapes
    so, or if as a text to sign it could be that of another path, or of a path and parameters."""
    if _NEEDLESS_ESCAPE(path):
        return None
    try:
        plain = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    return None if plain.count("/") != path.count("/") or "\n" in plain or unquote(plain) != plain else plain


def _refuse_repeats(params: Params) -> None:
    """With two values of one parameter it would be unclear which one was signed. `auth_signature[x]` counts as a
    repetition, because one of the layouts that libraries sign joins it to `auth_signature`, which isn't signed."""
    seen = set()
    for name, _ in params:
        bare, bracket, _ = name.partition("[")
        if bare in AUTH_NAMES:
            if bare in seen or bracket:
                raise ApiError("unauthorized", f"{bare} is given more than once, or with brackets")
            seen.add(bare)


def _missing(fields: dict[str, str]) -> str:
    for name in ("auth_key", "auth_timestamp", "auth_signature", "auth_version"):
        if name not in fields:
            return (
                f"no credentials: sign the query (its {name} is missing), send a bearer token, "
                "or send X-Service-Key and X-Service-Secret"
            )
    return "auth_version must be 1.0"


def _utf8(text: str) -> str:
    """Bytes that weren't UTF-8 arrive as lone surrogates, which can't be encoded into an answer: replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _signature_fault(text: str, signature: str) -> str:
    quoted = _utf8(text[:_MAX_QUOTED_CHARS]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return (
        f'Invalid signature: you should have sent HmacSHA256Hex("{quoted}", your_secret_key), '
        f'but you sent "{signature[:_MAX_KEY_CHARS]}"'
    )


def _check_time(stamp: str, now_s: float) -> None:
    if _SECONDS(stamp) is None:
        raise ApiError("timestamp_out_of_range", "auth_timestamp must be Unix time in whole seconds")
    ahead_s = int(stamp) - now_s
    if abs(ahead_s) > MAX_SKEW_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        raise ApiError(
            "timestamp_out_of_range",
            f"Timestamp expired: auth_timestamp {stamp} is {abs(ahead_s):.0f} s {way} the server's time "
            f"{now_s:.0f}; at most {MAX_SKEW_S} s are allowed",
        )


def _check_body(claimed: str | None, body: bytes) -> None:
    """Pusher's Python library sends the digest of an empty body with every GET; it is verified like any other."""
    if claimed is None:
        if body:
            raise ApiError("body_md5_mismatch", f"body_md5 is missing; the body has {len(body)} bytes")
        return
    actual = hashlib.md5(body, usedforsecurity=False).hexdigest().encode()
    if not hmac.compare_digest(actual, claimed.encode("utf-8", "replace")):
        raise ApiError(
            "body_md5_mismatch",
            f"body_md5 does not match the {len(body)} bytes received: a proxy may have changed the body",
        )
