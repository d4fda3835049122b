"""TLS on a socket of the poller: the handshake, decrypting and encrypting.

A TlsSocket is what the poller watches and the transport of a WebSocket. So handshakes and reads of TLS connections are
done in the poller's turns, for as long as a turn may last, like those of plain sockets. An OpenSslSocket calls OpenSSL
itself (_openssl.pyx); a PythonTlsSocket does the same by Python's ssl module, where OpenSSL can't be called. This module
knows bytes; it knows neither frames nor certificates. Deadlines of the handshake are the caller's.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.errno cimport EAGAIN, EINTR, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from redpoll._engine cimport WebSocket
from redpoll._fanout cimport Sink
from redpoll._openssl cimport Context, fault_text, openssl
from redpoll._sockets cimport BULK, Poller, peer_of, place_of

from redpoll import _engine, _openssl

__all__ = ["CLOSE_WITHIN_S", "OpenSslSocket", "PythonTlsSocket", "TlsSocket"]

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
    HANDSHAKE_RECORD = 22
    MAJOR_VERSION = 3
    RECORD_HEAD_BYTES = 5
    MAX_RECORD_BYTES = 16384
    # What is decrypted at once at most.
    PLAIN_BYTES = 65536
    # Bytes that are read and dropped after our last ones. If bytes were left unread, the kernel would send a reset.
    LINGER_BYTES = 2097152
    # What may be added for a peer that doesn't read: answers to its key updates.
    MAX_UNREAD_BYTES = 65536
    # Room for encrypted bytes that is kept.
    KEPT_OUT_BYTES = 262144
    # Steps of the handshake and of key updates, of which a client that keeps its keys for a whole connection needs 20.
    # Each key update costs 12 µs, and OpenSSL takes as many as come.
    MAX_HANDSHAKE_STEPS = 512

    # Of OpenSSL 3 (bio.h, ssl.h).
    BIO_TYPE_SOURCE_SINK = 0x0400
    BIO_FLAGS_READ = 0x01
    BIO_FLAGS_SHOULD_RETRY = 0x08
    BIO_FLAGS_OF_RETRIES = 0x0F
    BIO_CTRL_FLUSH = 11
    SSL_CB_ACCEPT_LOOP = 0x2001
    SSL_ERROR_WANT_READ = 2
    SSL_ERROR_ZERO_RETURN = 6

cdef enum Decrypted:
    # Instead of a number of bytes.
    AT_END = 0
    WANTS_MORE = -1
    DAMAGED = -2

# How long a connection that ends may take to read its last bytes and to close. It is the limit of a WebSocket's closing
# handshake too.
CLOSE_WITHIN_S = 5.0

# Shared by all connections of the process, because each read is used up before the next one.
cdef object raw_buffer = bytearray(RAW_BYTES)
cdef object plain_buffer = bytearray(PLAIN_BYTES)
cdef object plain_view = memoryview(plain_buffer)

cdef uint8_t WEBSOCKET_OPEN = _engine.OPEN
cdef uint8_t WEBSOCKET_HTTP = _engine.HTTP

# Of Python's module ssl, from the first PythonTlsSocket that begins on: a Python may be built without it.
cdef object MemoryBIO = None
cdef object WantRead = None
cdef object SSLError = None


cdef bint is_cut_hello(const uint8_t* at, Py_ssize_t size) noexcept:
    """The beginning of a handshake record of TLS (RFC 8446 5.1) that isn't whole. OpenSSL judges all else."""
    if at[0] != HANDSHAKE_RECORD or size > 1 and at[1] != MAJOR_VERSION:
        return False
    return size < RECORD_HEAD_BYTES or (
        at[3] << 8 | at[4]) <= MAX_RECORD_BYTES and size < RECORD_HEAD_BYTES + (at[3] << 8 | at[4])


