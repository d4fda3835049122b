"""What workers tell each other about the requests of sessions (cluster/mailbox.py)."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["Attach", "Bring", "Left", "Message", "Missed", "Status", "Written", "decode", "encode"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """`number` is the request's in the worker `by` (RUN.K) that has it."""

    number: int
    by: str


class Attach(Message, frozen=True):
    """A stream or poll waits for the session's lines. Answered by Written, or Status."""

    key: str
    session: str
    polls: bool
    n: int | None


class Bring(Message, frozen=True):
    """An xhr_send. Answered by Status."""

    key: str
    session: str
    n: int | None
    body: bytes


class Left(Message, frozen=True):
    """The client of a stream or poll has gone."""


class Missed(Message, frozen=True):
    """An xhr_send of this session didn't reach it: it was answered with `status`. `number` is 0."""

    key: str
    session: str
    status: int = 503


class Written(Message, frozen=True):
    """Lines for a request; `by` is the session's worker. The first one may be empty: the session is there. `last`:
    nothing more comes."""

    text: bytes
    last: bool


class Status(Message, frozen=True):
    """The HTTP status that answers a request."""

    status: int


encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Attach | Bring | Left | Missed | Written | Status).decode
