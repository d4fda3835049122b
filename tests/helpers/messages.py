"""Messages between a worker and control (redpoll/http/messages.py), read in Python for the tests."""

import struct
from typing import NamedTuple

from redpoll.http.messages import unpack_fields

# Size, number, flags, refusal, bytes of method, client address, target, fields; the announced body.
_REQUEST = struct.Struct("<IIBHBBHHI")
_ANSWER = struct.Struct("<IIB")


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
    fields = unpack_fields(message[at : at + fields_size]) if fields_size else {}
    announced = None if body_size == 0xFFFF_FFFF else body_size
    return WorkerRequest(number, flags, refusal, method, client, target, fields, announced, message[at + fields_size :])


def unpack_answer(message: bytes) -> Answer:
    """The answer of a whole message."""
    _, number, flags = _ANSWER.unpack_from(message)
    return Answer(number, flags, message[_ANSWER.size :])
