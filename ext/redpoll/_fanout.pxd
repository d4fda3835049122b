# Sinks, audiences, and the frames that wait for each sink: layout and ownership. Behaviour is in _fanout.pyx.

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from redpoll._sockets cimport Polled, Poller


cdef struct Chain:
    # Unsent frames, which wait for a sink: the last one, and the chain of those before it. Sinks with the
    # same frames share one chain.
    # Sinks, longer chains and calls under way that point here; freed at 0.
    uint32_t holders
    # Of this chain, `before` included.
    uint32_t frames
    uint64_t size
    # Owned (one of its holders).
    Chain* before
    # The chain that the last post made from this one. Borrowed; set to NULL when that chain is freed.
    Chain* grown
    # Owned: a bytes object.
    PyObject* frame


cdef packed struct Seat:
    # Borrowed: the audience takes its seats away before it goes.
    PyObject* audience
    # Index into the audience's sinks.
    uint32_t place


cdef enum:
    # A connection is in the audience of all connections and, mostly, in that of one channel.
    INLINE_SEATS = 2


cdef enum:
    # The flusher's queues that a sink is in (`Sink.queued`).
    IN_QUICK = 1
    IN_BULK = 2


cdef enum:
    # `Sink.overrun`. 0: there was none. DUE: more waited for it than may, and its frames were dropped; the next flush
    # closes it. HANDLED: a flush has.
    OVERRUN_DUE = 1
    OVERRUN_HANDLED = 2


cdef union Seats:
    # Up to INLINE_SEATS lie in the sink itself; more are heap memory, of which the sink owns `heap`.
    Seat[INLINE_SEATS] inline
    Seat* heap


cdef class Transport(Polled):
    # What has a sink's socket and encrypts its bytes.
    cdef int write_bytes(self, const char* at, Py_ssize_t size) except -1


@cython.no_gc
cdef class Sink(Polled):
    # Owned; shared by all sinks of the process.
    cdef Flusher flusher
    # Owned from connection_made until the connection ends. None before and after, and always None for a plain socket.
    cdef object transport
    # One hold each, or NULL. `urgent` goes first. The rest of a frame that the kernel took in part is its first link.
    cdef Chain* unsent_chain
    cdef Chain* urgent
    # The socket id's two numbers; 0, 0 until it has one.
    cdef readonly uint64_t sid_hi
    cdef readonly uint64_t sid_lo
    # The audiences that this is in: heap memory if `seat_count` is above INLINE_SEATS.
    cdef Seats seats
    cdef uint32_t seat_count
    # Bytes that the transport had not written when it paused us. A Transport says so after each write; of others it is
    # the size of what was handed to them.
    cdef uint32_t buffered
    # Flags take a byte each; a bint takes four, and there are tens of thousands of sinks.
    # Frames are taken: from connection_made until a Close is queued or the transport goes.
    cdef uint8_t writable
    # The flusher's queues that this is in: IN_QUICK, IN_BULK or both.
    cdef uint8_t queued
    # OVERRUN_DUE, OVERRUN_HANDLED, or 0.
    cdef readonly uint8_t overrun
    # Half-close as soon as nothing is unsent.
    cdef uint8_t finishing
    # Report when less than Flusher.writable_below_bytes are unsent (WRITABLE), or none (DRAINED); 0: report nothing.
    cdef uint8_t awaited
    # The first link of `urgent` is the rest of a frame. It is sent first and never dropped.
    cdef uint8_t started

    cdef inline Seat* seats_at(self) noexcept
    cdef int take_seat(self, PyObject* audience, uint32_t place) except -1
    cdef void leave_seat(self, uint32_t index) noexcept
    cdef inline bint is_attached(self) noexcept
    cdef int attach(self, object transport) except -1
    cdef void detach_transport(self) noexcept
    cdef int note(self, bytes frame, bint urgent) except -1
    cdef int owe(self, bytes frame, bint urgent) except -1
    cdef int drop_unsent(self) except -1
    cdef int lengthen(self, bytes frame, bint urgent) except -1
    cdef inline uint64_t unsent_weight(self) noexcept
    cdef int be_flushed(self) except -1
    cdef int finish(self) except -1
    cdef void forget_unsent(self) noexcept
    cdef int overran(self) except -1
    cdef int broke(self) except -1
    cdef inline uint64_t unsent(self) noexcept
    cdef int check_writable(self) except -1


