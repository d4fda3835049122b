"""What a reader gets: messages as JSON or as server-sent events, with the position after them.

Knows nothing of connections. A `Form` says how a stream of events is written; its readers share what is written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from redpoll import _frame
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import StoredMessage
from redpoll.protocol.streams import Live, Reading, cursor_at, token_of

__all__ = [
    "KEEP_ALIVE",
    "KEEP_ALIVE_S",
    "STREAM_S",
    "Batch",
    "Form",
    "Message",
    "as_json",
    "event_text",
    "form_of",
    "lifetime_s",
    "message_of",
]

_encode: Final = msgspec.json.Encoder().encode
# A stream ends after about this time (section 10.2 of the protocol).
STREAM_S: Final = 60.0
_SPREAD: Final = 0.15
# A comment: proxies and clients see that the connection is alive. On streams without events, at least one in this time.
KEEP_ALIVE: Final = b":\n\n"
KEEP_ALIVE_S: Final = 15.0
# EventSource reconnects after this time, instead of the browser's 3 to 5 s: streams end once a minute.
_RETRY: Final = b"retry: 1000\n\n"
# The event after which an EventSource is to be closed. Names that begin so can't be published.
_ENDED_EVENT: Final = "pusher:end"
_ERROR_EVENT: Final = "pusher:error"
# JSON may name half of such a pair alone, as JSON.stringify does; msgspec takes that for a fault.
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LINE_BREAK: Final = re.compile(rb"\r\n|\r|\n")


class Message(NamedTuple):
    """A stored message; `prev` is the offset of the one before it. `event` and `data` are UTF-8."""

    offset: int
    prev: int
    event: bytes
    data: bytes


class Batch(NamedTuple):
    """Messages of one epoch, oldest first, and what is known after them: the reader's position `offset`; `up_to_date`:
    the last stored message is among them or before them; `ended`: no further one will come."""

    epoch: str
    messages: Sequence[Message]
    offset: int
    up_to_date: bool
    ended: bool = False


class Form(NamedTuple):
    """How a stream of events is written. `chunked`: in chunks of HTTP/1.1. Cursors are `least_cursor` or greater."""

    live: Live
    data_only: bool
    chunked: bool
    least_cursor: int = 0

    def opening(self) -> bytes:
        """What comes before the first event."""
        return self._chunk(_RETRY) if self.live is Live.EVENT_SOURCE else b""

    def written(self, batch: Batch, now_s: float) -> bytes:
        """A batch at Unix time `now_s`. It may be empty: then a `control` event, or an `id` for EventSource, tells the
        position."""
        if self.live is Live.EVENT_SOURCE:
            return self._chunk(_events_of(batch))
        data = b""
        if batch.messages:
            data = b"event: data\ndata:%b\n\n" % as_json(batch.messages, self.data_only)
        return self._chunk(b"%bevent: control\ndata:%b\n\n" % (data, self._control(batch, now_s)))

    def failure(self, error: ApiError) -> bytes:
        """Why a stream ends before its time. Clients of the protocol know no such event; they ask again, and get it as
        an answer. EventSource shows pages no answers, so it gets it here."""
        if self.live is not Live.EVENT_SOURCE:
            return b""
        body = {"error": error.message, "code": error.code, "status": error.status}
        return self._chunk(b"event: %b\ndata: %b\n\n" % (_ERROR_EVENT.encode(), _encode(body)))

    def events(self, events: Iterable[bytes]) -> bytes:
        """Events as `event_text` makes them."""
        return self._chunk(b"".join(events))

    def keep_alive(self) -> bytes:
        return self._chunk(KEEP_ALIVE)

    def closing(self) -> bytes:
        """The end of the response."""
        return b"0\r\n\r\n" if self.chunked else b""

    def _control(self, batch: Batch, now_s: float) -> bytes:
        control: dict[str, str | bool] = {"streamNextOffset": token_of(batch.epoch, batch.offset)}
        if not batch.ended:
            control["streamCursor"] = str(max(self.least_cursor, cursor_at(now_s, None)))
        if batch.up_to_date:
            control["upToDate"] = True
        if batch.ended:
            control["streamClosed"] = True
        return _encode(control)

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked and data else data


def lifetime_s() -> float:
    """How long a stream lasts. The times differ, so that the clients of a busy channel don't all come again at once."""
    return STREAM_S * random.uniform(1 - _SPREAD, 1)


def form_of(reading: Reading, chunked: bool, now_s: float) -> Form:
    """The form of a reader's stream. A client whose cursor isn't behind gets greater ones (section 10.1)."""
    least = 0
    if reading.live is Live.SSE and reading.cursor is not None and reading.cursor >= cursor_at(now_s, None):
        least = cursor_at(now_s, reading.cursor)
    return Form(reading.live, reading.data_only, chunked, least)


def message_of(payload: bytes) -> Message:
    """The message of an EVENT envelope (cluster/envelopes.py)."""
    offset, prev, *_, event, data = _frame.envelope(payload)
    return Message(offset, prev, event, data)


def as_json(messages: Iterable[Message], data_only: bool) -> bytes:
    """A JSON array, without line breaks. Each item is as in the history of the HTTP API; with `data_only` it is the
    data: as it is if it is JSON, else as a string."""
    if data_only:
        items = [_data_of(message) for message in messages]
    else:
        items = [
            _encode(
                StoredMessage(message.offset, message.event.decode(), message.data.decode(), message.offset // 1000)
            )
            for message in messages
        ]
    return b"[%b]" % b",".join(items)


def _data_of(message: Message) -> bytes:
    json = _in_one_line(message.data)
    if json is None:
        without_halves, surrogates = _SURROGATE.subn(rb"\\u0020", message.data)
        if surrogates and _in_one_line(without_halves) is not None:
            # In JSON, line breaks are only between tokens.
            json = _LINE_BREAK.sub(b" ", message.data)
    return _encode(message.data.decode()) if json is None else json


def _in_one_line(data: bytes) -> bytes | None:
    """None: it isn't JSON."""
    try:
        return msgspec.json.format(data, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return None


def _events_of(batch: Batch) -> bytes:
    if not batch.messages and not batch.ended:
        # An event without data is none for the page, but EventSource sends this id when it reconnects.
        return b"id: %b\n\n" % token_of(batch.epoch, batch.offset).encode()
    pieces = [
        event_text(token_of(batch.epoch, message.offset), message.event, message.data) for message in batch.messages
    ]
    if batch.ended:
        pieces.append(b"event: %b\ndata: {}\n\n" % _ENDED_EVENT.encode())
    return b"".join(pieces)


def event_text(event_id: str, name: bytes, data: bytes) -> bytes:
    """A field is one line: a line break in a name becomes a space, and data with several lines has several fields,
    which the client joins."""
    lines = b"".join(b"data: %b\n" % line for line in _LINE_BREAK.split(data))
    return b"id: %b\nevent: %b\n%b\n" % (event_id.encode(), _LINE_BREAK.sub(b" ", name), lines)
