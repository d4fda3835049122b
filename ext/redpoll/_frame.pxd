# The command that publishes an event, in parts: layout. Behaviour is in _frame.pyx.

from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from redpoll._shards cimport Shards


cdef struct Span:
    # Borrowed bytes: valid while the object that the caller holds is.
    const uint8_t* at
    Py_ssize_t size


# An EVENT envelope in parts, before its bytes are allocated.
cdef struct Parts:
    # Skip, trace, user, event, data.
    Span[5] text
    uint8_t[20] user_digits
    uint8_t[20] event_digits
    int user_count
    int event_count
    Py_ssize_t size


# PUBLISH or SPUBLISH of an envelope. The caller sets the spans; `measure_publish` the rest.
cdef struct Publish:
    Span command
    Span app
    Span channel
    Parts parts
    Span head
    Py_ssize_t topic_size


cdef inline Span span_of_text(str of) except *:
    """As UTF-8, which the text keeps; UnicodeEncodeError for a lone surrogate."""
    cdef:
        Span span
        Py_ssize_t size = 0
    span.at = <const uint8_t*> PyUnicode_AsUTF8AndSize(of, &size)
    span.size = size
    return span


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


cdef Py_ssize_t measure_publish(Publish* publish, Shards shards) except -1
cdef uint8_t* put_publish(uint8_t* to, Publish* publish) noexcept
