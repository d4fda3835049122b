"""Plain TCP without a transport object: accepts connections, and watches their descriptors with epoll.

A Listener accepts many connections per wake-up. A Poller keeps their descriptors in four epoll sets; the event
loop watches a single descriptor. The poller calls a Polled (the base class of the fan-out's
Sink) when it can be read or written. This module knows descriptors; it knows no frames.
"""

from cpython.bytes cimport PyBytes_FromString
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport (
    EAGAIN,
    ECONNABORTED,
    EHOSTDOWN,
    EHOSTUNREACH,
    EINTR,
    ENETDOWN,
    ENETUNREACH,
    ENOPROTOOPT,
    EOPNOTSUPP,
    EPERM,
    EPROTO,
    errno,
)
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

import os
from collections import deque

__all__ = ["Listener", "Polled", "Poller", "accepted_peer"]

cdef extern from "<sys/epoll.h>" nogil:
    int epoll_create1(int flags)
    int epoll_ctl(int epoll_fd, int what, int fd, epoll_event* event)
    int epoll_wait(int epoll_fd, epoll_event* events, int size, int timeout_ms)
    enum:
        EPOLLIN
        EPOLLOUT
        EPOLLERR
        EPOLLHUP
        EPOLLRDHUP
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
        EPOLL_CTL_MOD

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <sys/socket.h>
    #include <netinet/in.h>
    #include <arpa/inet.h>
    """

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    struct sockaddr:
        uint16_t sa_family
    int accept4(int fd, sockaddr* address, socklen_t* size, int flags)
    int getpeername(int fd, sockaddr* address, socklen_t* size)
    enum:
        AF_INET
        AF_INET6
        SOCK_NONBLOCK
        SOCK_CLOEXEC

cdef extern from "<netinet/in.h>" nogil:
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr_in:
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_port
        in6_addr sin6_addr

cdef extern from "<arpa/inet.h>" nogil:
    const char* inet_ntop(int family, const void* address, char* text, socklen_t size)
    uint16_t ntohs(uint16_t value)
    enum:
        INET6_ADDRSTRLEN

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    ssize_t read(int fd, void* to, size_t size)
    ssize_t write(int fd, const void* at, size_t size)

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* now)
    enum:
        CLOCK_MONOTONIC

cdef enum:
    MAX_ACCEPTS_PER_TURN = 256
    # Accepted before the first of them is read: most clients need a moment to send.
    MAX_TOGETHER = 32

# The longest time of one turn of accepting, because connected clients wait during it.
cdef double ACCEPT_SLICE_S = 0.002
# Of such a turn, the time in which newcomers are read at once. Later ones are only accepted: in a storm the kernel's
# queue must not overflow.
cdef double READ_SLICE_S = 0.001
# What each turn has at least for each set but the first.
cdef double MIN_SLICE_S = 0.001
# The longest time of one turn of reporting lost sockets: each leaves its channels.
cdef double LOST_SLICE_S = 0.002
# How long accepting pauses after an error such as EMFILE. New clients wait in the kernel's queue.
cdef double REST_S = 0.25


cdef double monotonic_s() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef uint32_t epoll_events(uint8_t watched) noexcept nogil:
    """What epoll is asked for, by the bits of Polled.watched."""
    return (EPOLLIN | EPOLLRDHUP if watched & WATCHED_IN else 0) | (EPOLLOUT if watched & WATCHED_OUT else 0)


cdef int watch_alone(int set_fd, int fd) noexcept nogil:
    """Have the set at `set_fd` report `fd`, without a socket; -1 if it can't."""
    cdef epoll_event event
    event.events = EPOLLIN
    event.data.ptr = NULL
    return epoll_ctl(set_fd, EPOLL_CTL_ADD, fd, &event)


cdef void forget_events(EventSet* events) noexcept:
    while events.next < events.count:
        Py_DECREF(<Polled> events.events[events.next].data.ptr)
        events.next += 1


