"""The addresses of the HTTP fallback: PREFIX/app/KEY/N/SESSION/ACTION?QUERY.

pusher-js makes them (src/core/http/http_socket.ts): N has up to three digits, SESSION is eight random digits to the
base 32, and each request has a number `n`, which rises with each request of the page. PREFIX is its option `httpPath`,
by default /pusher.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import unquote

__all__ = ["Action", "Target", "read_target"]

# A session is known by its name alone. Eight characters of pusher-js are 40 random bits, and N adds ten.
_PATH: Final = re.compile(
    rb"((?:/[^?]{0,256})?/app/([^/?]{1,128}))/([0-9]{1,4}/[A-Za-z0-9_-]{8,64})/(xhr_streaming|xhr|xhr_send)(?:\?(.*))?"
).fullmatch
_NUMBER: Final = re.compile(rb"(?:.*&)?n=([0-9]{1,15})(?:&.*)?").fullmatch


class Action(Enum):
    STREAM = b"xhr_streaming"
    POLL = b"xhr"
    SEND = b"xhr_send"


class Target(NamedTuple):
    """`path` ends in /app/KEY, as a WebSocket's; `key` is decoded. `session` is N/SESSION. `number`: the request's `n`,
    None if it has none."""

    path: str
    key: str
    session: str
    action: Action
    query: str
    number: int | None


def read_target(target: bytes) -> Target | None:
    """None: it is no address of the fallback."""
    match = _PATH(target)
    if match is None:
        return None
    path, key, session, action, query = match.groups(b"")
    number = _NUMBER(query)
    return Target(
        path.decode("latin-1"),
        unquote(key.decode("latin-1")),
        session.decode(),
        Action(action),
        query.decode("latin-1"),
        int(number[1]) if number is not None else None,
    )
