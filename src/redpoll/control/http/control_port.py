"""The control port: its connections, and the requests that come over them.

The connections are those of http/connection.py, as on the public port; here each is an asyncio transport. Every request
becomes a PortRequest, which `received` must answer. The port limits its connections, and ends in order.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from redpoll.config.proxies import NO_PROXIES, TrustedProxies
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.http.connection import HttpConnection, State
from redpoll.http.head import FieldTable
from redpoll.http.messages import FIELDS
from redpoll.http.reader import Fault, ParsedRequest
from redpoll.http.server import HttpServer
from redpoll.loop.writable import WRITABLE_BELOW_BYTES

__all__ = ["ControlPort", "PortRequest"]

# What handlers read of requests to the control port. Forms and pages of the dashboard need more than the API.
_TABLE: Final = FieldTable(
    (
        *FIELDS,
        "Host",
        "Cookie",
        "HX-Current-URL",
        "HX-Request",
        "Sec-Fetch-Site",
        "X-CSRF-Token",
        "X-Forwarded-Proto",
    )
)
# A client whose connection ends has this long to stop sending and read the last response.
_LINGER_S: Final = 2.0
# Longer if it still reads: until it has read nothing for this long.
_STALLED_S: Final = 30.0
# The control port serves the dashboard, metrics and the operator's scripts. Redis, the record store and webhook
# deliveries need the other descriptors.
_MAX_CONNECTIONS: Final = 1024
_MAX_SHARE_OF_DESCRIPTORS: Final = 4


class PortRequest(Request):
    """A request to the control port. `link` is its connection."""

    __slots__ = ()

    link: HttpConnection[PortStream]

    def answer(self, flags: int, response: bytes) -> None:
        # Its client may have gone.
        if self.link.state is State.ANSWER:
            self.link.answered(flags, response)


class PortStream(asyncio.Protocol):
    """The bytes of a connection to `port`. `heard_at`: when bytes last came (loop time)."""

    def __init__(self, port: ControlPort) -> None:
        self.heard_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        # Called once when the client has read what waits for it.
        self.on_read: Callable[[], None] | None = None
        self._port = port
        self._http: HttpConnection[PortStream] | None = None
        self._transport: asyncio.Transport
        self._writing_paused = False

    # -- called by the transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITABLE_BELOW_BYTES)
        peer = transport.get_extra_info("peername")
        self._http = self._port.opened(self, peer[0] if isinstance(peer, tuple) else "")

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._port.now_s()
        if self._http is not None:
            self._http.received(data)

    def eof_received(self) -> bool:
        if self._http is not None and self._http.ended():
            return True
        # The transport closes when the client has read everything.
        self._linger_if_unsent()
        return False

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        then, self.on_read = self.on_read, None
        if then is not None:
            then()

    def connection_lost(self, fault: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._port.lost(self)

    # -- called by its HTTP connection ---------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Not less than WRITABLE_BELOW_BYTES exactly if `resume_writing` will be called."""
        return WRITABLE_BELOW_BYTES if self._writing_paused else 0

    @property
    def is_http(self) -> bool:
        return not self._transport.is_closing()

    def write_http(self, response: bytes) -> None:
        self._transport.write(response)

    def end_http(self, response: bytes = b"") -> None:
        if self._transport.is_closing():
            self._linger_if_unsent()
            return
        if response:
            self._transport.write(response)
        if response and not self._port.draining and self._transport.can_write_eof():
            # If bytes were left unread, the kernel would send a reset, and the client might lose the response.
            self._transport.write_eof()
            self.resume_reading()
            self._linger()
        else:
            # With TLS the transport lingers itself, for the client's close_notify.
            self._transport.close()
            self._linger_if_unsent()

    def _linger_if_unsent(self) -> None:
        if self.has_unsent:
            self._linger()

    def _linger(self) -> None:
        now_s = self._port.now_s()
        self._look_later(self._transport.get_write_buffer_size(), now_s + self._port.stalled_s)

    def _look_later(self, unsent_bytes: int, stalled_at: float) -> None:
        if self.timer is not None:
            self.timer.cancel()
        again_s = min(_LINGER_S, self._port.stalled_s)
        self.timer = asyncio.get_running_loop().call_later(again_s, self._end_lingering, unsent_bytes, stalled_at)

    def _end_lingering(self, unsent_bytes: int, stalled_at: float) -> None:
        """The client had left `unsent_bytes` unread."""
        left = self._transport.get_write_buffer_size()
        if not left:
            self._transport.close()
        elif left < unsent_bytes:
            self._linger()
        elif self._port.now_s() < stalled_at:
            self._look_later(left, stalled_at)
        else:
            self._transport.abort()

    @property
    def has_unsent(self) -> bool:
        return self._transport.get_write_buffer_size() > 0

    def make_room(self) -> None:
        """Ends an idle connection, at once if its client hasn't read its last answer."""
        if self.has_unsent:
            self._transport.abort()
        else:
            self.end_http()

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()


