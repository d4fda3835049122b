"""Reads the requests of one HTTP connection from its bytes, with llhttp (httptools).

RequestReader adds what llhttp leaves to its user: limits on sizes and counts, and refusals of heads that two readers
could understand differently (head.py). It has no socket and answers nothing: connection.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

import httptools

from redpoll.http.head import MAX_HEAD_BYTES, FieldTable, Head, HeadFault, read_head, size_of_head
from redpoll.http.messages import CLOSES, HTTP_1_0, MAX_BODY_BYTES

__all__ = ["PIECE_BYTES", "Fault", "ParsedRequest", "Phase", "RequestReader"]

# How many bytes llhttp gets at once. It reads all requests in them, and only the first can be sent now.
PIECE_BYTES: Final = 8 * 1024
# Tiny chunks cost far more than their bytes. Beyond this many, chunks must have this size on average.
_FREE_CHUNKS: Final = 1024
_MIN_CHUNK_BYTES: Final = 64
# What a body may have besides its content: sizes and extensions of chunks, trailers.
_MAX_EXTRA_BYTES: Final = 16 * 1024
_EXTRA_BYTES_PER_CHUNK: Final = 8

_HEAD_TOO_LARGE: Final = f"the request head is larger than {MAX_HEAD_BYTES // 1024} KiB"
_NO_HEAD: Final = Head([], [], 0, False, False)


class Phase(Enum):
    """What the next byte belongs to."""

    BETWEEN = "between requests"
    HEAD = "a head"
    BODY = "a body"
    # llhttp reports the end of the head twice: on_message_complete, then HttpParserUpgrade.
    UPGRADE = "another protocol"


# Looking a member up in its class takes ten times as long.
_BETWEEN, _HEAD, _BODY, _UPGRADE = Phase


class Fault(NamedTuple):
    """Why the connection ends once the requests before are answered: an error of the API."""

    status: int
    code: str
    text: str


class ParsedRequest(NamedTuple):
    """A request as it came. `flags` as in messages.py. `fields`: header fields by their place in the FieldTable.

    `forwarded`: its X-Forwarded-For headers. With HEAD_ONLY in `flags` there is no body yet, and `announced` says how
    many bytes are to come (None: chunked). `refusal`: the HTTP status with which reading the body stopped, or 0.
    """

    flags: int
    method: bytes
    target: bytes
    fields: Sequence[tuple[int, bytes]]
    forwarded: Sequence[str]
    body: bytes
    announced: int | None = 0
    refusal: int = 0


class _Refused(Exception):
    """Raised inside the parser's callbacks: the request is refused, and nothing after it is read."""


