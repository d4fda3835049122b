"""The HTTP responses to readers: heads, and whole answers to those who don't get a stream of events.

Sections named here are those of the Durable Streams protocol (protocol/streams.py).
"""

from __future__ import annotations

import random
import secrets
import time
from http import HTTPStatus
from typing import Final

import msgspec

from redpoll.http.errors import error_response, http_date
from redpoll.http.messages import STREAM_APP, STREAM_CHANNEL
from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live, Reading, cursor_at, token_of
from redpoll.worker.streams.formats import Batch, as_json

__all__ = [
    "Granted",
    "batch_answer",
    "come_again",
    "error_answer",
    "etag_of",
    "is_known",
    "metadata",
    "secured",
    "stream_head",
]

# What pages of other origins may read besides the usual ones.
_EXPOSED: Final = (
    "Access-Control-Expose-Headers: Stream-Next-Offset, Stream-Cursor, Stream-Up-To-Date, Stream-Closed, ETag\r\n"
)
# Section 12.7.
_SECURITY: Final = "X-Content-Type-Options: nosniff\r\nCross-Origin-Resource-Policy: cross-origin\r\n"
# A client may keep an answer, and asks each time whether it is still right: the next one may say that the history was
# cleared. Section 10.1 would let it be used for a minute.
_REVALIDATE: Final = "Cache-Control: private, no-cache\r\n"
_NOT_STORED: Final = "Cache-Control: no-store\r\n"
# nginx passes each event on at once.
_EVENTS: Final = "Content-Type: text/event-stream\r\nCache-Control: no-cache, no-transform\r\nX-Accel-Buffering: no\r\n"
# When an EventSource comes again that can't be served now. Many of them may be answered at once.
_COME_AGAIN_MS: Final = (1_000, 3_000)
_TRACE_ID: Final = "X-Service-Trace-Id"
_JSON: Final = "Content-Type: application/json\r\n"


class Granted(msgspec.Struct, frozen=True):
    """Control's answer to a worker: the caller may read this channel. `headers` are lines for the response, with the
    trace id among them."""

    app_id: str
    channel: str
    headers: str
    trace_id: str = ""

    @classmethod
    def of_response(cls, response: bytes) -> Granted:
        """What control's response says (control/api/streams.py)."""
        app_id = channel = headers = trace_id = ""
        for line in response.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(": ")
            if name == STREAM_APP:
                app_id = value
            elif name == STREAM_CHANNEL:
                channel = value
            elif name.startswith("Access-Control-") or name in ("Vary", _TRACE_ID):
                headers += f"{line}\r\n"
                trace_id = value if name == _TRACE_ID else trace_id
        return cls(app_id, channel, headers, trace_id)


def batch_answer(batch: Batch, begin: str, reading: Reading, granted: Granted, known: str) -> bytes:
    """The whole answer to a request without a stream. `begin` is the position that it was read from, for the ETag;
    `known` the client's If-None-Match. Without messages, a long poll gets 204."""
    now_s = time.time()
    lines = _position(batch) + granted.headers + _EXPOSED
    if reading.live is Live.LONG_POLL and not batch.ended:
        lines += f"Stream-Cursor: {cursor_at(now_s, reading.cursor)}\r\n"
    if reading.live is not Live.NO and not batch.messages:
        return _response(204, lines + _NOT_STORED, b"")
    if reading.start.now:
        return _response(200, lines + _JSON + _NOT_STORED, as_json(batch.messages, reading.data_only))
    etag = etag_of(batch, begin)
    lines += f"ETag: {etag}\r\n{_REVALIDATE}"
    if is_known(etag, known):
        return _response(304, lines, b"")
    return _response(200, lines + _JSON, as_json(batch.messages, reading.data_only))


def metadata(batch: Batch, granted: Granted) -> bytes:
    """The answer to HEAD: the position after the last message (section 5.5)."""
    return _response(200, _position(batch) + granted.headers + _EXPOSED + _JSON + _NOT_STORED, None)


def stream_head(granted: Granted, chunked: bool) -> bytes:
    """The head of a stream of events. The connection ends with the stream."""
    coding = "Transfer-Encoding: chunked\r\n" if chunked else ""
    return _response(200, f"{_EVENTS}{coding}Connection: close\r\n{granted.headers}{_EXPOSED}", None)


def come_again() -> bytes:
    """The answer to an EventSource in place of a temporary error. It would never ask again after a status other than
    200 (HTML, section 9.2.3). After this it does, with the id of its last event. Pages of any origin may read that
    there is nothing: those that the app allows may not be known now."""
    body = b"retry: %d\n\n" % random.randint(*_COME_AGAIN_MS)
    lines = f"Connection: close\r\nAccess-Control-Allow-Origin: *\r\n{_TRACE_ID}: {secrets.token_hex(16)}\r\n"
    return _response(200, _EVENTS + lines, body)


def error_answer(error: ApiError, granted: Granted | None = None) -> bytes:
    """An error (protocol/README.md "Errors")."""
    more, trace_id = ("", "") if granted is None else (granted.headers + _EXPOSED, granted.trace_id)
    more += "Retry-After: 1\r\n" if error.status == 503 else ""
    return error_response(error.status, error.code, error.message, _SECURITY + more, keep_alive=True, trace_id=trace_id)


def secured(response: bytes) -> bytes:
    """Control's error with the headers of this module's."""
    return response.replace(b"\r\n", b"\r\n" + _SECURITY.encode(), 1)


def etag_of(batch: Batch, begin: str) -> str:
    """Two answers with one ETag have the same body, and say the same of what follows (section 10.1)."""
    marks = (":u" if batch.up_to_date else "") + (":c" if batch.ended else "")
    return f'"{begin}:{batch.offset:016d}{marks}"'


def is_known(etag: str, known: str) -> bool:
    """Whether the client named this ETag in If-None-Match (RFC 9110 section 13.1.2)."""
    return known.strip() == "*" or etag in [part.strip().removeprefix("W/") for part in known.split(",")]


def _position(batch: Batch) -> str:
    lines = f"Stream-Next-Offset: {token_of(batch.epoch, batch.offset)}\r\n"
    if batch.up_to_date:
        lines += "Stream-Up-To-Date: true\r\n"
    if batch.ended:
        lines += "Stream-Closed: true\r\n"
    return lines


def _response(status: int, lines: str, body: bytes | None) -> bytes:
    """`body` None: only the head, without its size."""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nDate: {http_date(int(time.time()))}\r\n{_SECURITY}{lines}"
    if body is None or status in (204, 304):
        return f"{head}\r\n".encode("latin-1")
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
