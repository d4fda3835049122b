"""Encodes the frames of events, once per event, and parses the bus envelope in which an event arrives.

Bytes in, bytes out: no sockets, no state. Payloads must be valid UTF-8; the callers have checked that.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from redpoll._shards cimport Shards
from redpoll._text cimport Span, put, put_number, span_of, span_of_text

__all__ = [
    "close",
    "envelope",
    "event_frame",
    "frame_and_trace",
    "frame_of",
    "offsets",
    "pack_event",
    "pack_publish",
    "ping",
    "pong",
    "text",
    "trace_of",
]

# RFC 6455 5.2: FIN set, no RSV, opcode. 5.5: a control frame carries at most 125 bytes.
cdef enum:
    TEXT = 0x81
    CLOSE = 0x88
    PING = 0x89
    PONG = 0x8A
    MAX_CONTROL_BYTES = 125

# Bytes that escaping adds to a byte of a JSON string: 1 for `\n` and the other short escapes, 5 for `\u001f`.
cdef uint8_t[256] extra
# The letter of the short escape, where there is one.
cdef uint8_t[256] letter
memset(extra, 0, 256)
memset(letter, 0, 256)


def _fill_tables():
    for byte in range(0x20):
        extra[byte] = 5
    for byte, escape in zip(b'"\\\b\t\n\f\r', b'"\\btnfr'):
        extra[byte] = 1
        letter[byte] = escape


_fill_tables()
del _fill_tables


cdef bytes dash = b"-"
cdef Span DASH = span_of(dash)

# -- WebSocket frames from the server: never masked (RFC 6455 5.1) -------------------------------------------


cdef inline Py_ssize_t head_size(Py_ssize_t size) noexcept nogil:
    return 2 if size < 126 else 4 if size < 65536 else 10


cdef inline uint8_t* put_head(uint8_t* at, uint8_t first, Py_ssize_t size) noexcept nogil:
    cdef int shift
    at[0] = first
    if size < 126:
        at[1] = <uint8_t> size
        return at + 2
    if size < 65536:
        at[1] = 126
        at[2] = <uint8_t> (size >> 8)
        at[3] = <uint8_t> size
        return at + 4
    at[1] = 127
    for shift in range(8):
        at[2 + shift] = <uint8_t> (<uint64_t> size >> (56 - 8 * shift))
    return at + 10


cdef bytes frame(uint8_t first, bytes payload):
    cdef:
        Py_ssize_t size = PyBytes_GET_SIZE(payload)
        bytes made = PyBytes_FromStringAndSize(NULL, head_size(size) + size)
        uint8_t* at = put_head(<uint8_t*> PyBytes_AS_STRING(made), first, size)
    memcpy(at, PyBytes_AS_STRING(payload), size)
    return made


def text(bytes payload not None) -> bytes:
    """A text frame of `payload`, unfragmented (RFC 6455 5.6)."""
    return frame(TEXT, payload)


def ping(bytes payload not None = b"") -> bytes:
    """A Ping frame (RFC 6455 5.5.2); ValueError above 125 bytes."""
    return control(PING, payload)


def pong(bytes payload not None = b"") -> bytes:
    """A Pong frame (RFC 6455 5.5.3); ValueError above 125 bytes."""
    return control(PONG, payload)


def close(code: int | None, reason: str = "") -> bytes:
    """A Close frame (RFC 6455 5.5.1), the reason cut at a whole character so that it fits. None: no body."""
    if code is None:
        return frame(CLOSE, b"")
    body = reason.encode()[: MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
    return frame(CLOSE, int(code).to_bytes(2, "big") + body)


cdef bytes control(uint8_t first, bytes payload):
    if PyBytes_GET_SIZE(payload) > MAX_CONTROL_BYTES:
        raise ValueError("a control frame carries at most 125 bytes")
    return frame(first, payload)


# -- events (protocol/README.md "Frames") --------------------------------------------------------------------


cdef inline uint64_t needs_escape(const uint8_t* at) noexcept nogil:
    """Not 0 if one of eight bytes is a quote, a backslash or below 0x20. No such byte is missed. Bytes above 0x80 may
    be reported wrongly, which only costs time."""
    cdef:
        uint64_t word, ones = 0x0101010101010101, high = 0x8080808080808080
        uint64_t quote, back
    memcpy(&word, at, 8)
    quote = word ^ (ones * 0x22)
    back = word ^ (ones * 0x5C)
    return (((word - ones * 0x20) & ~word) | ((quote - ones) & ~quote) | ((back - ones) & ~back)) & high


cdef Py_ssize_t escaped_size(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    cdef:
        const uint8_t* end = at + size
        Py_ssize_t total = size
        int i
    while end - at >= 8:
        if needs_escape(at):
            for i in range(8):
                total += extra[at[i]]
        at += 8
    while at < end:
        total += extra[at[0]]
        at += 1
    return total


cdef inline uint8_t* put_byte(uint8_t* to, uint8_t byte) noexcept nogil:
    if extra[byte] == 0:
        to[0] = byte
        return to + 1
    to[0] = c'\\'
    if letter[byte]:
        to[1] = letter[byte]
        return to + 2
    memcpy(to + 1, b"u00", 3)
    to[4] = c'0' + (byte >> 4)
    to[5] = (c'0' if (byte & 15) < 10 else c'a' - 10) + (byte & 15)
    return to + 6


cdef uint8_t* put_escaped(uint8_t* to, const uint8_t* at, Py_ssize_t size, bint plain) noexcept nogil:
    cdef:
        const uint8_t* end = at + size
        int i
    if plain:
        memcpy(to, at, size)
        return to + size
    while end - at >= 8:
        if needs_escape(at):
            for i in range(8):
                to = put_byte(to, at[i])
        else:
            memcpy(to, at, 8)
            to += 8
        at += 8
    while at < end:
        to = put_byte(to, at[0])
        at += 1
    return to


def pack_event(str event not None, str data not None, str skip, str trace, str user) -> bytes:
    """An EVENT envelope without offsets (cluster/envelopes.py): `e 0 0 SKIP TRACE USER_BYTES EVENT_BYTES\\n` and the
    user, the event and the data."""
    cdef:
        Parts parts
        bytes made
    set_parts(&parts, event, data, skip, trace, user)
    measure_parts(&parts)
    made = PyBytes_FromStringAndSize(NULL, parts.size)
    put_parts(<uint8_t*> PyBytes_AS_STRING(made), &parts)
    return made


def pack_publish(
    bytes command not None,
    Shards shards not None,
    str app_id not None,
    str channel not None,
    str event not None,
    str data not None,
    str skip,
    str trace,
    str user,
) -> bytes:
    """The command for Redis, in RESP, that publishes `pack_event(event, data, skip, trace, user)` to a channel's topic.

    `shards` know the channel's (cluster/redis/keys.py); `command` is PUBLISH or SPUBLISH.
    """
    cdef:
        Publish publish
        Py_ssize_t size
        bytes made
    publish.command = span_of(command)
    publish.app = span_of_text(app_id)
    publish.channel = span_of_text(channel)
    set_parts(&publish.parts, event, data, skip, trace, user)
    size = measure_publish(&publish, shards)
    made = PyBytes_FromStringAndSize(NULL, size)
    put_publish(<uint8_t*> PyBytes_AS_STRING(made), &publish)
    return made


cdef Py_ssize_t measure_publish(Publish* publish, Shards shards) except -1:
    """Find the topic's shard, and return the bytes of the whole command. The head is borrowed from `shards`."""
    cdef Py_ssize_t at = shards.place(publish.app.at, publish.app.size, publish.channel.at, publish.channel.size)
    measure_parts(&publish.parts)
    publish.shard = <int> at
    publish.head = span_of(<bytes?> shards.heads[at])
    publish.topic_size = publish.head.size + 2 + publish.app.size + 1 + publish.channel.size
    return 4 + bulk_size(publish.command.size) + bulk_size(publish.topic_size) + bulk_size(publish.parts.size)


