"""Reads the header fields of a request that llhttp has parsed, and refuses heads that two readers could understand
differently.

Knows nothing of sockets: reader.py parses the bytes, and connection.py decides what to do with the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = [
    "JSON_TYPES",
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "FieldTable",
    "Head",
    "HeadFault",
    "read_head",
    "size_of_head",
]

MAX_HEAD_BYTES: Final = 16 * 1024
MAX_HEADERS: Final = 100
# int() refuses thousands of them, also of zeros.
_MAX_LENGTH_DIGITS: Final = 20

# The kind of a header field: its place in FieldTable.names if it is passed on, else one of these.
_IGNORE, _HOST, _LENGTH, _ENCODING, _EXPECT, _UPGRADE, _FORWARDED = -1, 100, 101, 102, 103, 104, 105
_READ_HERE: Final = {
    b"host": _HOST,
    b"content-length": _LENGTH,
    b"transfer-encoding": _ENCODING,
    b"expect": _EXPECT,
    b"upgrade": _UPGRADE,
    b"x-forwarded-for": _FORWARDED,
}
_MAX_SPELLINGS: Final = 1024

# A Content-Type of JSON, in lower case. JSON is always UTF-8 (RFC 8259 section 8.1), which some libraries say again.
JSON_TYPES: Final = frozenset(
    (b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8")
)


class FieldTable:
    """The header fields that are passed on, by their places in `names`; others are ignored.

    Content-Type is passed on if it isn't JSON, which is usual. `kinds`: the kind of each name in lower case.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.kinds: dict[bytes, int] = {name.lower().encode(): place for place, name in enumerate(names)} | _READ_HERE
        self.content_type = names.index("Content-Type")
        self.host = names.index("Host") if "Host" in names else None
        # A cache of kinds by the spelling on the wire. Bounded: clients choose the spellings.
        self.spellings: dict[bytes, int] = {}

    def kind_of(self, name: bytes) -> int:
        """The kind of a field whose name is spelled like this."""
        kind = self.kinds.get(name.lower(), _IGNORE)
        if len(self.spellings) < _MAX_SPELLINGS:
            self.spellings[name] = kind
        return kind


class HeadFault(Exception):
    """The request is refused with `status`, and nothing after it is read."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class Head(NamedTuple):
    """`fields` are passed on, each by its place in the table. `forwarded` are the X-Forwarded-For headers.
    `announced` is the size of the body in bytes, None if it is chunked. `expects`: the client waits for 100 Continue.
    `websocket`: an Upgrade header names a WebSocket."""

    fields: list[tuple[int, bytes]]
    forwarded: list[str]
    announced: int | None
    expects: bool
    websocket: bool


def read_head(version: str, headers: Sequence[tuple[bytes, bytes]], table: FieldTable) -> Head:
    """Read the `headers` of a request of this HTTP version, names and values as they were sent. Raises HeadFault."""
    if len(headers) > MAX_HEADERS:
        raise HeadFault(431, f"more than {MAX_HEADERS} header fields")
    fields: list[tuple[int, bytes]] = []
    forwarded: list[str] = []
    announced = hosts = 0
    chunked = expects = websocket = False
    for name, value in headers:
        kind = table.spellings.get(name)
        if kind is None:
            kind = table.kind_of(name)
        if kind < 0:
            continue
        if kind < _HOST:
            if kind != table.content_type or value.lower() not in JSON_TYPES:
                fields.append((kind, value))
        elif kind == _HOST:
            hosts += 1
            if table.host is not None:
                fields.append((table.host, value))
        elif kind == _LENGTH:
            if len(value) > _MAX_LENGTH_DIGITS:
                raise HeadFault(400, "not an HTTP request: Content-Length has too many digits")
            announced = int(value)
        elif kind == _ENCODING:
            if chunked or value.lower() != b"chunked":
                raise HeadFault(400, "the only transfer coding is chunked, once")
            chunked = True
        elif kind == _EXPECT:
            if value.lower() != b"100-continue":
                raise HeadFault(417, "the only expectation is 100-continue")
            expects = True
        elif kind == _UPGRADE:
            websocket = websocket or b"websocket" in value.lower()
        else:
            forwarded.append(value.decode("latin-1"))
    if version == "1.1":
        if hosts != 1:
            raise HeadFault(400, "not an HTTP request: HTTP/1.1 needs one Host header")
    elif version != "1.0" or chunked or hosts > 1:
        raise HeadFault(400, "not an HTTP request: HTTP/1.1 is spoken here, and HTTP/1.0 without chunks")
    return Head(fields, forwarded, None if chunked else announced, expects, websocket)


def size_of_head(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """About how many bytes the head has."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
