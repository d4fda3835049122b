"""One HTTP connection of a client: bytes in, requests to control, answers out in the order of the requests.

A whole request of the usual shape is read in C (_http.pack_simple). llhttp (httptools) parses all others; this class
adds what llhttp leaves to its user: limits on sizes and counts, one request under way at a time, and refusals of heads
that two readers could understand differently. A request for a WebSocket goes back to the engine, any other to control.
A large body isn't read before control has checked the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import httptools

from redpoll._engine import HTTP
from redpoll._http import pack_simple
from redpoll.http.errors import (
    ALIVE,
    TOO_MANY_OF_ADDRESS,
    alive_response,
    closing,
    error_response,
)
from redpoll.http.head import KINDS, MAX_HEAD_BYTES, HeadFault, read_head, size_of_head
from redpoll.http.messages import (
    AUTHENTICATED,
    CLOSES,
    CONTINUE,
    HEAD_ONLY,
    HTTP_1_0,
    LAST,
    MAX_BODY_BYTES,
    pack_fields,
)
from redpoll.loop.writable import MAX_UNSENT_BYTES

if TYPE_CHECKING:
    from redpoll.loop.writable import DrainSignal
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.ingress.control_link import ControlLink
    from redpoll.worker.ingress.strangers import Strangers

__all__ = ["HttpConnection"]

# A body announced as no larger than this is read without asking control.
_MAX_UNASKED_BODY_BYTES: Final = 16 * 1024
# Control decides about the body of any other request: it answers those that have none at once.
_WITH_BODY: Final = (b"POST", b"PUT", b"PATCH", b"DELETE")
# Tiny chunks cost far more than their bytes. Beyond this many, chunks must have this size on average.
_FREE_CHUNKS: Final = 1024
_MIN_CHUNK_BYTES: Final = 64
# What a body may have besides its content: sizes and extensions of chunks, trailers.
_MAX_EXTRA_BYTES: Final = 16 * 1024
_EXTRA_BYTES_PER_CHUNK: Final = 8
# How many bytes llhttp gets at once. It reads all requests in them, and only the first can be sent now.
_PIECE_BYTES: Final = 8 * 1024
# How many requests the worker answers itself in one go. A client may send thousands in one packet.
_MAX_OWN_ANSWERS: Final = 16

_CONTINUE_LINE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_HEAD_TOO_LARGE: Final = f"the request head is larger than {MAX_HEAD_BYTES // 1024} KiB"

# What the parser reads next: the start of a request, the rest of a head, the rest of a body.
_BETWEEN, _IN_HEAD, _IN_BODY = range(3)


class _Refused(Exception):
    """Raised inside the parser's callbacks: the request is refused, and nothing after it is read."""


class Shared(Protocol):
    """What all HTTP connections of a worker share (http_requests.py)."""

    link: ControlLink
    draining: bool
    strangers: Strangers
    max_requests: int
    reading_bytes: int
    max_reading_bytes: int
    idle: dict[Connection, None]
    drain_signal: DrainSignal

    @property
    def max_strange_requests(self) -> int: ...
    @property
    def max_strange_reading_bytes(self) -> int: ...

    def wait_for_head(self, connection: Connection) -> None: ...
    def wait_for_body(self, connection: Connection) -> None: ...
    def later(self, call: Callable[[], None]) -> None: ...
    def limit_reached(self, limit: str) -> None: ...
    def refusal(self, http: HttpConnection, request: tuple[Any, ...]) -> bytes | None: ...
    def upgrade(self, http: HttpConnection, received: bytes) -> None: ...
    def is_signed(self, method: bytes, target: bytes, fields: bytes) -> bool: ...
    def client_of(self, peer: str, forwarded_for: Sequence[str]) -> str: ...