cdef class TlsSocket(Transport):
    """One TLS connection of `poller` on its server's side: `poller.adopt(fd, tls_socket)`. Use a subclass.

    The handshake begins with the first record, with the context that `context_of()` returns then. When it is complete,
    this becomes the transport of `connection`, a WebSocket, and `settled(None)` is called. If the handshake fails, `settled`
    is called with the reason once the descriptor is closed, and the WebSocket never gets a transport. What a WebSocket and its flusher call
    of a transport is here, and nothing else.
    """

    def __init__(self, Poller poller not None, context_of, WebSocket connection not None, settled):
        self.poller = poller
        self.context_of = context_of
        self.connection = connection
        self.settled = settled

    # -- what subclasses do ----------------------------------------------------------------------------------

    cdef int begin(self) except -1:
        """Make what encrypts and decrypts, because the first record has come."""
        raise NotImplementedError

    cdef int feed(self, const uint8_t* at, Py_ssize_t size) except -1:
        """These bytes were received. NULL: those of an earlier step. A step ends with `end_step`."""
        raise NotImplementedError

    cdef int do_handshake(self) except -1:
        """Go on with the handshake. 1: it is complete; 0: it wants more bytes; 2: it failed, and `fault` says why."""
        raise NotImplementedError

    cdef Py_ssize_t decrypt(self, uint8_t* to, Py_ssize_t size) except -3:
        """Up to `size` bytes of one record; or AT_END, WANTS_MORE, DAMAGED."""
        raise NotImplementedError

    cdef bint has_more(self) except -1:
        """There are received bytes that weren't passed on."""
        raise NotImplementedError

    cdef int encrypt(self, const char* at, Py_ssize_t size) except -1:
        """Encrypt and emit. Aborts if that fails."""
        raise NotImplementedError

    cdef int shut(self) except -1:
        """Emit close_notify."""
        raise NotImplementedError

    cdef int end_step(self) except -1:
        """Keep the received bytes that are left, and emit what was encrypted."""
        raise NotImplementedError

    cdef int drop(self) except -1:
        """Free everything."""
        raise NotImplementedError

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
        self.unsent = self.early = self.ticket = None
        self.drop()
        if self.settled is not None:
            self.settle(self.fault or "closed before its handshake was complete")
        elif connection is not None:
            connection.connection_lost(None)
        return 0

    cdef int socket_refused(self) except -1:
        self.state = STATE_LOST
        return self.settle("its socket can't be watched")

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
        """Read the socket and feed that. 0 at the end of the stream, which closes; -1 if there is nothing yet."""
        cdef:
            ssize_t size = recv(self.fd, PyByteArray_AS_STRING(raw_buffer), RAW_BYTES, MSG_DONTWAIT)
            const uint8_t* at = <const uint8_t*> PyByteArray_AS_STRING(raw_buffer)
        if size > 0:
            if not self.begun:
                # Not before the client's first message: connections that send less cost little.
                if self.early is not None:
                    # Kept until the end of the step.
                    self.early += PyBytes_FromStringAndSize(<const char*> at, size)
                    at = <const uint8_t*> PyBytes_AS_STRING(self.early)
                    size = PyBytes_GET_SIZE(self.early)
                if is_cut_hello(at, size):
                    if self.early is None:
                        self.early = PyBytes_FromStringAndSize(<const char*> at, size)
                    return -1
                self.begun = True
                self.begin()
            self.feed(at, size)
            return size
        if size < 0 and (errno == EAGAIN or errno == EINTR):
            return -1
        # TLS ends with close_notify; an end of the stream without it is like a reset.
        self.abort()
        return 0

    cdef int shake(self) except -1:
        cdef int result
        if self.receive() <= 0:
            return 0
        result = self.do_handshake()
        if result == 1:
            self.state = STATE_OPEN
            # A request that came with the last message of the handshake: one packet has the session ticket and the answer.
            self.more = self.keeps_ticket = self.has_more()
        self.end_step()
        self.keeps_ticket = False
        self.early = None
        if result == 2 and self.state != STATE_LOST:
            # The alert says why.
            self.begin_closing()
        if result != 1 or self.state != STATE_OPEN:
            # Also if it was lost while its last bytes were sent: socket_lost() settles it.
            return 0
        self.settle(None)
        if self.state == STATE_OPEN:
            self.connection.connection_made(self)
        if self.state == STATE_OPEN and self.more and not self.held:
            self.read()
        if self.ticket is not None:
            # Unless the flush comes before, with the answer.
            self.poller.loop.call_soon(self._send_ticket)
        return 0

    def _send_ticket(self):
        cdef bytes ticket
        if self.ticket is not None:
            ticket = self.ticket
            self.ticket = None
            self.emit(PyBytes_AS_STRING(ticket), PyBytes_GET_SIZE(ticket))

    cdef int read(self) except -1:
        """Decrypt one read's worth and pass it on. What is left has a turn of its own."""
        cdef:
            WebSocket connection = self.connection
            Py_ssize_t asked = connection.read_size(place_of(self) == BULK)
            Py_ssize_t size = WANTS_MORE
            Py_ssize_t total = 0
            # A newcomer counts as one until its first messages are read.
            bint established = connection.state == WEBSOCKET_OPEN or connection.state == WEBSOCKET_HTTP
        if self.more:
            self.more = False
            self.feed(NULL, 0)
        elif self.receive() <= 0:
            return 0
        while total < asked and self.has_more():
            size = self.decrypt(<uint8_t*> PyByteArray_AS_STRING(plain_buffer) + total, asked - total)
            if size <= 0:
                break
            total += size
        if size == DAMAGED:
            # With an alert that says why.
            self.end_step()
            self.abort()
            return 0
        self.more = size > 0 and self.has_more()
        # Also the answer to a key update.
        self.end_step()
        if self.state != STATE_OPEN:
            return 0
        if total:
            connection.take(<const uint8_t*> PyByteArray_AS_STRING(plain_buffer), total)
        if self.state != STATE_OPEN:
            return 0
        if size == AT_END:
            self.peer_closed = True
            connection.eof_received()
            self.close()
            return 0
        if established:
            self.poller.move(self, connection.place_after(total == asked, place_of(self)))
        if self.more and not self.held:
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

    cdef int emit(self, const char* at, Py_ssize_t size) except -1:
        """Send encrypted bytes. The connection is paused while some of them wait for room in the kernel."""
        cdef:
            Py_ssize_t sent = -1
            bytes more
        if size == 0 or self.state == STATE_LOST:
            return 0
        if self.keeps_ticket:
            self.ticket = PyBytes_FromStringAndSize(at, size)
            return 0
        if self.ticket is not None:
            more = self.ticket + PyBytes_FromStringAndSize(at, size)
            self.ticket = None
            return self.emit(PyBytes_AS_STRING(more), PyBytes_GET_SIZE(more))
        if self.unsent is not None:
            self.discarded += <uint32_t> size
            if self.state == STATE_OPEN and self.discarded > MAX_UNREAD_BYTES:
                self.abort()
                return 0
            more = PyBytes_FromStringAndSize(at, size)
            self.unsent = self.unsent[self.unsent_at:] + more
            self.unsent_at = 0
            return 0
        while sent < 0:
            sent = send(self.fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent < 0 and errno != EINTR:
                if errno != EAGAIN and errno != ENOBUFS and errno != ENOMEM:
                    self.abort()
                    return 0
                sent = 0
        if sent < size:
            self.unsent = PyBytes_FromStringAndSize(at + sent, size - sent)
            self.unsent_at = 0
            self.wait_for_room()
        return 0

    cdef int wait_for_room(self) except -1:
        self.paused = True
        self.poller.watch(self)
        if self.state == STATE_OPEN:
            # After each send, because a slow client is spared while this becomes less.
            (<Sink> self.connection).buffered = <uint32_t> (PyBytes_GET_SIZE(self.unsent) - self.unsent_at)
            if not self.connection_paused:
                self.connection_paused = True
                self.connection.pause_writing()
        return 0

    cdef int send_rest(self) except -1:
        cdef ssize_t sent
        while self.unsent is not None and self.state != STATE_LOST:
            sent = send(
                self.fd,
                PyBytes_AS_STRING(self.unsent) + self.unsent_at,
                PyBytes_GET_SIZE(self.unsent) - self.unsent_at,
                MSG_DONTWAIT | MSG_NOSIGNAL,
            )
            if sent >= 0:
                self.unsent_at += sent
                if self.unsent_at == PyBytes_GET_SIZE(self.unsent):
                    self.unsent = None
                    self.discarded = 0
            elif errno == EAGAIN or errno == ENOBUFS or errno == ENOMEM:
                self.wait_for_room()
                return 0
            elif errno != EINTR:
                self.abort()
        return 0

    cdef int begin_closing(self) except -1:
        """Send our last bytes, close_notify or an alert, and wait for the peer to close, at most CLOSE_WITHIN_S."""
        self.state = STATE_CLOSING
        self.timer = self.poller.loop.call_later(CLOSE_WITHIN_S, self.abort)
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

    cdef int write_bytes(self, const char* at, Py_ssize_t size) except -1:
        if self.state == STATE_OPEN:
            self.encrypt(at, size)
        return 0

    def write(self, bytes data not None):
        """Encrypt and send. What the kernel doesn't take is kept, and the connection's pause_writing() is called."""
        self.write_bytes(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

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
        self.shut()
        if self.state == STATE_OPEN:
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
        return self.context if name == "sslcontext" and self.begun else default

    @property
    def context(self):
        """That of the handshake."""
        raise NotImplementedError


cdef int load_ssl() except -1:
    global MemoryBIO, WantRead, SSLError
    import ssl

    WantRead, SSLError = ssl.SSLWantReadError, ssl.SSLError
    MemoryBIO = ssl.MemoryBIO
    return 0


cdef class PythonTlsSocket(TlsSocket):
    """`context_of` returns an ssl.SSLContext."""

    @property
    def context(self):
        return self.tls.context if self.tls is not None else None

    cdef int begin(self) except -1:
        if MemoryBIO is None:
            load_ssl()
        self.incoming = MemoryBIO()
        self.outgoing = MemoryBIO()
        self.tls = self.context_of().wrap_bio(self.incoming, self.outgoing, server_side=True)
        return 0

    cdef int feed(self, const uint8_t* at, Py_ssize_t size) except -1:
        if size:
            self.incoming.write(PyBytes_FromStringAndSize(<const char*> at, size))
        return 0

    cdef int do_handshake(self) except -1:
        try:
            self.tls.do_handshake()
        except WantRead:
            return 0
        except SSLError as fault:
            self.fault = str(fault)
            return 2
        return 1

    cdef Py_ssize_t decrypt(self, uint8_t* to, Py_ssize_t size) except -3:
        cdef Py_ssize_t at = to - <uint8_t*> PyByteArray_AS_STRING(plain_buffer)
        try:
            return self.tls.read(size, plain_view[at:])
        except WantRead:
            # A part of a record.
            return WANTS_MORE
        except SSLError:
            return DAMAGED

    cdef bint has_more(self) except -1:
        return self.incoming.pending or self.tls.pending()

    cdef int encrypt(self, const char* at, Py_ssize_t size) except -1:
        cdef:
            bytes data = PyBytes_FromStringAndSize(at, size)
            Py_ssize_t done = 0
        try:
            while done < size:
                done += <Py_ssize_t> self.tls.write(data[done:] if done else data)
        except SSLError:
            self.abort()
            return 0
        return self.end_step()

    cdef int shut(self) except -1:
        try:
            self.tls.unwrap()
        except SSLError:
            # It wants the peer's close_notify, or found data instead. Ours is made.
            pass
        return self.end_step()

    cdef int end_step(self) except -1:
        cdef bytes made
        if self.outgoing.pending:
            made = self.outgoing.read()
            self.emit(PyBytes_AS_STRING(made), PyBytes_GET_SIZE(made))
        return 0

    cdef int drop(self) except -1:
        self.tls = self.incoming = self.outgoing = None
        return 0


# -- OpenSSL called by us ------------------------------------------------------------------------------------

# What all BIOs of the process read and write, because each step of a connection ends before the next one's. `incoming_at`
# points to the bytes that were received and not read yet; `out` has what was encrypted and isn't emitted.
cdef const uint8_t* incoming_at = NULL
cdef Py_ssize_t incoming_left = 0
cdef char* out = NULL
cdef Py_ssize_t out_size = 0
cdef Py_ssize_t out_capacity = 0
cdef void* bio_method = NULL
# Of the connection whose step it is, so far.
cdef int handshake_steps = 0


cdef void count_step(const void* ssl, int where, int value) noexcept nogil:
    global handshake_steps
    if where == SSL_CB_ACCEPT_LOOP:
        handshake_steps += 1


cdef int read_incoming(void* bio, char* to, int size) noexcept:
    global incoming_at, incoming_left
    openssl.BIO_clear_flags(bio, BIO_FLAGS_OF_RETRIES)
    if handshake_steps > MAX_HANDSHAKE_STEPS:
        return -1
    if incoming_left == 0 or size <= 0:
        openssl.BIO_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY)
        return -1
    if size > incoming_left:
        size = <int> incoming_left
    memcpy(to, incoming_at, size)
    incoming_at += size
    incoming_left -= size
    return size


cdef int write_out(void* bio, const char* at, int size) noexcept:
    global out, out_size, out_capacity
    cdef:
        char* larger
        Py_ssize_t capacity
    openssl.BIO_clear_flags(bio, BIO_FLAGS_OF_RETRIES)
    if size <= 0:
        return 0
    if out_size + size > out_capacity:
        capacity = max(out_size + size, out_capacity * 2, <Py_ssize_t> RAW_BYTES)
        larger = <char*> PyMem_Realloc(out, capacity)
        if larger == NULL:
            return -1
        out = larger
        out_capacity = capacity
    memcpy(out + out_size, at, size)
    out_size += size
    return size


cdef long control_bio(void* bio, int what, long number, void* at) noexcept:
    return what == BIO_CTRL_FLUSH


cdef int make_method() except -1:
    global bio_method
    if not _openssl.load():
        raise RuntimeError(_openssl.missing())
    bio_method = openssl.BIO_meth_new(BIO_TYPE_SOURCE_SINK | 100, b"redpoll")
    if bio_method == NULL:
        raise MemoryError()
    openssl.BIO_meth_set_read(bio_method, <void*> read_incoming)
    openssl.BIO_meth_set_write(bio_method, <void*> write_out)
    openssl.BIO_meth_set_ctrl(bio_method, <void*> control_bio)
    return 0


cdef class OpenSslSocket(TlsSocket):
    """`context_of` returns an _openssl.Context."""

    @property
    def context(self):
        return self.context_used

    @property
    def resumed(self) -> bool:
        """The client's session ticket was accepted."""
        return self.ssl != NULL and openssl.SSL_session_reused(self.ssl) == 1

    def __dealloc__(self):
        if self.ssl != NULL:
            openssl.SSL_free(self.ssl)

    cdef int begin(self) except -1:
        cdef void* bio
        if bio_method == NULL:
            make_method()
        self.context_used = self.context_of()
        self.ssl = openssl.SSL_new(self.context_used.ctx)
        bio = openssl.BIO_new(bio_method) if self.ssl != NULL else NULL
        if bio == NULL:
            raise MemoryError()
        openssl.BIO_set_init(bio, 1)
        # It owns the BIO from now on: one reference for both directions.
        openssl.SSL_set_bio(self.ssl, bio, bio)
        openssl.SSL_set_accept_state(self.ssl)
        openssl.SSL_set_info_callback(self.ssl, <void*> count_step)
        return 0

    cdef int feed(self, const uint8_t* at, Py_ssize_t size) except -1:
        global incoming_at, incoming_left, out_size, handshake_steps
        # After a step that failed, what another connection encrypted would be left.
        out_size = 0
        handshake_steps = self.handshake_steps
        if at == NULL and self.rest is not None:
            # Kept until the end of the step.
            at = <const uint8_t*> PyBytes_AS_STRING(self.rest)
            size = PyBytes_GET_SIZE(self.rest)
        incoming_at = at
        incoming_left = size
        return 0

    cdef int do_handshake(self) except -1:
        cdef int result
        openssl.ERR_clear_error()
        result = openssl.SSL_do_handshake(self.ssl)
        if result == 1:
            return 1
        if openssl.SSL_get_error(self.ssl, result) == SSL_ERROR_WANT_READ:
            return 0
        self.fault = fault_text()
        return 2

    cdef Py_ssize_t decrypt(self, uint8_t* to, Py_ssize_t size) except -3:
        cdef int result, error
        openssl.ERR_clear_error()
        result = openssl.SSL_read(self.ssl, to, <int> size)
        if result > 0:
            return result
        error = openssl.SSL_get_error(self.ssl, result)
        if error == SSL_ERROR_WANT_READ:
            return WANTS_MORE
        if error == SSL_ERROR_ZERO_RETURN:
            return AT_END
        openssl.ERR_clear_error()
        return DAMAGED

    cdef bint has_more(self) except -1:
        return incoming_left > 0 or openssl.SSL_pending(self.ssl) > 0

    cdef int encrypt(self, const char* at, Py_ssize_t size) except -1:
        global out_size
        out_size = 0
        if openssl.SSL_write(self.ssl, at, <int> size) != size:
            openssl.ERR_clear_error()
            out_size = 0
            self.abort()
            return 0
        return self.emit_out()

    cdef int shut(self) except -1:
        global out_size
        out_size = 0
        # It wants the peer's close_notify, too. Ours is made.
        openssl.SSL_shutdown(self.ssl)
        openssl.ERR_clear_error()
        return self.emit_out()

    cdef int end_step(self) except -1:
        global incoming_left
        cdef Py_ssize_t left = incoming_left
        # Before anything can fail: `rest` or the next read would be gone.
        incoming_left = 0
        self.handshake_steps = handshake_steps
        self.rest = PyBytes_FromStringAndSize(<const char*> incoming_at, left) if left else None
        return self.emit_out()

    cdef int emit_out(self) except -1:
        global out, out_size, out_capacity
        cdef Py_ssize_t size = out_size
        out_size = 0
        self.emit(out, size)
        if out_capacity > KEPT_OUT_BYTES:
            PyMem_Free(out)
            out = NULL
            out_capacity = 0
        return 0

    cdef int drop(self) except -1:
        cdef void* ssl = self.ssl
        self.ssl = NULL
        self.context_used = None
        self.rest = None
        if ssl != NULL:
            openssl.SSL_free(ssl)
        return 0
