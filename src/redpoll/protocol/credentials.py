"""Which credential of an HTTP request counts, and the app that it opens (protocol/README.md "HTTP API").

If a request has several, only the first of these counts: a bearer token, the header pair, the signature in the query.
Signatures are checked in `auth`, tokens in `tokens`.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.protocol.tokens import MANAGE, Token, fault_of_token

__all__ = [
    "Grant",
    "Records",
    "Signed",
    "bearer_of",
    "check_admitted",
    "check_uncompressed",
    "granted",
    "has_pair",
    "has_token",
    "key_of",
    "manager",
]

# What a signature covers: method, path and query as requested, and the body; None if the body was refused unread.
Signed = tuple[str, str, str, bytes | None]


class Records(Protocol):
    """Apps by id and by key, tokens by their hash."""

    @property
    def apps(self) -> Mapping[str, App]: ...
    @property
    def by_key(self) -> Mapping[str, App]: ...
    @property
    def tokens(self) -> Mapping[str, Token]: ...


class Grant(NamedTuple):
    """What a valid credential opens. `params` are those of the query; `token` is None if it was another credential."""

    app: App
    params: auth.Params
    token: Token | None = None


def granted(
    records: Records,
    headers: Mapping[str, str],
    signed: Signed,
    scope: str,
    app_id: str | None,
    now_s: float,
    prefix: str = auth.PREFIX,
) -> Grant:
    """The grant of a request for `scope` at Unix time `now_s`. Raises ApiError: 401, or what `fault_of_token` says.

    `app_id` is the app that the path names; None on paths without an app, which belong to the app of the credential.
    `headers` have the names of http/messages.FIELDS. `prefix` is as in `auth.check_query`. An unknown app gets the same
    answer as a wrong key, so that clients can't find out which ids exist; only a token for every app gets 404.
    """
    method, path, query, body = signed
    if has_token(headers):
        return _of_token(records, headers, query, scope, app_id, now_s)
    app: App | None
    if has_pair(headers):
        key = headers.get("X-Service-Key", "")
        app = records.by_key.get(key) if app_id is None else records.apps.get(app_id)
        auth.check_pair(app, key, headers.get("X-Service-Secret", ""))
        params = auth.parse_query(query)
    else:
        # If auth_key is repeated, any of its values will do: check_query refuses the request.
        if app_id is None:
            app = records.by_key.get(dict(auth.parse_query(query)).get("auth_key", ""))
        else:
            app = records.apps.get(app_id)
        params = auth.check_query(app, method, path, query, body, now_s, prefix)
    assert app is not None
    return Grant(app, params)


def manager(records: Records, headers: Mapping[str, str], now_s: float) -> Token:
    """The token of a request that manages apps at Unix time `now_s`. Only a bearer token with the scope `manage`
    counts; a credential of an app opens none of these paths. Raises ApiError: 401, or 403 for another scope."""
    if not has_token(headers):
        raise ApiError("unauthorized", "this path needs a bearer token with the scope manage")
    token = records.tokens.get(auth.token_hash(bearer_of(headers)))
    fault = fault_of_token(token, MANAGE, None, now_s)
    if fault is not None:
        raise fault
    assert token is not None
    return token


def check_admitted(app: App, headers: Mapping[str, str]) -> None:
    """Refuse a request with a right credential: the app is disabled, or the body is compressed. Raises ApiError."""
    if not app.enabled:
        raise ApiError("app_disabled", "this app is disabled")
    check_uncompressed(headers)


def check_uncompressed(headers: Mapping[str, str]) -> None:
    """Refuse a compressed body. Raises ApiError."""
    if "Content-Encoding" in headers and headers["Content-Encoding"].lower() != "identity":
        raise ApiError("unsupported_media_type", "the body is compressed; send it without Content-Encoding")


def key_of(app: App, token: Token | None, headers: Mapping[str, str], params: auth.Params) -> str:
    """The app key of an authenticated request, from its headers or its query, of which the last value counts. For a
    token it is the key that the server signs with; empty if the app has no enabled key."""
    if token is not None:
        signing = app.signing_key()
        return "" if signing is None else signing.key
    key = headers.get("X-Service-Key")
    return dict(params).get("auth_key", "") if key is None else key


def has_token(headers: Mapping[str, str]) -> bool:
    return "Authorization" in headers and headers["Authorization"].partition(" ")[0].lower() == "bearer"


def bearer_of(headers: Mapping[str, str]) -> str:
    """What follows `Bearer`, if `has_token`."""
    return headers["Authorization"].partition(" ")[2].strip()


def has_pair(headers: Mapping[str, str]) -> bool:
    return "X-Service-Key" in headers or "X-Service-Secret" in headers


def _of_token(
    records: Records, headers: Mapping[str, str], query: str, scope: str, app_id: str | None, now_s: float
) -> Grant:
    token = records.tokens.get(auth.token_hash(bearer_of(headers)))
    if app_id is None:
        app_id = (token.app_id if token is not None else None) or ""
    fault = fault_of_token(token, scope, app_id, now_s)
    if fault is not None:
        raise fault
    if not app_id:
        raise ApiError("bad_request", "this token is for every app; name the app in the path: /apps/ID/…")
    app = records.apps.get(app_id)
    if app is None:
        raise ApiError("unknown_app", "there is no app with this id")
    return Grant(app, auth.parse_query(query), token)