cdef uint8_t* put_publish(uint8_t* to, Publish* publish) noexcept:
    """Write a command that was measured."""
    to = put(to, b"*3\r\n", 4)
    to = put_bulk_size(to, publish.command.size)
    to = put(to, <const char*> publish.command.at, publish.command.size)
    to = put(to, b"\r\n", 2)
    to = put_bulk_size(to, publish.topic_size)
    to = put(to, <const char*> publish.head.at, publish.head.size)
    to = put(to, b"t:", 2)
    to = put(to, <const char*> publish.app.at, publish.app.size)
    to = put(to, b":", 1)
    to = put(to, <const char*> publish.channel.at, publish.channel.size)
    to = put(to, b"\r\n", 2)
    to = put_bulk_size(to, publish.parts.size)
    to = put_parts(to, &publish.parts)
    return put(to, b"\r\n", 2)


cdef inline Span optional_span(str text) except *:
    cdef Span span
    if text:
        return span_of_text(text)
    span.at = NULL
    span.size = 0
    return span


cdef int set_parts(Parts* parts, str event, str data, str skip, str trace, str user) except -1:
    # The parts refer to the texts, which the caller keeps.
    parts.text[0] = optional_span(skip)
    parts.text[1] = optional_span(trace)
    parts.text[2] = optional_span(user)
    parts.text[3] = span_of_text(event)
    parts.text[4] = span_of_text(data)
    return 0


