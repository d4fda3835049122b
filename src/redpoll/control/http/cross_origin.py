"""Lets pages of other origins read an answer (protocol/README.md "CORS")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from redpoll.control.http.response import Response, header_line
from redpoll.protocol.handshake import origin_allowed

if TYPE_CHECKING:
    from redpoll.protocol.apps import App

__all__ = ["allowed_to_read", "preflight"]

_VARY: Final = b"Vary: Origin\r\n"
_PREFLIGHT: Final = b"Access-Control-Allow-Methods: %b\r\nAccess-Control-Max-Age: 600\r\n"
_EXPOSED: Final = b"Access-Control-Expose-Headers: X-Service-Trace-Id\r\n"


def allowed_to_read(origin: str | None, app: App | None) -> bytes:
    """The header lines of an answer that pages of the app's allowed origins may read. An unknown app is treated like
    one that allows every origin, so that the headers don't show which ids exist."""
    if origin is None or not origin.isascii():
        return _VARY
    if app is not None and not origin_allowed(origin, app.allowed_origins):
        return _VARY
    return header_line("Access-Control-Allow-Origin", origin) + _EXPOSED + _VARY


def preflight(headers: bytes, wanted: str, methods: bytes = b"POST") -> Response:
    """The answer to a browser's OPTIONS. `headers` are those of `allowed_to_read`; `wanted` is the value of
    Access-Control-Request-Headers."""
    if b"Access-Control-Allow-Origin" in headers:
        headers += _PREFLIGHT % methods
        if wanted and wanted.isascii():
            headers += header_line("Access-Control-Allow-Headers", wanted)
    return Response(204, b"", headers)
