"""HTTP/1.x responses of the control plane: a status, header lines and a body, written to the socket in one piece.

Bodies are never streamed or compressed.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

__all__ = ["EMPTY_OBJECT", "JSON", "Dateline", "Response", "dateline", "header_line"]

JSON: Final = b"Content-Type: application/json\r\n"
EMPTY_OBJECT: Final = b"{}"

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