cdef void measure_parts(Parts* parts) noexcept:
    cdef int i
    for i in range(2):
        if parts.text[i].at == NULL:
            parts.text[i] = DASH
    parts.user_count = put_number(parts.user_digits, parts.text[2].size)
    parts.event_count = put_number(parts.event_digits, parts.text[3].size)
    parts.size = 6 + 1 + 1 + parts.user_count + 1 + parts.event_count + 1
    for i in range(5):
        parts.size += parts.text[i].size


cdef uint8_t* put_parts(uint8_t* to, Parts* parts) noexcept nogil:
    cdef int i
    to = put(to, b"e 0 0 ", 6)
    for i in range(2):
        to = put(to, <const char*> parts.text[i].at, parts.text[i].size)
        to = put(to, b" ", 1)
    to = put(to, <const char*> parts.user_digits, parts.user_count)
    to = put(to, b" ", 1)
    to = put(to, <const char*> parts.event_digits, parts.event_count)
    to = put(to, b"\n", 1)
    if parts.text[2].size:
        to = put(to, <const char*> parts.text[2].at, parts.text[2].size)
    for i in range(3, 5):
        to = put(to, <const char*> parts.text[i].at, parts.text[i].size)
    return to


cdef inline Py_ssize_t bulk_size(Py_ssize_t size) noexcept nogil:
    """Bytes of a bulk string of RESP: `$`, its size, and two line ends besides its own bytes."""
    cdef uint8_t[20] digits
    return 1 + put_number(digits, size) + 2 + size + 2


cdef inline uint8_t* put_bulk_size(uint8_t* to, Py_ssize_t size) noexcept nogil:
    to[0] = c"$"
    to += 1
    to += put_number(to, size)
    return put(to, b"\r\n", 2)


cdef bytes encode_event(Span event, Span channel, Span data, Span user, bint has_user, uint64_t offset):
    # Sizes first, so that the frame is allocated once and exactly. Offset 0: none.
    cdef:
        uint8_t[20] digits
        int digits_size = 0
        Py_ssize_t event_size = escaped_size(event.at, event.size)
        Py_ssize_t channel_size = escaped_size(channel.at, channel.size)
        Py_ssize_t data_size = escaped_size(data.at, data.size)
        Py_ssize_t user_size = escaped_size(user.at, user.size) if has_user else 0
        Py_ssize_t size = 10 + event_size + 13 + channel_size + 10 + data_size + 2
        bytes made
        uint8_t* to
    if has_user:
        size += 13 + user_size
    if offset:
        digits_size = put_number(digits, offset)
        size += 10 + digits_size
    made = PyBytes_FromStringAndSize(NULL, head_size(size) + size)
    to = put_head(<uint8_t*> PyBytes_AS_STRING(made), TEXT, size)
    memcpy(to, b'{"event":"', 10)
    to = put_escaped(to + 10, event.at, event.size, event_size == event.size)
    memcpy(to, b'","channel":"', 13)
    to = put_escaped(to + 13, channel.at, channel.size, channel_size == channel.size)
    memcpy(to, b'","data":"', 10)
    to = put_escaped(to + 10, data.at, data.size, data_size == data.size)
    if has_user:
        memcpy(to, b'","user_id":"', 13)
        to = put_escaped(to + 13, user.at, user.size, user_size == user.size)
    to[0] = c'"'
    if offset:
        memcpy(to + 1, b',"offset":', 10)
        memcpy(to + 11, digits, digits_size)
        to += 10 + digits_size
    to[1] = c'}'
    return made


