"""Bytes that grow, bytes with gaps to fill, and UTF-8: what the compiled modules share that knows no protocol."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import re

__all__ = ["Form"]

cdef enum:
    # An empty text keeps this much: the commands of a read of 256 KiB, but not of large events for many channels.
    MAX_KEPT_BYTES = 1048576


def _fill_table():
    for char in range(256):
        plain_chars[char] = 0x20 <= char < 0x7F and char not in b'"\\'


_fill_table()
del _fill_table


cdef int grow(Text* text, Py_ssize_t more) except -1:
    cdef:
        Py_ssize_t room = max(2 * text.room, text.size + more)
        char* at = <char*> realloc(text.at, room)
    if at == NULL:
        raise MemoryError
    text.at = at
    text.room = room
    return 0


cdef bytes taken(Text* text):
    """The text as bytes; it is empty afterwards, and doesn't keep the memory of a burst for ever."""
    cdef bytes made = PyBytes_FromStringAndSize(text.at, text.size)
    text.size = 0
    if text.room > MAX_KEPT_BYTES:
        free(text.at)
        text.at = NULL
        text.room = 0
    return made


cdef class Form:
    """Bytes in which a value follows wherever one of the `marks` is: the first value for the first mark, and so on.
    What is between them was made by the code that makes such bytes without a form, so it is described there alone."""

    def __cinit__(self, bytes text not None, tuple marks not None):
        cdef:
            const char* at
            int i
        self.text = text
        parts = re.split(b"(" + b"|".join(map(re.escape, marks)) + b")", text)
        if len(parts) < 2 * len(marks) + 1:
            raise ValueError("a mark is missing")
        self.count = (len(parts) + 1) // 2
        self.pieces = <Piece*> malloc(self.count * sizeof(Piece))
        if self.pieces == NULL:
            raise MemoryError
        at = text
        for i in range(self.count):
            self.pieces[i].literal.at = <const uint8_t*> at
            self.pieces[i].literal.size = len(parts[2 * i])
            self.literals_size += len(parts[2 * i])
            at += len(parts[2 * i])
            self.pieces[i].gap = -1
            if i + 1 < self.count:
                self.pieces[i].gap = marks.index(parts[2 * i + 1])
                at += len(parts[2 * i + 1])

    def __dealloc__(self):
        free(self.pieces)

    cdef int put(self, Text* text, const Span* values) except -1:
        """Add the bytes with these values, one for each mark."""
        cdef:
            Py_ssize_t size = self.literals_size
            const Piece* piece = self.pieces
            const Piece* last = piece + self.count - 1
            uint8_t* to
        while piece < last:
            size += values[piece.gap].size
            piece += 1
        reserve(text, size)
        to = <uint8_t*> text.at + text.size
        text.size += size
        piece = self.pieces
        while piece < last:
            to = put_short(to, piece.literal)
            to = put_short(to, values[piece.gap])
            piece += 1
        put_short(to, last.literal)
        return 0


cdef inline uint8_t* put_short(uint8_t* to, Span span) noexcept nogil:
    """As `put`, of nothing as well, and without a call where most pieces of a form are short."""
    if span.size > 32:
        memcpy(to, span.at, span.size)
    elif span.size >= 16:
        memcpy(to, span.at, 16)
        memcpy(to + span.size - 16, span.at + span.size - 16, 16)
    elif span.size >= 8:
        memcpy(to, span.at, 8)
        memcpy(to + span.size - 8, span.at + span.size - 8, 8)
    elif span.size:
        memcpy(to, span.at, span.size)
    return to + span.size


# -- UTF-8 (RFC 3629) ----------------------------------------------------------------------------------------


cdef bint is_plain(Span text) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(text.size):
        if not plain_chars[text.at[i]]:
            return False
    return True


cdef bint utf8_goes_on(Utf8* state, const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """Whether the text can still become valid UTF-8. It is, at its end, if nothing is missing."""
    cdef:
        const uint8_t* end = at + size
        uint64_t word
        uint8_t byte
    while at < end:
        if state.missing == 0:
            # ASCII, eight at a time.
            while end - at >= 8:
                memcpy(&word, at, 8)
                if word & <uint64_t> 0x8080808080808080:
                    break
                at += 8
            if at == end:
                return True
        byte = at[0]
        at += 1
        if state.missing:
            if byte < state.low or byte > state.high:
                return False
            state.low = 0x80
            state.high = 0xBF
            state.missing -= 1
        elif byte >= 0x80:
            # The table of RFC 3629 section 4: no overlong forms, no surrogates, nothing above U+10FFFF.
            state.low = 0x80
            state.high = 0xBF
            if byte < 0xC2 or byte > 0xF4:
                return False
            if byte < 0xE0:
                state.missing = 1
            elif byte < 0xF0:
                state.missing = 2
                if byte == 0xE0:
                    state.low = 0xA0
                elif byte == 0xED:
                    state.high = 0x9F
            else:
                state.missing = 3
                if byte == 0xF0:
                    state.low = 0x90
                elif byte == 0xF4:
                    state.high = 0x8F
    return True


cdef bint is_utf8(Span text) noexcept nogil:
    cdef Utf8 state
    state.missing = 0
    return utf8_goes_on(&state, text.at, text.size) and not state.missing
