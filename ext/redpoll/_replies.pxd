# Who takes Redis' replies without a Python call: layout. Behaviour is in _replies.pyx.


cdef class Taker:
    cdef int take_reply(self, object reply) except -1
