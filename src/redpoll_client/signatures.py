"""Signatures of subscriptions, sign-ins and requests, as plain functions for every framework.

All are HMAC-SHA256 in lowercase hex, made with the app's secret: protocol/README.md "Authentication of channels" and
"Request signing".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from redpoll_client.encryption import channel_key
from redpoll_client.names import check_channel, check_signed_in_id, check_socket_id, is_encrypted

__all__ = ["from_json", "hex_hmac", "sign_channel", "sign_request", "sign_user", "to_json"]

# `json.dumps` makes an encoder for each call, which takes longer than to encode a usual event.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_decode_at_start = json.JSONDecoder().raw_decode
# Keys that need no escapes in a query: all that servers generate.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+").fullmatch


def hex_hmac(secret: str, message: bytes) -> str:
    """HMAC-SHA256 of the message in lowercase hex."""
    return hmac.digest(secret.encode(), message, "sha256").hex()


def to_json(value: object, encoder: type[json.JSONEncoder] | None = None) -> str:
    """JSON without spaces. Raises TypeError for what JSON can't express, ValueError for NaN and infinities, which
    browsers can't parse."""
    if encoder is None:
        return _encode(value)
    return encoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(value)


def from_json(text: str) -> Any:
    """The document of a JSON text. Raises ValueError and RecursionError as `json.loads`, which takes twice as long for
    a usual frame: it looks for spaces around it."""
    try:
        value, end = _decode_at_start(text)
    except ValueError:
        return json.loads(text)
    return value if end == len(text) else json.loads(text)


def sign_channel(
    key: str,
    secret: str,
    socket_id: str,
    channel: str,
    member: Mapping[str, Any] | str | None = None,
    *,
    master_key: bytes | None = None,
    json_encoder: type[json.JSONEncoder] | None = None,
) -> dict[str, str]:
    """What an auth endpoint answers when `socket_id` may subscribe to `channel`.

    `member` is required on presence channels: `user_id` (a string or an integer) and optionally `user_info`; a string
    is sent as it is. `master_key` (32 bytes) is required on encrypted channels. The result has `auth` (`KEY:HEX`), with
    a member `channel_data`, and on encrypted channels `shared_secret`. Raises ValueError for a name, an id or a member
    that the server would refuse.

    Whether the user may join is for the caller to decide first: anyone who has the result can join.
    """
    check_socket_id(socket_id)
    check_channel(channel)
    signed = f"{socket_id}:{channel}"
    result = {}
    if member is not None:
        if not isinstance(member, str):
            _check_member(member)
            member = to_json(dict(member), json_encoder)
        signed += f":{member}"
        result["channel_data"] = member
    elif channel.startswith("presence-"):
        raise ValueError(f"{channel} is a presence channel: its subscribers need a member with user_id")
    if is_encrypted(channel):
        if master_key is None:
            raise ValueError(f"{channel} is encrypted: the master key is needed (encryption_master_key_base64)")
        result["shared_secret"] = base64.b64encode(channel_key(channel, master_key)).decode()
    return {"auth": f"{key}:{hex_hmac(secret, signed.encode())}", **result}


def sign_user(
    key: str,
    secret: str,
    socket_id: str,
    user: Mapping[str, Any],
    *,
    json_encoder: type[json.JSONEncoder] | None = None,
) -> dict[str, str]:
    """What a sign-in endpoint answers when `socket_id` is the connection of `user`.

    `user` has `id`, a string of 1 to 128 characters, and optionally `user_info` and `watchlist` (up to 100 ids). The
    result has `auth` and `user_data`. Raises ValueError for an id that the server would refuse.
    """
    check_socket_id(socket_id)
    check_signed_in_id(user.get("id"))
    user_data = to_json(dict(user), json_encoder)
    signature = hex_hmac(secret, f"{socket_id}::user::{user_data}".encode())
    return {"auth": f"{key}:{signature}", "user_data": user_data}


def sign_request(
    key: str, secret: str, method: str, path: str, params: Mapping[str, str], body: bytes, now_s: int
) -> str:
    """The query of a signed request: `params`, `auth_key`, `auth_timestamp` (Unix seconds), `auth_version`, with a body
    `body_md5`, and `auth_signature`. `path` is as it will be requested, with its escapes; `params` are not escaped.
    """
    fields = [("auth_key", key), ("auth_timestamp", str(now_s)), ("auth_version", "1.0")]
    if body:
        fields.append(("body_md5", hashlib.md5(body, usedforsecurity=False).hexdigest()))
    if params:
        fields = sorted([*fields, *params.items()])
    # Signed are the plain values, sent are the escaped ones.
    text = "&".join([f"{name}={value}" for name, value in fields])
    signature = hex_hmac(secret, f"{method}\n{path}\n{text}".encode())
    query = text if not params and _PLAIN(key) else urlencode(fields, quote_via=quote)
    return f"{query}&auth_signature={signature}"


def _check_member(member: Mapping[str, Any]) -> None:
    user_id = member.get("user_id")
    valid = isinstance(user_id, str | int) and not isinstance(user_id, bool)
    if not valid or not 1 <= len(str(user_id)) <= 128:
        raise ValueError(f"user_id must be a string or integer of 1 to 128 characters, not {user_id!r:.80}")
