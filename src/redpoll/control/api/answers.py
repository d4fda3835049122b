"""Parts of the API's answers that depend on their arguments alone (protocol/README.md "HTTP API").

No I/O: `redpoll.testing` answers with them too.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

import msgspec

from redpoll.control.http.schemas import Attributes, AuthResponse
from redpoll.protocol.apps import App
from redpoll.protocol.auth import AUTH_NAMES, Params, encryption_secret, sign_channel
from redpoll.protocol.channels import Kind, is_encrypted, kind_of
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import AuthRequest

__all__ = [
    "DEFAULT_PAGE",
    "MAX_PAGE",
    "attributes_of",
    "cursor_of",
    "fingerprint",
    "idempotency_conflict",
    "page_limit",
    "parse_cursor",
    "signed",
]

# Channels of a page.
DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1_000

_encode: Final = msgspec.json.Encoder().encode


def attributes_of(
    channel: str, info: tuple[str, ...], subscriptions: Callable[[], int], users: Callable[[], int]
) -> Attributes:
    """The wanted attributes, without those that don't apply to the channel's kind."""
    kind, attributes = kind_of(channel), Attributes()
    if "subscription_count" in info and kind is not Kind.USER:
        attributes.subscription_count = subscriptions()
    if "user_count" in info and kind is Kind.PRESENCE:
        attributes.user_count = users()
    return attributes


def signed(asked: AuthRequest, app: App, key: str, master_key: bytes | None) -> AuthResponse:
    """The signature of a subscription by `key` of the app. `master_key`: 32 bytes, for the secrets of encrypted
    channels, or None. Raises ApiError if the app has no such enabled key."""
    secret, channel = app.secret_of(key), asked.channel_name
    if secret is None:
        raise ApiError("app_disabled", "all keys of this app are disabled; enable one to sign subscriptions")
    # Only the signature of a presence channel covers member data. A page may send it with every request; pusher-js
    # forwards to the server only what this response has.
    channel_data = asked.channel_data if kind_of(channel) is Kind.PRESENCE else None
    body = AuthResponse(f"{key}:{sign_channel(secret, asked.socket_id, channel, channel_data)}")
    if channel_data is not None:
        body.channel_data = channel_data
    if master_key is not None and is_encrypted(channel):
        body.shared_secret = encryption_secret(master_key, channel)
    return body


def fingerprint(is_batch: bool, params: Params, body: bytes) -> bytes:
    """What identifies a publish beside its correlation_id (protocol/README.md "Idempotency"): equal for a repeated
    request, whatever its path prefix, signature and credential. `params` is its query."""
    query = sorted((name, value) for name, value in params if name not in AUTH_NAMES)
    return b"%b\n%b\n%b" % (b"batch_events" if is_batch else b"events", _encode(query), body)


def idempotency_conflict() -> ApiError:
    """The answer to a publish with the correlation_id of another one."""
    return ApiError(
        "idempotency_conflict", "nothing was published: another request used this correlation_id within the last 120 s"
    )


def page_limit(text: str | None) -> int:
    """The query parameter `limit`. Raises ApiError."""
    if text is None:
        return DEFAULT_PAGE
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise ApiError("bad_request", f"limit must be a number from 1 to {MAX_PAGE}, not {text[:40]!r}")
    return limit


def cursor_of(shard: int, name: str) -> str:
    """`SHARD:NAME` in base64url, which needs no escapes in a URL."""
    return base64.urlsafe_b64encode(f"{shard}:{name}".encode()).decode().rstrip("=")


def parse_cursor(cursor: str | None, shards: int) -> tuple[int, str] | None:
    """What `cursor_of` made; None without a cursor. Raises ApiError."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        text = ""
    shard, colon, name = text.partition(":")
    if not colon or not (shard.isascii() and shard.isdecimal() and len(shard) <= 2 and int(shard) < shards):
        raise ApiError("invalid_cursor", "cursor must be the `next` of an earlier answer")
    return int(shard), name
