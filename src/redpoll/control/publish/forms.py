"""The bytes of a usual publish's answer and of its row in the event log, with gaps.

The functions that answer and log every other publish make these bytes once. The compiled way fills the gaps, so a
change of the answer or of the row is a change of those functions.
"""

from __future__ import annotations

from typing import Final

import msgspec

from redpoll._text import Form
from redpoll.control.http.request import Request
from redpoll.control.http.response import EMPTY_OBJECT, dateline
from redpoll.control.tracing.tracing import call_row
from redpoll.http.messages import CLOSES, HTTP_1_0

__all__ = ["answer_form", "row_form"]

_TRACE: Final = "<trace>"
_LINES: Final = b"<lines>"
_DATELINE: Final = b"<dateline>"
_APP, _NAMES, _CHANNELS, _CALLER, _CLIENT = "<app>", "<names>", "<channels>", "<caller>", "<client>"
# Digits, because they are numbers in the row. The longer one is looked for first.
_TIME_US: Final = 1111111111111111
_TIME_MS: Final = 2222222222222
_BYTES: Final = 333333333


class _Sample(Request):
    """A usual publish that nobody sent. `sent`: the flags and the bytes of its answer."""

    __slots__ = ("sent",)

    sent: tuple[int, bytes]

    def answer(self, flags: int, response: bytes) -> None:
        self.sent = flags, response


def answer_form(*, closes: bool, http_1_0: bool = False) -> tuple[int, Form]:
    """The flags and the bytes of the answer to a confirmed publish, as Request.ok and Request.respond make them. The
    values are the trace id, more header lines, and the dateline. `closes`: the connection closes after it.
    `http_1_0`: the client speaks HTTP/1.0."""
    request = _Sample("POST", "/", {}, b"", (CLOSES if closes else 0) | (HTTP_1_0 if http_1_0 else 0))
    request.caller_known = True
    request.found_trace_id = _TRACE
    request.more_headers = _LINES
    request.respond(request.ok(EMPTY_OBJECT))
    flags, response = request.sent
    marked = response.replace(dateline.line, _DATELINE)
    return flags, Form(marked, (_TRACE.encode(), _LINES, _DATELINE))


def row_form() -> Form:
    """A row of the event log, as store/call_batch.py adds it. The values are the trace id, the app's id, the time in µs
    and in ms, names, channels, bytes, the caller and the client's address."""
    row = call_row(
        _TRACE,
        _APP,
        None,
        (_TIME_MS, _TIME_US),
        (_NAMES, [_CHANNELS], _BYTES),
        _CALLER,
        _CLIENT,
        200,
        False,
    )
    marks = (_TRACE, _APP, _TIME_US, _TIME_MS, _NAMES, _CHANNELS, _BYTES, _CALLER, _CLIENT)
    return Form(msgspec.json.encode(row) + b",", tuple(str(mark).encode() for mark in marks))
