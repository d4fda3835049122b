"""HTTP responses that the worker writes itself: errors in the API's format (protocol/README.md "Errors") and health."""

from __future__ import annotations

import functools
import secrets
import time
from email.utils import formatdate
from http import HTTPStatus

import msgspec

__all__ = [
    "ALIVE",
    "TOO_MANY_OF_ADDRESS",
    "alive_response",
    "closing",
    "error_response",
    "http_date",
    "upgrade_wanted",
]

# By path: these ask whether this process is alive, which doesn't depend on control. As control/observe/health.py
# answers.
ALIVE = {
    b"/": ("text/plain; charset=utf-8", b"OK"),
    b"/healthz": ("application/json", b'{"status":"ok"}'),
}
TOO_MANY_OF_ADDRESS = (
    "your address has as many requests without a right credential under way as this server allows; send the request "
    "again"
)


def alive_response(path: bytes) -> bytes:
    """The complete response to a request for one of ALIVE."""
    content_type, body = ALIVE[path]
    return _response(200, content_type, "", body)


def error_response(
    status: int, code: str, text: str, more_headers: str = "", *, keep_alive: bool = False, trace_id: str = ""
) -> bytes:
    """A complete response. `more_headers` are complete header lines, each with its CRLF. `trace_id` is one that they
    have; "": a new one."""
    if not trace_id:
        trace_id = secrets.token_hex(16)
        more_headers += f"X-Service-Trace-Id: {trace_id}\r\n"
    body = msgspec.json.encode({"error": text, "code": code, "status": status, "trace_id": trace_id})
    connection = "" if keep_alive else "Connection: close\r\n"
    return _response(status, "application/json", connection + more_headers, body)


def upgrade_wanted() -> bytes:
    """The complete response to a request for /app/KEY that is no upgrade."""
    text = "this is a WebSocket address; connect with an Upgrade"
    return error_response(426, "bad_request", text, "Upgrade: websocket\r\n")


def _response(status: int, content_type: str, more_headers: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {http_date(int(time.time()))}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more_headers}\r\n"
    )
    return head.encode() + body


@functools.lru_cache(maxsize=1)
def http_date(second: int) -> str:
    """For the header Date, which a server with a clock sends (RFC 9110 section 6.6.1). Formatted once a second."""
    return formatdate(second, usegmt=True)


def closing(response: bytes) -> bytes:
    """`response` with the header `Connection: close`."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"\r\nConnection: close" in head:
        return response
    head = head.replace(b"\r\nConnection: keep-alive", b"", 1)
    return head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + b"\r\n\r\n" + body
