"""HTTP connections: aiohttp's server, with what it lacks on a public port.

The client's true address on connections that a worker accepted, an absolute deadline for heads, errors of the
parser in our own shape, and Upgrades that come late. Private names of aiohttp are used here and nowhere else:
tests/control/test_connections.py fails where a new aiohttp means something else by them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web import Server
from aiohttp.web_protocol import RequestHandler

from redpoll.control.request import Request
from redpoll.control.response import Response
from redpoll.proxies import NO_PROXIES, TrustedProxies

__all__ = ["Connection", "Connections", "ErrorPage", "HandBack"]

log = structlog.get_logger(__name__)

# Longer than the 60 s after which proxies commonly drop an idle connection, so that they close first.
_KEEPALIVE_S: Final = 75.0
# A client that is refused half-way through its body gets this long to stop sending and read why.
_LINGER_S: Final = 2.0
# As in the worker's gate: request line and any one header.
_MAX_LINE_BYTES: Final = 16 * 1024
# An Upgrade is handed back when the answers before it are written; a client that leaves them unread is cut.
_WRITTEN_WITHIN_S: Final = 2.0
# What is still there behind the grace period is cut; handlers have this long to notice.
_CUT_WITHIN_S: Final = 0.1

# (status, code, text) -> the answer in the API's error shape.
ErrorPage = Callable[[int, str, str], Response]
# (descriptor, peer, bytes read so far) -> whether a worker took the connection; the descriptor is closed anyway.
HandBack = Callable[[int, tuple[str, int], bytes], bool]


class Connection(RequestHandler):
    """One HTTP connection. `peer` is the client's address as the worker knows it, None on the control port.

    `half_head_since`: since when (loop time) a request head is incomplete; 0 while none is. `hand_back` is None
    where the connection didn't come from a worker. `trusted`: the proxies whose word is taken; one of them may be
    the peer, and then each request has a client of its own. `takes_no_more`: closes behind the answer under way.
    """

    __slots__ = (
        "_error_page",
        "_read_before",
        "half_head_since",
        "hand_back",
        "peer",
        "takes_no_more",
        "trusted",
    )

    def __init__(
        self,
        connections: Connections,
        peer: tuple[str, int] | None = None,
        hand_back: HandBack | None = None,
        read_before: bytes = b"",
    ) -> None:
        super().__init__(connections, **connections.options)
        # Kept here: aiohttp forgets its server when the peer is gone, and may still have a fault to render.
        self._error_page = connections.error_page
        self.peer = peer
        self.hand_back = hand_back
        self.trusted = connections.trusted
        self._read_before = read_before
        self.half_head_since = 0.0
        # One that was on its way here when the end began.
        self.takes_no_more = connections.finishing

    @property
    def peername(self) -> Any:
        if self.peer is None and self.transport is not None:
            self.peer = self.transport.get_extra_info("peername")
        return self.peer

    @property
    def waits_for_a_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._read_before:
            # Here and not later: from the next tick on the transport reads what came behind it.
            self.data_received(self._read_before)
            self._read_before = b""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits_for_a_head:
            self.half_head_since = 0.0
        elif not self.half_head_since:
            self.half_head_since = self._loop.time()

    def resume_reading(self, resume_parser: bool = True) -> None:
        # Called after every body, whether or not reading was paused; going on costs as much as parsing a head.
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def refuse(self, answer: Response) -> None:
        """Answer a request that never became one, and close."""
        if self.transport is not None:
            answer.keep_alive = False
            self.transport.write(answer.render("GET"))
        self.force_close()

    def handle_error(
        self,
        request: Any,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Any:
        """aiohttp's own errors: bytes that are no HTTP. Ours are rendered by the front and never come here."""
        if status < 500:
            text = "not an HTTP request: " + (message or "malformed").partition("\n")[0].rstrip(":")[:200]
            answer = self._error_page(status, "bad_request", text)
        else:
            log.error("http connection failed", exc_info=exc)
            answer = self._error_page(500, "internal", "internal error")
        answer.keep_alive = False
        return answer

    async def leave(self, upgrade: RawRequestMessage) -> bool:
        """Hand this connection, with the Upgrade that was its last request, back to a worker.

        False: nobody took it.
        """
        transport = self.transport
        if self.hand_back is None or transport is None or not self._upgraded:
            return False
        transport.pause_reading()
        deadline = self._loop.time() + _WRITTEN_WITHIN_S
        while transport.get_write_buffer_size():
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(0.005)
        sock: socket.socket = transport.get_extra_info("socket")
        descriptor = os.dup(sock.fileno())
        taken = self.hand_back(descriptor, self.peername[:2], _head_of(upgrade) + self._message_tail)
        if taken:
            transport.abort()
        return taken


