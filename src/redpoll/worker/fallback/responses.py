"""The HTTP responses of the fallback, and what pages of other origins may read of them.

The fallback uses no cookies, so CORS protects nothing here: what counts is that a session of a foreign origin isn't
opened, and that its requests are refused. A page of an origin that isn't allowed may read the close code that says so,
as on a WebSocket.
"""

from __future__ import annotations

import time
from typing import Final

from redpoll.http.errors import error_response, http_date
from redpoll.protocol import frames
from redpoll.protocol.handshake import Refusal
from redpoll.worker.fallback.lines import OPEN, close_line, message_line

__all__ = ["cors_lines", "failed", "nothing", "poll", "preflight", "refused", "stream_head"]

# `no-transform` and X-Accel-Buffering: proxies must pass a stream on as it comes (nginx, `proxy_buffering`).
_HEAD: Final = (
    "HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Type: application/javascript; charset=UTF-8\r\n"
    "Cache-Control: no-store, no-transform\r\nX-Accel-Buffering: no\r\nX-Content-Type-Options: nosniff\r\n"
)


def cors_lines(origin: str | None) -> str:
    """Header lines that let a page of `origin` read the response."""
    return "" if origin is None else f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n"


def stream_head(cors: str, *, chunked: bool) -> bytes:
    """The head of a stream, which ends with its connection."""
    transfer = "Transfer-Encoding: chunked\r\n" if chunked else ""
    return f"{_HEAD % http_date(int(time.time()))}{cors}{transfer}Connection: close\r\n\r\n".encode()


def poll(text: bytes, cors: str) -> bytes:
    """A whole response with these lines."""
    return f"{_HEAD % http_date(int(time.time()))}{cors}Content-Length: {len(text)}\r\n\r\n".encode() + text


def refused(refusal: Refusal, cors: str) -> bytes:
    """What a client gets that isn't admitted: the error and the close that a WebSocket would get."""
    error = message_line(frames.error(refusal.code, refusal.message).decode())
    return poll(OPEN.text + error + close_line(refusal.code, refusal.message), cors)


def nothing(cors: str) -> bytes:
    """The answer to an xhr_send."""
    return f"HTTP/1.1 204 No Content\r\nDate: {http_date(int(time.time()))}\r\n{cors}\r\n".encode()


def preflight(cors: str) -> bytes:
    """The answer to OPTIONS."""
    return nothing(
        f"{cors}Access-Control-Allow-Methods: POST\r\nAccess-Control-Allow-Headers: Content-Type\r\n"
        "Access-Control-Max-Age: 7200\r\n"
    )


_TEXTS: Final = {
    400: ("bad_request", 'the body must be a JSON array of at most 100 strings, as ["{\\"event\\":…}"]'),
    403: ("forbidden", "pages of this origin may not use this app (allowed_origins)"),
    404: ("not_found", "no such session: open one by xhr_streaming or xhr, with a new name"),
    408: ("bad_request", "the body didn't come in time"),
    413: ("payload_too_large", "the body is larger than messages may be (max_message_bytes)"),
    503: ("unavailable", "this server isn't ready; connect again"),
}


def failed(status: int, cors: str, text: str = "") -> bytes:
    """An error of the API with this status."""
    code, usual = _TEXTS[status]
    retry = "Retry-After: 1\r\n" if status == 503 else ""
    return error_response(status, code, text or usual, retry + cors, keep_alive=status != 408)
