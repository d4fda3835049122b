"""Reads the JSON of usual requests to publish, without a Python object.

It refuses nothing: it says whether it has read the body, and protocol/messages.py reads all others. What it has read
is checked in _publish.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from redpoll._publish cimport Call, Event
from redpoll._text cimport HIGH_BITS, LOW_BITS, Span, hex_digit, is_literal, is_utf8, plain_chars, put


cdef struct Json:
    const uint8_t* at
    const uint8_t* end
    # Where texts with escapes are written: as much room as the body is long.
    uint8_t* to


cdef inline void skip_space(Json* json) noexcept nogil:
    while json.at < json.end and (json.at[0] == 0x20 or json.at[0] == 0x0A or json.at[0] == 0x0D or json.at[0] == 0x09):
        json.at += 1


cdef inline bint skip(Json* json, uint8_t char_) noexcept nogil:
    """Whether the next token is this character, which is passed."""
    skip_space(json)
    if json.at == json.end or json.at[0] != char_:
        return False
    json.at += 1
    return True


cdef inline bint skip_null(Json* json) noexcept nogil:
    """Whether the next token is `null`, which is passed."""
    skip_space(json)
    if json.end - json.at < 4 or memcmp(json.at, b"null", 4) != 0:
        return False
    json.at += 4
    return True


cdef bint read_plain(Json* json, Span* text) noexcept nogil:
    """A string of printable ASCII without escapes."""
    cdef const uint8_t* plain = plain_chars
    if not skip(json, b'"'):
        return False
    text.at = json.at
    while json.at < json.end and plain[json.at[0]]:
        json.at += 1
    text.size = json.at - text.at
    if json.at == json.end or json.at[0] != b'"':
        return False
    json.at += 1
    return True


cdef inline uint64_t is_special(const uint8_t* at) noexcept nogil:
    """Not 0 if one of eight bytes is a quote, a backslash, below 0x20 or above 0x7F. No such byte is missed."""
    cdef:
        uint64_t word, quote, back
    memcpy(&word, at, 8)
    quote = word ^ (LOW_BITS * 0x22)
    back = word ^ (LOW_BITS * 0x5C)
    return ((word - LOW_BITS * 0x20) | (quote - LOW_BITS) | (back - LOW_BITS) | word) & HIGH_BITS


cdef int hex_unit(const uint8_t* at, const uint8_t* end) noexcept nogil:
    """The number of an escape `\\uXXXX` that begins at `at`; -1: there is none."""
    cdef int i, digit, unit = 0
    if end - at < 6 or at[0] != b"\\" or at[1] != b"u":
        return -1
    for i in range(2, 6):
        digit = hex_digit(<char> at[i])
        if digit < 0:
            return -1
        unit = unit << 4 | digit
    return unit


cdef uint8_t* put_char(uint8_t* to, int char_) noexcept nogil:
    """Write a character as UTF-8 (RFC 3629 section 3); returns its end."""
    if char_ < 0x80:
        to[0] = <uint8_t> char_
        return to + 1
    if char_ < 0x800:
        to[0] = <uint8_t> (0xC0 | char_ >> 6)
    else:
        if char_ < 0x10000:
            to[0] = <uint8_t> (0xE0 | char_ >> 12)
        else:
            to[0] = <uint8_t> (0xF0 | char_ >> 18)
            to[1] = <uint8_t> (0x80 | char_ >> 12 & 0x3F)
            to += 1
        to[1] = <uint8_t> (0x80 | char_ >> 6 & 0x3F)
        to += 1
    to[1] = <uint8_t> (0x80 | char_ & 0x3F)
    return to + 2


cdef uint8_t* put_unescaped(uint8_t* to, const uint8_t** at, const uint8_t* end) noexcept nogil:
    """Write the character of the escape at `at`, which is moved past it; returns its end. NULL: it is malformed, or
    half of a surrogate pair."""
    cdef:
        uint8_t char_
        int unit, low
    if end - at[0] < 2:
        return NULL
    char_ = at[0][1]
    if char_ == b"u":
        unit = hex_unit(at[0], end)
        at[0] += 6
        if 0xD800 <= unit < 0xDC00:
            low = hex_unit(at[0], end)
            if not 0xDC00 <= low < 0xE000:
                return NULL
            at[0] += 6
            unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
        elif unit < 0 or 0xDC00 <= unit < 0xE000:
            return NULL
        return put_char(to, unit)
    at[0] += 2
    if char_ == b'"' or char_ == b"\\" or char_ == b"/":
        to[0] = char_
    elif char_ == b"n":
        to[0] = 0x0A
    elif char_ == b"r":
        to[0] = 0x0D
    elif char_ == b"t":
        to[0] = 0x09
    elif char_ == b"b":
        to[0] = 0x08
    elif char_ == b"f":
        to[0] = 0x0C
    else:
        return NULL
    return to + 1


cdef bint read_text(Json* json, Span* text) noexcept nogil:
    """A string of any characters, with any escapes."""
    cdef:
        const uint8_t* at
        const uint8_t* end = json.end
        const uint8_t* run
        uint8_t* to = json.to
        uint8_t char_
        bint ascii_ = True
    if not skip(json, b'"'):
        return False
    at = run = json.at
    text.at = NULL
    while True:
        while end - at >= 8 and not is_special(at):
            at += 8
        if at >= end:
            return False
        char_ = at[0]
        if char_ == b'"':
            break
        if char_ == b"\\":
            to = put(to, <const char*> run, at - run)
            to = put_unescaped(to, &at, end)
            if to == NULL:
                return False
            run = at
            text.at = json.to
        elif char_ < 0x20:
            return False
        else:
            if char_ >= 0x80:
                ascii_ = False
            at += 1
    if text.at == NULL:
        text.at = run
        text.size = at - run
    else:
        to = put(to, <const char*> run, at - run)
        text.size = to - json.to
        json.to = to
    json.at = at + 1
    return ascii_ or is_utf8(text[0])


cdef bint read_name(Json* json, Span* text) noexcept nogil:
    """As `read_text`; most names are plain."""
    cdef Json before = json[0]
    if read_plain(json, text):
        return True
    json[0] = before
    return read_text(json, text)


cdef bint read_event(Json* json, Call call) noexcept:
    """An object with an event: each member once, and none that asks for more than a publish."""
    cdef:
        Event* event
        Span key
        bint has_channel = False, has_socket_id = False
    if call.event_count == call.event_room or not skip(json, b"{"):
        return False
    event = &call.events[call.event_count]
    call.event_count += 1
    event.name.at = event.data.at = event.socket_id.at = NULL
    event.first_channel = call.channel_count
    while True:
        if not read_plain(json, &key) or not skip(json, b":"):
            return False
        if key.size == 4 and memcmp(key.at, b"name", 4) == 0:
            if event.name.at != NULL or not read_name(json, &event.name):
                return False
        elif key.size == 4 and memcmp(key.at, b"data", 4) == 0:
            if event.data.at != NULL or not read_text(json, &event.data):
                return False
        elif key.size == 7 and memcmp(key.at, b"channel", 7) == 0:
            if has_channel or call.channel_count == call.channel_room:
                return False
            has_channel = True
            if not read_plain(json, &call.channels[call.channel_count]):
                return False
            call.channel_count += 1
        elif not call.is_batch and key.size == 8 and memcmp(key.at, b"channels", 8) == 0:
            if has_channel or not skip(json, b"["):
                return False
            has_channel = True
            while True:
                if call.channel_count == call.channel_room or not read_plain(json, &call.channels[call.channel_count]):
                    return False
                call.channel_count += 1
                if not skip(json, b","):
                    break
            if not skip(json, b"]"):
                return False
        elif key.size == 9 and memcmp(key.at, b"socket_id", 9) == 0:
            # The library for Rust says that there is none.
            if has_socket_id or not (skip_null(json) or read_plain(json, &event.socket_id)):
                return False
            has_socket_id = True
        else:
            return False
        if not skip(json, b","):
            break
    event.channel_count = call.channel_count - event.first_channel
    return has_channel and event.name.at != NULL and event.data.at != NULL and skip(json, b"}")


cdef bint read_body(Call call, const uint8_t* at, Py_ssize_t size, uint8_t* to) noexcept:
    """Fill the call, which is empty, with the whole body of `POST events`, or of `POST batch_events` if it is a batch.
    False: it has another shape, or more events or channels than the call has room for.

    Texts with escapes are written to `to`, where there is as much room as the body is long. The call refers to both.
    """
    cdef:
        Json json
        Span key
    json.at = at
    json.end = at + size
    json.to = to
    if call.is_batch:
        if not skip(&json, b"{") or not read_plain(&json, &key) or not is_literal(key, b"batch"):
            return False
        if not skip(&json, b":") or not skip(&json, b"["):
            return False
        while True:
            if not read_event(&json, call):
                return False
            if not skip(&json, b","):
                break
        if not skip(&json, b"]") or not skip(&json, b"}"):
            return False
    elif not read_event(&json, call):
        return False
    skip_space(&json)
    return json.at == json.end
