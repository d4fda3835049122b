"""HTTP/1.x responses of the control plane: a status, header lines and a body, written to the socket in one piece.

Bodies are never streamed or compressed.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final

import msgspec

from redpoll.protocol.errors import ApiError

__all__ = [
    "EMPTY_OBJECT",
    "JSON",
    "TRACE_HEAD",
    "Dateline",
    "Response",
    "dateline",
    "error_response",
    "header_line",
]

JSON: Final = b"Content-Type: application/json\r\n"
EMPTY_OBJECT: Final = b"{}"
_RETRY_AFTER: Final = b"Retry-After: 1\r\n"
# RFC 9110 section 15.5.2 requires a challenge on every 401. Bearer (RFC 6750) is our only registered scheme.
_CHALLENGES: Final = {
    "token_expired": b'WWW-Authenticate: Bearer error="invalid_token", error_description="expired"\r\n',
    "token_revoked": b'WWW-Authenticate: Bearer error="invalid_token", error_description="revoked"\r\n',
    "insufficient_scope": b'WWW-Authenticate: Bearer error="insufficient_scope"\r\n',
}
_CHALLENGE: Final = b"WWW-Authenticate: Bearer\r\n"
TRACE_HEAD: Final = JSON + b"X-Service-Trace-Id: "

_encode: Final = msgspec.json.Encoder().encode
_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WITHOUT_BODY: Final = frozenset({204, 304})


class Dateline:
    """The line of the Date header (RFC 9110 section 6.6.1). `tick()` renders it, once a second."""

    def __init__(self) -> None:
        self.line = b""
        self.tick()

    def tick(self) -> None:
        self.line = f"Date: {formatdate(time.time(), usegmt=True)}\r\n".encode()


# One per process. The janitor calls its `tick()`.
dateline: Final = Dateline()


def header_line(name: str, value: str) -> bytes:
    """One header line. Raises ValueError if `value` has a line break, which would start another header."""
    if "\r" in value or "\n" in value:
        raise ValueError(f"a line break in header {name}")
    return f"{name}: {value}\r\n".encode("latin-1")


class Response:
    """One response. `headers` are complete lines (`header_line`), without Content-Length, Date and Connection.

    If `keep_alive` is False the connection closes after the response, whatever the client asked for.
    """

    __slots__ = ("body", "headers", "keep_alive", "status")

    def __init__(self, status: int, body: bytes, headers: bytes = JSON, *, keep_alive: bool = True) -> None:
        self.status = status
        self.body = body
        self.headers = headers
        self.keep_alive = keep_alive

    def render(self, method: str, *, http_1_0: bool = False) -> bytes:
        """The bytes of the response to a request with `method`. `http_1_0`: the client uses HTTP/1.0."""
        if not self.keep_alive:
            connection = b"Connection: close\r\n"
        elif http_1_0:
            connection = b"Connection: keep-alive\r\n"
        else:
            connection = b""
        if self.status in _WITHOUT_BODY:
            return b"%b%b%b%b\r\n" % (_STATUS_LINES[self.status], dateline.line, self.headers, connection)
        return b"%b%b%b%bContent-Length: %d\r\n\r\n%b" % (
            _STATUS_LINES[self.status],
            dateline.line,
            self.headers,
            connection,
            len(self.body),
            b"" if method == "HEAD" else self.body,
        )


def error_response(error: ApiError, trace_id: str, status: int = 0) -> Response:
    """An error response (protocol/README.md "Errors"): `{"error", "code", "status", "trace_id"}`.

    503 has a Retry-After header, 401 a WWW-Authenticate header. `status`, if not 0, replaces the status of the error's
    code.
    """
    body: dict[str, Any] = error.body(trace_id)
    body["status"] = status = status or error.status
    if not body["error"].isascii():
        # The text may quote the client's bytes, which need not be UTF-8.
        body["error"] = body["error"].encode("utf-8", "replace").decode()
    more = _RETRY_AFTER if status == 503 else _CHALLENGES.get(error.code, _CHALLENGE if status == 401 else b"")
    return Response(status, _encode(body), b"%b%b\r\n%b" % (TRACE_HEAD, trace_id.encode(), more))
