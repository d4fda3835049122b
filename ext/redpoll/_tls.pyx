"""TLS on a socket of the poller: the handshake, decrypting and encrypting, by Python's ssl module.

A TlsSocket is what the poller watches and the transport of a WebSocket. So handshakes and reads of TLS connections are
done in the poller's turns, for as long as a turn may last, like those of plain sockets. This module knows bytes; it
knows neither frames nor certificates. Deadlines of the handshake are the caller's.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint8_t, uint32_t

from redpoll._engine cimport WebSocket
from redpoll._sockets cimport BULK, Poller, Polled, peer_of, place_of

import ssl

from redpoll import _engine

__all__ = ["CLOSE_WITHIN_S", "TlsSocket"]

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* to, size_t size, int flags)
    ssize_t send(int fd, const void* at, size_t size, int flags)
    int shutdown(int fd, int how)
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        MSG_TRUNC
        SHUT_WR

cdef enum State:
    # SETUP: the handshake isn't complete. OPEN: the connection has this transport. CLOSING: close_notify, or the alert of
    # a failed handshake, is sent or waits for room. LOST: the descriptor is closed.
    STATE_SETUP
    STATE_OPEN
    STATE_CLOSING
    STATE_LOST

cdef enum:
    # One read of the socket: a record of the largest size, and its head and tag.
    RAW_BYTES = 16384 + 256
    # What is decrypted at once at most.
    PLAIN_BYTES = 65536
    # Bytes that are read and dropped after our last ones. If bytes were left unread, the kernel would send a reset.
    LINGER_BYTES = 2097152

# How long a connection that ends may take to read its last bytes and to close. It is the limit of a WebSocket's closing
# handshake too.
CLOSE_WITHIN_S = 5.0

# Shared by all connections of the process, because each read is used up before the next one.
cdef object raw_buffer = bytearray(RAW_BYTES)
cdef object plain_buffer = bytearray(PLAIN_BYTES)
cdef object plain_view = memoryview(plain_buffer)

cdef uint8_t WEBSOCKET_OPEN = _engine.OPEN
cdef uint8_t WEBSOCKET_HTTP = _engine.HTTP

cdef object MemoryBIO = ssl.MemoryBIO
cdef object WantRead = ssl.SSLWantReadError
cdef object SSLError = ssl.SSLError


cdef class TlsSocket(Polled):
    """One TLS connection of `poller` on its server's side: `poller.adopt(fd, tls_socket)`.

    The handshake begins with the first byte, with the context that `context_of()` returns then. When it is complete,
    this becomes the transport of `connection`, a WebSocket, and `settled(None)` is called. If the handshake fails, `settled`
    is called with the reason once the descriptor is closed, and the WebSocket never gets a transport. What a WebSocket and its flusher call
    of a transport is here, and nothing else.
    """

    def __init__(self, Poller poller not None, context_of, WebSocket connection not None, settled):
        self.poller = poller
        self.context_of = context_of
        self.connection = connection
        self.settled = settled

    # -- what the poller calls -------------------------------------------------------------------------------

    cdef int socket_readable(self) except -1:
        if self.state == STATE_OPEN:
            # With bytes left, this has a turn of its own.
            return 0 if self.queued else self.read()
        if self.state == STATE_CLOSING:
            return self.drain()
        return self.shake()

    cdef int socket_again(self) except -1:
        self.queued = False
        if self.state == STATE_OPEN and not self.held:
            self.read()
        return 0

    cdef int socket_writable(self) except -1:
        # WATCHED_OUT stays until everything is written.
        self.paused = False
        self.send_rest()
        if self.state == STATE_LOST or self.paused:
            return 0
        self.poller.watch(self)
        if self.connection_paused:
            self.connection_paused = False
            self.connection.resume_writing()
        if self.state == STATE_CLOSING and self.unsent is None:
            self.written()
        return 0

    cdef int socket_lost(self) except -1:
        cdef WebSocket connection = self.connection
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.state = STATE_LOST
        self.connection = None
        self.tls = self.incoming = self.outgoing = self.unsent = None
        if self.settled is not None:
            self.settle(self.fault or "closed before its handshake was complete")
        elif connection is not None:
            connection.connection_lost(None)
        return 0

    # -- bytes in --------------------------------------------------------------------------------------------

    cdef int settle(self, fault) except -1:
        settled, self.settled = self.settled, None
        if fault is not None:
            # It never gets this transport, so it must not lose it.
            self.connection = None
        if settled is not None:
            settled(self, fault)
        return 0

    cdef Py_ssize_t receive(self) except -2:
        """Read the socket into `incoming`. 0 at the end of the stream, which closes; -1 if there is nothing yet."""
        cdef ssize_t size = recv(self.fd, PyByteArray_AS_STRING(raw_buffer), RAW_BYTES, MSG_DONTWAIT)
        if size > 0:
            if self.tls is None:
                # Not before there is a byte: connections that never send one cost little.
                self.incoming = MemoryBIO()
                self.outgoing = MemoryBIO()
                self.tls = self.context_of().wrap_bio(self.incoming, self.outgoing, server_side=True)
            self.incoming.write(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(raw_buffer), size))
            return size
        if size < 0 and (errno == EAGAIN or errno == EINTR):
            return -1
        # TLS ends with close_notify; an end of the stream without it is like a reset.
        self.abort()
        return 0

    cdef int shake(self) except -1:
        if self.receive() <= 0:
            return 0
        try:
            self.tls.do_handshake()
        except WantRead:
            self.flush()
            return 0
        except SSLError as fault:
            self.fault = str(fault)
            # The alert says why.
            self.begin_closing()
            return 0
        self.state = STATE_OPEN
        self.flush()
        self.settle(None)
        if self.state == STATE_OPEN:
            self.connection.connection_made(self)
        if self.state == STATE_OPEN and (self.incoming.pending or self.tls.pending()):
            self.more = True
            self.come_again()
        return 0

    cdef int read(self) except -1:
        """Decrypt one read's worth and pass it on. What is left has a turn of its own."""
        cdef:
            WebSocket connection = self.connection
            Py_ssize_t asked = connection.read_size(place_of(self) == BULK)
            Py_ssize_t size, total = 0
            # A newcomer counts as one until its first messages are read.
            bint established = connection.state == WEBSOCKET_OPEN or connection.state == WEBSOCKET_HTTP
            bint ended = False
        if not self.more and self.receive() <= 0:
            return 0
        self.more = False
        try:
            while total < asked and (self.incoming.pending or self.tls.pending()):
                size = self.tls.read(asked - total, plain_view[total:] if total else plain_view)
                if size == 0:
                    ended = True
                    break
                total += size
        except WantRead:
            # A part of a record.
            pass
        except SSLError:
            self.abort()
            return 0
        if self.outgoing.pending:
            # The answer to a key update.
            self.flush()
        if total:
            connection.take(<const uint8_t*> PyByteArray_AS_STRING(plain_buffer), total)
        if self.state != STATE_OPEN:
            return 0
        if ended:
            self.peer_closed = True
            connection.eof_received()
            self.close()
            return 0
        if established:
            self.poller.move(self, connection.place_after(total == asked))
        if total == asked and (self.incoming.pending or self.tls.pending()):
            self.more = True
            if not self.held:
                self.come_again()
        return 0

    cdef int come_again(self) except -1:
        if not self.queued:
            self.queued = True
            self.poller.again(self)
        return 0

    cdef int drain(self) except -1:
        """Drop what comes after our last bytes, until the peer closes."""
        cdef ssize_t size = recv(
            self.fd, PyByteArray_AS_STRING(plain_buffer), PLAIN_BYTES, MSG_DONTWAIT | MSG_TRUNC
        )
        if size > 0:
            self.discarded += <uint32_t> size
        if size == 0 or self.discarded > LINGER_BYTES or (size < 0 and errno != EAGAIN and errno != EINTR):
            self.abort()
        return 0

    # -- bytes out -------------------------------------------------------------------------------------------

    cdef int flush(self) except -1:
        """Send what is encrypted. The connection is paused while some of it waits for room in the kernel."""
        if self.unsent is not None or self.state == STATE_LOST:
            return 0
        self.unsent = self.outgoing.read()
        self.unsent_at = 0
        return self.send_rest()

    cdef int send_rest(self) except -1:
        cdef ssize_t sent
        while self.unsent is not None:
            if self.unsent_at == PyBytes_GET_SIZE(self.unsent):
                self.unsent = self.outgoing.read() if self.outgoing.pending else None
                self.unsent_at = 0
                continue
            sent = send(
                self.fd,
                PyBytes_AS_STRING(self.unsent) + self.unsent_at,
                PyBytes_GET_SIZE(self.unsent) - self.unsent_at,
                MSG_DONTWAIT | MSG_NOSIGNAL,
            )
            if sent >= 0:
                self.unsent_at += sent
            elif errno == EAGAIN or errno == ENOBUFS or errno == ENOMEM:
                self.paused = True
                self.poller.watch(self)
                if self.state == STATE_OPEN and not self.connection_paused:
                    self.connection_paused = True
                    self.connection.pause_writing()
                return 0
            elif errno != EINTR:
                self.abort()
                return 0
        return 0

    cdef int begin_closing(self) except -1:
        """Send our last bytes, close_notify or an alert, and wait for the peer to close, at most CLOSE_WITHIN_S."""
        self.state = STATE_CLOSING
        self.timer = self.poller.loop.call_later(CLOSE_WITHIN_S, self.abort)
        self.flush()
        if self.state == STATE_CLOSING and self.unsent is None:
            self.written()
        return 0

    cdef int written(self) except -1:
        """Our last bytes have left: TCP ends in the same way."""
        if self.peer_closed:
            self.abort()
        else:
            # Fails if the peer has reset the connection; the next read reports that.
            shutdown(self.fd, SHUT_WR)
        return 0

    # -- what the connection calls ---------------------------------------------------------------------------

    def write(self, bytes data not None):
        """Encrypt and send. What the kernel doesn't take is kept, and the connection's pause_writing() is called."""
        cdef Py_ssize_t at = 0
        if self.state != STATE_OPEN:
            return
        try:
            while at < PyBytes_GET_SIZE(data):
                at += <Py_ssize_t> self.tls.write(data[at:] if at else data)
        except SSLError:
            self.abort()
            return
        self.flush()

    def close(self):
        """Send close_notify after everything else, and wait for the peer to close, at most CLOSE_WITHIN_S."""
        if self.state == STATE_SETUP:
            self.abort()
        if self.state != STATE_OPEN:
            return
        self.connection_paused = self.more = False
        if self.held:
            self.held = False
            self.poller.watch(self)
        try:
            self.tls.unwrap()
        except SSLError:
            # It wants the peer's close_notify, or found data instead. Ours is made.
            pass
        self.begin_closing()

    def abort(self):
        """Close at once. The connection's connection_lost(), or `settled` before the end of setup, follows from the
        loop."""
        if self.state != STATE_LOST:
            self.state = STATE_LOST
            self.poller.close_socket(self)

    def pause_reading(self):
        self.held = True
        self.poller.watch(self)

    def resume_reading(self):
        if not self.held:
            return
        self.held = False
        self.poller.watch(self)
        if self.more and self.state == STATE_OPEN:
            self.come_again()

    def can_write_eof(self) -> bool:
        # close_notify ends both directions for most peers.
        return False

    def set_write_buffer_limits(self, high, low):
        """The connection is always paused when a byte is unsent."""

    def get_extra_info(self, name, default=None):
        """`peername`, and the `sslcontext` of the handshake."""
        if name == "peername":
            return peer_of(self.fd) if self.watched else default
        return self.tls.context if name == "sslcontext" and self.tls is not None else default
