# Borrowed bytes, bytes that grow, bytes with gaps, UTF-8 in pieces: layout, and what must be inlined. The rest is in
# _text.pyx.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, strlen


cdef struct Span:
    # Borrowed bytes: valid while the object that the caller holds is.
    const uint8_t* at
    Py_ssize_t size


cdef struct Text:
    # Owned bytes that grow at their end. Zeros are an empty one; its owner frees `at`.
    char* at
    Py_ssize_t size
    Py_ssize_t room


cdef struct Utf8:
    # Continuation bytes still to come, and the bounds of the next of them (RFC 3629 section 4).
    uint8_t missing
    uint8_t low
    uint8_t high


cdef struct Piece:
    # Bytes of a Form, and which of the values follows them; -1 at the end.
    Span literal
    int gap


cdef class Form:
    cdef:
        bytes text
        Piece* pieces
        int count
        Py_ssize_t literals_size

    cdef int put(self, Text* text, const Span* values) except -1


# Characters that JSON has as they are: printable ASCII but quote and backslash.
cdef uint8_t[256] plain_chars

cdef int grow(Text* text, Py_ssize_t more) except -1
cdef bytes taken(Text* text)
cdef bint is_plain(Span text) noexcept nogil
cdef bint utf8_goes_on(Utf8* state, const uint8_t* at, Py_ssize_t size) noexcept nogil
cdef bint is_utf8(Span text) noexcept nogil


cdef extern from *:
    """
    #define LOW_BITS 0x0101010101010101u
    #define HIGH_BITS 0x8080808080808080u
    """
    # The lowest bit of each of eight bytes, and the highest.
    const uint64_t LOW_BITS
    const uint64_t HIGH_BITS


cdef inline bint has_byte(uint64_t word, uint8_t byte) noexcept nogil:
    """Whether one of eight bytes is this one."""
    word ^= LOW_BITS * byte
    return (word - LOW_BITS) & ~word & HIGH_BITS != 0


cdef inline Span span_of(bytes of) noexcept:
    cdef Span span
    span.at = <const uint8_t*> PyBytes_AS_STRING(of)
    span.size = PyBytes_GET_SIZE(of)
    return span


cdef inline Span span_of_text(str of) except *:
    """As UTF-8, which the text keeps; UnicodeEncodeError for a lone surrogate."""
    cdef:
        Span span
        Py_ssize_t size = 0
    span.at = <const uint8_t*> PyUnicode_AsUTF8AndSize(of, &size)
    span.size = size
    return span


cdef inline bint is_same(Span a, Span b) noexcept nogil:
    return a.size == b.size and memcmp(a.at, b.at, a.size) == 0


cdef inline bint is_literal(Span span, const char* literal) noexcept nogil:
    return span.size == <Py_ssize_t> strlen(literal) and memcmp(span.at, literal, span.size) == 0


cdef inline uint8_t* put(uint8_t* to, const char* source, Py_ssize_t size) noexcept nogil:
    memcpy(to, source, size)
    return to + size


cdef inline int put_number(uint8_t* to, uint64_t number) noexcept nogil:
    """Write decimal digits and return how many, at most 20."""
    cdef:
        uint8_t[20] digits
        int count = 0
        int i
    while True:
        digits[count] = c'0' + <uint8_t> (number % 10)
        number //= 10
        count += 1
        if number == 0:
            break
    for i in range(count):
        to[i] = digits[count - 1 - i]
    return count


cdef inline int hex_digit(char of) noexcept nogil:
    """The value of a hex digit; -1 for any other character."""
    if b"0" <= of <= b"9":
        return of - 48
    if b"a" <= of <= b"f":
        return of - 87
    if b"A" <= of <= b"F":
        return of - 55
    return -1


cdef inline int reserve(Text* text, Py_ssize_t more) except -1:
    """Make room for `more` bytes. Pointers into the text end here."""
    if text.room - text.size >= more:
        return 0
    return grow(text, more)


cdef inline void add(Text* text, Span span) noexcept:
    # After `reserve`. Of nothing, either may be NULL, which memcpy doesn't allow.
    if span.size:
        memcpy(text.at + text.size, span.at, span.size)
        text.size += span.size
