"""The public port's door: reads the head of a request and says where it goes.

An Upgrade becomes a WebSocket here, or is refused with the protocol's own code; any other request is handed
to the control plane as the same TCP connection. Knows HTTP heads and nothing of channels.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import msgspec
import structlog

from redpoll import _engine, _frame, handover
from redpoll._fanout import Flusher
from redpoll.cluster.directory import Directory
from redpoll.config import Settings
from redpoll.protocol import frames, handshake
from redpoll.protocol.limits import Limits
from redpoll.protocol.session import Session
from redpoll.worker.connection import Connection
from redpoll.worker.hub import Hub
from redpoll.worker.janitor import Janitor

__all__ = ["Gate"]

log = structlog.get_logger()

_REASONS = {
    400: "Bad Request",
    405: "Method Not Allowed",
    408: "Request Timeout",
    426: "Upgrade Required",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_ALIVE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK"
# Connections that haven't shown a head may use the descriptors between the two bounds (failures.md row 14).
_HEADROOM = 48


class Gate:
    """Lets connections in. `ready()` says whether this worker may: directory loaded, Redis there.

    `max_connections` counts sockets of this worker, open or still at the door.
    """

    def __init__(
        self,
        settings: Settings,
        flusher: Flusher,
        hub: Hub,
        janitor: Janitor,
        directory: Directory,
        handover_path: str,
        ready: Callable[[], bool],
        max_connections: int,
    ) -> None:
        self.settings = settings
        self.flusher = flusher
        self.hub = hub
        self.janitor = janitor
        self._directory = directory
        self._handover_path = handover_path
        self._passage: handover.Passage | None = None
        self._ready = ready
        self._max_connections = max_connections
        self._limits = Limits(settings.max_channels_per_connection, settings.client_events_per_second)
        self.draining = False
        self.connections = 0
        self.connections_total = 0
        self.upgrades_refused_total = 0
        self.handed_over_total = 0

    # -- a connection's way in and out ---------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.connections += 1
        self.connections_total += 1
        if self.connections > self._max_connections + _HEADROOM:
            connection.abort()
        else:
            self.janitor.arrived(connection)

    def gone(self, connection: Connection) -> None:
        """A connection that never became a WebSocket is lost, answered or handed over."""
        self.connections -= 1
        self.janitor.departed(connection)

    def closing(self, connection: Connection) -> None:
        """Our last word is queued: channels are left now, the socket has a little time for its goodbye."""
        self.janitor.closing(connection)
        if connection.session is not None:
            self.hub.closed(connection)

    def closed(self, connection: Connection) -> None:
        """It is no WebSocket any more, whatever the cause: FIN, RST, silence, a fault, ourselves."""
        self.connections -= 1
        if connection.state == _engine.CLOSED:
            self.janitor.departed(connection)
        if connection.session is not None:
            self.hub.closed(connection)

    def head_received(self, connection: Connection, head: bytes) -> None:
        try:
            request = _engine.parse_head(head)
        except ValueError as fault:
            self._answer(connection, 400, "bad_request", f"not an HTTP request: {fault}")
            return
        # An Upgrade to something else (curl offers h2c) is a request like any other: nobody must follow it.
        if b"websocket" in request.headers.get(b"upgrade", b"").lower():
            self._upgrade(connection, request)
        elif _is_websocket_path(request.target):
            text = "this is a WebSocket address; connect with an Upgrade"
            self._answer(connection, 426, "bad_request", text, "Upgrade: websocket\r\n")
        else:
            self._hand_over(connection, request.target)

    def head_too_large(self, connection: Connection) -> None:
        self._answer(connection, 431, "bad_request", "the request head is larger than 16 KiB")

    def head_late(self, connection: Connection) -> None:
        """The head isn't complete in time (failures.md row 24)."""
        text = f"no complete request within {self.settings.head_timeout_s:g} s"
        self._answer(connection, 408, "bad_request", text)

    # -- WebSockets ----------------------------------------------------------------------------------------

    def _upgrade(self, connection: Connection, request: _engine.Head) -> None:
        fault = _engine.upgrade_fault(request)
        if fault is not None:
            status, text = fault
            extra = "Sec-WebSocket-Version: 13\r\n" if status == 426 else ""
            self._answer(connection, status, "bad_request", text, extra)
            return
        if self.draining or not self._ready() or self.connections > self._max_connections:
            # Refused here, never by a 42xx close: pusher-js would come back at once (protocol.md 4.1).
            self.upgrades_refused_total += 1
            text = "this server is full" if self._ready() and not self.draining else "this server isn't ready"
            self._answer(connection, 503, "unavailable", text, "Retry-After: 1\r\n")
            return
        target = urlsplit(request.target.decode("latin-1"))
        outcome = handshake.check(
            target.path,
            {name: values[-1] for name, values in parse_qs(target.query, keep_blank_values=True).items()},
            _text(request.headers.get(b"origin")),
            self._directory.find,
        )
        connection.accept(request.headers[b"sec-websocket-key"])
        if isinstance(outcome, handshake.Refusal):
            self.upgrades_refused_total += 1
            connection.shut(outcome.code, outcome.message)
            return
        connection.set_sid(secrets.randbits(40) + 1, secrets.randbits(40) + 1)
        session = Session((connection.sid_hi, connection.sid_lo), outcome, self._limits)
        connection.session = session
        self.hub.everyone.add(connection)
        self.janitor.opened(connection)
        timeout_s = self.settings.activity_timeout_s
        connection.send(_frame.text(frames.connection_established(session.socket_id, timeout_s)))

    # -- everything else -----------------------------------------------------------------------------------

    def _hand_over(self, connection: Connection, target: bytes) -> None:
        if self._passage is None:
            self._passage = handover.connect(self._handover_path, self._handed_back, self._passage_lost)
        if self._passage is None:
            if target in (b"/", b"/healthz"):
                connection.answer(_ALIVE)  # this process is, whatever the other one does
                return
            text = "the control plane isn't there; send the request again"
            self._answer(connection, 503, "unavailable", text, "Retry-After: 1\r\n")
            return
        peer = connection.peer
        descriptor, data = connection.detach()
        self.handed_over_total += 1
        self._passage.send(descriptor, peer or ("", 0), data)

    def _handed_back(self, descriptor: int, peer: tuple[str, int], data: bytes) -> None:
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        self.janitor.spawn(self._take_back(sock, data))

    async def _take_back(self, sock: socket.socket, data: bytes) -> None:
        def connection() -> Connection:
            # Fed before the transport is there, so that nothing read later can come before it.
            made = Connection(self)
            made.feed(data)
            return made

        await self.janitor.loop.connect_accepted_socket(connection, sock)

    def _passage_lost(self) -> None:
        self._passage = None

    def _answer(self, connection: Connection, status: int, code: str, text: str, extra_headers: str = "") -> None:
        """A last word in HTTP, in the API's error shape (protocol.md 14.11), and the connection ends."""
        body = msgspec.json.encode({"error": text, "code": code, "status": status, "trace_id": secrets.token_hex(16)})
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{extra_headers}\r\n"
        )
        connection.answer(head.encode() + body)

    def close(self) -> None:
        if self._passage is not None:
            self._passage.close()


def _is_websocket_path(target: bytes) -> bool:
    return target.startswith(b"/app/")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
