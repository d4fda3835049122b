# A WebSocket connection's bytes: layout and ownership. Behaviour is in _engine.pyx.

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from redpoll._fanout cimport Sink
from redpoll._text cimport Utf8


cdef struct Header:
    # One frame's (RFC 6455 5.2).
    bint fin
    uint8_t opcode
    uint8_t[4] mask
    uint64_t size


cdef struct Unfinished:
    # What a connection has received in part. It exists only while there is such a part.
    # Bytes of the header of the frame under way, as received.
    uint8_t[14] head
    uint8_t head_size
    # The header, once it is complete; `left` of its payload is still to come.
    bint in_payload
    Header frame
    uint64_t left
    # A control frame's payload.
    uint8_t[125] control
    # The message under way (opcode 0: none), or the request head and what came after it. Owned heap memory.
    uint8_t opcode
    Utf8 utf8
    uint8_t* data
    size_t size
    size_t capacity
    # Of `data`: the request head, once it is complete.
    size_t request_size


@cython.no_gc
cdef class WebSocket(Sink):
    # Owned heap memory, or NULL: most connections have received nothing in part.
    cdef Unfinished* unfinished
    cdef readonly uint32_t max_message_bytes
    # Bytes dropped since the connection stopped parsing.
    cdef uint32_t discarded
    # HEAD, OPEN, CLOSING, CLOSED, HTTP.
    cdef readonly uint8_t state
    # Flags: it was OPEN; closed() or gone() was called; frames are still parsed; head_received() is running.
    cdef uint8_t opened
    cdef uint8_t end_reported
    cdef uint8_t listening
    cdef uint8_t deciding
    # pong_received() is called for the next pong.
    cdef public uint8_t awaits_pong
    # For the layer above: where it counts connections by address; 0: not counted. It fits into the padding.
    cdef public uint16_t address_slot
    # Owned; for the layer above. They lie here because a subclass with slots of its own would be tracked by the
    # garbage collector: 16 bytes more, and each full collection would visit every connection.
    cdef public object gate
    cdef public object session
    cdef public object client_seen

    cdef int place_after(self, bint full, int place) noexcept
    cdef size_t read_size(self, bint bulk) noexcept
    cdef int take(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef bint take_post(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef int take_head(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef int take_frames(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef Py_ssize_t take_whole_frame(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef Py_ssize_t take_part(self, Unfinished* part, const uint8_t* at, Py_ssize_t size) except -1
    cdef int frame_fault(self, Header* frame, uint8_t under_way, uint64_t so_far) noexcept
    cdef int frame_done(self, Unfinished* part) except -1
    cdef int deliver(self, uint8_t opcode, bytes message) except -1
    cdef int take_control(self, uint8_t opcode, const uint8_t* at, Py_ssize_t size) except -1
    cdef int take_close(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef int take_pending(self) except -1
    cdef int start(self) except -1
    cdef int end(self) except -1
    cdef bint stays_open(self) except -1
    cdef int lose(self) except -1
    cdef Unfinished* part(self) except NULL
    cdef void drop_part(self) noexcept
    cdef int begin_closing(self) except -1
    cdef int fail(self, int code, str reason) except -1
    cdef int tell_closed(self, int code, str reason) except -1
    cdef int callback_failed(self, fault) except -1
    cdef int overran(self) except -1
    cdef int broke(self) except -1
