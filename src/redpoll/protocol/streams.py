"""Reading a channel over HTTP: what a request asks for, positions as tokens, and cursors.

The Durable Streams protocol 1.0, its reading half in JSON mode, and server-sent events for EventSource. Sections named
here are those of its specification. protocol/README.md "Streams" says what redpoll adds.
"""

import random
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import MAX_OFFSET

__all__ = [
    "CURSOR_INTERVAL_S",
    "Live",
    "Reading",
    "Start",
    "accepts_events",
    "cursor_at",
    "has_ended_since",
    "parse_reading",
    "token_of",
]

# Section 10.1: cursors count intervals from 2024-10-09T00:00:00Z.
CURSOR_INTERVAL_S: Final = 20
_CURSOR_EPOCH_S: Final = 1_728_432_000
# A cursor that isn't behind the present interval is raised by as many at most. The protocol allows 180 (an hour); few
# different cursors mean few different frames for readers of the same events.
_MAX_CURSOR_STEP: Final = 3
_MAX_TOKEN_CHARS: Final = 128
_TOKEN = re.compile(r"([0-9A-Za-z]{1,100})_([0-9]{16})").fullmatch
_CURSOR = re.compile(r"[0-9]{1,15}").fullmatch

_BEGINNING: Final = "-1"
_NOW: Final = "now"


class Live(Enum):
    """How a reader gets what comes after the stored messages."""

    NO = "no"
    """Not at all: the answer has what is stored (section 5.6)."""
    LONG_POLL = "long-poll"
    """The answer waits for the next message (section 5.7)."""
    SSE = "sse"
    """A stream of events: `data` and `control` (section 5.8)."""
    EVENT_SOURCE = "event-source"
    """A stream of events as they were published, for EventSource: `Accept: text/event-stream` without `live`."""

    @property
    def is_stream(self) -> bool:
        return self in (Live.SSE, Live.EVENT_SOURCE)


class Start(NamedTuple):
    """Where a reader begins: after `offset` in `epoch`; without an epoch at the beginning, or with `now` after the last
    message."""

    epoch: str | None = None
    offset: int = 0
    now: bool = False


class Reading(NamedTuple):
    """What a request asks for. `cursor` is the client's last one. `data_only`: messages are their data alone."""

    start: Start
    live: Live
    cursor: int | None
    data_only: bool


def token_of(epoch: str, offset: int) -> str:
    """The position after the message at `offset`. Tokens of one epoch sort as text."""
    return f"{epoch}_{offset:016d}"


def parse_reading(query: Sequence[tuple[str, str]], accept: str, last_event_id: str) -> Reading:
    """What a request with this query and these header fields ("" without one) asks for. Unknown parameters are ignored.
    Raises ApiError `bad_request`."""
    values = _single_values(query)
    live = _live_of(values.get("live"), accept)
    offset = values.get("offset")
    if offset is None and live in (Live.LONG_POLL, Live.SSE):
        raise ApiError("bad_request", f"offset is missing; live={live.value} needs one: -1, now, or a token")
    if live is Live.EVENT_SOURCE and last_event_id:
        # What EventSource sends when it reconnects, to the same URL.
        start = _start_of(last_event_id, "Last-Event-ID")
    else:
        start = _start_of(_BEGINNING if offset is None else offset, "offset")
    cursor = values.get("cursor")
    if cursor is not None and _CURSOR(cursor) is None:
        raise ApiError("bad_request", "cursor is not one that this server returned")
    only = values.get("only")
    if only not in (None, "data"):
        raise ApiError("bad_request", "only must be data, or left out")
    return Reading(start, live, None if cursor is None else int(cursor), only is not None)


def accepts_events(accept: str) -> bool:
    """Whether the Accept header asks for server-sent events."""
    return "text/event-stream" in [part.partition(";")[0].strip().lower() for part in accept.split(",")]


def cursor_at(now_s: float, asked: int | None) -> int:
    """The cursor for an answer at Unix time `now_s` to a client whose last one was `asked`: always a greater one than
    that (section 10.1)."""
    present = int(now_s - _CURSOR_EPOCH_S) // CURSOR_INTERVAL_S
    return present if asked is None or asked < present else asked + random.randint(1, _MAX_CURSOR_STEP)


def has_ended_since(start: Start, epoch: str) -> bool:
    """Whether the position that a client names is of an earlier epoch than the channel's: messages are missing."""
    return start.epoch is not None and start.epoch != epoch


def _single_values(query: Sequence[tuple[str, str]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in query:
        if name in ("offset", "live", "cursor", "only"):
            if name in values:
                raise ApiError("bad_request", f"{name} is given more than once")
            values[name] = value
    return values


def _live_of(live: str | None, accept: str) -> Live:
    if live is None:
        return Live.EVENT_SOURCE if accepts_events(accept) else Live.NO
    if live == Live.LONG_POLL.value:
        return Live.LONG_POLL
    if live == Live.SSE.value:
        return Live.SSE
    raise ApiError("bad_request", "live must be long-poll or sse, or left out")


def _start_of(text: str, name: str) -> Start:
    if text == _BEGINNING:
        return Start()
    if text == _NOW:
        return Start(now=True)
    match = _TOKEN(text) if len(text) <= _MAX_TOKEN_CHARS else None
    if match is None or int(match[2]) > MAX_OFFSET:
        raise ApiError("bad_request", f"{name} must be -1, now, or a token from Stream-Next-Offset")
    return Start(match[1], int(match[2]))
