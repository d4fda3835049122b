"""The messages between a worker and the control plane: an HTTP request, and the answer to it.

A worker parses HTTP and sends each request as one message over one Unix stream socket; control answers with one
message, in any order. A message is a 32-bit size and that many bytes, the first four of which are the request's number;
_http (RequestHead, AnswerHead) packs and reads them. This module knows neither sockets nor what a request means.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

__all__ = [
    "AUTHENTICATED",
    "CLOSES",
    "CONTINUE",
    "FIELDS",
    "HEAD_ONLY",
    "HEARTBEAT_S",
    "HTTP_1_0",
    "LAST",
    "MAX_BODY_BYTES",
    "PULL_LIMIT",
    "PULL_TERMS",
    "SECURE",
    "SIZE_BYTES",
    "STREAM",
    "STREAM_APP",
    "STREAM_CHANNEL",
    "PullTerms",
    "number_of",
    "pack_fields",
    "size_of",
    "unpack_fields",
]

# The greatest body of a request.
MAX_BODY_BYTES: Final = 1024 * 1024
# Control sends an empty answer to request 0 this often, so that a worker notices a control plane that hangs.
HEARTBEAT_S: Final = 0.5
SIZE_BYTES: Final = 4

# Flags of a request.
SECURE: Final = 1  # the client used TLS
HEAD_ONLY: Final = 2  # the body isn't read yet; the worker asks whether to read it
CLOSES: Final = 4  # the connection closes after the answer
HTTP_1_0: Final = 8  # the client speaks HTTP/1.0
STREAM: Final = 16  # the worker answers it, and asks what it may answer (worker/streams)

# Header fields of control's answer to a request with STREAM: the app, and the channel that may be read.
STREAM_APP: Final = "X-Stream-App"
STREAM_CHANNEL: Final = "X-Stream-Channel"
# In a pull of webhooks whose client gets a stream: how many deliveries it takes now, because others are on their way.
PULL_LIMIT: Final = "X-Pull-Limit"
# In the answer to it, and to any pull for which nothing is due: PullTerms, with STREAM_APP.
PULL_TERMS: Final = "X-Pull-Terms"

# Flags of an answer.
LAST: Final = 1  # the connection closes after it; of request 0: control is stopping
CONTINUE: Final = 2  # the worker may read the body; the answer to the request follows later
AUTHENTICATED: Final = 4  # the request had a right credential of an app

# The header fields that control reads; the worker leaves out all others, and a Content-Type of JSON, which is usual.
FIELDS: Final = (
    "Authorization",
    "X-Service-Key",
    "X-Service-Secret",
    "Content-Type",
    "Content-Encoding",
    "If-Match",
    "If-None-Match",
    "Origin",
    "Access-Control-Request-Headers",
    "traceparent",
    PULL_LIMIT,
)

_FIELD: Final = struct.Struct("<BH")
_SIZE: Final = struct.Struct("<I")


class PullTerms(NamedTuple):
    """For how long the client of a pull waits, how many deliveries it takes at a time, how long they are leased to it,
    and in how many seconds the next one is due; infinity if none waits."""

    wait_s: float
    limit: int
    lease_s: float
    next_s: float

    def packed(self) -> str:
        """The value of PULL_TERMS."""
        return f"{self.wait_s:g} {self.limit} {self.lease_s:g} {self.next_s:.3f}"

    @classmethod
    def unpack(cls, value: str) -> Self:
        wait_s, limit, lease_s, next_s = value.split(" ")
        return cls(float(wait_s), int(limit), float(lease_s), float(next_s))


def pack_fields(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """Header fields, each by its place in FIELDS; later places are not for control."""
    return b"".join([_FIELD.pack(place, len(value)) + value for place, value in fields if place < len(FIELDS)])


def size_of(buffer: bytes | bytearray, at: int) -> int:
    """Bytes of the message at `at`, its size included. At least SIZE_BYTES must be there."""
    (size,) = _SIZE.unpack_from(buffer, at)
    return SIZE_BYTES + int(size)


def number_of(message: bytes) -> int:
    """The number of the request of a whole message."""
    (number,) = _SIZE.unpack_from(message, SIZE_BYTES)
    return int(number)


def unpack_fields(data: bytes) -> dict[str, str]:
    """The header fields that `pack_fields` packed; of several with the same name the first."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(data):
        place, size = _FIELD.unpack_from(data, at)
        at += _FIELD.size
        fields.setdefault(FIELDS[place], data[at : at + size].decode("utf-8", "surrogateescape"))
        at += size
    return fields
