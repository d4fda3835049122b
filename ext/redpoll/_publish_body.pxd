# The reader of usual bodies: layout. Behaviour is in _publish_body.pyx.

from libc.stdint cimport uint8_t

from redpoll._publish cimport Call

cdef bint read_body(Call call, const uint8_t* at, Py_ssize_t size, uint8_t* to) noexcept
