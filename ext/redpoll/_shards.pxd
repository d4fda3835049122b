# In which shard a channel is: layout. Behaviour is in _shards.pyx.

from libc.stdint cimport uint8_t, uint64_t


cdef class Shards:
    cdef:
        readonly tuple heads
        int way
        int only
        uint64_t[2] key

    cdef Py_ssize_t place(
        self, const uint8_t* app, Py_ssize_t app_size, const uint8_t* channel, Py_ssize_t channel_size
    ) except -1
