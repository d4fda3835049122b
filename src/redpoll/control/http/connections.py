"""The HTTP connections of the control port, on aiohttp's server.

This module adds what aiohttp's server lacks: absolute deadlines for heads and bodies, parser errors as JSON of the API,
and a limit on connections. No other module uses private names of aiohttp; tests/control/http/test_connections.py fails
if a new version changes them.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import set_exception
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web import RequestPayloadError, Server
from aiohttp.web_protocol import RequestHandler

from redpoll.config.proxies import NO_PROXIES, TrustedProxies
from redpoll.control.http.request import CutOff, Request, too_large
from redpoll.control.http.response import Response
from redpoll.http.messages import MAX_BODY_BYTES

__all__ = ["Connection", "Connections", "ErrorPage", "PortRequest"]

log = structlog.get_logger(__name__)

# Longer than the 60 s after which proxies commonly drop an idle connection, so that they close first.
_KEEPALIVE_S: Final = 75.0
# A client that is refused before its body is complete has this long to stop sending and read the response.
_LINGER_S: Final = 2.0
# Applies to the request line and to each header, as in the worker.
_MAX_LINE_BYTES: Final = 16 * 1024
# After the grace period the remaining handlers are cancelled; they have this long to end.
_CUT_WITHIN_S: Final = 0.1
# The control port serves the dashboard, metrics and the operator's scripts. Redis, the record store and webhook
# deliveries need the other descriptors.
_MAX_CONNECTIONS: Final = 1024
_MAX_SHARE_OF_DESCRIPTORS: Final = 4
# Of all bodies that are being read, as in a worker. Forms of the dashboard are read before their session is known.
_MAX_READING_BYTES: Final = 32 * 1024 * 1024

# (status, code, text) -> an error response of the API.
ErrorPage = Callable[[int, str, str], Response]


class PortRequest(Request):
    """A request to the control port. aiohttp's server creates it instead of its own request class."""

    __slots__ = ("_payload", "_task", "answered", "message", "protocol", "writer")

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Connection,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        super().__init__(message.method, message.path, message.headers, b"")
        self.message = message
        self.protocol = protocol
        self.writer = writer
        self._payload = payload
        self._task = task
        self.answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        peer = protocol.peername
        host: str = (peer[0] if isinstance(peer, tuple) else peer) or ""
        trusted = protocol.trusted
        self.remote = trusted.client_of(host, message.headers.getall("X-Forwarded-For", ())) if trusted else host
        self.secure = trusted.is_secure(host, self.headers.get("X-Forwarded-Proto"), False)

    def respond(self, response: Response) -> None:
        # aiohttp cancels the request's task, and with it this future, when the client disconnects.
        if not self.answered.done():
            self.answered.set_result(response)

    @property
    def body_is_whole(self) -> bool:
        return self._payload.is_eof()

    @property
    def body_size(self) -> int | None:
        """The body's Content-Length in bytes; None if it is chunked. The parser has checked that it is a number."""
        length = self.headers.get("Content-Length")
        return int(length) if length is not None else None if "Transfer-Encoding" in self.headers else 0

    async def read_body(self, timeout_s: float) -> None:
        """Read the complete body within `timeout_s`; more bytes don't extend the time. Raises CutOff."""
        content = self._payload
        if content.is_eof():
            self.body = content.read_nowait()
            return
        transport = self.protocol.transport
        if self.headers.get("Expect", "").lower() == "100-continue" and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = 0
        connections = self.protocol.connections
        try:
            async with asyncio.timeout(timeout_s):
                while not content.at_eof():
                    part = await content.readany()
                    parts.append(part)
                    size += len(part)
                    connections.reading_bytes += len(part)
                    if size > MAX_BODY_BYTES:
                        raise too_large()
                    if connections.reading_bytes > connections.max_reading_bytes:
                        text = "the control port is reading too many request bodies; send the request again"
                        raise CutOff(503, "unavailable", text)
        except TimeoutError:
            raise CutOff(408, "bad_request", f"the body was not complete within {timeout_s:g} s") from None
        except RequestPayloadError:
            raise CutOff(400, "bad_request", "the body doesn't match its Content-Length or Transfer-Encoding") from None
        except ConnectionError:
            # No client reads this response, but the request is counted.
            raise CutOff(400, "bad_request", "the client closed the connection before its body was complete") from None
        finally:
            connections.reading_bytes -= size
        self.body = b"".join(parts)

    # -- called by aiohttp's server ------------------------------------------------------------------------

    def _cancel(self, reason: BaseException) -> None:
        """The client disconnected: end a read of the body."""
        set_exception(self._payload, reason)

    def _finish(self) -> None:
        """The handler has ended; there is nothing to release."""


