"""HTTP responses that the worker writes itself: errors in the API's format (protocol/README.md "Errors") and health."""

from __future__ import annotations

import secrets
from http import HTTPStatus

import msgspec

__all__ = ["ALIVE", "TOO_MANY_OF_ADDRESS", "closing", "error_response"]

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
# By path: these ask whether this process is alive, which doesn't depend on control. As control/health.py answers.
ALIVE = {
    b"/": _OK % (b"text/plain; charset=utf-8", 2, b"OK"),
    b"/healthz": _OK % (b"application/json", 15, b'{"status":"ok"}'),
}
TOO_MANY_OF_ADDRESS = (
    "your address has as many requests without a right credential under way as this server allows; send the request "
    "again"
)


def error_response(status: int, code: str, text: str, more_headers: str = "", *, keep_alive: bool = False) -> bytes:
    """A complete response. `more_headers` are complete header lines, each with its CRLF."""
    body = msgspec.json.encode({"error": text, "code": code, "status": status, "trace_id": secrets.token_hex(16)})
    connection = "" if keep_alive else "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{connection}{more_headers}\r\n"
    )
    return head.encode() + body


def closing(response: bytes) -> bytes:
    """`response` with the header `Connection: close`."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"\r\nConnection: close" in head:
        return response
    head = head.replace(b"\r\nConnection: keep-alive", b"", 1)
    return head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + b"\r\n\r\n" + body
