"""The server side of RFC 6455, from the first byte of the HTTP head to the last of the closing handshake.

A WebSocket has a socket of its own (`Poller.adopt`), or is the buffered protocol of a uvloop transport (TLS). The
layers above see no difference. The fan-out writes to it as to any sink. A connection that turns out to be HTTP becomes
a stream of bytes. Subclass WebSocket and override its callbacks. This module knows frames; it knows no channels and no
JSON. It has no timers: the layer above sets them.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from libc.errno cimport EAGAIN, EINTR, errno

cimport cython

from redpoll._fanout cimport Audience, Flusher, Sink
from redpoll._sockets cimport BULK, CROWD, MANY, QUICK, REQUESTS, peer_of, place_of
from redpoll._text cimport Utf8, utf8_goes_on

import asyncio
import binascii
import hashlib

from redpoll import _fanout, _frame

__all__ = [
    "CLOSED",
    "CLOSING",
    "HEAD",
    "HTTP",
    "OPEN",
    "WebSocket",
    "counters",
    "live",
    "set_tick",
]

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

cdef extern from "<string.h>" nogil:
    void* memmem(const void* in_, size_t in_size, const void* what, size_t size)

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* to, size_t size, int flags)
    enum:
        MSG_DONTWAIT

cdef enum State:
    # HEAD: the request head isn't answered yet. OPEN: frames in both directions. CLOSING: a Close or the last HTTP
    # response is queued. CLOSED: the socket is closed. HTTP: requests and responses (serve_http).
    STATE_HEAD
    STATE_OPEN
    STATE_CLOSING
    STATE_CLOSED
    STATE_HTTP

HEAD = STATE_HEAD
OPEN = STATE_OPEN
CLOSING = STATE_CLOSING
CLOSED = STATE_CLOSED
HTTP = STATE_HTTP

cdef enum Opcode:
    # RFC 6455 5.2.
    OP_CONTINUATION = 0
    OP_TEXT = 1
    OP_BINARY = 2
    OP_CLOSE = 8
    OP_PING = 9
    OP_PONG = 10

cdef enum:
    # protocol/errors.py `Code.OVER_CAPACITY`, which modules here can't import.
    OVER_CAPACITY = 4100
    READ_BUFFER_BYTES = 65536
    # One read of an open WebSocket: what its messages cause must not keep other clients waiting, and a client may send
    # a hundred subscribes at once. Less while a crowd waits to be read: each is read in turn, so the others wait for a
    # few messages of each and not for all that the crowd has sent. Least for those in the poller's set for bulk.
    READ_BYTES = 8192
    READ_BYTES_OF_BULK = 2048
    READ_BYTES_IN_CROWD = 1024
    READ_BYTES_OF_BULK_IN_CROWD = 256
    # The same for a connection that speaks HTTP. A request that comes in one read costs least, so a batch of publishes
    # should fit; but 64 KiB are also 2,400 small requests. A client that sends as many is in bulk after its first read.
    HTTP_READ_BYTES_OF_BULK = 16384
    HTTP_READ_BYTES_IN_CROWD = 32768
    HTTP_READ_BYTES_OF_BULK_IN_CROWD = 8192
    # One read of a transport: a TLS record's largest payload.
    TLS_READ_BYTES = 16384
    MAX_HEAD_BYTES = 16384
    MAX_CONTROL_BYTES = 125
    # Bytes that are read and dropped after our last message. If bytes were left unread, the kernel would send a reset,
    # and the peer might lose that message. A peer that sends more than this may lose it.
    LINGER_BYTES = 2097152
    # Above this many waiting bytes, pongs are written at once and not at the end of the tick: one read may bring 10,000
    # pings.
    PROMPT_URGENT_BYTES = 16384

# Shared by all connections of the process, because each read is parsed before the next one.
cdef object read_buffer = bytearray(READ_BUFFER_BYTES)
cdef object tls_read_buffer = memoryview(read_buffer)[:TLS_READ_BYTES]

cdef uint32_t tick = 0
cdef uint64_t bytes_received = 0
cdef uint64_t frames_received = 0
cdef uint64_t messages_received = 0
cdef uint64_t protocol_faults = 0
cdef uint64_t callback_errors = 0
cdef Py_ssize_t live_websockets = 0
cdef Py_ssize_t live_unfinished = 0


def set_tick(uint32_t now_tick):
    """Set the tick that connections store in `heard_tick` when bytes arrive."""
    global tick
    tick = now_tick


def counters() -> dict:
    """Counters of this process: what its connections received, and how many were closed for an error of theirs or
    ours."""
    return {
        "bytes_received": bytes_received,
        "frames_received": frames_received,
        "messages_received": messages_received,
        "protocol_faults": protocol_faults,
        "callback_errors": callback_errors,
    }


def live() -> dict:
    """Objects alive, by kind, in a debug build; empty in others."""
    if not COUNTS_LIVE:
        return {}
    return _fanout.live() | {"websockets": live_websockets, "unfinished": live_unfinished}


cdef bint is_head_of_post(ssize_t size) noexcept:
    """Whether what was read is a POST up to the end of its head."""
    cdef const char* at = PyByteArray_AS_STRING(read_buffer)
    return size > 9 and memcmp(at, b"POST ", 5) == 0 and memcmp(at + size - 4, b"\r\n\r\n", 4) == 0


# -- frame headers (RFC 6455 5.2) ----------------------------------------------------------------------------


cdef void unmask(
    uint8_t* to, const uint8_t* at, size_t size, const uint8_t* mask, size_t offset
) noexcept nogil:
    """`at` lies `offset` bytes into its payload."""
    cdef:
        uint8_t[8] key
        uint64_t key_word, word
        size_t i
    for i in range(8):
        key[i] = mask[(offset + i) & 3]
    memcpy(&key_word, key, 8)
    while size >= 8:
        memcpy(&word, at, 8)
        word ^= key_word
        memcpy(to, &word, 8)
        at += 8
        to += 8
        size -= 8
    for i in range(size):
        to[i] = at[i] ^ key[i]


cdef int read_header(const uint8_t* at, Py_ssize_t size, Header* frame) noexcept nogil:
    """The size of the header at `at`. 0: it is incomplete. Negative: the close code for its fault.

    Faults are found at the first byte that shows them.
    """
    cdef:
        uint8_t opcode
        uint8_t short_size
        uint64_t long_size = 0
        int used = 2
        int extended
        int i
    if size < 1:
        return 0
    opcode = at[0] & 0x0F
    if at[0] & 0x70:
        # No extension was agreed on, so no reserved bit has a meaning.
        return -1002
    if 2 < opcode < 8 or opcode > 10:
        return -1002
    if opcode >= 8 and not at[0] & 0x80:
        # 5.5: control frames are never fragmented.
        return -1002
    if size < 2:
        return 0
    if not at[1] & 0x80:
        # 5.1: a client masks every frame.
        return -1002
    short_size = at[1] & 0x7F
    if opcode >= 8 and short_size > MAX_CONTROL_BYTES:
        return -1002
    extended = 0 if short_size < 126 else 2 if short_size == 126 else 8
    if size < 2 + extended:
        return 0
    for i in range(extended):
        long_size = long_size << 8 | at[2 + i]
    if extended == 0:
        long_size = short_size
    elif extended == 2:
        if long_size < 126:
            # The minimal form is required.
            return -1002
    elif long_size < 65536 or long_size >> 63:
        return -1002
    used += extended
    frame.fin = at[0] >> 7
    frame.opcode = opcode
    frame.size = long_size
    if size < used + 4:
        # Incomplete, but the caller can already check the size.
        return 0
    memcpy(frame.mask, at + used, 4)
    return used + 4


cdef bint is_close_code(int code) noexcept nogil:
    """RFC 6455 7.4 and the IANA registry: codes that a Close frame may have."""
    return 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999


# -- the connection ------------------------------------------------------------------------------------------


@cython.no_gc
cdef class WebSocket(Sink):
    """One client's connection, from accept to close. Override what you need:

    connected(), head_begun(), head_received(head), head_too_large(), message_received(message), binary_received(),
    pong_received(), closing(), closed(code, reason), gone(), released(), http_began(data), http_received(data), http_ended().

    If one of them raises, this socket is closed with 1011, and the exception is counted and passed to the loop's
    exception handler. Other connections aren't affected. `max_message_bytes` bounds a message, in one frame or in many.
    """

    def __cinit__(self):
        global live_websockets
        if COUNTS_LIVE:
            live_websockets += 1

    def __init__(self, Flusher flusher not None, uint32_t max_message_bytes):
        self.flusher = flusher
        self.max_message_bytes = max_message_bytes
        self.listening = True
        self.heard_tick = tick

    def __dealloc__(self):
        global live_websockets
        self.drop_part()
        if COUNTS_LIVE:
            live_websockets -= 1

    # -- to override -----------------------------------------------------------------------------------------

    def connected(self):
        """The socket is open; nothing was received yet."""

    def head_received(self, head: bytes):
        """A complete request head, with its blank line. Answer by accept(), answer() or serve_http(),
        now or later; until then nothing more is read."""
        self.abort()

    def head_begun(self):
        """The first bytes came, and they aren't a complete head. Not called for a POST that comes in one piece."""

    def head_too_large(self):
        """More than 16 KiB and no blank line. Answer by answer() or abort()."""
        self.abort()

    def message_received(self, message: bytes):
        """A complete text message; valid UTF-8."""

    def binary_message_received(self, message: bytes):
        """A complete binary message. Unless overridden, drops the bytes and calls `binary_received`."""
        self.binary_received()

    def binary_received(self):
        """A binary message was received and dropped."""

    def pong_received(self):
        """A pong came after `awaits_pong` was set; each time it is set, this is called once."""

    def http_began(self, data: bytes) -> bool:
        """The first bytes are a POST with its whole head. True: this connection speaks HTTP from now on, and `data` is
        taken. False: head_received() decides."""
        return False

    def http_received(self, data: bytes):
        """The next bytes of a connection that speaks HTTP."""

    def http_ended(self) -> bool:
        """The client of such a connection sends no more. True: it stays open until end_http()."""
        return False

    def closing(self):
        """A close has begun, on either side. The caller sets a timer that calls abort() if it doesn't end."""

    def closed(self, code: int, reason: str):
        """The WebSocket has ended, from any cause. Called once for each that was accepted.

        `code` is the peer's, or ours for a fault of the peer; 1005: a Close without a code; 1006: no Close came.
        """

    def gone(self):
        """The connection is lost or was answered, and was never accepted as a WebSocket."""

    def released(self):
        """The descriptor is closed; called once, after closed() or gone(), and seconds after closed() if the client
        keeps the TCP connection open."""

    # -- what the poller calls -------------------------------------------------------------------------------

    cdef int socket_opened(self) except -1:
        Sink.socket_opened(self)
        return self.start()

    cdef int socket_readable(self) except -1:
        cdef:
            ssize_t asked = self.read_size(place_of(self) == BULK)
            ssize_t size = recv(self.fd, PyByteArray_AS_STRING(read_buffer), asked, MSG_DONTWAIT)
            ssize_t more
            # A newcomer counts as one until its first messages are read.
            bint established = self.state == STATE_OPEN or self.state == STATE_HTTP
        if size > 0:
            if size < asked and (self.state == STATE_HTTP or self.state == STATE_HEAD) and is_head_of_post(size):
                # Libraries send the body right after the head: mostly it is there by now.
                more = recv(self.fd, PyByteArray_AS_STRING(read_buffer) + size, asked - size, MSG_DONTWAIT)
                if more > 0:
                    size += more
            self.take(<const uint8_t*> PyByteArray_AS_STRING(read_buffer), size)
            if established and self.watched:
                self.flusher.poller.move(self, self.place_after(size == asked, place_of(self)))
        elif size == 0:
            self.end()
        elif errno != EAGAIN and errno != EINTR:
            self.broke()
        return 0

    cdef int place_after(self, bint full, int place) noexcept:
        """Among which sockets it is served from now on; now it is in `place`. `full`: there was more than one read
        takes, so it comes after those of which a read takes everything."""
        if full:
            return BULK
        if self.state != STATE_HTTP:
            return QUICK
        # A few requests delay nobody, and a further set costs a µs for each.
        return REQUESTS if place == REQUESTS or self.flusher.poller.unserved() > MANY else QUICK

    cdef size_t read_size(self, bint bulk) noexcept:
        """How much to read at most; `bulk`: the socket is in that set. What is left is reported again, after the
        others."""
        cdef:
            bint crowded = self.flusher.poller.unserved() > CROWD
            size_t size
        if self.state == STATE_HEAD or self.state == STATE_HTTP:
            if bulk and self.state == STATE_HTTP:
                return HTTP_READ_BYTES_OF_BULK_IN_CROWD if crowded else HTTP_READ_BYTES_OF_BULK
            return HTTP_READ_BYTES_IN_CROWD if crowded else READ_BUFFER_BYTES
        if self.state != STATE_OPEN:
            return READ_BUFFER_BYTES
        if bulk:
            size = READ_BYTES_OF_BULK_IN_CROWD if crowded else READ_BYTES_OF_BULK
        else:
            size = READ_BYTES_IN_CROWD if crowded else READ_BYTES
        if self.unfinished != NULL and self.unfinished.in_payload and self.unfinished.left > size:
            # The rest of one message.
            size = min(<size_t> self.unfinished.left, <size_t> READ_BUFFER_BYTES)
        return size

    cdef int socket_lost(self) except -1:
        # A call by name, because a subclass may override it.
        self.connection_lost(None)
        return 0

    cdef int end(self) except -1:
        """The peer of a plain socket sends nothing more: close after the next flush. It may write the response to a
        request that came together with the end."""
        if self.state == STATE_HTTP and self.stays_open():
            # end_http() resumes, reads the end once more, and closes.
            self.pause_reading()
            return 0
        self.ended = True
        self.writable = False
        if not self.paused:
            self.flusher.write_now(self)
        if self.watched:
            self.flusher.poller.watch(self)
        return 0

    # -- what the transport calls ----------------------------------------------------------------------------

    @staticmethod
    def get_buffer(size_hint):
        # Static, so that there is no bound method per connection. uvloop calls it just before it reads.
        return tls_read_buffer

    @property
    def buffer_updated(self):
        # The transport stores this object and calls it after each read. A bound method would take 80 bytes per
        # connection, so the connection itself is callable.
        return self

    def __call__(self, Py_ssize_t size):
        self.take(<const uint8_t*> PyByteArray_AS_STRING(read_buffer), size)
        if size == TLS_READ_BYTES and self.transport is not None and not self.held:
            # More has arrived, and libuv would read up to 32 times: 512 KiB of one client's small messages before other
            # clients are served (deploy/failures.md "Hostile input").
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self):
        if self.transport is not None and not self.held:
            self.transport.resume_reading()

    def connection_made(self, transport):
        self.attach(transport)
        self.start()

    cdef int start(self) except -1:
        cdef Unfinished* early = self.unfinished
        try:
            self.connected()
            if early != NULL and self.state == STATE_HEAD and self.is_attached():
                # Handle the bytes that were fed earlier as if they had just arrived.
                self.unfinished = NULL
                try:
                    self.take(early.data, early.size)
                finally:
                    free_part(early)
        except Exception as fault:
            self.callback_failed(fault)
        return 0

    def connection_lost(self, fault):
        self.lose()

    cdef int lose(self) except -1:
        self.detach_transport()
        self.state = STATE_CLOSED
        self.listening = False
        self.drop_part()
        try:
            if self.opened:
                self.tell_closed(1006, "")
            elif not self.end_reported:
                self.end_reported = True
                try:
                    self.gone()
                except Exception as fault:
                    self.callback_failed(fault)
            self.released()
        except Exception as error:
            self.callback_failed(error)
        finally:
            while self.seat_count:
                # An audience that still has this connection would keep it alive for ever.
                (<Audience> self.seats_at()[0].audience).remove_at(self.seats_at()[0].place)
        return 0

    def eof_received(self):
        # The peer sends nothing more, so the transport closes after its pending writes. Hand it now what the next flush
        # would write, such as the response to a request that came together with the end.
        if self.transport is not None:
            self.flusher.write_now(self)
        self.ended = True
        # TLS can't be closed on one side alone.
        return self.fd >= 0 and self.state == STATE_HTTP and self.stays_open()

    cdef bint stays_open(self) except -1:
        """Whether an HTTP connection is to stay open although its client sends no more."""
        try:
            return bool(self.http_ended()) and self.is_attached()
        except Exception as fault:
            self.callback_failed(fault)
            return False

    # -- what the caller does --------------------------------------------------------------------------------

    def feed(self, bytes data not None):
        """Add bytes of this connection that were read elsewhere. They are stored until the socket is open."""
        if not self.is_attached() and self.state == STATE_HEAD:
            append(self.part(), <const uint8_t*> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        else:
            self.take(<const uint8_t*> PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    def accept(self, bytes key not None):
        """Answer the upgrade (RFC 6455 4.2.2): 101, OPEN. What came after the head is parsed next."""
        if self.state != STATE_HEAD or self.unfinished == NULL or self.unfinished.request_size == 0:
            raise RuntimeError("no request head to accept")
        proof = binascii.b2a_base64(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.state = STATE_OPEN
        self.opened = True
        self.note(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + proof[:-1] + b"\r\n\r\n",
            # Before the pong to a ping that comes too early, which is urgent, but not before responses that wait.
            self.unsent_chain == NULL,
        )
        if not self.deciding:
            # accept() was called later: the caller may have to finish its setup before it gets messages.
            asyncio.get_running_loop().call_soon(self._resume)

    def send_first(self, bytes frame not None) -> bool:
        """As `send`, for the first frame after accept(), in the same tick: both leave in one write."""
        return self.state == STATE_OPEN and self.note(frame, self.unsent_chain == NULL) == 1

    def open_on(self, transport):
        """Open without a request: `transport` takes whole frames in memory, and `feed` brings what the client sends."""
        if self.state != STATE_HEAD or self.is_attached() or self.unfinished != NULL:
            raise RuntimeError("the connection has begun")
        self.attach(transport)
        self.state = STATE_OPEN
        self.opened = True

    def answer(self, bytes response not None):
        """Write a last HTTP response, then close. Further bytes from the peer are dropped."""
        if self.state != STATE_HEAD or not self.is_attached():
            raise RuntimeError("no request to answer")
        self.end_http(response)

    def serve_http(self) -> bytes:
        """Call from head_received() or later: this connection speaks HTTP until upgrade() or end_http().

        Returns what was received so far, the head first; http_received() gets what comes next.
        """
        if self.state != STATE_HEAD or not self.is_attached() or self.unfinished == NULL:
            raise RuntimeError("no request head to serve")
        received = PyBytes_FromStringAndSize(<const char*> self.unfinished.data, self.unfinished.size)
        self.drop_part()
        self.state = STATE_HTTP
        if not self.deciding:
            self.resume_reading()
        return received

    def write_http(self, bytes response not None):
        """Write a response at the end of the tick, however large it is. The caller bounds how many are unread."""
        if self.state == STATE_HTTP and self.writable:
            self.lengthen(response, False)
            if not self.paused:
                self.be_flushed()

    def end_http(self, bytes response not None=b""):
        """Close after everything is written, with `response` last. Further bytes from the peer are dropped."""
        if (self.state != STATE_HTTP and self.state != STATE_HEAD) or not self.is_attached():
            return
        self.state = STATE_HTTP
        if response:
            self.write_http(response)
        self.state = STATE_CLOSING
        self.listening = False
        self.drop_part()
        self.finish()
        self.resume_reading()
        self.closing()

    def end_reading(self):
        """The request that came is the client's last: close a plain socket as soon as the answer is written, without
        waiting for the client's end. While the answer to an earlier request waits, this does nothing: that one would be
        taken for the last."""
        if self.watched and self.unsent_chain == NULL and self.urgent == NULL:
            self.ended = True

    def upgrade(self, bytes received not None):
        """A request on an HTTP connection asks for a WebSocket: `received` is its head and what follows."""
        if not self.is_attached():
            # The client has gone, and the loop hasn't said so yet.
            return
        if self.state != STATE_HTTP:
            raise RuntimeError("no HTTP connection to upgrade")
        # Bytes behind an unanswered request had paused it.
        self.resume_reading()
        if self.unsent_chain != NULL:
            # The response to that request: a pong to a ping that came too early, which is urgent, must not overtake it.
            self.flusher.write_now(self)
            if not self.is_attached():
                return
        self.state = STATE_HEAD
        self.take_head(<const uint8_t*> PyBytes_AS_STRING(received), PyBytes_GET_SIZE(received))

    def send(self, bytes frame not None) -> bool:
        """Queue a frame for this client only. False if it takes none (it is closing, or not open yet)."""
        return self.state == STATE_OPEN and self.note(frame, False) == 1

    def send_urgent(self, bytes frame not None) -> bool:
        """As `send`, before all frames that haven't been started. Urgent frames keep their order."""
        return self.state == STATE_OPEN and self.note(frame, True) == 1

    def close(self, int code=1000, str reason not None=""):
        """Send a Close frame after all waiting frames; closed() is called when the peer's Close comes.

        closing() is called now. Before the upgrade: abort. Later calls do nothing.
        """
        if self.state == STATE_HEAD:
            self.abort()
        elif self.state == STATE_OPEN:
            self.note(_frame.close(code, reason), False)
            self.writable = False
            self.begin_closing()

    def pause_reading(self):
        """Stop reading from this client until resume_reading(). Its bytes wait in the kernel."""
        if self.transport is not None:
            self.held = True
            self.transport.pause_reading()
        elif self.watched:
            self.held = True
            self.flusher.poller.watch(self)

    def resume_reading(self):
        """Undo pause_reading()."""
        if not self.held:
            return
        if self.transport is not None:
            self.held = False
            self.transport.resume_reading()
        elif self.watched:
            self.held = False
            self.flusher.poller.watch(self)

    def abort(self):
        """Drop the connection and the frames that wait for it. closed() or gone() follows from the loop."""
        if self.is_attached():
            self.broke()

    @property
    def peer(self):
        """`(host, port)` of the other end, from the kernel; None after the connection has closed."""
        if self.watched:
            return peer_of(self.fd)
        if self.transport is None:
            return None
        address = self.transport.get_extra_info("peername")
        return tuple(address[:2]) if isinstance(address, (tuple, list)) else None

    @property
    def buffered(self) -> int:
        """Bytes received and stored: a head, frame or message that isn't complete."""
        return 0 if self.unfinished == NULL else self.unfinished.size + self.unfinished.head_size

    # -- bytes in --------------------------------------------------------------------------------------------

    cdef int take(self, const uint8_t* at, Py_ssize_t size) except -1:
        global bytes_received
        bytes_received += size
        self.heard_tick = tick
        if self.state == STATE_HEAD:
            if not self.take_post(at, size):
                self.take_head(at, size)
        elif self.state == STATE_HTTP:
            try:
                self.http_received(PyBytes_FromStringAndSize(<const char*> at, size))
            except Exception as fault:
                self.callback_failed(fault)
        elif self.listening:
            self.take_frames(at, size)
        else:
            self.discarded += <uint32_t> size
            if self.discarded > LINGER_BYTES:
                self.abort()
        if self.urgent != NULL and self.urgent.size > PROMPT_URGENT_BYTES and not self.paused:
            self.flusher.write_now(self)
            self.flusher.wake()
        return 0

    cdef bint take_post(self, const uint8_t* at, Py_ssize_t size) except -1:
        """Whether a POST began the connection, whose head came as a whole and is in other hands now. It can't be a
        WebSocket's, so nothing has to look at it first."""
        if (
            self.unfinished != NULL
            or size < 9
            or memcmp(at, b"POST ", 5) != 0
            or memmem(at, min(size, MAX_HEAD_BYTES), b"\r\n\r\n", 4) == NULL
        ):
            return False
        self.state = STATE_HTTP
        try:
            if self.http_began(PyBytes_FromStringAndSize(<const char*> at, size)):
                return True
        except Exception as fault:
            self.callback_failed(fault)
            return True
        self.state = STATE_HEAD
        return False

    cdef int take_head(self, const uint8_t* at, Py_ssize_t size) except -1:
        cdef:
            Unfinished* part = self.part()
            size_t looked = part.size - 3 if part.size > 3 else 0
            uint8_t* end_of_head
        append(part, at, size)
        if part.request_size:
            # The head isn't answered yet. Reading is paused, so this is little.
            return 0
        end_of_head = <uint8_t*> memmem(part.data + looked, part.size - looked, b"\r\n\r\n", 4)
        if end_of_head != NULL and end_of_head - part.data + 4 <= MAX_HEAD_BYTES:
            part.request_size = end_of_head - part.data + 4
        elif part.size <= MAX_HEAD_BYTES:
            if part.size == <size_t> size:
                try:
                    self.head_begun()
                except Exception as fault:
                    self.callback_failed(fault)
            return 0
        self.deciding = True
        try:
            if part.request_size:
                self.head_received(PyBytes_FromStringAndSize(<const char*> part.data, part.request_size))
            else:
                self.head_too_large()
        except Exception as fault:
            self.callback_failed(fault)
        finally:
            self.deciding = False
        if self.opened:
            self.take_pending()
        elif self.state == STATE_HEAD:
            self.pause_reading()
        return 0

    def _resume(self):
        # The second half of an accept() that was called later.
        if self.is_attached():
            self.resume_reading()
            self.take_pending()

    cdef int take_pending(self) except -1:
        """Parse what came after the request head."""
        cdef Unfinished* part = self.unfinished
        if part == NULL or part.request_size == 0:
            return 0
        self.unfinished = NULL
        try:
            self.take_frames(part.data + part.request_size, part.size - part.request_size)
        finally:
            free_part(part)
        return 0

    cdef int take_frames(self, const uint8_t* at, Py_ssize_t size) except -1:
        cdef Py_ssize_t used
        while size > 0 and self.listening:
            used = self.take_whole_frame(at, size) if self.unfinished == NULL else 0
            if used == 0 and self.listening:
                used = self.take_part(self.part(), at, size)
            at += used
            size -= used
        if not self.listening:
            self.drop_part()
        return 0

    cdef Py_ssize_t take_whole_frame(self, const uint8_t* at, Py_ssize_t size) except -1:
        """Handle a complete frame that is a complete message; it is copied once, to unmask it. Returns 0 for anything
        else."""
        global frames_received
        cdef:
            Header frame
            Utf8 utf8
            bytes message
            uint8_t[MAX_CONTROL_BYTES] control
            int fault
            int head_size = read_header(at, size, &frame)
        if head_size < 0:
            self.fail(-head_size, "")
            return 0
        if head_size == 0 or not frame.fin or frame.size > <uint64_t> (size - head_size):
            return 0
        frames_received += 1
        fault = self.frame_fault(&frame, 0, 0)
        if fault:
            self.fail(fault, "")
            return 0
        at += head_size
        if frame.opcode >= OP_CLOSE:
            unmask(control, at, frame.size, frame.mask, 0)
            self.take_control(frame.opcode, control, frame.size)
        elif self.state == STATE_OPEN:
            message = PyBytes_FromStringAndSize(NULL, frame.size)
            unmask(<uint8_t*> PyBytes_AS_STRING(message), at, frame.size, frame.mask, 0)
            if frame.opcode == OP_TEXT:
                utf8.missing = 0
                if (
                    not utf8_goes_on(&utf8, <uint8_t*> PyBytes_AS_STRING(message), frame.size)
                    or utf8.missing
                ):
                    self.fail(1007, "invalid UTF-8")
                    return 0
            self.deliver(frame.opcode, message)
        return head_size + frame.size

    cdef int frame_fault(self, Header* frame, uint8_t under_way, uint64_t so_far) noexcept:
        """The close code if this header is wrong at this place, or 0 (RFC 6455 5.4, and our limit)."""
        if frame.opcode >= OP_CLOSE:
            return 0
        if (frame.opcode == OP_CONTINUATION) != (under_way != 0):
            return 1002
        if frame.size > self.max_message_bytes - so_far:
            return 1009
        return 0

    cdef Py_ssize_t take_part(self, Unfinished* part, const uint8_t* at, Py_ssize_t size) except -1:
        """Take the bytes that belong to the header or payload of the frame under way, and return their number."""
        cdef:
            int head_size
            int fault = 0
            Py_ssize_t used = 0
            size_t offset
            uint8_t* to
        if not part.in_payload:
            # Byte by byte, because a header is small and a fault must be found at its first byte.
            while used < size:
                part.head[part.head_size] = at[used]
                part.head_size += 1
                used += 1
                part.frame.size = 0
                head_size = read_header(part.head, part.head_size, &part.frame)
                if head_size < 0:
                    self.fail(-head_size, "")
                    return used
                if head_size == 0:
                    continue
                fault = self.frame_fault(&part.frame, part.opcode, part.size)
                if fault:
                    self.fail(fault, "")
                    return used
                part.in_payload = True
                part.left = part.frame.size
                if part.frame.opcode == OP_TEXT or part.frame.opcode == OP_BINARY:
                    part.opcode = part.frame.opcode
                    part.utf8.missing = 0
                break
            if not part.in_payload:
                return used
        at += used
        size -= used
        if <uint64_t> size > part.left:
            size = part.left
        offset = part.frame.size - part.left
        part.left -= size
        if part.frame.opcode >= OP_CLOSE:
            unmask(part.control + offset, at, size, part.frame.mask, offset)
        elif self.state == STATE_OPEN:
            to = make_room(part, size)
            unmask(to, at, size, part.frame.mask, offset)
            part.size += size
            if part.opcode == OP_TEXT and not utf8_goes_on(&part.utf8, to, size):
                self.fail(1007, "invalid UTF-8")
                return used + size
        if part.left == 0:
            self.frame_done(part)
        return used + size

    cdef int frame_done(self, Unfinished* part) except -1:
        global frames_received
        cdef:
            uint8_t opcode = part.frame.opcode
            bytes message = None
        frames_received += 1
        part.in_payload = False
        part.head_size = 0
        if opcode >= OP_CLOSE:
            if part.opcode == 0:
                # Nothing else is under way. Release it before a callback runs.
                self.unfinished = NULL
                try:
                    self.take_control(opcode, part.control, part.frame.size)
                finally:
                    free_part(part)
            else:
                self.take_control(opcode, part.control, part.frame.size)
        elif part.frame.fin:
            opcode = part.opcode
            if self.state == STATE_OPEN:
                if opcode == OP_TEXT and part.utf8.missing:
                    self.fail(1007, "invalid UTF-8")
                    return 0
                message = PyBytes_FromStringAndSize(<const char*> part.data, part.size)
            self.drop_part()
            if message is not None:
                self.deliver(opcode, message)
        return 0

    cdef int deliver(self, uint8_t opcode, bytes message) except -1:
        global messages_received
        messages_received += 1
        try:
            if opcode == OP_TEXT:
                self.message_received(message)
            else:
                self.binary_message_received(message)
        except Exception as fault:
            self.callback_failed(fault)
        return 0

    cdef int take_control(self, uint8_t opcode, const uint8_t* at, Py_ssize_t size) except -1:
        if opcode == OP_CLOSE:
            self.take_close(at, size)
        elif opcode == OP_PING and self.state == STATE_OPEN:
            self.note(_frame.pong(PyBytes_FromStringAndSize(<const char*> at, size)), True)
        elif opcode == OP_PONG and self.awaits_pong:
            self.awaits_pong = False
            try:
                self.pong_received()
            except Exception as fault:
                self.callback_failed(fault)
        return 0

    cdef int take_close(self, const uint8_t* at, Py_ssize_t size) except -1:
        """RFC 6455 5.5.1: echo the code if their Close came first, then the TCP connection ends."""
        cdef:
            int code = 1005
            Utf8 utf8
            str reason = ""
        utf8.missing = 0
        if size == 1:
            return self.fail(1002, "")
        if size >= 2:
            code = at[0] << 8 | at[1]
            if not is_close_code(code):
                return self.fail(1002, "")
            if not utf8_goes_on(&utf8, at + 2, size - 2) or utf8.missing:
                return self.fail(1007, "invalid UTF-8")
            reason = (<bytes> PyBytes_FromStringAndSize(<const char*> at + 2, size - 2)).decode()
        self.listening = False
        if self.state == STATE_OPEN:
            self.note(_frame.close(code if size else None), False)
            self.begin_closing()
        if self.watched:
            # RFC 6455 7.1.1: both Closes are sent or queued, so the server ends the TCP connection. It doesn't wait for
            # the client to do so, because such clients could use up all descriptors.
            self.ended = True
            self.flusher.poller.watch(self)
        self.finish()
        return self.tell_closed(code, reason)

    # -- the end ---------------------------------------------------------------------------------------------

    cdef int begin_closing(self) except -1:
        self.state = STATE_CLOSING
        try:
            self.closing()
        except Exception as fault:
            self.callback_failed(fault)
        return 0

    cdef int fail(self, int code, str reason) except -1:
        """RFC 6455 7.1.7: send the reason, half-close, parse no more. Waiting frames go first."""
        global protocol_faults
        protocol_faults += 1
        self.listening = False
        if self.state == STATE_OPEN:
            self.note(_frame.close(code, reason or FAULTS.get(code, "")), False)
            self.begin_closing()
        self.finish()
        return self.tell_closed(code, reason or FAULTS.get(code, ""))

    cdef int tell_closed(self, int code, str reason) except -1:
        if self.end_reported:
            return 0
        self.end_reported = True
        try:
            self.closed(code, reason)
        except Exception as fault:
            self.callback_failed(fault)
        return 0

    cdef int callback_failed(self, fault) except -1:
        """A callback raised: close this socket only."""
        global callback_errors
        callback_errors += 1
        _fanout.report(fault, self)
        self.listening = False
        if not self.is_attached():
            return 0
        if self.state == STATE_OPEN:
            self.note(_frame.close(1011, "internal error"), False)
            self.state = STATE_CLOSING
            self.finish()
            self.begin_closing()
            self.tell_closed(1011, "internal error")
        elif self.state == STATE_CLOSING:
            self.finish()
        else:
            self.abort()
        return 0

    cdef int overran(self) except -1:
        """The client reads slower than we write to it (protocol/README.md "Close codes")."""
        if self.state != STATE_OPEN:
            return self.broke()
        self.forget_unsent()
        self.listening = False
        # The Close frame is sent although the client is beyond its limit.
        self.lengthen(_frame.close(OVER_CAPACITY, "slow consumer"), False)
        self.finish()
        self.begin_closing()
        return self.tell_closed(OVER_CAPACITY, "slow consumer")

    cdef int broke(self) except -1:
        self.listening = False
        if self.state == STATE_OPEN or self.state == STATE_HTTP:
            self.state = STATE_CLOSING
        return Sink.broke(self)

    cdef Unfinished* part(self) except NULL:
        global live_unfinished
        if self.unfinished == NULL:
            self.unfinished = <Unfinished*> PyMem_Malloc(sizeof(Unfinished))
            if self.unfinished == NULL:
                raise MemoryError()
            memset(self.unfinished, 0, sizeof(Unfinished))
            if COUNTS_LIVE:
                live_unfinished += 1
        return self.unfinished

    cdef void drop_part(self) noexcept:
        cdef Unfinished* part = self.unfinished
        self.unfinished = NULL
        free_part(part)


FAULTS = {
    1002: "protocol error",
    1009: "message too big",
}


cdef void free_part(Unfinished* part) noexcept:
    global live_unfinished
    if part != NULL:
        PyMem_Free(part.data)
        PyMem_Free(part)
        if COUNTS_LIVE:
            live_unfinished -= 1


cdef uint8_t* make_room(Unfinished* part, size_t size) except NULL:
    """Returns where to put the next `size` bytes of `data`. The buffer grows by what has arrived, never by what a
    header announces."""
    cdef:
        size_t capacity = part.capacity
        uint8_t* data
    if part.size + size > capacity or part.data == NULL:
        capacity = max(part.size + size, capacity + capacity // 2, <size_t> 64)
        data = <uint8_t*> PyMem_Realloc(part.data, capacity)
        if data == NULL:
            raise MemoryError()
        part.data = data
        part.capacity = capacity
    return part.data + part.size


cdef int append(Unfinished* part, const uint8_t* at, size_t size) except -1:
    memcpy(make_room(part, size), at, size)
    part.size += size
    return 0
