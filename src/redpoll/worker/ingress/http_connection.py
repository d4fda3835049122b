"""One HTTP connection of a client: bytes in, requests to control, answers out in the order of the requests.

A whole request of the usual shape is read in C (_http.pack_simple). llhttp (httptools) parses all others; this class
adds what llhttp leaves to its user: limits on sizes and counts, one request under way at a time, and refusals of heads
that two readers could understand differently. A request for a WebSocket goes back to the engine, any other to control.
A large body isn't read before control has checked the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import httptools

from redpoll._engine import HTTP
from redpoll._http import pack_simple
from redpoll.http_messages import CLOSES, CONTINUE, FIELDS, HEAD_ONLY, HTTP_1_0, LAST, MAX_BODY_BYTES, pack_fields
from redpoll.worker.drained import MAX_UNSENT_BYTES
from redpoll.worker.ingress.http_errors import closing, error_response

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection
    from redpoll.worker.drained import DrainSignal
    from redpoll.worker.ingress.control_link import ControlLink

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "HttpConnection"]

MAX_HEAD_BYTES: Final = 16 * 1024
MAX_HEADERS: Final = 100
# A body announced as no larger than this is read without asking control.
_MAX_UNASKED_BODY_BYTES: Final = 16 * 1024
# Tiny chunks cost far more than their bytes. Beyond this many, chunks must have this size on average.
_FREE_CHUNKS: Final = 1024
_MIN_CHUNK_BYTES: Final = 64

# The kind of a header field: its place in FIELDS if it is passed to control, else one of these.
_IGNORE, _HOST, _LENGTH, _ENCODING, _EXPECT, _UPGRADE, _FORWARDED = -1, 100, 101, 102, 103, 104, 105
_CONTENT_TYPE: Final = FIELDS.index("Content-Type")
_KINDS: Final[dict[bytes, int]] = {
    **{name.lower().encode(): place for place, name in enumerate(FIELDS)},
    b"host": _HOST,
    b"content-length": _LENGTH,
    b"transfer-encoding": _ENCODING,
    b"expect": _EXPECT,
    b"upgrade": _UPGRADE,
    b"x-forwarded-for": _FORWARDED,
}
# A cache of kinds by the spelling on the wire. Bounded: clients choose the spellings.
_SPELLINGS: Final[dict[bytes, int]] = {}
_MAX_SPELLINGS: Final = 1024

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
    max_requests: int
    reading_bytes: int
    max_reading_bytes: int
    idle: dict[HttpConnection, None]
    drain_signal: DrainSignal

    def wait_for_head(self, connection: Connection) -> None: ...
    def wait_for_body(self, connection: Connection) -> None: ...
    def limit_reached(self, limit: str) -> None: ...
    def refusal(self, target: bytes) -> bytes | None: ...
    def upgrade(self, http: HttpConnection, received: bytes) -> None: ...
    def client_of(self, peer: str, forwarded_for: Sequence[str]) -> str: ...


class HttpConnection:
    """Reads requests from `connection` and answers them. `http` is what all HTTP connections of the worker share.

    `busy`: the number of the request that control has, 0 while it has none. `stalled`: the next request waits until
    the client has read the answers before it.
    """

    busy = 0
    stalled = False
    # llhttp's, made for the first request that isn't of the usual shape.
    _parser: httptools.HttpRequestParser | None = None
    _phase = _BETWEEN
    # How the connection ends after the requests before it are answered: status, code, text.
    _fault: tuple[int, str, str] | None = None
    # Bytes that came while a request was under way.
    _backlog = b""
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
    _switching = b""
    # The phase whose deadline runs. A deadline is for a whole head or body, however many pieces it comes in.
    _timed_phase = _BETWEEN
    # Control has been asked whether the body may be read.
    _asked = False
    # Bytes of the body that count as being read.
    _counted_bytes = 0
    # Bytes that were fed to the parser at once, and bytes of the head under way.
    _feed_bytes = 0
    _head_bytes = 0

    def __init__(self, http: Shared, connection: Connection, peer: str, secure: int) -> None:
        self.connection = connection
        self._http = http
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
        if self.busy or self._requests:
            self._backlog += data
            self.connection.pause_reading()
            return
        if self._phase == _BETWEEN:
            http = self._http
            http.idle.pop(self, None)
            link = http.link
            if link.ready and len(link.awaited) < http.max_requests:
                simple = pack_simple(data, link.next_number, self._secure, self._client, _KINDS)
                if simple is not None:
                    # One whole request of the usual shape: nearly all of them come so.
                    self._flags, self._method, message = simple
                    self.busy = link.send_packed(self, message)
                    return
        self._parse(data)

    def ended(self) -> bool:
        """The client sends no more. True: there are requests to answer before the connection closes."""
        self._ended = self.busy > 0 or bool(self._requests)
        return self._ended

    def _parse(self, data: bytes) -> None:
        self._feed_bytes = len(data)
        if self._phase == _IN_HEAD:
            self._head_bytes += len(data)
        else:
            self._head_bytes = len(data)
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._switch(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            if self._fault is None and self._size <= MAX_BODY_BYTES:
                raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._fault = 400, "bad_request", f"not an HTTP request: {str(error).lower()}"
        if self._phase == _IN_HEAD and self._head_bytes > MAX_HEAD_BYTES and self._fault is None:
            self._refusal(431, _HEAD_TOO_LARGE)
        self._go_on()

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
        parser, headers = self._parser, self._headers
        assert parser is not None
        if self._head_bytes + self._feed_bytes > MAX_HEAD_BYTES:
            self._check_head_size()
        if len(headers) > MAX_HEADERS:
            raise self._refusal(431, f"more than {MAX_HEADERS} header fields")
        self._phase = _IN_BODY
        self._body = []
        self._size = 0
        self._announced = 0
        self._asked = self._expects = False
        forwarded: list[str] = []
        fields: list[tuple[int, bytes]] = []
        hosts = 0
        chunked = upgrades = False
        for name, value in headers:
            kind = _SPELLINGS.get(name)
            if kind is None:
                kind = _kind_of(name)
            if kind < 0:
                continue
            if kind < _HOST:
                if kind != _CONTENT_TYPE or value != b"application/json":
                    fields.append((kind, value))
            elif kind == _HOST:
                hosts += 1
            elif kind == _LENGTH:
                self._announced = int(value)
            elif kind == _ENCODING:
                if chunked or value.lower() != b"chunked":
                    raise self._refusal(400, "the only transfer coding is chunked, once")
                chunked = True
            elif kind == _EXPECT:
                self._expects = value.lower() == b"100-continue"
            elif kind == _UPGRADE:
                upgrades = b"websocket" in value.lower()
            else:
                forwarded.append(value.decode("latin-1"))
        self._fields = fields
        self._forwarded = forwarded
        flags = self._secure
        if parser.get_http_version() == "1.1":
            if hosts != 1:
                raise self._refusal(400, "not an HTTP request: HTTP/1.1 needs one Host header")
        elif parser.get_http_version() == "1.0" and not chunked and hosts < 2:
            flags |= HTTP_1_0
        else:
            raise self._refusal(400, "not an HTTP request: HTTP/1.1 is spoken here, and HTTP/1.0 without chunks")
        if not parser.should_keep_alive():
            flags |= CLOSES
        self._flags = flags
        self._method = parser.get_method()
        if chunked:
            self._announced = None
            self._chunks = 0
        if parser.should_upgrade():
            if self._method == b"CONNECT":
                raise self._refusal(405, "this server is no proxy")
            self._switching = self._head(upgrades)

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

    def _check_head_size(self) -> None:
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > MAX_HEAD_BYTES:
            raise self._refusal(431, _HEAD_TOO_LARGE)

    def _refusal(self, status: int, text: str) -> _Refused:
        self._fault = status, "bad_request", text
        return _Refused()

    # -- upgrades ------------------------------------------------------------------------------------------

    def _head(self, websocket: bool) -> bytes:
        """The head as it came, up to spaces; without its Upgrade where that names no WebSocket."""
        lines = [b"%b %b HTTP/1.1" % (self._method, self._target)]
        lines += [b"%b: %b" % header for header in self._headers if websocket or header[0].lower() != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _switch(self, rest: bytes) -> None:
        """The parser stopped at the end of a head with an Upgrade, and has read no body."""
        head, self._switching = self._switching, b""
        websocket = any(name.lower() == b"upgrade" and b"websocket" in value.lower() for name, value in self._headers)
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _BETWEEN
        if not websocket:
            # Another protocol: answer the request in HTTP/1.1 (RFC 9110, section 7.8).
            self._parse(head + rest)
            return
        self._requests.append(head + rest)
        self._go_on()

    # -- bodies that come later than their head ------------------------------------------------------------

    def _wait_for_body(self) -> None:
        self._count_body()
        if self._fault is not None:
            self._refuse()
        elif self._size > MAX_BODY_BYTES:
            self.refuse_body(413)
        elif self._backlog:
            self._read_on()
        elif not self._asked and (
            self._expects or self._announced is None or self._announced > _MAX_UNASKED_BODY_BYTES
        ):
            self._asked = True
            self.connection.pause_reading()
            self._send(self._request(b"", HEAD_ONLY, self._announced))
        else:
            self.connection.resume_reading()
            if self._timed_phase != _IN_BODY:
                self._timed_phase = _IN_BODY
                self._http.wait_for_body(self.connection)

    def _count_body(self) -> None:
        self._http.reading_bytes += self._size - self._counted_bytes
        self._counted_bytes = self._size
        if self._http.reading_bytes > self._http.max_reading_bytes:
            self._http.limit_reached("bodies")
            self._fault = 503, "unavailable", "this server is reading too many request bodies; send the request again"

    def refuse_body(self, status: int) -> None:
        """Stop reading the body. Control sends the refusal, because it authenticates and logs the request."""
        self._phase = _BETWEEN
        self._drop_body()
        self.connection.pause_reading()
        self._send(self._request(b"", HEAD_ONLY | CLOSES, None, status))

    # -- requests and answers ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next step: send a complete request, refuse, parse the backlog, or read on."""
        connection, requests = self.connection, self._requests
        while requests:
            # A client that pipelines must read the answers before its next request is executed.
            if connection.bytes_owed >= MAX_UNSENT_BYTES:
                self.stalled = True
                self._http.drain_signal.wait(connection, self._client_has_read)
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
            self._read_on()
        elif self._ended:
            connection.end_http()
        elif self._phase == _IN_HEAD:
            connection.resume_reading()
            if self._timed_phase != _IN_HEAD:
                self._timed_phase = _IN_HEAD
                self._http.wait_for_head(connection)
        elif self._http.draining:
            connection.end_http()
        else:
            self._http.idle[self] = None
            connection.resume_reading()

    def _read_on(self) -> None:
        data, self._backlog = self._backlog, b""
        self.connection.resume_reading()
        if data:
            self._parse(data)

    def _send(self, request: tuple[Any, ...]) -> None:
        """Send a request to control, or answer it here if it doesn't need control or can't reach it."""
        http = self._http
        if request[3].startswith(b"/app/"):
            text = "this is a WebSocket address; connect with an Upgrade"
            answer = error_response(426, "bad_request", text, "Upgrade: websocket\r\n")
        else:
            refusal = http.refusal(request[3])
            if refusal is None:
                self.busy = http.link.send(self, *request)
                return
            answer = refusal
        if request[1] == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        if request[0] & (CLOSES | HEAD_ONLY | HTTP_1_0):
            answer = closing(answer)
        if b"\r\nConnection: close\r\n" in answer:
            self.connection.end_http(answer)
        else:
            self.connection.write_http(answer)

    def answered(self, flags: int, response: bytes) -> None:
        """Control has answered the request, or allows its body to be read."""
        self.busy = 0
        http = self._http
        if not flags and not http.draining:
            self.connection.write_http(response)
            if self._requests or self._backlog or self._fault is not None or self._ended:
                self._go_on()
            else:
                http.idle[self] = None
        elif flags & CONTINUE:
            if self._expects and not self._size:
                self.connection.write_http(_CONTINUE_LINE)
            self._go_on()
        elif flags & LAST:
            self.connection.end_http(response)
        else:
            self.connection.end_http(closing(response))

    def unanswered(self, sent: bool) -> None:
        """Control went away before it answered. `sent` False: it never saw the request."""
        self.busy = 0
        text = (
            "not confirmed: the control plane went away before it answered"
            if sent
            else "the control plane isn't there; send the request again"
        )
        answer = error_response(503, "unavailable", text, "Retry-After: 1\r\n")
        # `_flags` and `_method` belong to the request that was read last, which may be a later, pipelined one.
        if self._phase != _BETWEEN or self._flags & (CLOSES | HTTP_1_0) or self._method == b"HEAD":
            self.connection.end_http(answer if self._method != b"HEAD" else answer[: answer.index(b"\r\n\r\n") + 4])
        else:
            self.connection.write_http(answer.replace(b"Connection: close\r\n", b"", 1))
            self._go_on()

    def _client_has_read(self) -> None:
        if self.stalled:
            self.stalled = False
            self._go_on()

    def _refuse(self) -> None:
        assert self._fault is not None
        self._drop_body()
        status, code, text = self._fault
        more = "Retry-After: 1\r\n" if status == 503 else ""
        self.connection.end_http(error_response(status, code, text, more))

    def gone(self) -> None:
        """The connection is lost, or became a WebSocket."""
        http = self._http
        http.idle.pop(self, None)
        if self.stalled:
            self.stalled = False
            http.drain_signal.closed(self.connection)
        self._drop_body()
        if self.busy:
            http.link.forget(self.busy)
        # The parser refers to this object's methods. Breaking the cycle frees both without the garbage collector.
        self._parser = None


def _kind_of(name: bytes) -> int:
    kind = _KINDS.get(name.lower(), _IGNORE)
    if len(_SPELLINGS) < _MAX_SPELLINGS:
        _SPELLINGS[name] = kind
    return kind
