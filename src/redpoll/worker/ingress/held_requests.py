"""Requests that the worker answers itself, and later: those of the HTTP fallback (worker/fallback)."""

from __future__ import annotations

from typing import Any, Final, Protocol

from redpoll.http.connection import HttpConnection, State
from redpoll.http.errors import closing
from redpoll.http.messages import CLOSES, CONTINUE, HEAD_ONLY, HTTP_1_0
from redpoll.http.reader import Fault, ParsedRequest, Phase
from redpoll.worker.hub.connection import Connection

__all__ = ["LATER", "HoldingConnection", "LocalRequests", "Waiting"]

# What `LocalRequests.answer` returns for a request that is answered later.
LATER: Final = b""


class Waiting(Protocol):
    """What waits for an answer that doesn't come from control. `ends_with_client`: the connection closes when its
    client sends no more."""

    @property
    def ends_with_client(self) -> bool: ...
    def left(self) -> None:
        """The connection is gone."""


class LocalRequests(Protocol):
    """Answers requests with /app/ in their target."""

    def answer(self, http: Any, request: ParsedRequest) -> bytes | None:
        """The answer, LATER, or None: it isn't for this. `http` is the connection."""


class HoldingConnection(HttpConnection[Connection]):
    """A connection whose request may wait for this worker. `sent_flags` and `sent_method` are those of the request that
    is under way, or was last."""

    # What has the request under way, if control hasn't.
    waiting: Waiting | None = None
    _sent_flags = 0
    _sent_method = b""

    def hold(self, waiting: Waiting, request: ParsedRequest) -> None:
        """`waiting` will answer, by `reply` or `finish`."""
        self.state = State.ANSWER
        self._sent_flags, self._sent_method = request.flags, request.method
        self.waiting = waiting

    def _answer_here(self, request: ParsedRequest) -> bytes | None:
        """As LocalRequests.answer."""
        raise NotImplementedError

    def refuse(self, fault: Fault) -> None:
        """Answer with an error, and read nothing more. A session hears of the xhr_send that is lost by this."""
        request = self._refused_request(fault.status) if fault.status == 503 else None
        answer = None if request is None else self._answer_here(request)
        if answer is None:
            super().refuse(fault)
        else:
            self.end(closing(answer))

    def refuse_first(self, data: bytes, fault: Fault) -> None:
        """There is no room for the connection. Only what came first is read, for `refuse`."""
        # Only requests of the HTTP fallback are answered here, and reading others would cost time when there is none.
        if b"/app/" in data:
            self._reader.read(data)
        self.refuse(fault)

    def _refused_request(self, status: int) -> ParsedRequest | None:
        """The request that is refused, if its head has come."""
        reader = self._reader
        if reader.phase is Phase.BODY:
            return reader.head_request(HEAD_ONLY | CLOSES, None, status)
        request = reader.requests[0] if reader.requests else None
        return request._replace(refusal=status) if isinstance(request, ParsedRequest) else None

    def read_no_more(self) -> None:
        """This request is the last of its connection: give back the memory of the reader."""
        self._reader.close()

    def reply(self, response: bytes) -> None:
        """The answer to what `hold` was called for."""
        self.waiting = None
        if self._sent_flags & (CLOSES | HTTP_1_0):
            self.end(closing(response))
        else:
            self.answered(self.authenticated, response)

    def finish(self, last: bytes) -> None:
        """The end of an answer that was written piece by piece; the connection closes."""
        self.waiting = None
        self.end(last)

    def let_body_in(self) -> None:
        """Read the body of the request whose head was passed on."""
        self.state = State.ANSWER
        self.answered(CONTINUE | self.authenticated, b"")

    def ended(self) -> bool:
        if self.waiting is not None and self.waiting.ends_with_client:
            return False
        return super().ended()

    def gone(self) -> None:
        waiting, self.waiting = self.waiting, None
        super().gone()
        if waiting is not None:
            waiting.left()