class ControlPort(HttpServer[PortStream, HttpConnection[PortStream]]):
    """Serves the control port; asyncio's server calls it for each connection.

    `received` gets each request. `error_page` (status, code, text) renders the errors of bytes that are no request.
    `trusted`: the proxies whose word about their clients counts. `secure`: the port has TLS. `stalled_s`: how long a
    connection that ends waits for a client that reads nothing.
    """

    def __init__(
        self,
        received: Callable[[PortRequest], None],
        error_page: Callable[[int, str, str], Response],
        *,
        head_timeout_s: float,
        body_timeout_s: float,
        trusted: TrustedProxies = NO_PROXIES,
        secure: bool = False,
    ) -> None:
        super().__init__(_TABLE, ("connections", "bodies"))
        self.body_timeout_s = body_timeout_s
        self.max_connections = _default_max_connections()
        self.stalled_s = _STALLED_S
        # Of `connections`, and of those that end.
        self.open_streams = 0
        self.trusted = trusted
        self._secure = secure
        self._received = received
        self._error_page = error_page
        self._head_timeout_s = head_timeout_s
        self._emptied = asyncio.Event()

    def __call__(self) -> PortStream:
        return PortStream(self)

    def opened(self, stream: PortStream, peer: str) -> HttpConnection[PortStream] | None:
        """Serve a new connection. None: there is no room, and it has been refused."""
        self.open_streams += 1
        if self.open_streams > self.max_connections and not self._close_idle():
            self.limit_reached("connections")
            text = "the control port has too many connections; try again later"
            stream.write_http(self.error(Fault(503, "unavailable", text)))
            stream.end_http()
            return None
        http = self.connections[stream] = HttpConnection(self, stream, peer, 0)
        self.idle[stream] = None
        stream.heard_at = self.now_s()
        self.wait(stream, self.idle_timeout_s)
        return http

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for the longest time; first those that have nothing more to send.
        False: none is idle."""
        oldest = next((stream for stream in self.idle if not stream.has_unsent), None) or next(iter(self.idle), None)
        if oldest is None:
            return False
        # Now, not when the connection is lost, which is later.
        self.gone(oldest)
        oldest.make_room()
        return True

    def lost(self, stream: PortStream) -> None:
        """The connection has ended: its descriptor is free."""
        self.open_streams -= 1
        self.gone(stream)

    def gone(self, stream: PortStream) -> None:
        super().gone(stream)
        if self.draining and not self.connections:
            self._emptied.set()

    async def finish(self, grace_s: float) -> None:
        """Close connections without a request at once, the others after their current response, and all after
        `grace_s`."""
        self.draining = True
        for http in list(self.connections.values()):
            if http.state in (State.IDLE, State.HEAD):
                http.end()
            elif http.state is State.ENDED:
                http.stream.end_http()
        if self.connections:
            try:
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
            except TimeoutError:
                for stream in self.connections:
                    stream.abort()

    # -- what connections ask for --------------------------------------------------------------------------

    @property
    def head_timeout_s(self) -> float:
        return self._head_timeout_s

    def submit(self, connection: HttpConnection[PortStream], request: ParsedRequest) -> None:
        flags, method, target, fields, forwarded, body, announced, refusal = request
        headers: dict[str, str] = {}
        for place, value in fields:
            headers.setdefault(_TABLE.names[place], value.decode("utf-8", "surrogateescape"))
        path = target.decode("utf-8", "surrogateescape")
        made = PortRequest(method.decode("ascii"), path, headers, body, flags, announced, refusal)
        made.link, made.began = connection, time.perf_counter()
        made.remote = self.trusted.client_of(connection.peer, forwarded) if self.trusted else connection.peer
        made.secure = self.trusted.is_secure(connection.peer, headers.get("X-Forwarded-Proto"), self._secure)
        # Later, because it may be answered at once, and the connection may have a thousand more.
        self.later(partial(self._received, made))

    def error(self, fault: Fault) -> bytes:
        page = self._error_page(*fault)
        page.keep_alive = False
        return page.render("GET")

    def now_s(self) -> float:
        """Loop time."""
        return self._loop.time()

    def wait(self, stream: PortStream, seconds: float) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
        stream.timer = self._loop.call_later(seconds, self.late, stream)

    def silent_s(self, stream: PortStream) -> float:
        return self.now_s() - stream.heard_at

    def when_read(self, stream: PortStream, then: Callable[[], None]) -> None:
        stream.on_read = then

    def forget_reader(self, stream: PortStream) -> None:
        stream.on_read = None


def _default_max_connections() -> int:
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(1, limit // _MAX_SHARE_OF_DESCRIPTORS))