cdef struct Queue:
    # Sinks with something to write, oldest first: [start, end) of heap memory, each owned.
    PyObject** sinks
    Py_ssize_t start
    Py_ssize_t end
    Py_ssize_t capacity


cdef struct Post:
    # Owned: a bytes object.
    PyObject* frame
    # The sink that doesn't get it; 0, 0 for none.
    uint64_t skip_hi
    uint64_t skip_lo
    # It is noted on the sinks before place `at`, and to be noted on those from there to before `stop`.
    uint32_t at
    uint32_t stop


cdef class Audience:
    # Owned.
    cdef readonly Flusher flusher
    # Heap memory, `count` of `capacity` used; each is owned.
    cdef PyObject** sinks
    cdef uint32_t count
    cdef uint32_t capacity
    # Posts that are not noted on all sinks yet, oldest first: `post_count` of MAX_POSTS, or NULL while there never was
    # one. Only the first has begun.
    cdef Post* posts
    cdef uint32_t post_count

    cdef void remove_at(self, uint32_t place) noexcept
    cdef inline void move(self, uint32_t place, uint32_t hole) noexcept
    cdef uint32_t keep_zones(self, uint32_t place) noexcept
    cdef int post_next(self) except -1
    cdef void drop_post(self) noexcept
    cdef int post_to(
        self, bytes frame, uint64_t skip_hi, uint64_t skip_lo, uint32_t first, uint32_t end
    ) except -1
    cdef int owe_one(self, Sink sink, bytes frame, Queue* queue, Py_ssize_t to_come) except -1


cdef class Flusher:
    # Owned: called with no arguments to have flush() called soon.
    cdef object schedule
    # Owned, or None where no sink has a socket of our own.
    cdef readonly Poller poller
    cdef public uint32_t max_unsent_bytes
    cdef public double slice_s
    # A sink with fewer unsent bytes counts as writable.
    cdef public uint32_t writable_below_bytes
    # A frame for more sinks than this is for many: they go to the bulk queue.
    cdef public uint32_t max_few
    # An audience with more sinks than this is posted to in slices; so many sinks make a part of a slice.
    cdef public uint32_t post_at_once
    cdef public uint32_t post_part
    # The audiences with posts under way.
    cdef list posting
    # Owned: called with a list of sinks at the end of a flush; None until it is set.
    cdef public object on_writable
    # Sinks to report at the end of this flush or the next; None while there are none.
    cdef list now_writable
    # Sinks with a frame for them alone or for a few, and those with a frame for many.
    cdef Queue quick
    cdef Queue bulk
    cdef bint scheduled
    cdef bint flushing
    # The frames of `joined` (held, or NULL), one after another.
    cdef char* scratch
    cdef size_t scratch_size
    cdef Chain* joined

    cdef readonly uint64_t frames_posted
    cdef readonly uint64_t frames_written
    cdef readonly uint64_t bytes_written
    cdef readonly uint64_t writes
    cdef readonly uint64_t overruns
    cdef readonly uint64_t sinks_closed_on_error

    cdef inline bint waits(self) noexcept
    cdef int wake(self) except -1
    cdef int report_writable(self) except -1
    cdef int post_some(self, double deadline) except -1
    cdef int write_some(self, Queue* queue, uint8_t place, Py_ssize_t stop, double deadline) except -1
    cdef int write_later(self, Sink sink, Queue* queue, uint8_t place) except -1
    cdef int write_now(self, Sink sink) except -1
    cdef int write_unsent(self, Sink sink) except -1
    cdef int write_through_transport(self, Sink sink, Chain* chain, bint urgent) except -1
    cdef int close_written(self, Sink sink) except -1
    cdef int keep_rest(self, Sink sink, Chain* chain, bint urgent, size_t sent) except -1
    cdef int hand_rest(self, Sink sink, Chain* chain, bint urgent, size_t sent, bint unsent) except -1
    cdef int hand(self, Sink sink, bytes data) except -1
    cdef char* join(self, Chain* chain) except NULL


# Debug builds count live objects, so that tests can check that the numbers return to what they were.
cdef struct Live:
    Py_ssize_t sinks
    Py_ssize_t audiences
    Py_ssize_t chains
    Py_ssize_t seats