def event_frame(
    bytes event not None, bytes channel not None, bytes data not None, bytes user_id=None
) -> bytes:
    """The text frame of an event on a channel (protocol/README.md "Frames"); arguments are UTF-8, unescaped."""
    cdef Span user
    user.at = NULL
    user.size = 0
    if user_id is not None:
        user = span_of(user_id)
    return encode_event(span_of(event), span_of(channel), span_of(data), user, user_id is not None, 0)


# -- the bus envelope (cluster/README.md "Topics and envelopes") ---------------------------------------------


cdef struct Envelope:
    uint64_t offset
    uint64_t prev
    uint64_t skip_hi
    uint64_t skip_lo
    # at == NULL: none.
    Span trace
    Span user
    Span event
    Span data


cdef int malformed(str what) except -1:
    raise ValueError(f"malformed envelope: {what}")


cdef int next_word(const uint8_t** at, const uint8_t* end, uint8_t stop, Span* word) except -1:
    cdef const uint8_t* separator = <const uint8_t*> memchr(at[0], stop, end - at[0])
    if separator == NULL or separator == at[0]:
        malformed("header line")
    word.at = at[0]
    word.size = separator - at[0]
    at[0] = separator + 1
    return 0


cdef bint to_number(const uint8_t* at, Py_ssize_t size, uint64_t* number) noexcept:
    """Parse decimal digits. False for anything else, and for numbers that don't fit."""
    cdef:
        uint64_t value = 0
        uint8_t digit
        Py_ssize_t i
    if size == 0 or size > 19:
        return False
    for i in range(size):
        digit = at[i] - c'0'
        if digit > 9:
            return False
        value = value * 10 + digit
    number[0] = value
    return True


cdef int read_number(Span word, uint64_t* number) except -1:
    if not to_number(word.at, word.size, number):
        malformed("number")
    return 0


cdef inline bint is_dash(Span word) noexcept:
    return word.size == 1 and word.at[0] == c'-'


cdef int read_envelope(bytes payload, Envelope* parsed) except -1:
    cdef:
        const uint8_t* at = <const uint8_t*> PyBytes_AS_STRING(payload)
        const uint8_t* end = at + PyBytes_GET_SIZE(payload)
        const uint8_t* dot
        const uint8_t* line
        Span word
        uint64_t user_size = 0
        uint64_t event_size = 0
    if end - at < 2 or at[0] != c'e' or at[1] != c' ':
        malformed("kind")
    line = <const uint8_t*> memchr(at, c'\n', end - at)
    if line == NULL:
        malformed("header line")
    at += 2
    next_word(&at, line, c' ', &word)
    read_number(word, &parsed.offset)
    next_word(&at, line, c' ', &word)
    read_number(word, &parsed.prev)
    next_word(&at, line, c' ', &word)
    parsed.skip_hi = parsed.skip_lo = 0
    if not is_dash(word):
        dot = <const uint8_t*> memchr(word.at, c'.', word.size)
        if dot == NULL:
            malformed("socket id")
        # No socket can have this id, so none is skipped and the event is delivered.
        if not (
            to_number(word.at, dot - word.at, &parsed.skip_hi)
            and to_number(dot + 1, word.at + word.size - dot - 1, &parsed.skip_lo)
        ):
            parsed.skip_hi = parsed.skip_lo = 0
    next_word(&at, line, c' ', &parsed.trace)
    if is_dash(parsed.trace):
        parsed.trace.at = NULL
    next_word(&at, line, c' ', &word)
    read_number(word, &user_size)
    next_word(&at, line + 1, c'\n', &word)
    read_number(word, &event_size)
    if user_size > <uint64_t> (end - at) or event_size > <uint64_t> (end - at) - user_size:
        malformed("sizes")
    parsed.user.at = at if user_size else NULL
    parsed.user.size = user_size
    parsed.event.at = at + user_size
    parsed.event.size = event_size
    parsed.data.at = parsed.event.at + event_size
    parsed.data.size = end - parsed.data.at
    return 0