class RelayedConnection(Connection):
    """A client of the TLS port: a worker has the TLS, this is one end of a socket pair (worker/ingress/relay.py)."""

    __slots__ = ("_last_body",)

    def __init__(
        self, connections: Connections, peer: tuple[str, int], hand_back: HandBack, read_before: bytes
    ) -> None:
        super().__init__(connections, peer, hand_back, read_before)
        # Of the request that came last.
        self._last_body: StreamReader | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last_body = self._messages[-1][1]

    def eof_received(self) -> bool:  # type: ignore[override]
        """The worker is being stopped, or the client has gone: nothing more comes.

        What was asked whole is answered first; where a head or a body is incomplete nobody waits for the rest.
        """
        if self.waits_for_a_head or self._last_body is None or not self._last_body.is_eof():
            return False
        self.close()
        return True


class Connections(Server):
    """Makes the connections of one control plane, whichever way they come, and looks after them.

    `handler` answers requests, `error_page` renders what never became one.
    """

    def __init__(
        self,
        handler: Callable[[Request], Awaitable[Response]],
        error_page: ErrorPage,
        *,
        head_timeout_s: float,
        trusted: TrustedProxies = NO_PROXIES,
    ) -> None:
        super().__init__(handler, request_factory=Request)  # type: ignore[arg-type]
        self.error_page = error_page
        self.trusted = trusted
        self.finishing = False
        self._head_timeout_s = head_timeout_s
        self.options: dict[str, Any] = {
            "loop": self._loop,
            "access_log": None,
            "keepalive_timeout": _KEEPALIVE_S,
            "lingering_time": _LINGER_S,
            "max_line_size": _MAX_LINE_BYTES,
            "max_field_size": _MAX_LINE_BYTES,
            # A compressed body is refused by its header; it must not be inflated before that.
            "auto_decompress": False,
        }

    def __call__(self) -> Connection:
        """A connection of the control port; asyncio's servers call this."""
        return Connection(self)

    async def take(self, sock: socket.socket, peer: tuple[str, int], data: bytes, hand_back: HandBack) -> None:
        """Go on with a connection that a worker accepted, and of which it has read `data`."""
        make = RelayedConnection if sock.family == socket.AF_UNIX else Connection
        await self._loop.connect_accepted_socket(lambda: make(self, peer, hand_back, data), sock)

    def sweep(self) -> None:
        """Close connections whose next head isn't complete in time (failures.md row 24); once a second."""
        overdue = self._loop.time() - self._head_timeout_s
        for connection in self.connections:
            assert isinstance(connection, Connection)
            if 0 < connection.half_head_since < overdue and connection.waits_for_a_head:
                text = f"no complete request within {self._head_timeout_s:g} s"
                connection.refuse(self.error_page(408, "bad_request", text))

    async def finish(self, grace_s: float) -> None:
        """End: idle connections at once, the others behind the answer under way, all within `grace_s`.

        aiohttp's own shutdown would stop reading first, and a request whose body is on its way would be lost.
        """
        self.finishing = True
        deadline = self._loop.time() + grace_s
        while (left_s := deadline - self._loop.time()) > 0 and (busy := self._end_idle()):
            await asyncio.wait(busy, timeout=left_s)
        await self.shutdown(_CUT_WITHIN_S)

    def _end_idle(self) -> list[asyncio.Task[None]]:
        """Closes what waits for a request; what is left are the tasks of the others."""
        busy = []
        for connection in self.connections:
            assert isinstance(connection, Connection)
            if connection.waits_for_a_head:
                connection.force_close()
            connection.takes_no_more = True
            task = connection._task_handler
            if task is not None and not task.done():
                busy.append(task)
        return busy


def _head_of(message: RawRequestMessage) -> bytes:
    """A parsed head as it came, but for spaces around values."""
    target = message.path.encode("utf-8", "surrogateescape")
    lines = [b"%b %b HTTP/%d.%d" % (message.method.encode(), target, *message.version)]
    lines += [b"%b: %b" % header for header in message.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"
