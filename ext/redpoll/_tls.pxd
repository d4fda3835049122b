# TLS on a socket of the poller: layout and ownership. Behaviour is in _tls.pyx.

from libc.stdint cimport uint32_t, uint8_t

from redpoll._engine cimport WebSocket
from redpoll._fanout cimport Transport
from redpoll._openssl cimport Context
from redpoll._sockets cimport Poller


cdef class TlsSocket(Transport):
    # Owned.
    cdef readonly Poller poller
    # Owned: returns the context of a handshake that begins now.
    cdef object context_of
    # Owned until the socket is lost: whose transport this is.
    cdef WebSocket connection
    # Owned until setup is over: called once with None or what went wrong.
    cdef object settled
    # Owned: what went wrong in the handshake, or None.
    cdef object fault
    # Owned: the beginning of the first record, until it is whole; or None.
    cdef bytes early
    # Owned: what ends the handshake, to be sent before the next bytes; or None.
    cdef bytes ticket
    # Owned: encrypted bytes that the kernel hasn't taken, from `unsent_at` on; or None.
    cdef bytes unsent
    cdef Py_ssize_t unsent_at
    # Owned: the timer of a close, or None.
    cdef object timer
    # SETUP, OPEN, CLOSING, LOST.
    cdef uint8_t state
    # The first record has come.
    cdef uint8_t begun
    # Decrypted or whole encrypted bytes are here, for which the socket isn't readable. It waits for its turn (Poller.again).
    cdef uint8_t more
    cdef uint8_t queued
    # What is emitted becomes `ticket`.
    cdef uint8_t keeps_ticket
    # pause_writing() of the connection was called last.
    cdef uint8_t connection_paused
    # The peer has sent its close_notify.
    cdef uint8_t peer_closed
    # Bytes dropped after our last ones.
    cdef uint32_t discarded

    # What subclasses do.
    cdef int begin(self) except -1
    cdef int feed(self, const uint8_t* at, Py_ssize_t size) except -1
    cdef int do_handshake(self) except -1
    cdef Py_ssize_t decrypt(self, uint8_t* to, Py_ssize_t size) except -3
    cdef bint has_more(self) except -1
    cdef int encrypt(self, const char* at, Py_ssize_t size) except -1
    cdef int shut(self) except -1
    cdef int end_step(self) except -1
    cdef int drop(self) except -1

    cdef int settle(self, fault) except -1
    cdef Py_ssize_t receive(self) except -2
    cdef int shake(self) except -1
    cdef int read(self) except -1
    cdef int drain(self) except -1
    cdef int emit(self, const char* at, Py_ssize_t size) except -1
    cdef int wait_for_room(self) except -1
    cdef int send_rest(self) except -1
    cdef int begin_closing(self) except -1
    cdef int written(self) except -1
    cdef int come_again(self) except -1


cdef class PythonTlsSocket(TlsSocket):
    # Owned, from the first record on: an ssl.SSLObject and the two ssl.MemoryBIO between it and the socket.
    cdef object tls
    cdef object incoming
    cdef object outgoing


cdef class OpenSslSocket(TlsSocket):
    # Owned from the first record on, or NULL: an SSL, which owns its BIO; and the context of its handshake.
    cdef void* ssl
    cdef Context context_used
    # Owned: encrypted bytes that were received and not looked at, or None.
    cdef bytes rest
    # Of the handshake and of key updates, so far.
    cdef int handshake_steps

    cdef int emit_out(self) except -1
