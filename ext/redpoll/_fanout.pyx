"""Fan-out: queues frames for the sinks of an audience, and writes each sink once with all its frames.

`post` stores a reference per sink and copies nothing. `flush` runs once per loop tick and makes one send(2) per sink.
Frames that wait for a sink are its unsent frames. This module knows bytes and descriptors; it knows no WebSockets, channels
or JSON. It runs in one thread, on one loop.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EAGAIN, EINTR, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

import asyncio

cimport cython

from redpoll._sockets cimport WATCHED_OUT, Polled, Poller, monotonic_s

__all__ = ["Audience", "Flusher", "Sink"]

cdef extern from "<sys/socket.h>" nogil:
    ssize_t send(int fd, const void* at, size_t size, int flags)
    ssize_t recv(int fd, void* to, size_t size, int flags)
    int shutdown(int fd, int how)
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        MSG_TRUNC
        SHUT_WR

cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int fd, unsigned long what, int* value)

cdef extern from "<linux/sockios.h>" nogil:
    enum:
        SIOCOUTQ

cdef extern from *:
    """
    #ifdef REDPOLL_DEBUG
    #define REDPOLL_COUNTS_LIVE 1
    #else
    #define REDPOLL_COUNTS_LIVE 0
    #endif
    """
    enum:
        COUNTS_LIVE "REDPOLL_COUNTS_LIVE"

cdef enum:
    # What a queued frame costs beyond its bytes: its chain link. It counts towards the limit, so that a client can't
    # make us store a million frames of two bytes.
    LINK_BYTES = 64
    # The clock is read once per this many sinks (a send takes about 5 µs).
    SINKS_PER_LOOK = 32
    MAX_FEW = 64
    # A larger scratch buffer is freed at the end of a flush.
    KEPT_SCRATCH_BYTES = 262144
    # A TLS transport is handed this much at a time, plus at most a frame: it takes whatever it is given, and only then
    # reports that it is full.
    TRANSPORT_WRITE_BYTES = 65536
    MAX_DISCARDS = 32
    # Noting a frame on 10,000 sinks takes about 1 ms when they are not in the processor's caches.
    POST_AT_ONCE = 20000
    POST_PART = 4096
    # Of one audience; with one more, those before it are finished at once.
    MAX_POSTS = 64
    # What a sink waits for, to be reported.
    WRITABLE = 1
    DRAINED = 2

# Bytes that are dropped are read into this.
cdef char[65536] discarded

cdef Live alive
memset(&alive, 0, sizeof(Live))


def live() -> dict:
    """Objects alive, by kind, in a debug build; empty in others."""
    if COUNTS_LIVE:
        return alive
    return {}


# -- chains --------------------------------------------------------------------------------------------------

# The one-frame chain that was made last; borrowed, as `grown` is.
cdef Chain* single = NULL


cdef Chain* grow(Chain* before, PyObject* frame) except NULL:
    """The chain of `before` and then `frame`, found or created. A new one must be held or dropped by the caller."""
    global single
    cdef Chain* chain = single if before == NULL else before.grown
    if chain != NULL and chain.frame == frame:
        return chain
    chain = <Chain*> PyMem_Malloc(sizeof(Chain))
    if chain == NULL:
        raise MemoryError()
    chain.holders = 0
    chain.before = before
    chain.grown = NULL
    chain.frame = frame
    chain.size = PyBytes_GET_SIZE(<bytes> frame)
    chain.frames = 1
    Py_INCREF(<object> frame)
    if before == NULL:
        single = chain
    else:
        chain.size += before.size
        chain.frames += before.frames
        before.grown = chain
        before.holders += 1
    if COUNTS_LIVE:
        alive.chains += 1
    return chain


cdef void drop_unheld(Chain* chain) noexcept:
    """Free `chain` if it has no holder, and then those before it that have none."""
    global single
    cdef Chain* before
    while chain != NULL and chain.holders == 0:
        before = chain.before
        if before == NULL:
            if single == chain:
                single = NULL
        else:
            if before.grown == chain:
                before.grown = NULL
            before.holders -= 1
        Py_DECREF(<object> chain.frame)
        PyMem_Free(chain)
        if COUNTS_LIVE:
            alive.chains -= 1
        chain = before


cdef inline void release(Chain* chain, uint32_t holds) noexcept:
    if chain != NULL:
        chain.holders -= holds
        if chain.holders == 0:
            drop_unheld(chain)


cdef inline uint64_t weight(Chain* chain) noexcept nogil:
    return chain.size + <uint64_t> chain.frames * LINK_BYTES if chain != NULL else 0


# -- sinks ---------------------------------------------------------------------------------------------------


@cython.no_gc
cdef class Sink(Polled):
    """A socket and the frames that wait for it.

    Base class of WebSocket. By itself it takes any bytes: `attach_to(transport)`, then `send`.
    A sink whose kernel buffer is full is aborted when more than `Flusher.max_unsent_bytes` wait for it (a WebSocket sends
    4100 first).
    """

    def __cinit__(self):
        if COUNTS_LIVE:
            alive.sinks += 1

    def __init__(self, Flusher flusher not None):
        self.flusher = flusher

    def __dealloc__(self):
        # No seat is left, because audiences own their sinks.
        release(self.unsent_chain, 1)
        release(self.urgent, 1)
        if COUNTS_LIVE:
            alive.sinks -= 1

    def set_sid(self, uint64_t hi, uint64_t lo):
        """Give this sink its socket id, `hi.lo`; neither is 0."""
        self.sid_hi = hi
        self.sid_lo = lo

    def attach_to(self, transport):
        """Write to `transport` from now on; one with a descriptor and no TLS is written by send(2)."""
        self.attach(transport)

    def send(self, bytes frame not None) -> bool:
        """Queue `frame` for this sink only. False if it takes none."""
        return self.note(frame, False) == 1

    def send_urgent(self, bytes frame not None) -> bool:
        """As `send`, before all frames that haven't been started. Urgent frames keep their order."""
        return self.note(frame, True) == 1

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self.buffered = 0
        if self.unsent_chain != NULL or self.urgent != NULL or self.finishing:
            self.be_flushed()
        if self.awaited:
            self.check_writable()
            self.flusher.wake()

    def await_writable(self) -> bool:
        """Report this sink to `Flusher.on_writable` once, when it has less than `writable_below_bytes` unsent.

        Returns False if it has so already; then nothing is reported. A sink that closes first isn't reported.
        """
        self.awaited = WRITABLE if self.unsent() >= self.flusher.writable_below_bytes else 0
        return self.awaited != 0

    def await_drained(self) -> bool:
        """As `await_writable`, once nothing is unsent."""
        self.awaited = DRAINED if self.unsent() else 0
        return self.awaited != 0

    @property
    def unsent_bytes(self) -> int:
        """Queued bytes that the kernel hasn't taken yet."""
        return self.unsent()

    @property
    def undelivered_bytes(self) -> int:
        """As `unsent_bytes`, with those that the kernel has and the peer's kernel hasn't acknowledged.

        So it shows sooner that a slow peer reads: our kernel reports room only when a third of its buffer is free. It
        costs a system call.
        """
        cdef:
            Polled polled = <Transport> self.transport if isinstance(self.transport, Transport) else self
            int of_kernel = 0
        # 0 if it fails.
        if polled.watched:
            ioctl(polled.fd, SIOCOUTQ, &of_kernel)
        return self.unsent() + of_kernel

    cdef inline uint64_t unsent(self) noexcept:
        cdef uint64_t total = self.buffered
        if self.unsent_chain != NULL:
            total += self.unsent_chain.size
        if self.urgent != NULL:
            total += self.urgent.size
        return total

    cdef int check_writable(self) except -1:
        """Called after a write of an awaited sink. The callback runs at the end of a flush and not here, because the
        caller may be iterating over an audience."""
        cdef Flusher flusher = self.flusher
        if self.writable and self.unsent() < (1 if self.awaited == DRAINED else flusher.writable_below_bytes):
            self.awaited = 0
            if flusher.now_writable is None:
                flusher.now_writable = []
            flusher.now_writable.append(self)
        return 0

    cdef inline Seat* seats_at(self) noexcept:
        return &self.seats.inline[0] if self.seat_count <= INLINE_SEATS else self.seats.heap

    cdef int take_seat(self, PyObject* audience, uint32_t place) except -1:
        cdef:
            uint32_t count = self.seat_count
            Seat* more
        if count == INLINE_SEATS:
            more = <Seat*> PyMem_Malloc(2 * INLINE_SEATS * sizeof(Seat))
            if more == NULL:
                raise MemoryError()
            memcpy(more, &self.seats.inline[0], INLINE_SEATS * sizeof(Seat))
            self.seats.heap = more
        elif count > INLINE_SEATS and count & (count - 1) == 0:
            # Capacities are powers of two.
            more = <Seat*> PyMem_Realloc(self.seats.heap, 2 * count * sizeof(Seat))
            if more == NULL:
                raise MemoryError()
            self.seats.heap = more
        self.seat_count = count + 1
        more = self.seats_at()
        more[count].audience = audience
        more[count].place = place
        if COUNTS_LIVE:
            alive.seats += 1
        return 0

    cdef void leave_seat(self, uint32_t index) noexcept:
        # noexcept, because it only shrinks. The last seat moves into the gap.
        cdef:
            Seat* seats = self.seats_at()
            uint32_t last = self.seat_count - 1
        if index != last:
            seats[index] = seats[last]
        self.seat_count = last
        if last == INLINE_SEATS:
            # `seats` was heap memory; `inline` shares the place of its pointer.
            memcpy(&self.seats.inline[0], seats, INLINE_SEATS * sizeof(Seat))
            PyMem_Free(seats)
        if COUNTS_LIVE:
            alive.seats -= 1

    cdef inline bint is_attached(self) noexcept:
        """Whether there is a socket, ours or a transport's."""
        return self.watched or self.transport is not None

    cdef int socket_opened(self) except -1:
        if self.flusher is None or self.flusher.poller is None:
            raise RuntimeError("the sink's flusher has no poller")
        self.writable = True
        return 0

    cdef int socket_readable(self) except -1:
        """Drop what the peer sends. WebSocket overrides this."""
        cdef ssize_t size = recv(self.fd, discarded, sizeof(discarded), MSG_DONTWAIT)
        if size == 0 or (size < 0 and errno != EAGAIN and errno != EINTR):
            self.broke()
        return 0

    cdef int socket_writable(self) except -1:
        # WATCHED_OUT stays until everything is written: the flush comes before the next look at the set.
        self.paused = False
        if self.unsent_chain != NULL or self.urgent != NULL or self.finishing or self.ended:
            self.be_flushed()
        else:
            self.flusher.poller.watch(self)
        return 0

    cdef int attach(self, object transport) except -1:
        if self.flusher is None:
            raise RuntimeError("Sink.__init__ was not called")
        sock = transport.get_extra_info("socket")
        self.transport = transport
        self.writable = True
        if transport.get_extra_info("sslcontext") is not None:
            # uvloop pauses us as soon as the socket is full of encrypted bytes (it pauses at `high`, so 1 and not 0).
            transport.set_write_buffer_limits(1, 0)
        elif sock is not None:
            self.fd = sock.fileno()
            # uvloop resumes us when the transport's buffer is empty; then send(2) can't overtake it.
            transport.set_write_buffer_limits(0, 0)
        return 0

    cdef void detach_transport(self) noexcept:
        """The socket is closed or closing: write nothing more."""
        if not self.watched:
            # Otherwise the poller sets it.
            self.fd = -1
        self.transport = None
        self.writable = False
        self.finishing = False
        self.started = False
        self.paused = False
        self.buffered = 0
        self.forget_unsent()

    cdef void forget_unsent(self) noexcept:
        cdef:
            Chain* unsent_chain = self.unsent_chain
            Chain* urgent = self.urgent
            Chain* rest = NULL
        if self.started:
            # The peer already has the beginning of this frame.
            rest = urgent
            while rest.before != NULL:
                rest = rest.before
            rest.holders += 1
        self.unsent_chain = NULL
        self.urgent = rest
        release(unsent_chain, 1)
        release(urgent, 1)

    cdef int note(self, bytes frame, bint urgent) except -1:
        """Queue `frame` and schedule its write. 0 if this sink takes none."""
        cdef int noted = 0
        if self.writable:
            noted = self.owe(frame, urgent)
            self.flusher.wake()
        return noted

    cdef int owe(self, bytes frame, bint urgent) except -1:
        """As `note`, for a sink that is writable; the caller wakes the flusher."""
        cdef:
            Flusher flusher = self.flusher
            uint64_t size = PyBytes_GET_SIZE(frame) + LINK_BYTES
        if self.unsent_weight() + size > flusher.max_unsent_bytes:
            if not self.paused:
                # Many bytes in one tick aren't the client's fault: nothing was written to it yet.
                flusher.write_now(self)
                if not self.writable:
                    return 0
            if self.paused and self.unsent_weight() + size > flusher.max_unsent_bytes:
                self.drop_unsent()
                return 0
        # Not before the write: its transport may have put other sinks into the queue.
        reserve(&flusher.quick, 1)
        self.lengthen(frame, urgent)
        flusher.frames_posted += 1
        if not self.queued & IN_QUICK and not self.paused:
            put(&flusher.quick, <PyObject*> self, IN_QUICK)
        return 1

    def overrun_now(self):
        """More waits for this sink than may, where its caller keeps it: the next flush closes it, as with too many unsent
        bytes."""
        if self.writable:
            self.drop_unsent()
            self.flusher.wake()

    cdef int drop_unsent(self) except -1:
        """Drop all frames, and let the next flush close this sink: the caller may be iterating over an audience."""
        reserve(&self.flusher.quick, 1)
        self.forget_unsent()
        self.writable = False
        self.overrun = OVERRUN_DUE
        if not self.queued:
            put(&self.flusher.quick, <PyObject*> self, IN_QUICK)
        return 0

    cdef int lengthen(self, bytes frame, bint urgent) except -1:
        """Add `frame` after the others, without checking the limit."""
        cdef:
            Chain* was = self.urgent if urgent else self.unsent_chain
            Chain* now = grow(was, <PyObject*> frame)
        now.holders += 1
        release(was, 1)
        if urgent:
            self.urgent = now
        else:
            self.unsent_chain = now
        return 0

    cdef inline uint64_t unsent_weight(self) noexcept:
        return self.buffered + weight(self.unsent_chain) + weight(self.urgent)

    cdef int finish(self) except -1:
        """Take no more frames, and half-close when the waiting ones are written."""
        self.writable = False
        if not self.is_attached():
            return 0
        self.finishing = True
        if not self.paused:
            self.be_flushed()
        return 0

    cdef int be_flushed(self) except -1:
        """Put this sink into the next flush."""
        if not self.queued & IN_QUICK:
            reserve(&self.flusher.quick, 1)
            put(&self.flusher.quick, <PyObject*> self, IN_QUICK)
            self.flusher.wake()
        return 0

    cdef int overran(self) except -1:
        """Too many bytes waited for this sink; they are dropped already."""
        return self.broke()

    cdef int broke(self) except -1:
        """Close the socket at once. connection_lost or socket_lost follows."""
        transport = self.transport
        if self.watched:
            self.flusher.poller.close_socket(self)
        self.detach_transport()
        if transport is not None:
            transport.abort()
        return 0


