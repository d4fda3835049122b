"""The requests by which Laravel's AI package broadcasts a model's answer, byte for byte. Not a test.

Made of what the sources of laravel/ai (Streaming/Events), laravel/framework (AnonymousEvent, PusherBroadcaster),
pusher-http-php 7.2.6 and Guzzle 7 do: one request for each event of the stream, over one connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from helpers.wire import Target

__all__ = ["answer_events", "php_json", "request"]


def php_json(value: Any) -> str:
    """As PHP's json_encode without flags: escaped slashes, and ASCII only."""
    return json.dumps(value, separators=(",", ":")).replace("/", "\\/")


def answer_events(pieces: Iterable[str], number: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and payloads of one answer whose text has these pieces."""
    invocation, message = str(UUID(int=number << 64 | 1)), str(UUID(int=number << 64 | 2))
    at = 0

    def event(type: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        nonlocal at
        at += 1
        head = {"id": str(UUID(int=number << 64 | at + 100)), "invocation_id": invocation, "type": type}
        return type, {**head, **fields}

    now = {"timestamp": 1_763_990_000}
    yield event("stream_start", provider="anthropic", model="claude", **now, metadata=None)
    yield event("text_start", message_id=message, **now)
    for piece in pieces:
        yield event("text_delta", message_id=message, delta=piece, **now)
    yield event("text_end", message_id=message, **now)
    usage = {"prompt_tokens": 12, "completion_tokens": at, "cache_write_input_tokens": 0}
    yield event("stream_end", reason="stop", usage=usage, **now)


def request(target: Target, channel: str, name: str, payload: dict[str, Any]) -> bytes:
    """One broadcast."""
    body = php_json({"name": name, "data": php_json(payload), "channels": [channel]}).encode()
    path = f"/apps/{target.app_id}/events"
    query = (
        f"auth_key={target.app_key}&auth_timestamp={int(time.time())}&auth_version=1.0"
        f"&body_md5={hashlib.md5(body).hexdigest()}"
    )
    signed = hmac.new(target.app_secret.encode(), f"POST\n{path}\n{query}".encode(), hashlib.sha256).hexdigest()
    head = (
        f"POST {path}?{query}&auth_signature={signed} HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{target.port}\r\n"
        "User-Agent: GuzzleHttp/7\r\n"
        "Content-Type: application/json\r\n"
        "X-Pusher-Library: pusher-http-php 7.2.6\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
