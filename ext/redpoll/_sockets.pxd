# Sockets of our own, and the epoll set that watches them: layout and ownership. Behaviour is in _sockets.pyx.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from redpoll._wheel cimport Timed

cdef extern from "<sys/socket.h>" nogil:
    struct sockaddr_storage:
        uint16_t ss_family

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cdef enum:
    # What one call of epoll_wait(2) returns at most.
    MAX_EVENTS = 256
    # Bits of Polled.watched: the descriptor is in a set; reported when readable; reported when writable. The others are
    # its place.
    WATCHED = 1
    WATCHED_IN = 2
    WATCHED_OUT = 4
    PLACE_SHIFT = 3
    # A turn with more events than this has a crowd.
    CROWD = 8
    # With more events than this, requests come after the clients.
    MANY = 64

cdef enum:
    # In which of the sets a socket is, in the order in which a turn serves them.
    QUICK
    REQUESTS
    BULK
    LEAVING
    PLACES
    # In none of them, because there is nothing to wait for: a newcomer that was read as soon as it was accepted.
    NOWHERE = PLACES


cdef struct EventSet:
    # Owned: an epoll descriptor; -1 after close().
    int fd
    # What epoll_wait returned last; [next, count) is not handled yet, and owned.
    int next
    int count
    # Sockets in the set.
    Py_ssize_t sockets
    epoll_event[MAX_EVENTS] events


cdef class Polled(Timed):
    # The descriptor, or -1. Ours to close while `watched` is not 0; otherwise a transport's.
    cdef int fd
    # What the epoll set reports of it (bits above); 0: the poller doesn't own it.
    cdef uint8_t watched
    # Reading is paused until resume_reading().
    cdef uint8_t held
    # Bytes wait for room in the kernel. Nothing may overtake them.
    cdef uint8_t paused
    # Nothing more is read from the peer: close as soon as everything is written.
    cdef uint8_t ended

    cdef int socket_opened(self) except -1
    cdef int socket_readable(self) except -1
    cdef int socket_again(self) except -1
    cdef int socket_writable(self) except -1
    cdef int socket_lost(self) except -1
    cdef int socket_refused(self) except -1


cdef inline int place_of(Polled polled) noexcept:
    """The set that it is in."""
    return polled.watched >> PLACE_SHIFT


cdef class Poller:
    # Owned: whose add_reader watches the descriptor of the first set.
    cdef readonly object loop
    # The first one also watches the descriptors of the others.
    cdef EventSet[PLACES] sets
    # How long one turn may last, in seconds.
    cdef public double slice_s
    # Sockets in all sets; each is owned.
    cdef readonly Py_ssize_t sockets
    # Owned: sockets that have something to do although epoll doesn't report them, and an eventfd that is readable, while
    # `has_waiting`, until the last of them has had its turn.
    cdef object waiting
    cdef int waiting_fd
    cdef bint has_waiting
    # Owned: newcomers that had sent nothing when they were accepted, to be read once more.
    cdef list newcomers
    # Sockets that are closed and whose socket_lost() is still to be called, from `next_lost` on.
    cdef list lost
    cdef Py_ssize_t next_lost
    cdef bint lost_scheduled

    cdef int add(self, Polled polled, int fd) except -1
    cdef int add_read(self, Polled polled, int fd) except -1
    cdef int move(self, Polled polled, int place) except -1
    cdef int unserved(self) noexcept
    cdef int watch(self, Polled polled) except -1
    cdef int again(self, Polled polled) except -1
    cdef int fetch_waiting(self) except -1
    cdef int release(self, Polled polled) except -1
    cdef int close_socket(self, Polled polled) except -1
    cdef int serve(self, int place, double deadline) except -1
    cdef int fetch(self, int place) except -1
    cdef int handle(self, Polled polled, uint32_t events) except -1


cdef class Listener:
    # Owned.
    cdef readonly Poller poller
    # Owned: closed by close(); -1 from then on.
    cdef int fd
    # Owned: returns a new Polled for each connection.
    cdef object make
    # Whether those that were accepted are read at once.
    cdef bint reads
    # Owned: called with an errno when accepting pauses.
    cdef object on_error
    # Owned: the timer that resumes accepting, or None.
    cdef object resting
    # Connections accepted so far.
    cdef readonly uint64_t accepted

    cdef int accept_some(self, int most, int* fault) noexcept
    cdef int take_in(self, int fd, sockaddr_storage* address, bint reads) except -1


cdef double monotonic_s() noexcept nogil
cdef object peer_of(int fd)