cdef class Transport(Polled):
    """What a sink without a descriptor writes through, in the poller's turns: subclass it (_tls.pyx)."""

    cdef int write_bytes(self, const char* at, Py_ssize_t size) except -1:
        """Write all of it, or keep what there is no room for, in the sink's `buffered`, and call its pause_writing()."""
        return 0


# -- audiences -----------------------------------------------------------------------------------------------


cdef class Audience:
    """A set of sinks that get the same frames. Adding and discarding are O(1) in its size; it takes 8 to 12 bytes per
    sink.

    It owns its sinks. Subclass it to add a name. `len` and `in` work; iteration goes over a copy, so that the caller
    may add, discard and close.
    """

    def __cinit__(self):
        if COUNTS_LIVE:
            alive.audiences += 1

    def __init__(self, Flusher flusher not None):
        self.flusher = flusher

    def __dealloc__(self):
        while self.post_count:
            self.drop_post()
        PyMem_Free(self.posts)
        while self.count:
            self.remove_at(self.count - 1)
        PyMem_Free(self.sinks)
        if COUNTS_LIVE:
            alive.audiences -= 1

    def __len__(self) -> int:
        return self.count

    def __contains__(self, sink) -> bool:
        return isinstance(sink, Sink) and seat_of(self, <Sink> sink) >= 0

    def __iter__(self):
        return iter([<Sink> self.sinks[i] for i in range(self.count)])

    def add(self, Sink sink not None) -> bool:
        """Add `sink`. False if it was in already."""
        cdef:
            PyObject** sinks
            uint32_t capacity
        if self.flusher is None or sink.flusher is not self.flusher:
            raise ValueError("a sink and its audiences have one flusher")
        if seat_of(self, sink) >= 0:
            return False
        if self.count == self.capacity:
            # Grows by a half: an audience of one is common, and one of a hundred thousand must not double.
            capacity = self.capacity + self.capacity // 2 + 1
            sinks = <PyObject**> PyMem_Realloc(self.sinks, capacity * sizeof(PyObject*))
            if sinks == NULL:
                raise MemoryError()
            self.sinks = sinks
            self.capacity = capacity
        sink.take_seat(<PyObject*> self, self.count)
        # Take the reference last, when nothing can fail.
        self.sinks[self.count] = <PyObject*> sink
        self.count += 1
        Py_INCREF(sink)
        return True

    def discard(self, Sink sink not None) -> bool:
        """Remove `sink`. False if it wasn't in."""
        cdef Py_ssize_t seat = seat_of(self, sink)
        if seat < 0:
            return False
        self.remove_at(sink.seats_at()[seat].place)
        return True

    def find(self, uint64_t sid_hi, uint64_t sid_lo):
        """The sink with this socket id, or None. Looks at each."""
        cdef uint32_t i
        for i in range(self.count):
            if (<Sink> self.sinks[i]).sid_lo == sid_lo and (<Sink> self.sinks[i]).sid_hi == sid_hi:
                return <Sink> self.sinks[i]
        return None

    def part(self, uint32_t first, uint32_t count) -> list:
        """Up to `count` sinks, from the one at place `first` on."""
        cdef uint32_t i
        return [<Sink> self.sinks[i] for i in range(first, min(<uint64_t> first + count, self.count))]

    def unsent(self, uint32_t first, uint32_t count) -> int:
        """The unsent bytes of up to `count` sinks, from the one at place `first` on."""
        cdef:
            uint32_t i
            uint64_t total = 0
        for i in range(first, min(<uint64_t> first + count, self.count)):
            total += (<Sink> self.sinks[i]).unsent()
        return total

    def take_paused(self, uint32_t first, uint32_t count) -> list:
        """Remove the sinks whose kernel buffer is full, of up to `count` from the one at place `first` on. Returns them.
        None are removed while a post is under way, which they would miss."""
        cdef:
            list taken = []
            uint32_t end = <uint32_t> min(<uint64_t> first + count, self.count)
            uint32_t i = end
            Sink sink
        if self.post_count:
            return taken
        # From the end, because the last sink moves into a gap.
        while i > first:
            i -= 1
            if (<Sink> self.sinks[i]).paused and (<Sink> self.sinks[i]).writable:
                sink = <Sink> self.sinks[i]
                self.remove_at(i)
                taken.append(sink)
        return taken

    cdef void remove_at(self, uint32_t place) noexcept:
        # noexcept, because it only shrinks and dealloc must not fail. The last sink moves into the gap. Its seat is
        # searched for, because an index per sink would double the audience's memory.
        cdef:
            PyObject* sink = self.sinks[place]
            PyObject** sinks
            uint32_t last = self.count - 1
        if self.post_count:
            place = self.keep_zones(place)
        if place != last:
            self.move(last, place)
        self.count = last
        (<Sink> sink).leave_seat(seat_of(self, <Sink> sink))
        if self.capacity > 16 and last < self.capacity // 4:
            sinks = <PyObject**> PyMem_Realloc(self.sinks, (self.capacity // 2) * sizeof(PyObject*))
            if sinks != NULL:
                self.sinks = sinks
                self.capacity //= 2
        Py_DECREF(<Sink> sink)

    cdef inline void move(self, uint32_t place, uint32_t hole) noexcept:
        cdef PyObject* moved = self.sinks[place]
        self.sinks[hole] = moved
        (<Sink> moved).seats_at()[seat_of(self, <Sink> moved)].place = hole

    cdef uint32_t keep_zones(self, uint32_t place) noexcept:
        """The sink at `place` goes while posts are under way. Moves others so that each stays among those that have a
        frame, that are to get it, or that came after it was posted; the place that is empty then, in the last zone."""
        cdef:
            uint32_t hole = place
            uint32_t below = place
            uint32_t end
            uint32_t i
        while True:
            # The next end of a zone.
            end = self.count
            for i in range(self.post_count):
                if below < self.posts[i].at < end:
                    end = self.posts[i].at
                if below < self.posts[i].stop < end:
                    end = self.posts[i].stop
            if end == self.count:
                break
            if end - 1 != hole:
                self.move(end - 1, hole)
                hole = end - 1
            below = end
        for i in range(self.post_count):
            if self.posts[i].at > place:
                self.posts[i].at -= 1
            if self.posts[i].stop > place:
                self.posts[i].stop -= 1
        return hole

    def post(self, bytes frame not None, uint64_t skip_hi=0, uint64_t skip_lo=0) -> int:
        """Queue `frame` for every sink except the one whose socket id is `skip_hi.skip_lo`. Returns their number.

        Copies nothing. It calls only `schedule` and the transports of sinks with too much unsent. Neither may change the
        audience, because it is walked. In an audience of more than `Flusher.post_at_once`, the next flushes add it, a
        slice each, and all sinks count as noted. A sink that is added later doesn't get it, and posts keep their order.
        """
        cdef:
            Flusher flusher = self.flusher
            uint32_t noted
            Post* post
        if self.count == 0:
            return 0
        if self.post_count == 0 and self.count <= flusher.post_at_once:
            noted = self.post_to(frame, skip_hi, skip_lo, 0, self.count)
            flusher.wake()
            return noted
        while self.post_count == MAX_POSTS:
            # Only the oldest: to note all of them at once would take as long as all of them.
            self.post_next()
        if self.posts == NULL:
            self.posts = <Post*> PyMem_Malloc(MAX_POSTS * sizeof(Post))
            if self.posts == NULL:
                raise MemoryError()
        if self.post_count == 0:
            flusher.posting.append(self)
        post = &self.posts[self.post_count]
        post.frame = <PyObject*> frame
        post.skip_hi = skip_hi
        post.skip_lo = skip_lo
        post.at = 0
        post.stop = self.count
        Py_INCREF(frame)
        self.post_count += 1
        flusher.wake()
        return self.count

    def finish_posts(self):
        """Note now what later flushes would note."""
        while self.post_count:
            self.post_next()

    cdef int post_next(self) except -1:
        """Note the oldest post on the next part of those who are to get it."""
        cdef:
            Post* post = &self.posts[0]
            uint32_t first = post.at
            uint32_t end = min(first + self.flusher.post_part, post.stop)
            uint64_t skip_hi = post.skip_hi
            uint64_t skip_lo = post.skip_lo
            bytes frame = <bytes> post.frame
        # Before anything can fail: nobody gets a frame twice.
        post.at = end
        if end == post.stop:
            self.drop_post()
        if end > first:
            self.post_to(frame, skip_hi, skip_lo, first, end)
        return 0

    cdef void drop_post(self) noexcept:
        Py_DECREF(<bytes> self.posts[0].frame)
        self.post_count -= 1
        memmove(self.posts, self.posts + 1, self.post_count * sizeof(Post))

    cdef int post_to(
        self, bytes frame, uint64_t skip_hi, uint64_t skip_lo, uint32_t first, uint32_t end
    ) except -1:
        """Note `frame` on the sinks from place `first` to before `end`; how many were noted. The caller wakes."""
        cdef:
            Flusher flusher = self.flusher
            bint few = self.count <= self.flusher.max_few
            Queue* queue = &flusher.quick if few else &flusher.bulk
            uint8_t place = IN_QUICK if few else IN_BULK
            # A sink in the quick queue is written early enough for this frame, too.
            uint8_t places = IN_QUICK | place
            uint64_t limit
            uint64_t total = 0
            uint32_t noted = 0
            uint32_t moved = 0
            uint32_t i
            PyObject* sink
            # Neighbours usually have the same frames waiting, so the next sink can use the same new chain.
            Chain* was = NULL
            Chain* now = NULL
        if first == end:
            return 0
        limit = flusher.max_unsent_bytes
        reserve(queue, end - first)
        try:
            for i in range(first, end):
                sink = self.sinks[i]
                if not (<Sink> sink).writable:
                    continue
                if skip_lo and (<Sink> sink).sid_lo == skip_lo and (<Sink> sink).sid_hi == skip_hi:
                    continue
                if now == NULL or (<Sink> sink).unsent_chain != was:
                    settle(was, now, moved)
                    moved = 0
                    was = (<Sink> sink).unsent_chain
                    now = NULL
                    now = grow(was, <PyObject*> frame)
                    total = weight(now)
                if total + (<Sink> sink).buffered + weight((<Sink> sink).urgent) > limit:
                    noted += self.owe_one(<Sink> sink, frame, queue, end - i - 1)
                    continue
                (<Sink> sink).unsent_chain = now
                moved += 1
                noted += 1
                flusher.frames_posted += 1
                if not (<Sink> sink).queued & places and not (<Sink> sink).paused:
                    put(queue, sink, place)
        finally:
            # Also after an exception: the sinks that point to `now` are its holders.
            settle(was, now, moved)
        return noted

    cdef int owe_one(self, Sink sink, bytes frame, Queue* queue, Py_ssize_t to_come) except -1:
        """Note `frame` on a sink that may have too much unsent, in the middle of a post. It, and those that its transport
        writes to, may take the room in `queue` that the sinks to come need."""
        cdef int noted = sink.owe(frame, False)
        reserve(queue, to_come)
        return noted


cdef inline void settle(Chain* was, Chain* now, uint32_t moved) noexcept:
    """`moved` sinks changed from one chain to the other."""
    if now != NULL:
        now.holders += moved
        release(was, moved)
        drop_unheld(now)


cdef Py_ssize_t seat_of(Audience audience, Sink sink) noexcept:
    # A connection is in few audiences, so searching its seats is cheaper than an index per seat.
    cdef:
        Seat* seats = sink.seats_at()
        uint32_t i
    for i in range(sink.seat_count):
        if seats[i].audience == <PyObject*> audience:
            return i
    return -1


# -- the flusher ---------------------------------------------------------------------------------------------


cdef int reserve(Queue* queue, Py_ssize_t more) except -1:
    """Room for `more` sinks, so that `put` can't fail."""
    cdef:
        Py_ssize_t capacity
        PyObject** sinks
    if queue.end + more <= queue.capacity:
        return 0
    capacity = max(queue.capacity * 2, queue.end + more, 64)
    sinks = <PyObject**> PyMem_Realloc(queue.sinks, capacity * sizeof(PyObject*))
    if sinks == NULL:
        raise MemoryError()
    queue.sinks = sinks
    queue.capacity = capacity
    return 0


cdef inline void put(Queue* queue, PyObject* sink, uint8_t place) noexcept:
    # noexcept: reserve() was called.
    queue.sinks[queue.end] = sink
    queue.end += 1
    (<Sink> sink).queued |= place
    Py_INCREF(<Sink> sink)


cdef void close_gap(Queue* queue) noexcept:
    """Move the rest of the queue to the beginning of its memory."""
    if queue.start == 0:
        return
    memmove(queue.sinks, queue.sinks + queue.start, (queue.end - queue.start) * sizeof(PyObject*))
    queue.end -= queue.start
    queue.start = 0


cdef void empty(Queue* queue) noexcept:
    cdef Py_ssize_t i
    for i in range(queue.start, queue.end):
        Py_DECREF(<Sink> queue.sinks[i])
    PyMem_Free(queue.sinks)


cdef class Flusher:
    """Has the queues of sinks with something to write, and writes them.

    A frame for one sink or a few goes to the quick queue, which comes first; one for many to the bulk queue. So an
    answer or a small channel's event doesn't wait for thousands who get another event. Of one sink, everything that
    waits is written at once, in order, whichever queue it is found in.

    `schedule()` is called when there is work and no call of `flush` is scheduled: `lambda:
    loop.call_soon(flusher.flush)`. `max_unsent_bytes` is the limit of what may wait for one sink whose kernel buffer is
    full (a larger burst is written early). `slice_s` limits the time of one flush. Counters only grow.

    `on_writable(sinks)` is called after a flush with the awaited sinks (`Sink.await_writable`) that have less than
    `writable_below_bytes` unsent. Other sinks pay one test of a byte per write.
    """

    def __init__(self, schedule, uint32_t max_unsent_bytes=1048576, double slice_s=0.004, Poller poller=None):
        self.schedule = schedule
        self.poller = poller
        self.max_unsent_bytes = max_unsent_bytes
        self.slice_s = slice_s
        self.writable_below_bytes = 1
        self.max_few = MAX_FEW
        self.post_at_once = POST_AT_ONCE
        self.post_part = POST_PART
        self.posting = []

    def __dealloc__(self):
        empty(&self.quick)
        empty(&self.bulk)
        PyMem_Free(self.scratch)
        release(self.joined, 1)

    @property
    def waiting(self) -> int:
        """The number of sinks that have something to write and can be written to. One in both queues counts twice."""
        return self.quick.end - self.quick.start + self.bulk.end - self.bulk.start

    cdef inline bint waits(self) noexcept:
        return self.quick.end > self.quick.start or self.bulk.end > self.bulk.start

    def flush(self) -> bool:
        """Write all waiting frames, with one write per sink. True if the slice was too short.

        The rest is scheduled. A sink that fails is closed and counted, and affects no other sink.
        """
        cdef:
            double now
            double deadline
            Py_ssize_t quick_stop
        if self.flushing:
            # One of our callbacks called this. What it queued is in the queues, and the outer call writes it.
            return self.waits()
        self.flushing = True
        self.scheduled = False
        now = monotonic_s()
        deadline = now + self.slice_s
        # Sinks that are added during this flush wait for the next one. Otherwise a callback that always sends would
        # keep us here.
        quick_stop = self.quick.end
        try:
            if self.posting or self.bulk.end > self.bulk.start:
                # A quarter of the time at least is for these.
                self.write_some(&self.quick, IN_QUICK, quick_stop, deadline - self.slice_s / 4)
                if self.posting:
                    # Half of what is left, so that what is noted is also written.
                    now = monotonic_s()
                    self.post_some(now + (deadline - now) / 2)
                self.write_some(&self.bulk, IN_BULK, self.bulk.end, deadline)
            else:
                self.write_some(&self.quick, IN_QUICK, quick_stop, deadline)
        finally:
            self.flushing = False
            release(self.joined, 1)
            self.joined = NULL
            if self.scratch_size > KEPT_SCRATCH_BYTES:
                PyMem_Free(self.scratch)
                self.scratch = NULL
                self.scratch_size = 0
            close_gap(&self.quick)
            close_gap(&self.bulk)
            self.wake()
        if self.now_writable is not None:
            self.report_writable()
        return self.waits() or bool(self.posting)

    cdef int write_some(self, Queue* queue, uint8_t place, Py_ssize_t stop, double deadline) except -1:
        """Write the sinks of `queue` before `stop`, until `deadline`."""
        cdef:
            uint32_t until_look = SINKS_PER_LOOK
            Sink sink
        while queue.start < stop:
            try:
                # One try block for all sinks: setting it up per sink costs time.
                while queue.start < stop:
                    sink = <Sink> queue.sinks[queue.start]
                    queue.start += 1
                    Py_DECREF(sink)
                    sink.queued &= ~place
                    if self.write_unsent(sink):
                        self.write_later(sink, queue, place)
                    if sink.awaited:
                        sink.check_writable()
                    until_look -= 1
                    if until_look == 0:
                        until_look = SINKS_PER_LOOK
                        if monotonic_s() > deadline:
                            return 0
            except Exception as fault:
                report(fault, sink)
                self.sinks_closed_on_error += 1
                sink.broke()
        return 0

    cdef int write_later(self, Sink sink, Queue* queue, uint8_t place) except -1:
        """Put a sink that has more to write at the end of `queue`, unless it is in one."""
        if not sink.queued:
            reserve(queue, 1)
            put(queue, <PyObject*> sink, place)
        return 0

    cdef int post_some(self, double deadline) except -1:
        """Go on with the posts to large audiences, by turns."""
        cdef Audience audience
        while self.posting:
            audience = <Audience> self.posting.pop(0)
            if audience.post_count == 0:
                continue
            try:
                audience.post_next()
            finally:
                if audience.post_count:
                    self.posting.append(audience)
            if monotonic_s() > deadline:
                break
        return 0

    cdef int report_writable(self) except -1:
        now_writable = self.now_writable
        self.now_writable = None
        if self.on_writable is not None:
            self.on_writable(now_writable)
        return 0

    cdef int wake(self) except -1:
        if (self.waits() or self.now_writable is not None or self.posting) and not self.scheduled and not self.flushing:
            self.scheduled = True
            try:
                self.schedule()
            except BaseException:
                self.scheduled = False
                raise
        return 0

    cdef int write_now(self, Sink sink) except -1:
        """Write what waits for `sink` now, not at the flush. Calls only its transport, which may put other sinks into the
        queues: one of the HTTP fallback writes to another connection."""
        try:
            if self.write_unsent(sink):
                self.write_later(sink, &self.quick, IN_QUICK)
        except Exception as fault:
            report(fault, sink)
            self.sinks_closed_on_error += 1
            sink.broke()
        if sink.awaited:
            sink.check_writable()
        if not self.flushing:
            release(self.joined, 1)
            self.joined = NULL
        return 0

    cdef int write_unsent(self, Sink sink) except -1:
        """Write what waits for `sink`. 1 if it can be written to and has more, because a callback queued something or
        the transport takes only a part."""
        cdef:
            Chain* chain
            char* at
            ssize_t sent
            bint urgent
            int i
        if sink.overrun == OVERRUN_DUE:
            sink.overrun = OVERRUN_HANDLED
            self.overruns += 1
            sink.overran()
        # Urgent frames, the others, and one more turn for a frame that the first write cut. Frames that callbacks queue
        # from here wait for the next flush, because a callback that always sends must not keep us here.
        for i in range(3):
            if sink.paused or not sink.is_attached():
                return 0
            urgent = sink.urgent != NULL
            chain = sink.urgent if urgent else sink.unsent_chain
            if chain == NULL:
                if sink.watched:
                    return self.close_written(sink)
                if sink.finishing:
                    sink.finishing = False
                    if sink.transport.can_write_eof() and not sink.ended:
                        sink.transport.write_eof()
                    else:
                        sink.transport.close()
                return 0
            if sink.fd < 0:
                self.write_through_transport(sink, chain, urgent)
                continue
            at = PyBytes_AS_STRING(<bytes> chain.frame) if chain.frames == 1 else self.join(chain)
            sent = send(sink.fd, at, chain.size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent == <ssize_t> chain.size:
                self.writes += 1
                self.frames_written += chain.frames
                self.bytes_written += sent
                if urgent:
                    sink.urgent = NULL
                    sink.started = False
                else:
                    sink.unsent_chain = NULL
                release(chain, 1)
            elif sent >= 0:
                self.writes += 1
                self.bytes_written += sent
                if sink.watched:
                    return self.keep_rest(sink, chain, urgent, sent)
                self.hand_rest(sink, chain, urgent, sent, False)
            elif errno == EAGAIN or errno == ENOBUFS or errno == ENOMEM:
                if sink.watched:
                    return self.keep_rest(sink, chain, urgent, 0)
                self.hand_rest(sink, chain, urgent, 0, False)
            elif errno != EINTR:
                self.sinks_closed_on_error += 1
                sink.broke()
                return 0
        if sink.paused:
            return 0
        return (
            sink.unsent_chain != NULL
            or sink.urgent != NULL
            or sink.finishing
            or (sink.watched and (sink.ended or sink.watched & WATCHED_OUT))
        )

    cdef int close_written(self, Sink sink) except -1:
        """Everything for a plain socket is written: stop waiting for room, and end the connection if it is
        finishing."""
        cdef int reads = MAX_DISCARDS
        if sink.ended:
            # Unread bytes would turn the close into a reset, which may overtake our last bytes.
            while reads and recv(sink.fd, discarded, sizeof(discarded), MSG_DONTWAIT | MSG_TRUNC) > 0:
                reads -= 1
            sink.broke()
            return 0
        if sink.watched & WATCHED_OUT:
            self.poller.watch(sink)
        if sink.finishing:
            sink.finishing = False
            # Fails if the peer has reset the connection; the next read reports that.
            shutdown(sink.fd, SHUT_WR)
        return 0

    cdef int keep_rest(self, Sink sink, Chain* chain, bint urgent, size_t sent) except -1:
        """The kernel took `sent` bytes of `chain` and is full: store the rest and wait for room."""
        cdef:
            Chain** links
            Chain* link = chain
            Chain* rest = NULL
            Chain* first = NULL
            uint32_t i = chain.frames
            uint32_t next_frame
            uint32_t j
            bytes frame
        sink.paused = True
        self.poller.watch(sink)
        if sent == 0:
            return 0
        links = <Chain**> PyMem_Malloc(chain.frames * sizeof(Chain*))
        if links == NULL:
            raise MemoryError()
        try:
            while link != NULL:
                i -= 1
                links[i] = link
                link = link.before
            while sent >= <size_t> PyBytes_GET_SIZE(<bytes> links[i].frame):
                sent -= PyBytes_GET_SIZE(<bytes> links[i].frame)
                i += 1
            self.frames_written += i
            next_frame = i
            try:
                if sent:
                    frame = (<bytes> links[i].frame)[sent:]
                    first = grow(NULL, <PyObject*> frame)
                    first.holders += 1
                    next_frame += 1
                if urgent:
                    rest = first
                for j in range(next_frame, chain.frames):
                    rest = grow(rest, links[j].frame)
            except MemoryError:
                drop_unheld(rest)
                release(first, 1)
                raise
        finally:
            PyMem_Free(links)
        if rest != NULL:
            rest.holders += 1
        if urgent:
            sink.urgent = rest
            release(first, 1)
        else:
            # No urgent frame waits, because it would have been written first.
            sink.urgent = first
            sink.unsent_chain = rest
        sink.started = first != NULL
        release(chain, 1)
        return 0

    cdef int write_through_transport(self, Sink sink, Chain* chain, bint urgent) except -1:
        """Write the frames of `chain` in one write of a TLS transport. Of a long chain, only the first frames: what the
        transport has can't be dropped any more."""
        cdef:
            bytes data
            const char* at
            Py_ssize_t size = chain.size
        if size > TRANSPORT_WRITE_BYTES and chain.frames > 1:
            return self.hand_rest(sink, chain, urgent, TRANSPORT_WRITE_BYTES, True)
        self.frames_written += chain.frames
        # The caller's hold on the chain is the sink's, which is given up last.
        if urgent:
            sink.urgent = NULL
        else:
            sink.unsent_chain = NULL
        try:
            if isinstance(sink.transport, Transport):
                # Encrypted from where the frames lie; joined ones lie there for all sinks that have the same.
                at = PyBytes_AS_STRING(<bytes> chain.frame) if chain.frames == 1 else self.join(chain)
                self.writes += 1
                self.bytes_written += size
                (<Transport> sink.transport).write_bytes(at, size)
                return 0
            if chain.frames == 1:
                data = <bytes> chain.frame
            else:
                data = PyBytes_FromStringAndSize(self.join(chain), size)
        finally:
            release(chain, 1)
        return self.hand(sink, data)

    cdef int hand_rest(self, Sink sink, Chain* chain, bint urgent, size_t sent, bint unsent) except -1:
        """The kernel took `sent` bytes of `chain`. The rest of the frame in which it stopped goes to the transport,
        which waits for room. Later frames stay in the sink as references. `unsent`: the kernel took none, so the
        transport also gets the frames before."""
        cdef:
            Chain** links
            Chain* link = chain
            Chain* rest = NULL
            Chain* longer
            uint32_t i = chain.frames
            uint32_t j
            bytes started
            list handed = []
        links = <Chain**> PyMem_Malloc(chain.frames * sizeof(Chain*))
        if links == NULL:
            raise MemoryError()
        try:
            while link != NULL:
                i -= 1
                links[i] = link
                link = link.before
            while sent >= <size_t> PyBytes_GET_SIZE(<bytes> links[i].frame):
                sent -= PyBytes_GET_SIZE(<bytes> links[i].frame)
                if unsent:
                    handed.append(<bytes> links[i].frame)
                i += 1
            self.frames_written += i + 1
            started = <bytes> links[i].frame
            for j in range(i + 1, chain.frames):
                try:
                    longer = grow(rest, links[j].frame)
                except MemoryError:
                    drop_unheld(rest)
                    raise
                rest = longer
        finally:
            PyMem_Free(links)
        if rest != NULL:
            rest.holders += 1
        if urgent:
            sink.urgent = rest
        else:
            sink.unsent_chain = rest
        release(chain, 1)
        if unsent:
            handed.append(started)
            return self.hand(sink, b"".join(handed))
        return self.hand(sink, started[sent:] if sent else started)

    cdef int hand(self, Sink sink, bytes data) except -1:
        self.writes += 1
        self.bytes_written += PyBytes_GET_SIZE(data)
        if isinstance(sink.transport, Transport):
            return (<Transport> sink.transport).write_bytes(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        sink.transport.write(data)
        if sink.paused:
            sink.buffered = <uint32_t> PyBytes_GET_SIZE(data)
        return 0

    cdef char* join(self, Chain* chain) except NULL:
        """Join the frames of `chain` in the scratch buffer. Often they are there already."""
        cdef:
            char* scratch
            char* at
            Chain* link = chain
            Py_ssize_t size
        if self.joined == chain:
            return self.scratch
        if self.scratch_size < chain.size:
            scratch = <char*> PyMem_Realloc(self.scratch, chain.size)
            if scratch == NULL:
                raise MemoryError()
            self.scratch = scratch
            self.scratch_size = chain.size
        release(self.joined, 1)
        chain.holders += 1
        self.joined = chain
        at = self.scratch + chain.size
        while link != NULL:
            size = PyBytes_GET_SIZE(<bytes> link.frame)
            at -= size
            memcpy(at, PyBytes_AS_STRING(<bytes> link.frame), size)
            link = link.before
        return self.scratch


def report(fault: BaseException, protocol) -> None:
    """Report an error of ours, which closed one socket, to the loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler(
        {
            "message": f"a socket was closed by a fault of ours: {type(fault).__name__}",
            "exception": fault,
            "protocol": protocol,
            "transport": (<Sink> protocol).transport,
        }
    )