class HttpConnection:
    """Reads requests from `connection` and answers them. `http` is what all HTTP connections of the worker share.

    `busy`: the number of the request that control has, 0 while it has none. `stalled`: the next request waits until
    the client has read the answers before it. `authenticated`: AUTHENTICATED if control found a right credential in
    the last request, else 0; then the connection is a stranger's (strangers.py).
    """

    busy = 0
    authenticated = 0
    stalled = False
    # llhttp's, made for the first request that isn't of the usual shape.
    _parser: httptools.HttpRequestParser | None = None
    _phase = _BETWEEN
    # How the connection ends after the requests before it are answered: status, code, text.
    _fault: tuple[int, str, str] | None = None
    # Bytes that wait to be parsed, because a request before them is under way.
    _backlog = b""
    # Requests that the worker answered itself, since other clients had their turn.
    _own_answers = 0
    # The client has closed its side.
    _ended = False
    # Of the request that is being read, or was read last. Where the Upgrade to another protocol is, `_switching` is
    # the head without it.
    _flags = 0
    _method = b""
    _target = b""
    _headers: list[tuple[bytes, bytes]]
    _fields: Sequence[tuple[int, bytes]] = ()
    _forwarded: Sequence[str] = ()
    _body: list[bytes]
    _size = 0
    _announced: int | None = 0
    _chunks = 0
    _expects = False
    _websocket = False
    _switching = b""
    # Of the request that control has. A later one may have been read meanwhile.
    _sent_flags = 0
    _sent_method = b""
    # The phase whose deadline runs. A deadline is for a whole head or body, however many pieces it comes in.
    _timed_phase = _BETWEEN
    # Control has been asked whether the body may be read.
    _asked = False
    # Bytes of the body that count as being read.
    _counted_bytes = 0
    # Bytes fed to the parser: at once; of the head under way; of the body under way, with all that isn't its content.
    _piece_bytes = 0
    _head_bytes = 0
    _body_bytes = 0

    def __init__(self, http: Shared, connection: Connection, peer: str, secure: int) -> None:
        self.connection = connection
        self._http = http
        self._idle = http.strangers.idle
        http.strangers.callers[connection] = None
        self._peer = peer
        self._client = peer.encode("ascii", "replace")
        self._secure = secure
        # Whole requests that wait for their turn: arguments of ControlLink.send, or the head of an Upgrade.
        self._requests: list[tuple[Any, ...] | bytes] = []

    @property
    def reads_head(self) -> bool:
        return self._phase == _IN_HEAD and not self.busy

    @property
    def reads_body(self) -> bool:
        return self._phase == _IN_BODY and not self.busy

    # -- bytes in ------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """The next bytes of the client."""
        if self.busy or self._requests or self._backlog:
            self._backlog += data
            self.connection.pause_reading()
            return
        if self._phase == _BETWEEN:
            http = self._http
            self._idle.pop(self.connection, None)
            link = http.link
            if link.ready and (
                len(link.awaited) < http.max_requests
                if self.authenticated
                else len(link.awaited) < http.max_strange_requests and http.strangers.take(self.connection, self._peer)
            ):
                simple = pack_simple(data, link.next_number, self._secure, self._client, KINDS)
                if simple is not None:
                    # One whole request of the usual shape: nearly all of them come so.
                    self._sent_flags, self._sent_method, message = simple
                    self.busy = link.send_packed(self, message)
                    return
        self._parse(data)

    def ended(self) -> bool:
        """The client sends no more. True: there are requests to answer before the connection closes."""
        self._ended = self.busy > 0 or bool(self._requests or self._backlog)
        return self._ended

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of a request; what is left is parsed after its answer."""
        rest = memoryview(data)
        while rest and not self._requests and self._fault is None and self._size <= MAX_BODY_BYTES:
            piece = rest[:_PIECE_BYTES]
            rest = rest[self._feed(piece) :]
        if rest and self._fault is None:
            self._backlog = bytes(rest) + self._backlog
        self._go_on()

    def _feed(self, piece: bytes | memoryview) -> int:
        """Feed the parser, and return how many bytes it took."""
        size = len(piece)
        self._piece_bytes = size
        self._head_bytes = self._head_bytes + size if self._phase == _IN_HEAD else size
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade()
            return int(upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if self._fault is None and self._size <= MAX_BODY_BYTES:
                raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._fault = 400, "bad_request", f"not an HTTP request: {str(error).lower()}"
        if self._fault is None:
            if self._phase == _IN_HEAD and self._head_bytes > MAX_HEAD_BYTES:
                self._refusal(431, _HEAD_TOO_LARGE)
            elif self._phase == _IN_BODY:
                self._body_bytes = self._size if self._body_bytes < 0 else self._body_bytes + size
                if self._body_bytes - self._size > _MAX_EXTRA_BYTES + _EXTRA_BYTES_PER_CHUNK * self._chunks:
                    self._refusal(400, "the body has too many bytes besides its content")
        return size

    def on_message_begin(self) -> None:
        self._phase = _IN_HEAD
        self._timed_phase = _BETWEEN
        self._target = b""
        self._headers = []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers of a chunked body come here, too, and are ignored.
        if self._phase == _IN_HEAD:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if (
            self._head_bytes + self._piece_bytes > MAX_HEAD_BYTES
            and size_of_head(self._target, self._headers) > MAX_HEAD_BYTES
        ):
            raise self._refusal(431, _HEAD_TOO_LARGE)
        version = parser.get_http_version()
        try:
            head = read_head(version, self._headers)
        except HeadFault as fault:
            raise self._refusal(fault.status, fault.text) from None
        self._fields, self._forwarded, self._announced, self._expects, self._websocket = head
        self._phase = _IN_BODY
        self._body = []
        self._size = self._chunks = 0
        # _feed() counts what follows the head in this piece.
        self._body_bytes = -1
        self._asked = False
        self._flags = (
            self._secure | (0 if version == "1.1" else HTTP_1_0) | (0 if parser.should_keep_alive() else CLOSES)
        )
        self._method = parser.get_method()
        if parser.should_upgrade():
            if self._method == b"CONNECT":
                raise self._refusal(405, "this server is no proxy")
            self._switching = self._head()

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS + self._size // _MIN_CHUNK_BYTES:
            raise self._refusal(400, "the body comes in too many small chunks")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)
        self._size += len(part)
        if self._size > MAX_BODY_BYTES:
            raise _Refused

    def on_message_complete(self) -> None:
        if self._switching:
            return
        body = self._body
        self._requests.append(self._request(b"".join(body) if len(body) != 1 else body[0]))
        self._phase = _BETWEEN
        # Counts the next head, which begins somewhere in the bytes after this request.
        self._head_bytes = 0
        self._drop_body()

    def _drop_body(self) -> None:
        self._body = []
        if self._counted_bytes:
            self._http.reading_bytes -= self._counted_bytes
            self._counted_bytes = 0

    def _request(self, body: bytes, flags: int = 0, announced: int | None = 0, refusal: int = 0) -> tuple[Any, ...]:
        client = self._client
        if self._forwarded:
            client = self._http.client_of(self._peer, self._forwarded).encode("ascii", "replace")
        fields = pack_fields(self._fields) if self._fields else b""
        return (
            self._flags | flags,
            self._method,
            client,
            self._target,
            fields,
            body,
            announced,
            refusal,
        )

    def _refusal(self, status: int, text: str) -> _Refused:
        self._fault = status, "bad_request", text
        return _Refused()

    # -- upgrades ------------------------------------------------------------------------------------------

    def _head(self) -> bytes:
        """The head as it came, up to spaces; without its Upgrade where that names no WebSocket."""
        lines = [b"%b %b HTTP/1.%d" % (self._method, self._target, 0 if self._flags & HTTP_1_0 else 1)]
        lines += [b"%b: %b" % header for header in self._headers if self._websocket or header[0].lower() != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _upgrade(self) -> None:
        """The parser stopped at the end of a head with an Upgrade, and has read no body."""
        head, self._switching = self._switching, b""
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _BETWEEN
        if self._websocket:
            self._requests.append(head)
        else:
            # Another protocol: answer the request in HTTP/1.1 (RFC 9110, section 7.8).
            self._feed(head)

    # -- bodies that come later than their head ------------------------------------------------------------

    def _wait_for_body(self) -> None:
        self._count_body()
        if self._fault is not None:
            self._refuse()
        elif self._size > MAX_BODY_BYTES:
            self.refuse_body(413)
        elif self._backlog:
            self._go_on_later()
        elif not self._asked and (
            self._expects
            or self._announced is None
            or self._announced > _MAX_UNASKED_BODY_BYTES
            or self._method not in _WITH_BODY
            or (not self.authenticated and self._http.reading_bytes > self._http.max_strange_reading_bytes)
        ):
            self._asked = True
            self.connection.pause_reading()
            self._send(self._request(b"", HEAD_ONLY, self._announced))
        elif self._has_place():
            self.connection.resume_reading()
            if self._timed_phase != _IN_BODY:
                self._timed_phase = _IN_BODY
                self._http.wait_for_body(self.connection)

    def _count_body(self) -> None:
        self._http.reading_bytes += self._body_bytes - self._counted_bytes
        self._counted_bytes = self._body_bytes
        http = self._http
        asked_in_vain = self._asked and not self.authenticated
        if http.reading_bytes > (http.max_strange_reading_bytes if asked_in_vain else http.max_reading_bytes):
            http.limit_reached("bodies")
            self._fault = 503, "unavailable", "this server is reading too many request bodies; send the request again"

    def refuse_body(self, status: int) -> None:
        """Stop reading the body. Control sends the refusal, because it authenticates and logs the request."""
        self._phase = _BETWEEN
        self._drop_body()
        self.connection.pause_reading()
        self._send(self._request(b"", HEAD_ONLY | CLOSES, None, status))

    # -- requests and answers ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next step: send a complete request, refuse, have the backlog parsed, or read on."""
        connection, requests = self.connection, self._requests
        while requests:
            # A client that pipelines must read the answers before its next request is executed.
            if connection.bytes_owed >= MAX_UNSENT_BYTES:
                self.stalled = True
                self._http.drain_signal.wait(connection, self._client_has_read)
                return
            if self._own_answers == _MAX_OWN_ANSWERS:
                self._go_on_later()
                return
            request = requests.pop(0)
            if isinstance(request, bytes):
                self._http.upgrade(self, request + self._backlog)
                return
            self._send(request)
            if self.busy or connection.state != HTTP:
                return
        if self._fault is not None:
            self._refuse()
        elif self._phase == _IN_BODY:
            self._wait_for_body()
        elif self._backlog:
            self._go_on_later()
        elif self._ended:
            self._end()
        elif self._phase == _IN_HEAD:
            if self._has_place():
                connection.resume_reading()
                if self._timed_phase != _IN_HEAD:
                    self._timed_phase = _IN_HEAD
                    self._http.wait_for_head(connection)
        elif self._http.draining:
            self._end()
        else:
            self._rest()
            connection.resume_reading()

    def _rest(self) -> None:
        """There is nothing to do until the next request."""
        if not self.authenticated:
            self._http.strangers.rest(self.connection)
        self._idle[self.connection] = None

    def _has_place(self) -> bool:
        """Whether the client may send the rest of a head or body. If not, the request is refused."""
        http = self._http
        if self.authenticated or http.strangers.take(self.connection, self._peer):
            return True
        if self._phase == _IN_BODY and http.is_signed(self._method, self._target, pack_fields(self._fields)):
            return True
        http.limit_reached("address")
        self._fault = 503, "unavailable", TOO_MANY_OF_ADDRESS
        self._refuse()
        return False

    def _go_on_later(self) -> None:
        """Other clients have their turn first: there may be thousands of requests to parse or to answer here."""
        self.connection.pause_reading()
        self._http.later(self._resume)

    def _resume(self) -> None:
        self._own_answers = 0
        if self.connection.state != HTTP or self.busy:
            return
        if len(self._backlog) <= _PIECE_BYTES:
            # Not while there is more: a read may bring more than the parser takes at once.
            self.connection.resume_reading()
        if self._requests or not self._backlog:
            self._go_on()
        else:
            data, self._backlog = self._backlog, b""
            self._parse(data)

    def _send(self, request: tuple[Any, ...]) -> None:
        """Send a request to control, or answer it here if it doesn't need control or can't reach it."""
        http = self._http
        if request[3].startswith(b"/app/"):
            text = "this is a WebSocket address; connect with an Upgrade"
            answer = error_response(426, "bad_request", text, "Upgrade: websocket\r\n")
        elif request[3] in ALIVE and request[1] in (b"GET", b"HEAD"):
            answer = alive_response(request[3])
        else:
            refusal = http.refusal(self, request)
            if refusal is None:
                self._sent_flags, self._sent_method = request[0], request[1]
                self.busy = http.link.send(self, *request)
                return
            answer = refusal
        self._own_answers += 1
        if request[1] == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        goes_on = self.authenticated or http.strangers.may_leave_unread(self.connection, request[2].decode())
        if not goes_on or request[0] & (CLOSES | HEAD_ONLY | HTTP_1_0):
            answer = closing(answer)
        if b"\r\nConnection: close\r\n" in answer:
            self._end(answer)
        else:
            self.connection.write_http(answer)

    def answered(self, flags: int, response: bytes) -> None:
        """Control has answered the request, or allows its body to be read."""
        self.busy = 0
        if flags & AUTHENTICATED != self.authenticated:
            self._judge(flags & AUTHENTICATED)
        if not flags & ~AUTHENTICATED and not self._http.draining:
            self.connection.write_http(response)
            if self._requests or self._backlog or self._fault is not None or self._ended:
                self._go_on()
            else:
                self._rest()
                self.connection.resume_reading()
        elif flags & CONTINUE:
            if self._expects and not self._size:
                self.connection.write_http(_CONTINUE_LINE)
            self._go_on()
        elif flags & LAST:
            self._end(response)
        else:
            self._end(closing(response))

    def _judge(self, authenticated: int) -> None:
        """The caller has just authenticated, or no longer does."""
        self.authenticated = authenticated
        strangers = self._http.strangers
        if authenticated:
            self._idle = self._http.idle
            strangers.authenticated(self.connection, self._peer)
        else:
            self._idle = strangers.idle
            strangers.callers[self.connection] = None

    def unanswered(self, sent: bool) -> None:
        """Control went away before it answered. `sent` False: it never saw the request."""
        self.busy = 0
        text = (
            "not confirmed: the control plane went away before it answered"
            if sent
            else "the control plane isn't there; send the request again"
        )
        answer = error_response(503, "unavailable", text, "Retry-After: 1\r\n")
        if self._sent_method == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        if self._sent_flags & (CLOSES | HTTP_1_0 | HEAD_ONLY):
            self._end(answer)
        else:
            self.connection.write_http(answer.replace(b"Connection: close\r\n", b"", 1))
            self._go_on()

    def _end(self, response: bytes = b"") -> None:
        """Close after `response`. What was received goes now: the client may keep the connection open for a while."""
        self._drop_body()
        self._parser = None
        self._backlog = b""
        self.connection.end_http(response)

    def _client_has_read(self) -> None:
        if self.stalled:
            self.stalled = False
            self._go_on()

    def _refuse(self) -> None:
        assert self._fault is not None
        status, code, text = self._fault
        more = "Retry-After: 1\r\n" if status == 503 else ""
        self._end(error_response(status, code, text, more))

    def gone(self) -> None:
        """The connection is lost, or became a WebSocket."""
        http = self._http
        self._idle.pop(self.connection, None)
        http.strangers.forget(self.connection)
        if self.stalled:
            self.stalled = False
            http.drain_signal.closed(self.connection)
        self._drop_body()
        if self.busy:
            http.link.forget(self.busy)
        # The parser refers to this object's methods. Breaking the cycle frees both without the garbage collector.
        self._parser = None
