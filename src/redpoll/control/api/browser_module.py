"""GET /api/v1/redpoll.js: a browser module that adds rewind, history and recovery to pusher-js.

static/redpoll.js documents what it does. It needs no credentials and may be loaded from pages of any origin.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Final

from redpoll.control.http.response import Response

if TYPE_CHECKING:
    from redpoll.control.http.request import Request

__all__ = ["BrowserModule"]

# Browsers check once an hour whether their copy is current, so an update reaches pages soon.
_HEADERS: Final = (
    b"Access-Control-Allow-Origin: *\r\n"
    b"Cross-Origin-Resource-Policy: cross-origin\r\n"
    b"Cache-Control: public, max-age=3600\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
)
_TYPE: Final = b"Content-Type: text/javascript; charset=utf-8\r\n"


class BrowserModule:
    """The handler. The file is read once, because it only changes with the installed version."""

    def __init__(self) -> None:
        self._script = resources.files("redpoll.control").joinpath("static/redpoll.js").read_bytes()
        self._tag = f'"{hashlib.sha256(self._script).hexdigest()[:16]}"'
        self._headers = _HEADERS + f"ETag: {self._tag}\r\n".encode()

    async def show(self, request: Request) -> Response:
        """Answers the script, or 304 if the client has this version."""
        return self.answer(request.headers.get("If-None-Match", ""))

    def answer(self, known: str) -> Response:
        """The same for the value of If-None-Match."""
        if self._tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(304, b"", self._headers)
        return Response(200, self._script, _TYPE + self._headers)