class Connection(RequestHandler):
    """One HTTP connection.

    `half_head_since`: when (loop time) the first bytes of an incomplete request head arrived; 0 if there is none.
    `trusted`: the trusted proxies. If the peer is one of them, each request may come from another client.
    `takes_no_more`: the connection closes after the current response.
    """

    __slots__ = ("_error_page", "connections", "half_head_since", "peername", "takes_no_more", "trusted")

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections, **connections.options)
        self.connections = connections
        # A reference of our own: when the peer disconnects, aiohttp drops its server and may still render an error.
        self._error_page = connections.error_page
        self.trusted = connections.trusted
        self.peername: Any = None
        self.half_head_since = 0.0
        # True if the connection was accepted after the shutdown began.
        self.takes_no_more = connections.finishing

    @property
    def waits_for_a_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peername = transport.get_extra_info("peername")
        if not self.connections.make_room():
            text = "the control port has too many connections; try again later"
            self.refuse(self._error_page(503, "unavailable", text))

    def data_received(self, data: bytes) -> None:
        # A body is under way, or these bytes are of the next head, also while the last request is being answered.
        in_head = self.waits_for_a_head or (self._newest_body().is_eof() and not data.isspace())
        earlier = len(self._messages)
        super().data_received(data)
        if len(self._messages) == earlier:
            is_half = in_head
        else:
            # What follows a body in one packet isn't noticed here.
            is_half = self._newest_body() is EMPTY_PAYLOAD and not data.endswith((b"\r\n\r\n", b"\n\n"))
        if not is_half:
            self.half_head_since = 0.0
        elif not self.half_head_since:
            self.half_head_since = self._loop.time()

    def _newest_body(self) -> StreamReader:
        """The body of the last request whose head is complete, which may be under way."""
        if self._messages:
            return self._messages[-1][1]
        request = self._current_request
        return EMPTY_PAYLOAD if request is None else request._payload

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls this after every body, paused or not, and resuming costs as much as parsing a head.
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def refuse(self, response: Response) -> None:
        """Send an error response without a complete request, and close."""
        if self.transport is not None:
            response.keep_alive = False
            self.transport.write(response.render("GET"))
        self.force_close()

    def handle_error(
        self,
        request: Any,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Any:
        """Render aiohttp's errors, which are malformed requests. The front renders all errors of handlers."""
        if status < 500:
            text = "not an HTTP request: " + (message or "malformed").partition("\n")[0].rstrip(":")[:200]
            response = self._error_page(status, "bad_request", text)
        else:
            log.error("http connection failed", exc_info=exc)
            response = self._error_page(500, "internal", "internal error")
        response.keep_alive = False
        return response


class Connections(Server):
    """Creates the connections of the control port, limits their number and closes slow ones.

    `handler` responds to requests; `error_page` renders the errors of bytes that are no request. `refused` counts the
    connections that were refused because of `max_connections`. `reading_bytes`: of bodies that aren't complete.
    """

    def __init__(
        self,
        handler: Callable[[PortRequest], Awaitable[Response]],
        error_page: ErrorPage,
        *,
        head_timeout_s: float,
        trusted: TrustedProxies = NO_PROXIES,
        max_connections: int = 0,
    ) -> None:
        super().__init__(handler, request_factory=PortRequest)  # type: ignore[arg-type]
        self.refused = 0
        self.reading_bytes = 0
        self.max_reading_bytes = _MAX_READING_BYTES
        self.max_connections = max_connections or _default_max_connections()
        self._refusing = False
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
            # The front refuses compressed bodies by their header; aiohttp must not inflate them before.
            "auto_decompress": False,
        }

    def __call__(self) -> Connection:
        """Create a connection. asyncio's server calls this."""
        return Connection(self)

    def make_room(self) -> bool:
        """Close an idle connection if there are too many. Returns False if all are busy."""
        if len(self.connections) <= self.max_connections:
            self._refusing = False
            return True
        for connection in self.connections:
            assert isinstance(connection, Connection)
            # The last one is the new one, which has sent nothing yet.
            idle = connection.waits_for_a_head and not connection.half_head_since
            if idle and connection is not self.connections[-1]:
                connection.force_close()
                return True
        self.refused += 1
        if not self._refusing:
            self._refusing = True
            log.warning("control port full", connections=self.max_connections)
        return False

    def sweep(self) -> None:
        """Close connections whose next head isn't complete in time. The janitor calls this once a second.

        See deploy/failures.md "Hostile input".
        """
        overdue = self._loop.time() - self._head_timeout_s
        for connection in self.connections:
            assert isinstance(connection, Connection)
            if 0 < connection.half_head_since < overdue and connection.waits_for_a_head:
                text = f"no complete request within {self._head_timeout_s:g} s"
                connection.refuse(self.error_page(408, "bad_request", text))

    async def finish(self, grace_s: float) -> None:
        """Close idle connections at once, the others after their current response, and all after `grace_s`.

        aiohttp's own shutdown stops reading first, so a request whose body is still arriving would be lost.
        """
        self.finishing = True
        deadline = self._loop.time() + grace_s
        while (left_s := deadline - self._loop.time()) > 0 and (busy := self._end_idle()):
            await asyncio.wait(busy, timeout=left_s)
        await self.shutdown(_CUT_WITHIN_S)

    def _end_idle(self) -> list[asyncio.Task[None]]:
        """Close the connections that wait for a request. Returns the tasks of the others."""
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


def _default_max_connections() -> int:
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(1, limit // _MAX_SHARE_OF_DESCRIPTORS))
