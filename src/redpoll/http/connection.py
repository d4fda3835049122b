"""One HTTP connection of a client: bytes in, requests to its server, answers out in the order of the requests.

The reader (reader.py) makes requests of bytes; this class decides when the next one is passed on, what is waited for,
and when reading pauses. One request is under way at a time. A large body isn't read before the server has checked the
head. `server.py` has what all connections share; workers add their rules about strangers
(worker/ingress/http_requests.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Generic

from redpoll.http.errors import closing
from redpoll.http.messages import AUTHENTICATED, CLOSES, CONTINUE, HEAD_ONLY, LAST
from redpoll.http.reader import PIECE_BYTES, Fault, ParsedRequest, Phase, RequestReader
from redpoll.http.server import HttpServer, S
from redpoll.loop.writable import WRITABLE_BELOW_BYTES

__all__ = ["CONTINUE_LINE", "HttpConnection", "State"]

# How many requests in a row may be answered at once. A client may send thousands in one packet.
_MAX_ANSWERS_IN_A_ROW: Final = 16
CONTINUE_LINE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class State(Enum):
    """What a connection waits for."""

    IDLE = "the next request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    ANSWER = "the answer to a request, or to its head"
    UNREAD = "the client, to read answers"
    TURN = "its turn among other connections"
    ENDED = "the end: nothing more is read"


# Looking a member up in its class takes ten times as long.
_IDLE, _HEAD, _BODY, _ANSWER, _UNREAD, _TURN, _ENDED = State
_BETWEEN, _IN_HEAD, _IN_BODY, _ = Phase


class HttpConnection(Generic[S]):
    """Reads requests from `stream`, whose client is at `peer`, and answers them. `secure` is SECURE or 0.

    `authenticated`: AUTHENTICATED if the last answer says that its request had a right credential of an app, else 0.
    """

    # Whether an Upgrade to a WebSocket is one.
    websockets = False

    # Requests that were answered at once, since other clients had their turn.
    _answers_in_a_row = 0
    # The server has been asked whether the body may be read.
    _asked = False
    # Bytes of the body that count as being read.
    _counted_bytes = 0

    def __init__(self, server: HttpServer[S, Any], stream: S, peer: str, secure: int) -> None:
        self.stream = stream
        self.peer = peer
        self.state = _IDLE
        self.authenticated = 0
        self._server = server
        # Bytes that wait to be parsed, because a request before them is under way.
        self._backlog = b""
        # The client has closed its side, with requests to answer.
        self._client_ended = False
        # The idle connections of its kind.
        self._idle = server.idle
        self._reader = RequestReader(server.table, secure, websockets=self.websockets)

    # -- what a server may decide otherwise ----------------------------------------------------------------

    def _begin_whole(self, data: bytes) -> bool:
        """Whether these first bytes of a request are all of it, and it was passed on."""
        return False

    def _send(self, request: ParsedRequest) -> None:
        """Pass a request on; or write its answer at once, and `end` if it is the last."""
        self.state = _ANSWER
        self._server.submit(self, request)

    def _must_ask(self) -> bool:
        """Whether the server must check the head before the rest of its body is read."""
        return True

    def _has_place(self) -> bool:
        """Whether the client may send the rest of a head or body. If not, the request is refused here."""
        return True

    def _max_reading_bytes(self) -> int:
        """Of all bodies that are being read; beyond it, this one is refused."""
        return self._server.max_reading_bytes

    def _judge(self, authenticated: int) -> None:
        """The caller has just authenticated, or no longer does."""
        self.authenticated = authenticated

    def _rest(self) -> None:
        """There is nothing to do until the next request."""
        self.state = _IDLE
        self._idle[self.stream] = None

    def _upgrade(self, received: bytes) -> None:
        """A request asks for a WebSocket: `received` is its head and what follows."""
        raise NotImplementedError

    # -- bytes in ------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """The next bytes of the client."""
        state = self.state
        if state is _IDLE:
            self._idle.pop(self.stream, None)
            # While too much is unread, `_go_on` decides when the request is passed on.
            if self.stream.unsent_bytes >= WRITABLE_BELOW_BYTES or not self._begin_whole(data):
                self._read(data)
        elif state is _HEAD or state is _BODY:
            self._read(data)
        elif state is not _ENDED:
            self._backlog += data
            self.stream.pause_reading()

    def ended(self) -> bool:
        """The client sends no more. True: there are requests to answer before the connection closes."""
        self._client_ended = self.state in (_ANSWER, _UNREAD, _TURN)
        return self._client_ended

    def _read(self, data: bytes) -> None:
        """Read up to the end of a request; what is left is read after its answer."""
        self._backlog = self._reader.read(data) + self._backlog
        if self._counted_bytes and self._reader.requests:
            self._uncount_body()
        self._go_on()

    # -- bodies that come later than their head ------------------------------------------------------------

    def _wait_for_body(self) -> None:
        reader = self._reader
        self._count_body()
        if reader.fault is not None:
            self.refuse(reader.fault)
        elif reader.is_too_large:
            self._refuse_body(413)
        elif self._backlog:
            self._go_on_later()
        elif not self._asked and self._must_ask():
            self._asked = True
            self.stream.pause_reading()
            self._send(reader.head_request(HEAD_ONLY, reader.head.announced))
        elif self._has_place():
            if reader.head.expects and not self._asked and self.state is not _BODY and not reader.size:
                self.stream.write_http(CONTINUE_LINE)
            self._wait(_BODY, self._server.body_timeout_s)

    def _count_body(self) -> None:
        server, reader = self._server, self._reader
        server.reading_bytes += reader.body_bytes - self._counted_bytes
        self._counted_bytes = reader.body_bytes
        if server.reading_bytes > self._max_reading_bytes():
            server.limit_reached("bodies")
            text = "this server is reading too many request bodies; send the request again"
            reader.fault = Fault(503, "unavailable", text)

    def _uncount_body(self) -> None:
        self._server.reading_bytes -= self._counted_bytes
        self._counted_bytes = 0

    def _refuse_body(self, status: int) -> None:
        """Stop reading the body. The server sends the refusal, because it authenticates and logs the request."""
        self._reader.drop_body()
        self._uncount_body()
        self.stream.pause_reading()
        self._send(self._reader.head_request(HEAD_ONLY | CLOSES, None, status))

    # -- requests and answers ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next step: pass a whole request on, refuse, have the backlog read, or read on."""
        stream, reader = self.stream, self._reader
        while reader.requests:
            # A client must read the answers before its next request is executed.
            if stream.unsent_bytes >= WRITABLE_BELOW_BYTES:
                self.state = _UNREAD
                self._server.when_read(stream, self._client_has_read)
                return
            if self._answers_in_a_row == _MAX_ANSWERS_IN_A_ROW:
                self._go_on_later()
                return
            request = reader.requests.pop(0)
            self.state = _IDLE
            self._asked = False
            if isinstance(request, bytes):
                self._upgrade(request + self._backlog)
                return
            self._send(request)
            if self.state is not _IDLE:
                return
            self._answers_in_a_row += 1
        if reader.fault is not None:
            self.refuse(reader.fault)
        elif reader.phase is _IN_BODY:
            self._wait_for_body()
        elif self._backlog:
            self._go_on_later()
        elif self._client_ended:
            self.end()
        elif reader.phase is _IN_HEAD:
            if self._has_place():
                self._wait(_HEAD, self._server.head_timeout_s)
        elif self._server.draining:
            self.end()
        else:
            self._rest()
            stream.resume_reading()

    def _wait(self, state: State, timeout_s: float) -> None:
        """Read on. The deadline is for a whole head or body, however many pieces it comes in."""
        self.stream.resume_reading()
        if self.state is not state:
            self.state = state
            self._server.wait(self.stream, timeout_s)

    def _go_on_later(self) -> None:
        """Other clients have their turn first: there may be thousands of requests to read or to answer here."""
        self.state = _TURN
        self.stream.pause_reading()
        self._server.later(self._resume)

    def _resume(self) -> None:
        self._answers_in_a_row = 0
        if self.state is not _TURN or not self.stream.is_http:
            return
        if len(self._backlog) <= PIECE_BYTES:
            # Not while there is more: a read may bring more than the parser takes at once.
            self.stream.resume_reading()
        if self._reader.requests or not self._backlog:
            self._go_on()
        else:
            data, self._backlog = self._backlog, b""
            self._read(data)

    def answered(self, flags: int, response: bytes) -> None:
        """The server has answered the request, or allows its body to be read; `flags` as in messages.py."""
        if flags & AUTHENTICATED != self.authenticated:
            self._judge(flags & AUTHENTICATED)
        reader = self._reader
        if not flags & ~AUTHENTICATED and not self._server.draining:
            self.stream.write_http(response)
            if reader.requests or reader.phase is not _BETWEEN or self._backlog or reader.fault or self._client_ended:
                self._go_on()
            else:
                self._rest()
                self.stream.resume_reading()
        elif flags & CONTINUE:
            if reader.head.expects and not reader.size:
                self.stream.write_http(CONTINUE_LINE)
            self._go_on()
        elif flags & LAST:
            self.end(response)
        else:
            self.end(closing(response))

    def _client_has_read(self) -> None:
        if self.state is _UNREAD:
            self._go_on()

    def refuse(self, fault: Fault) -> None:
        """Answer with an error, and read nothing more."""
        self.end(self._server.error(fault))

    def late(self) -> None:
        """A deadline has passed."""
        if self.state is _HEAD:
            text = f"no complete request within {self._server.head_timeout_s:g} s"
            self.refuse(Fault(408, "bad_request", text))
        elif self.state is _BODY:
            self._refuse_body(408)
        elif self.state is _ANSWER:
            self._server.wait(self.stream, self._server.idle_timeout_s)
        elif (left_s := self._server.idle_timeout_s - self._server.silent_s(self.stream)) > 0:
            self._server.wait(self.stream, left_s)
        else:
            self.end()

    def end(self, response: bytes = b"") -> None:
        """Close after `response`. What was received goes now: the client may keep the connection open for a while."""
        self._forget()
        self.stream.end_http(response)

    def gone(self) -> None:
        """The connection is lost, or became a WebSocket."""
        self._idle.pop(self.stream, None)
        # Not only while UNREAD: the part that answers may wait for the client to read, too.
        self._server.forget_reader(self.stream)
        self._forget()

    def _forget(self) -> None:
        self.state = _ENDED
        self._uncount_body()
        self._reader.close()
        self._backlog = b""