cdef void close_set(EventSet* events) noexcept:
    if events.fd >= 0:
        close(events.fd)
        events.fd = -1


cdef bint is_of_one_client(int fault) noexcept nogil:
    """Whether accept(2) failed for the client at the head of the queue only (accept(2), "Error handling")."""
    return (
        fault == EINTR
        or fault == ECONNABORTED
        or fault == EPROTO
        or fault == EPERM
        or fault == ENETDOWN
        or fault == ENOPROTOOPT
        or fault == EHOSTDOWN
        or fault == EHOSTUNREACH
        or fault == EOPNOTSUPP
        or fault == ENETUNREACH
    )


# Sockets that were accepted together, and their peers' addresses; the one that is being taken in, and its own (-1: none
# is).
cdef int[MAX_TOGETHER] together
cdef sockaddr_storage[MAX_TOGETHER] their_addresses
cdef int accepted_fd = -1
cdef sockaddr_storage accepted_address


cdef object peer_of(int fd):
    """`(host, port)` of the other end; None for other address families and for a socket that is not connected."""
    cdef:
        sockaddr_storage address
        socklen_t size = sizeof(address)
        char[INET6_ADDRSTRLEN + 1] text
    if fd == accepted_fd and fd >= 0:
        address = accepted_address
    elif getpeername(fd, <sockaddr*> &address, &size) < 0:
        return None
    if address.ss_family == AF_INET:
        inet_ntop(AF_INET, &(<sockaddr_in*> &address).sin_addr, text, sizeof(text))
        return PyBytes_FromString(text).decode(), ntohs((<sockaddr_in*> &address).sin_port)
    if address.ss_family == AF_INET6:
        inet_ntop(AF_INET6, &(<sockaddr_in6*> &address).sin6_addr, text, sizeof(text))
        return PyBytes_FromString(text).decode(), ntohs((<sockaddr_in6*> &address).sin6_port)
    return None


def accepted_peer():
    """`peer_of` the socket for which a Listener calls its `make()` now; None at other times."""
    return peer_of(accepted_fd)


cdef class Polled(Timed):
    """An object with a descriptor that a Poller may own. Subclasses handle the events."""

    def __cinit__(self):
        self.fd = -1

    cdef int socket_opened(self) except -1:
        """The poller owns the descriptor from now on."""
        return 0

    cdef int socket_readable(self) except -1:
        """There are bytes, the end of the stream, or an error to read: one recv(2) finds out."""
        return 0

    cdef int socket_again(self) except -1:
        """The turn that `Poller.again` promised."""
        return 0

    cdef int socket_writable(self) except -1:
        """The kernel has room again."""
        return 0

    cdef int socket_lost(self) except -1:
        """The descriptor is closed or given away. Called once, from the loop."""
        return 0

    cdef int socket_refused(self) except -1:
        """A Listener made this for a socket that can't be watched. It is closed, and `socket_lost` doesn't follow."""
        return 0


