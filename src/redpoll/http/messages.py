"""The messages between a worker and the control plane: an HTTP request, and the answer to it.

A worker parses HTTP and sends each request as one message over one Unix stream socket; control answers with one
message, in any order. A message is a 32-bit size and that many bytes, the first four of which are the request's number.
Both ends use this module. It knows neither sockets nor what a request means.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from redpoll._http import pack_answer, pack_request

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
    "SECURE",
    "SIZE_BYTES",
    "Answer",
    "WorkerRequest",
    "pack_answer",
    "pack_fields",
    "pack_request",
    "size_of",
    "unpack_answer",
    "unpack_fields",
    "unpack_request",
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
    "Origin",
    "Access-Control-Request-Headers",
    "traceparent",
)

# Size, number, flags, refusal, bytes of method, client address, target, fields; the announced body.
_REQUEST: Final = struct.Struct("<IIBHBBHHI")
_ANSWER: Final = struct.Struct("<IIB")
_FIELD: Final = struct.Struct("<BH")
_SIZE: Final = struct.Struct("<I")
_NO_FIELDS: Final[dict[str, str]] = {}


class WorkerRequest(NamedTuple):
    """A request as control gets it.

    `method`, `target` and `fields` are as the client sent them; `client` is its address, as a trusted proxy names it
    where there is one. With HEAD_ONLY in `flags` there is no body yet, and `announced` says how many bytes are to come
    (None: chunked). `refusal`: the HTTP status with which the worker had to stop reading the body; 0 as a rule.
    """

    number: int
    flags: int
    refusal: int
    method: str
    client: str
    target: str
    fields: dict[str, str]
    announced: int | None
    body: bytes


class Answer(NamedTuple):
    """`response` is the whole HTTP response, ready to be written."""

    number: int
    flags: int
    response: bytes


def pack_fields(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """Header fields, each by its place in FIELDS."""
    return b"".join([_FIELD.pack(place, len(value)) + value for place, value in fields])


def size_of(buffer: bytes | bytearray, at: int) -> int:
    """Bytes of the message at `at`, its size included. At least SIZE_BYTES must be there."""
    (size,) = _SIZE.unpack_from(buffer, at)
    return SIZE_BYTES + int(size)


def unpack_request(message: bytes) -> WorkerRequest:
    """The request of a whole message. Bytes that aren't UTF-8 become lone surrogates."""
    _, number, flags, refusal, method_size, client_size, target_size, fields_size, body_size = _REQUEST.unpack_from(
        message
    )
    at = _REQUEST.size + method_size
    method = message[_REQUEST.size : at].decode("ascii")
    client = message[at : at + client_size].decode("ascii")
    at += client_size
    target = message[at : at + target_size].decode("utf-8", "surrogateescape")
    at += target_size
    fields = unpack_fields(message[at : at + fields_size]) if fields_size else _NO_FIELDS
    announced = None if body_size == 0xFFFF_FFFF else body_size
    return WorkerRequest(number, flags, refusal, method, client, target, fields, announced, message[at + fields_size :])


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


def unpack_answer(message: bytes) -> Answer:
    """The answer of a whole message."""
    _, number, flags = _ANSWER.unpack_from(message)
    return Answer(number, flags, message[_ANSWER.size :])
