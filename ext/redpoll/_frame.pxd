# The command that publishes an event, in parts: layout. Behaviour is in _frame.pyx.

from libc.stdint cimport uint8_t

from redpoll._shards cimport Shards
from redpoll._text cimport Span

# An EVENT envelope in parts, before its bytes are allocated.
cdef struct Parts:
    # Skip, trace, user, event, data. at == NULL: there is none of the first three.
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
    int shard


cdef Py_ssize_t measure_publish(Publish* publish, Shards shards) except -1
cdef uint8_t* put_publish(uint8_t* to, Publish* publish) noexcept

# For a string in JSON: its size with escapes, and the text written so; `plain`: it needs none.
cdef Py_ssize_t escaped_size(const uint8_t* at, Py_ssize_t size) noexcept nogil
cdef uint8_t* put_escaped(uint8_t* to, const uint8_t* at, Py_ssize_t size, bint plain) noexcept nogil