cdef class Poller:
    """Four epoll sets on `loop`. Owns each socket from `adopt` until it is closed or released.

    Neither a flood of requests, nor a storm of new clients, nor thousands that leave may delay the clients that are
    connected. So a turn serves the sets in this order: QUICK, the sockets of which the last read took everything;
    REQUESTS, those of them that speak HTTP, from the moment when there are many at once; BULK, newcomers and those that
    send more than one read takes; LEAVING, those whose other side has ended. The owner of a socket moves it among the
    first three.

    The sets are level-triggered: what a turn doesn't read is reported again. One turn lasts about `slice_s`, or 3 ms more,
    because each set but the first has 1 ms at least. Events that are left over come first in the next turn.
    """

    def __cinit__(self):
        cdef int place
        for place in range(PLACES):
            self.sets[place].fd = -1
        self.waiting_fd = -1
        self.newcomers = []
        self.lost = []
        self.waiting = deque()

    def __init__(self, loop, double slice_s=0.004):
        cdef int place
        if self.sets[QUICK].fd >= 0:
            raise RuntimeError("a Poller is initialised once")
        self.slice_s = slice_s
        self.loop = loop
        for place in range(PLACES):
            self.sets[place].fd = epoll_create1(EPOLL_CLOEXEC)
            # The loop watches the first set only, so that one callback serves all in order.
            if self.sets[place].fd < 0 or place != QUICK and watch_alone(self.sets[QUICK].fd, self.sets[place].fd) < 0:
                raise OSError(errno, os.strerror(errno))
        self.waiting_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.waiting_fd < 0 or watch_alone(self.sets[QUICK].fd, self.waiting_fd) < 0:
            raise OSError(errno, os.strerror(errno))
        loop.add_reader(self.sets[QUICK].fd, self.turn)

    def __dealloc__(self):
        cdef int place
        # Each socket in a set keeps its poller alive, so no socket is left.
        for place in range(PLACES):
            forget_events(&self.sets[place])
            close_set(&self.sets[place])
        if self.waiting_fd >= 0:
            close(self.waiting_fd)

    @property
    def places(self):
        """How many sockets are in each set, in the order of a turn."""
        return [self.sets[place].sockets for place in range(PLACES)]

    def close(self):
        """Watch nothing more. Close the sockets first: those left in a set get no more events."""
        cdef int place
        if self.sets[QUICK].fd >= 0:
            self.loop.remove_reader(self.sets[QUICK].fd)
            for place in range(PLACES):
                close_set(&self.sets[place])
            self.waiting.clear()

    def adopt(self, int fd, Polled polled not None):
        """Watch `fd`, a connected non-blocking socket, for `polled`, with the newcomers. The poller owns the
        descriptor from now on, even if this raises."""
        self.add(polled, fd)
        try:
            polled.socket_opened()
        except BaseException:
            self.close_socket(polled)
            raise

    cdef int add(self, Polled polled, int fd) except -1:
        cdef epoll_event event
        if polled.fd >= 0 or polled.watched:
            close(fd)
            raise RuntimeError("this has a socket already")
        event.events = EPOLLIN
        event.data.ptr = <void*> polled
        if epoll_ctl(self.sets[BULK].fd, EPOLL_CTL_ADD, fd, &event) < 0:
            fault = errno
            close(fd)
            raise OSError(fault, os.strerror(fault))
        polled.fd = fd
        polled.watched = WATCHED | WATCHED_IN | BULK << PLACE_SHIFT
        self.sets[BULK].sockets += 1
        self.sockets += 1
        Py_INCREF(polled)
        return 0

    cdef int add_read(self, Polled polled, int fd) except -1:
        """As `adopt`, for one that was just accepted: read it now and once more in the next pass of the loop, and watch
        it only for what is left to wait for. Its faults are reported and close it."""
        if polled.fd >= 0 or polled.watched:
            close(fd)
            raise RuntimeError("this has a socket already")
        polled.fd = fd
        polled.watched = WATCHED | NOWHERE << PLACE_SHIFT
        self.sockets += 1
        Py_INCREF(polled)
        try:
            polled.socket_opened()
            if polled.watched:
                polled.socket_readable()
            if polled.watched and not polled.held and not polled.ended:
                # Perhaps its bytes come while others are served.
                if not self.newcomers:
                    self.loop.call_soon(self._read_newcomers)
                self.newcomers.append(polled)
            else:
                self.watch(polled)
        except Exception as fault:
            self._report(fault, polled)
            self.close_socket(polled)
        return 0

    def _read_newcomers(self):
        cdef:
            double deadline = monotonic_s() + READ_SLICE_S
            Polled polled
        newcomers, self.newcomers = self.newcomers, []
        for polled in newcomers:
            if not polled.watched or place_of(polled) != NOWHERE:
                continue
            try:
                if not polled.held and not polled.ended and monotonic_s() < deadline:
                    polled.socket_readable()
                self.watch(polled)
            except Exception as fault:
                self._report(fault, polled)
                self.close_socket(polled)

    cdef int move(self, Polled polled, int place) except -1:
        """Have the set `place` report `polled` from now on. One that leaves stays where it is."""
        cdef:
            epoll_event event
            int old = place_of(polled)
        if not polled.watched or old == place or old == LEAVING or old == NOWHERE:
            return 0
        event.events = epoll_events(polled.watched)
        event.data.ptr = <void*> polled
        epoll_ctl(self.sets[old].fd, EPOLL_CTL_DEL, polled.fd, &event)
        self.sets[old].sockets -= 1
        polled.watched = polled.watched & (WATCHED | WATCHED_IN | WATCHED_OUT) | place << PLACE_SHIFT
        self.sets[place].sockets += 1
        if epoll_ctl(self.sets[place].fd, EPOLL_CTL_ADD, polled.fd, &event) < 0:
            # The caller closes it.
            raise OSError(errno, os.strerror(errno))
        return 0

    cdef int unserved(self) noexcept:
        """How many sockets wait to be read in this turn."""
        cdef:
            int place, waiting = 0
        for place in range(LEAVING):
            waiting += self.sets[place].count - self.sets[place].next
        return waiting

    cdef int watch(self, Polled polled) except -1:
        """Have its set report what `polled` waits for now, and no more. One in no set comes to the newcomers."""
        cdef:
            epoll_event event
            int place = place_of(polled)
            bint is_new = place == NOWHERE
            uint8_t wanted = WATCHED
        if not polled.watched:
            return 0
        if not polled.held and not polled.ended:
            wanted |= WATCHED_IN
        if polled.paused:
            wanted |= WATCHED_OUT
        if is_new:
            if wanted == WATCHED and polled.ended:
                return 0
            # Also while reading is paused: its set reports a reset.
            place = BULK
        wanted |= place << PLACE_SHIFT
        if wanted == polled.watched:
            return 0
        event.events = epoll_events(wanted)
        event.data.ptr = <void*> polled
        if epoll_ctl(self.sets[place].fd, EPOLL_CTL_ADD if is_new else EPOLL_CTL_MOD, polled.fd, &event) < 0:
            raise OSError(errno, os.strerror(errno))
        polled.watched = wanted
        if is_new:
            self.sets[place].sockets += 1
        return 0

    cdef int again(self, Polled polled) except -1:
        """Have a later turn call `socket_again()` of `polled`, among the events of BULK. It may be closed by then."""
        cdef uint64_t one = 1
        if not self.has_waiting:
            self.has_waiting = True
            write(self.waiting_fd, &one, 8)
        self.waiting.append(polled)
        return 0

    cdef int fetch_waiting(self) except -1:
        """Begin the events of BULK with some of those that wait for another turn; half of them at most.

        `waiting_fd` stays readable until all that were fetched have had their turn: nothing else may start the next one.
        """
        cdef:
            uint64_t ignored
            Polled polled
            EventSet* bulk = &self.sets[BULK]
        while self.waiting and bulk.count < MAX_EVENTS // 2:
            polled = <Polled> self.waiting.popleft()
            Py_INCREF(polled)
            bulk.events[bulk.count].events = 0
            bulk.events[bulk.count].data.ptr = <void*> polled
            bulk.count += 1
        if bulk.count == 0:
            self.has_waiting = False
            read(self.waiting_fd, &ignored, 8)
        return 0

    cdef int release(self, Polled polled) except -1:
        """Give the descriptor up without closing it; socket_lost() follows from the loop."""
        cdef epoll_event event
        if not polled.watched:
            return 0
        # Remove it explicitly. Closing alone isn't enough: a duplicate in a child that is about to exec would keep the
        # entry in the set, with a pointer to freed memory.
        if place_of(polled) != NOWHERE:
            epoll_ctl(self.sets[place_of(polled)].fd, EPOLL_CTL_DEL, polled.fd, &event)
            self.sets[place_of(polled)].sockets -= 1
        polled.watched = 0
        polled.fd = -1
        self.sockets -= 1
        self.lost.append(polled)
        Py_DECREF(polled)
        if not self.lost_scheduled:
            self.lost_scheduled = True
            self.loop.call_soon(self._tell_lost)
        return 0

    cdef int close_socket(self, Polled polled) except -1:
        """Close the descriptor; socket_lost() follows from the loop."""
        cdef int fd = polled.fd
        if polled.watched:
            self.release(polled)
            close(fd)
        return 0

    def _tell_lost(self):
        cdef:
            double deadline = monotonic_s() + LOST_SLICE_S
            Polled polled
        self.lost_scheduled = False
        while self.next_lost < len(self.lost):
            polled = <Polled> self.lost[self.next_lost]
            self.lost[self.next_lost] = None
            self.next_lost += 1
            try:
                polled.socket_lost()
            except Exception as fault:
                self._report(fault, polled)
            if monotonic_s() > deadline:
                break
        if self.next_lost == len(self.lost):
            self.lost.clear()
            self.next_lost = 0
        elif not self.lost_scheduled:
            self.lost_scheduled = True
            self.loop.call_soon(self._tell_lost)

    def turn(self):
        """Handle what the sets report, for `slice_s` at most, and longer if a set would get less than its share."""
        cdef:
            double deadline = monotonic_s() + self.slice_s
            EventSet* events
            int place
        self.serve(QUICK, deadline)
        for place in range(REQUESTS, PLACES):
            events = &self.sets[place]
            if events.sockets or events.next < events.count or place == BULK and self.has_waiting:
                self.serve(place, max(deadline, monotonic_s() + MIN_SLICE_S))

    cdef int serve(self, int place, double deadline) except -1:
        cdef:
            EventSet* events = &self.sets[place]
            epoll_event* event
            Polled polled
        while True:
            if events.next == events.count:
                self.fetch(place)
                if events.count == 0:
                    return 0
            while events.next < events.count:
                event = &events.events[events.next]
                events.next += 1
                polled = <Polled> event.data.ptr
                Py_DECREF(polled)
                try:
                    if place < BULK and event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR):
                        # It leaves its channels: that takes longer than what most others want, who wait after it.
                        self.move(polled, LEAVING)
                    else:
                        self.handle(polled, event.events)
                except Exception as fault:
                    self._report(fault, polled)
                    self.close_socket(polled)
                if monotonic_s() > deadline:
                    return 0
            if events.count < MAX_EVENTS:
                # That was all.
                return 0

    cdef int fetch(self, int place) except -1:
        cdef:
            EventSet* events = &self.sets[place]
            int event_count, i, count
        events.next = events.count = 0
        if events.fd < 0:
            return 0
        if place == BULK and self.has_waiting:
            self.fetch_waiting()
        count = events.count
        event_count = epoll_wait(events.fd, events.events + count, MAX_EVENTS - count, 0)
        if event_count < 0:
            if errno == EINTR:
                return 0
            raise OSError(errno, os.strerror(errno))
        for i in range(count, count + event_count):
            # The other sets themselves and `waiting_fd` have no pointer.
            if events.events[i].data.ptr != NULL:
                # Kept until it is handled: an earlier event may close it.
                Py_INCREF(<Polled> events.events[i].data.ptr)
                events.events[count] = events.events[i]
                count += 1
        events.count = count
        return 0

    cdef int handle(self, Polled polled, uint32_t events) except -1:
        if events == 0:
            return polled.socket_again()
        if events & EPOLLOUT and polled.watched & WATCHED_OUT:
            polled.socket_writable()
        if events & (EPOLLIN | EPOLLHUP | EPOLLERR):
            if polled.watched & WATCHED_IN:
                polled.socket_readable()
            elif events & (EPOLLHUP | EPOLLERR):
                # Reading is paused and both directions are closed. epoll would report that again and again.
                self.close_socket(polled)
        return 0

    def _report(self, fault, polled):
        self.loop.call_exception_handler(
            {
                "message": f"a socket was closed because of a fault of ours: {type(fault).__name__}",
                "exception": fault,
                "protocol": polled,
            }
        )


