"""GET /api/v1/redpoll.js: the module for pages, which adds rewind, history and recovery to a stock pusher-js.

What it does stands in it (static/redpoll.js). Anybody may load it, from a page of any origin.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

from redpoll.control.request import Request
from redpoll.control.response import Response

__all__ = ["BrowserModule"]

# An hour: after an update of the server pages have the new one soon, by asking whether theirs is still it.
_HEADERS: Final = (
    b"Access-Control-Allow-Origin: *\r\n"
    b"Cross-Origin-Resource-Policy: cross-origin\r\n"
    b"Cache-Control: public, max-age=3600\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
)
_TYPE: Final = b"Content-Type: text/javascript; charset=utf-8\r\n"


class BrowserModule:
    """The handler. The file is read once: it changes with the installed version only."""

    def __init__(self) -> None:
        self._script = resources.files("redpoll.control").joinpath("static/redpoll.js").read_bytes()
        self._tag = f'"{hashlib.sha256(self._script).hexdigest()[:16]}"'
        self._headers = _HEADERS + f"ETag: {self._tag}\r\n".encode()

    async def show(self, call: Request) -> Response:
        """The script; 304 to who has this very one."""
        known = (tag.strip().removeprefix("W/") for tag in call.headers.get("If-None-Match", "").split(","))
        if self._tag in known:
            return Response(304, b"", self._headers)
        return Response(200, self._script, _TYPE + self._headers)
