"""Makes the lines of the HTTP fallback from the WebSocket frames that a connection writes.

A line is a letter and JSON, as in SockJS (pusher-js, src/core/http/http_socket.ts):

    o                 the session is open
    a["…","…"]        messages
    h                 a heartbeat; a streaming client answers with an empty xhr_send
    c[code,"reason"]  the session is closed

Sessions that write the same frames share the bytes: a channel's event is made into a line once for all of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

__all__ = ["BEAT", "OPEN", "PRELUDE", "STILL_THERE", "LineMaker", "Lines", "close_line", "lines_of", "message_line"]

_TEXT, _CLOSE, _PING = 1, 8, 9
# Of all frames that are remembered, with their lines.
_MAX_REMEMBERED_BYTES: Final = 1024 * 1024


class Lines(NamedTuple):
    """Whole lines: as they are (`text`), and as a chunk of HTTP/1.1. `units` are the UTF-16 code units that a page
    counts. `closing`: the close code and reason, if the last line is `c`."""

    text: bytes
    chunk: bytes
    units: int
    closing: tuple[int, str] | None = None


def lines_of(text: bytes, closing: tuple[int, str] | None = None) -> Lines:
    units = len(text) if text.isascii() else len(text.decode().encode("utf-16-le")) // 2
    return Lines(text, b"%x\r\n%b\r\n" % (len(text), text) if text else b"", units, closing)


def message_line(*messages: str) -> bytes:
    return b"a" + msgspec.json.encode(messages) + b"\n"


def close_line(code: int, reason: str) -> bytes:
    return b"c" + msgspec.json.encode((code, reason)) + b"\n"


OPEN: Final = lines_of(b"o\n")
BEAT: Final = lines_of(b"h\n")
# Answers a client's ping: any line counts as a sign of life, and this one asks for no answer.
STILL_THERE: Final = lines_of(b"a[]\n")
# Some browsers and proxies pass on nothing before they have 2 KiB. pusher-js takes it for a heartbeat.
PRELUDE: Final = lines_of(b"h" * 2048 + b"\n")


class LineMaker:
    """Makes lines of frames, and remembers the latest. Call `forget` a few times a second."""

    def __init__(self) -> None:
        self._remembered: dict[bytes, Lines] = {}
        self._bytes = 0
        # How many were made; for tests and figures.
        self.made = 0

    def of(self, frames: bytes) -> Lines:
        """`frames` are whole frames of the server: text, Close, Ping; others are dropped."""
        lines = self._remembered.get(frames)
        if lines is None:
            lines = _read(frames)
            self.made += 1
            self._bytes += len(frames) + 2 * len(lines.text)
            if self._bytes > _MAX_REMEMBERED_BYTES:
                self.forget()
            else:
                self._remembered[frames] = lines
        return lines

    def forget(self) -> None:
        self._remembered.clear()
        self._bytes = 0


def _read(frames: bytes) -> Lines:
    made: list[bytes] = []
    messages: list[str] = []
    beats = False
    closing: tuple[int, str] | None = None
    at = 0
    while at < len(frames) and closing is None:
        opcode, size = frames[at] & 0x0F, frames[at + 1]
        at += 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size = int.from_bytes(frames[at : at + width], "big")
            at += width
        payload = frames[at : at + size]
        at += size
        if opcode == _TEXT:
            messages.append(payload.decode())
        elif opcode == _PING:
            beats = True
        elif opcode == _CLOSE:
            closing = (int.from_bytes(payload[:2], "big"), payload[2:].decode()) if payload else (1005, "")
    if messages:
        made.append(message_line(*messages))
    if beats:
        made.append(BEAT.text)
    if closing is not None:
        made.append(close_line(*closing))
    return lines_of(b"".join(made), closing)
