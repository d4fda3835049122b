"""A client's request that waits for lines: a stream or a poll, on an HTTP connection of this worker.

A session writes to its outlet. If the session is in another worker, that worker has an outlet whose lines come here by
way of Redis (relay.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from redpoll.http.messages import HTTP_1_0
from redpoll.worker.fallback import responses
from redpoll.worker.fallback.lines import PRELUDE, Lines

if TYPE_CHECKING:
    from redpoll.worker.ingress.http_requests import PublicConnection

__all__ = ["LineRequest", "Outlet", "PollRequest", "Request", "StreamRequest"]


class Outlet(Protocol):
    """Where a session writes. `polls`: it takes what comes in one pass of the loop, and is `ended` then."""

    @property
    def polls(self) -> bool: ...
    def begin(self) -> None:
        """The session is there: lines may follow."""

    def write(self, lines: Lines) -> None: ...
    def end(self) -> None:
        """Nothing more comes."""


def _nothing() -> None:
    pass


class Request:
    """A request of `http` that is answered later. `on_left` is called once if its client goes before that."""

    ends_with_client = False

    __slots__ = ("cors", "http", "on_left", "open")

    def __init__(self, http: PublicConnection, cors: str) -> None:
        self.http = http
        self.cors = cors
        self.on_left: Callable[[], None] = _nothing
        # Its client is there, and waits.
        self.open = True

    def left(self) -> None:
        """The connection is gone."""
        self.open = False
        then, self.on_left = self.on_left, _nothing
        then()

    def refuse(self, response: bytes) -> None:
        """Answer otherwise. Only before `write`."""
        if self.open:
            self.open = False
            self.on_left = _nothing
            self.http.reply(response)


class LineRequest(Request):
    """A stream or poll. When its client sends no more, nobody would read the answer."""

    ends_with_client = True
    polls = False

    __slots__ = ()

    def begin(self) -> None:
        if self.open:
            self.http.admitted()

    def write(self, lines: Lines) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class StreamRequest(LineRequest):
    """The response has no end: each line is sent as it comes."""

    __slots__ = ("_chunked",)

    def __init__(self, http: PublicConnection, cors: str, flags: int) -> None:
        super().__init__(http, cors)
        # nginx speaks HTTP/1.0 to its upstreams, unless it is configured otherwise.
        self._chunked = not flags & HTTP_1_0

    def begin(self) -> None:
        if self.open:
            super().begin()
            self.http.read_no_more()
            head = responses.stream_head(self.cors, chunked=self._chunked)
            self.http.stream.write_http(head + (PRELUDE.chunk if self._chunked else PRELUDE.text))

    def write(self, lines: Lines) -> None:
        if self.open and lines.text:
            self.http.stream.write_http(lines.chunk if self._chunked else lines.text)

    def end(self) -> None:
        if self.open:
            self.open = False
            self.on_left = _nothing
            self.http.finish(b"0\r\n\r\n" if self._chunked else b"")


class PollRequest(LineRequest):
    """The response has the lines of one pass of the loop."""

    polls = True

    __slots__ = ("_text",)

    def __init__(self, http: PublicConnection, cors: str) -> None:
        super().__init__(http, cors)
        self._text = b""

    def write(self, lines: Lines) -> None:
        self._text = self._text + lines.text if self._text else lines.text

    def end(self) -> None:
        self.refuse(responses.poll(self._text, self.cors))