cdef class Listener:
    """Accepts connections of a listening socket for `poller`; `make()` returns a new Polled for each, or None to close
    it. It may ask `accepted_peer()` who has connected.

    Accepts up to 256 per wake-up, for 2 ms at most. With `reads` it reads them at once during the first of these. If
    accepting fails (no descriptors, no memory), it calls `on_error(errno)` and pauses for 250 ms. It owns the descriptor.
    `accepted` counts connections.
    """

    def __cinit__(self):
        self.fd = -1

    def __init__(self, Poller poller not None, int fd, make, on_error, bint reads=True):
        self.poller = poller
        self.fd = fd
        self.reads = reads
        self.make = make
        self.on_error = on_error
        os.set_blocking(fd, False)
        poller.loop.add_reader(fd, self._accept)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    def close(self):
        """Accept nothing more, and close the listening socket."""
        if self.fd < 0:
            return
        if self.resting is not None:
            self.resting.cancel()
            self.resting = None
        else:
            self.poller.loop.remove_reader(self.fd)
        close(self.fd)
        self.fd = -1

    def _accept(self):
        cdef:
            double now = monotonic_s()
            double deadline = now + ACCEPT_SLICE_S
            double read_until = now + READ_SLICE_S
            int left = MAX_ACCEPTS_PER_TURN
            int count, i, fault = 0
        while left > 0 and self.fd >= 0 and fault == 0 and now < deadline:
            count = self.accept_some(left, &fault)
            left -= count
            for i in range(count):
                fault = self.take_in(together[i], &their_addresses[i], self.reads and now < read_until) or fault
                now = monotonic_s()
        if fault and fault != EAGAIN and self.fd >= 0:
            self._rest(fault)

    cdef int accept_some(self, int most, int* fault) noexcept:
        """Accept up to `most` that wait, and return their number. `fault`: why there are no more, or 0."""
        cdef:
            int count = 0, fd
            socklen_t size
        most = min(most, <int> MAX_TOGETHER)
        while count < most:
            size = sizeof(sockaddr_storage)
            # accept4 saves an fcntl per connection.
            fd = accept4(self.fd, <sockaddr*> &their_addresses[count], &size, SOCK_NONBLOCK | SOCK_CLOEXEC)
            if fd >= 0:
                together[count] = fd
                count += 1
            elif not is_of_one_client(errno):
                fault[0] = errno
                break
        return count

    cdef int take_in(self, int fd, sockaddr_storage* address, bint reads) except -1:
        """Have the poller serve an accepted socket; `reads`: read it at once. Returns why it can't be watched, or 0."""
        global accepted_fd, accepted_address
        self.accepted += 1
        accepted_fd = fd
        accepted_address = address[0]
        polled = None
        try:
            polled = self.make()
            if polled is None:
                close(fd)
            elif reads:
                self.poller.add_read(polled, fd)
            else:
                try:
                    self.poller.adopt(fd, polled)
                except OSError as fault:
                    (<Polled> polled).socket_refused()
                    return fault.errno
        except Exception as fault:
            if polled is None:
                close(fd)
            self.poller._report(fault, polled)
        finally:
            accepted_fd = -1
        return 0

    def _rest(self, int fault):
        self.poller.loop.remove_reader(self.fd)
        self.resting = self.poller.loop.call_later(REST_S, self._resume)
        self.on_error(fault)

    def _resume(self):
        self.resting = None
        if self.fd >= 0:
            self.poller.loop.add_reader(self.fd, self._accept)