class RequestReader:
    """Reads requests whose header fields `table` knows. `flags` go into each (SECURE, or 0).

    `requests`: whole requests that wait for their turn, the oldest first; bytes are the head of an Upgrade to a
    WebSocket, which is an ordinary request unless `websockets`. After a `fault` nothing more is read. `head` is that of
    the request that is being read, or was read last; `size` counts the content of its body, `body_bytes` all its bytes.
    """

    head = _NO_HEAD
    size = 0
    body_bytes = 0
    # llhttp's, made for the first request that isn't of the usual shape.
    _parser: httptools.HttpRequestParser | None = None
    _request_flags = 0
    method = b""
    _target = b""
    _headers: list[tuple[bytes, bytes]]
    _body: list[bytes]
    _chunks = 0
    # Bytes fed to the parser: at once; of the head under way.
    _piece_bytes = 0
    _head_bytes = 0

    def __init__(self, table: FieldTable, flags: int, *, websockets: bool) -> None:
        self.requests: list[ParsedRequest | bytes] = []
        self.phase = _BETWEEN
        self.fault: Fault | None = None
        self._table = table
        self._flags = flags
        self._websockets = websockets

    @property
    def is_too_large(self) -> bool:
        """The body is larger than MAX_BODY_BYTES, and nothing more is read."""
        return self.size > MAX_BODY_BYTES

    def read(self, data: bytes) -> bytes:
        """Read up to the end of a request. Returns what follows it, to be read after its answer."""
        rest = memoryview(data)
        while rest and not self.requests and self.fault is None and self.size <= MAX_BODY_BYTES:
            rest = rest[self._feed(rest[:PIECE_BYTES]) :]
        return bytes(rest) if self.fault is None else b""

    def head_request(self, flags: int, announced: int | None, refusal: int = 0) -> ParsedRequest:
        """The request whose body is being read, without its body. `flags` are added to its own."""
        return self._request(b"", flags, announced, refusal)

    def drop_body(self) -> None:
        """Forget the body that is being read; nothing more is read."""
        self.phase = _BETWEEN
        self._body = []

    def close(self) -> None:
        """Free what was read: the parser refers to this object's methods, and breaking the cycle needs no collector."""
        self._parser = None
        self.requests.clear()
        self.drop_body()

    def _feed(self, piece: bytes | memoryview) -> int:
        """Feed the parser, and return how many bytes it took."""
        size = len(piece)
        self._piece_bytes = size
        self._head_bytes = self._head_bytes + size if self.phase is _HEAD else size
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade()
            return int(upgrade.args[0])
        except httptools.HttpParserCallbackError as error:
            if self.fault is None and self.size <= MAX_BODY_BYTES:
                raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self.fault = Fault(400, "bad_request", f"not an HTTP request: {str(error).lower()}")
        if self.fault is None:
            if self.phase is _HEAD and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, _HEAD_TOO_LARGE)
            elif self.phase is _BODY:
                self.body_bytes = self.size if self.body_bytes < 0 else self.body_bytes + size
                if self.body_bytes - self.size > _MAX_EXTRA_BYTES + _EXTRA_BYTES_PER_CHUNK * self._chunks:
                    self._refuse(400, "the body has too many bytes besides its content")
        return size

    def _refuse(self, status: int, text: str) -> _Refused:
        self.fault = Fault(status, "bad_request", text)
        return _Refused()

    def _request(self, body: bytes, flags: int = 0, announced: int | None = 0, refusal: int = 0) -> ParsedRequest:
        fields, forwarded = self.head[:2]
        flags |= self._request_flags
        return ParsedRequest(flags, self.method, self._target, fields, forwarded, body, announced, refusal)

    # -- upgrades ------------------------------------------------------------------------------------------

    def _upgrade(self) -> None:
        """The parser stopped at the end of a head with an Upgrade, and has read no body."""
        websocket = self._websockets and self.head.websocket
        lines = [b"%b %b HTTP/1.%d" % (self.method, self._target, 0 if self._request_flags & HTTP_1_0 else 1)]
        lines += [b"%b: %b" % header for header in self._headers if websocket or header[0].lower() != b"upgrade"]
        # The head as it came, up to spaces; without its Upgrade if that is ignored.
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self.phase = _BETWEEN
        if websocket:
            self.requests.append(head)
        else:
            # Answer the request in HTTP/1.1 (RFC 9110, section 7.8).
            self._feed(head)

    # -- called by the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.phase = _HEAD
        self._target = b""
        self._headers = []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers of a chunked body come here, too, and are ignored.
        if self.phase is _HEAD:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if (
            self._head_bytes + self._piece_bytes > MAX_HEAD_BYTES
            and size_of_head(self._target, self._headers) > MAX_HEAD_BYTES
        ):
            raise self._refuse(431, _HEAD_TOO_LARGE)
        version = parser.get_http_version()
        try:
            self.head = read_head(version, self._headers, self._table)
        except HeadFault as fault:
            raise self._refuse(fault.status, fault.text) from None
        self.phase = _BODY
        self._body = []
        self.size = self._chunks = 0
        # _feed() counts what follows the head in this piece.
        self.body_bytes = -1
        self._request_flags = (
            self._flags | (0 if version == "1.1" else HTTP_1_0) | (0 if parser.should_keep_alive() else CLOSES)
        )
        self.method = parser.get_method()
        if parser.should_upgrade():
            if self.method == b"CONNECT":
                raise self._refuse(405, "this server is no proxy")
            self.phase = _UPGRADE

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS + self.size // _MIN_CHUNK_BYTES:
            raise self._refuse(400, "the body comes in too many small chunks")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)
        self.size += len(part)
        if self.size > MAX_BODY_BYTES:
            raise _Refused

    def on_message_complete(self) -> None:
        if self.phase is _UPGRADE:
            return
        body = self._body
        self.requests.append(self._request(b"".join(body) if len(body) != 1 else body[0]))
        self.drop_body()
        # Counts the next head, which begins somewhere in the bytes after this request.
        self._head_bytes = 0