cdef bytes bytes_of(Span span):
    return None if span.at == NULL else PyBytes_FromStringAndSize(<const char*> span.at, span.size)


def envelope(bytes payload not None) -> tuple:
    """`(offset, prev, skip_hi, skip_lo, trace, user, event, data)` of an `e` envelope
    (cluster/README.md "Topics and envelopes").

    trace and user are bytes or None; skip is 0, 0 if no socket is skipped. Raises ValueError if it is malformed.
    """
    cdef Envelope parsed
    read_envelope(payload, &parsed)
    return (
        parsed.offset,
        parsed.prev,
        parsed.skip_hi,
        parsed.skip_lo,
        bytes_of(parsed.trace),
        bytes_of(parsed.user),
        bytes_of(parsed.event),
        bytes_of(parsed.data),
    )


def frame_of(bytes payload not None, bytes channel not None, bint with_offset=False) -> tuple:
    """`(frame, skip_hi, skip_lo)`: an `e` envelope straight to the frame that its subscribers get.

    As `envelope` and `event_frame`, without the objects in between. `with_offset`: for those who recover, with
    `"offset":N` beside `"event"`, if the envelope has one. ValueError where it is malformed.
    """
    cdef Envelope parsed
    read_envelope(payload, &parsed)
    return (
        encode_event(
            parsed.event,
            span_of(channel),
            parsed.data,
            parsed.user,
            parsed.user.at != NULL,
            parsed.offset if with_offset else 0,
        ),
        parsed.skip_hi,
        parsed.skip_lo,
    )


def frame_and_trace(bytes payload not None, bytes channel not None) -> tuple:
    """`(frame, skip_hi, skip_lo, trace)`: as `frame_of`, and the trace as `trace_of`, in one look at the envelope."""
    cdef Envelope parsed
    read_envelope(payload, &parsed)
    return (
        encode_event(parsed.event, span_of(channel), parsed.data, parsed.user, parsed.user.at != NULL, 0),
        parsed.skip_hi,
        parsed.skip_lo,
        None
        if parsed.trace.at == NULL
        else PyBytes_FromStringAndSize(<const char*> parsed.trace.at, parsed.trace.size),
    )


cdef int read_offsets(
    bytes payload, uint64_t* offset, uint64_t* prev, const uint8_t** at, const uint8_t** end
) except -1:
    """The start of the header line; on return `at` is after it, `end` at the line's end."""
    cdef:
        const uint8_t* line
        Span word
    at[0] = <const uint8_t*> PyBytes_AS_STRING(payload)
    end[0] = at[0] + PyBytes_GET_SIZE(payload)
    if end[0] - at[0] < 2 or at[0][0] != c'e' or at[0][1] != c' ':
        malformed("kind")
    line = <const uint8_t*> memchr(at[0], c'\n', end[0] - at[0])
    if line == NULL:
        malformed("header line")
    end[0] = line
    at[0] += 2
    next_word(at, line, c' ', &word)
    read_number(word, offset)
    next_word(at, line, c' ', &word)
    read_number(word, prev)
    return 0


def offsets(bytes payload not None) -> tuple:
    """`(offset, prev)` of an `e` envelope; `0, 0` on channels without history. ValueError where its start is
    malformed; what follows isn't looked at."""
    cdef:
        uint64_t offset = 0
        uint64_t prev = 0
        const uint8_t* at
        const uint8_t* end
    read_offsets(payload, &offset, &prev, &at, &end)
    return offset, prev


def trace_of(bytes payload not None) -> bytes | None:
    """The trace id of an `e` envelope, None for an event that isn't traced. ValueError as `offsets`."""
    cdef:
        uint64_t offset = 0
        uint64_t prev = 0
        const uint8_t* at
        const uint8_t* end
        Span word
    read_offsets(payload, &offset, &prev, &at, &end)
    next_word(&at, end, c' ', &word)
    next_word(&at, end, c' ', &word)
    return None if is_dash(word) else PyBytes_FromStringAndSize(<const char*> word.at, word.size)
