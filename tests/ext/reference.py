"""RFC 6455 and our event frames in slow, plain Python, to compare the compiled code with.

It was written from the RFC alone and shares no code with ext/. Used by tests/ext and by bench/soak/fuzz.py.
"""

from __future__ import annotations

import itertools
import json
import re
import struct

CLOSE_CODES = {*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)}


def client_frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = b"\x37\xfa\x21\x3d",
    length_bytes: int | None = None,
    claim: int | None = None,
) -> bytes:
    """A client's frame, or an invalid one: without a mask, with a length that isn't in its shortest form
    (`length_bytes` 0, 2 or 8), or with a wrong length."""
    size = len(payload) if claim is None else claim
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 65536 else 8
    first = fin << 7 | rsv << 4 | opcode
    masked = 0x80 if mask is not None else 0
    if length_bytes == 0:
        head = bytes([first, masked | size])
    elif length_bytes == 2:
        head = bytes([first, masked | 126]) + struct.pack(">H", size)
    else:
        head = bytes([first, masked | 127]) + struct.pack(">Q", size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[!-~\x80-\xff]+")
_VALUE = re.compile(rb"[\t !-~\x80-\xff]*")
_VERSION = re.compile(rb"HTTP/([0-9])\.([0-9])")


def parse_head(head: bytes) -> tuple[bytes, bytes, tuple[int, int], dict[bytes, bytes]]:
    """Method, target, version and headers of a request head (RFC 9112). Raises ValueError for a head that two readers
    could understand differently."""
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3:
        raise ValueError("the request line is not `method target version`")
    method, target, version = words
    match = _VERSION.fullmatch(version)
    if not _TOKEN.fullmatch(method) or not _TARGET.fullmatch(target) or match is None:
        raise ValueError("a word of the request line is wrong")
    if len(lines) < 3 or lines[-1] or lines[-2]:
        raise ValueError("the head does not end in a blank line")
    headers: dict[bytes, bytes] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("a header line is wrong")
        name = name.lower()
        headers[name] = headers[name] + b", " + value if name in headers else value
    return method, target, (int(match[1]), int(match[2])), headers


def server_frames(data: bytes) -> list[tuple[int, bytes]]:
    """(opcode, payload) of each frame that a server sent. Raises AssertionError if one is incomplete or not plain."""
    frames = []
    while data:
        assert data[0] & 0xF0 == 0x80, f"not a final, plain frame: {data[:4]!r}"
        size, start = data[1], 2
        assert size < 128, "a server doesn't mask"
        if size == 126:
            size, start = struct.unpack(">H", data[2:4])[0], 4
            assert size > 125
        elif size == 127:
            size, start = struct.unpack(">Q", data[2:10])[0], 10
            assert size > 65535
        assert len(data) >= start + size, "cut off"
        frames.append((data[0] & 15, data[start : start + size]))
        data = data[start + size :]
    return frames


def is_utf8_so_far(data: bytes) -> bool:
    """Whether further bytes could make it valid UTF-8. (Python's incremental decoder is no help: it takes ED AA, the
    beginning of a surrogate, for the beginning of a character.)"""
    # One of the two follows every lead byte: E0 and F0 need the higher, ED and F4 the lower.
    return any(
        is_utf8(data + bytes(tail)) for missing in range(4) for tail in itertools.product((0x80, 0xA0), repeat=missing)
    )


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def parse(stream: bytes, max_message_bytes: int) -> list[tuple]:
    """What a server receives in `stream`: ("text" | "binary" | "ping", payload) …, and at most one last
    ("close", code, reason) or ("fail", code)."""
    events: list[tuple] = []
    message = bytearray()
    under_way = 0
    at = 0
    while at < len(stream):
        head = stream[at : at + 14]
        fin, rsv, opcode = head[0] >> 7, head[0] >> 4 & 7, head[0] & 15
        control = opcode >= 8
        if rsv or opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15) or (control and not fin):
            return [*events, ("fail", 1002)]
        if len(head) < 2:
            return events
        size = head[1] & 127
        if not head[1] & 128 or (control and size > 125):
            return [*events, ("fail", 1002)]
        start = 2
        if size == 126:
            if len(head) < 4:
                return events
            size, start = struct.unpack(">H", head[2:4])[0], 4
            if size < 126:
                return [*events, ("fail", 1002)]
        elif size == 127:
            if len(head) < 10:
                return events
            size, start = struct.unpack(">Q", head[2:10])[0], 10
            if size < 65536 or size >= 1 << 63:
                return [*events, ("fail", 1002)]
        mask = head[start : start + 4]
        if len(mask) < 4:
            return events
        if not control:
            if (opcode == 0) != bool(under_way):
                return [*events, ("fail", 1002)]
            if size + len(message) > max_message_bytes:
                return [*events, ("fail", 1009)]
        at += start + 4
        masked = stream[at : at + size]
        payload = bytes(byte ^ mask[i % 4] for i, byte in enumerate(masked))
        at += size
        complete = len(payload) == size
        if control:
            if not complete:
                return events
            if opcode == 9:
                events.append(("ping", payload))
            elif opcode == 8:
                return [*events, parse_close(payload)]
            continue
        under_way = under_way or opcode
        message += payload
        if under_way == 1 and not is_utf8_so_far(bytes(message)):
            return [*events, ("fail", 1007)]
        if not complete:
            return events
        if fin:
            if under_way == 1 and not is_utf8(bytes(message)):
                return [*events, ("fail", 1007)]
            events.append(("text" if under_way == 1 else "binary", bytes(message)))
            message.clear()
            under_way = 0
    return events


def parse_close(payload: bytes) -> tuple:
    if not payload:
        return ("close", 1005, "")
    if len(payload) == 1:
        return ("fail", 1002)
    code = struct.unpack(">H", payload[:2])[0]
    if code not in CLOSE_CODES:
        return ("fail", 1002)
    if not is_utf8(payload[2:]):
        return ("fail", 1007)
    return ("close", code, payload[2:].decode())


def event_frame(event: bytes, channel: bytes, data: bytes, user_id: bytes | None = None) -> bytes:
    """The text frame of an event, by json.dumps."""
    body = {"event": event.decode(), "channel": channel.decode(), "data": data.decode()}
    if user_id is not None:
        body["user_id"] = user_id.decode()
    payload = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if len(payload) < 126:
        return bytes([0x81, len(payload)]) + payload
    if len(payload) < 65536:
        return b"\x81\x7e" + struct.pack(">H", len(payload)) + payload
    return b"\x81\x7f" + struct.pack(">Q", len(payload)) + payload
