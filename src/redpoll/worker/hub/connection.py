"""One client's connection, from its first byte to its last.

The engine (`redpoll._engine`) parses HTTP heads and WebSocket frames. This class passes what it found on: request
heads to the gate, messages to the session, and the session's effects to the hub. It doesn't know Redis, and has no
state that the session or the engine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from redpoll import _frame
from redpoll._engine import HTTP, WebSocket
from redpoll._fanout import Flusher
from redpoll._memory import untracked
from redpoll.http.connection import HttpConnection
from redpoll.protocol import frames
from redpoll.protocol.effects import Effect
from redpoll.protocol.errors import close_reason
from redpoll.protocol.session import Session
from redpoll.worker.hub.client_libraries import UNKNOWN, Arrival

__all__ = ["Connection", "Doorkeeper", "Introduced"]


class Observer(Protocol):
    """Writes down what happens to connections that are being debugged (debugging.py). `any`: there is one."""

    any: bool

    def received(self, connection: Connection, message: bytes) -> None:
        """A message came."""

    def closing(self, connection: Connection, code: int, reason: str) -> None:
        """The server closes the connection."""

    def closed(self, connection: Connection, code: int, reason: str) -> None:
        """The WebSocket has ended."""


class Doorkeeper(Protocol):
    """What a connection reports its events to: the gate."""

    flusher: Flusher
    max_message_bytes: int
    http_connections: Mapping[Connection, HttpConnection[Any]]

    @property
    def debugging(self) -> Observer:
        """What writes down connections that are being debugged."""

    def connected(self, connection: Connection) -> None:
        """The TCP connection is open; nothing was received yet."""

    def head_received(self, connection: Connection, head: bytes) -> None:
        """A complete request head came."""

    def head_begun(self, connection: Connection) -> None:
        """A part of a request head came."""

    def http_began(self, connection: Connection, data: bytes) -> None:
        """The first bytes are a request that isn't an upgrade."""

    def head_too_large(self, connection: Connection) -> None:
        """16 KiB came without the end of a request head."""

    def gone(self, connection: Connection) -> None:
        """The connection ended without having been a WebSocket: lost or answered."""

    def perform(self, connection: Connection, effects: Sequence[Effect]) -> None:
        """Carry out its session's effects."""

    def pong_received(self, connection: Connection) -> None:
        """The next pong came after `awaits_pong` was set."""

    def closing(self, connection: Connection) -> None:
        """The closing handshake began, on either side."""

    def closed(self, connection: Connection) -> None:
        """The WebSocket has ended."""

    def released(self, connection: Connection) -> None:
        """Its descriptor is closed."""


@untracked
class Connection(WebSocket):
    """A client's connection. `session` is set when the client is greeted; before that, and for refused clients, it is
    None, which only the gate sees."""

    # The engine has the fields: with slots, the garbage collector would visit each connection
    # (ext/README.md "Ownership").
    __slots__ = ()

    arrival: Arrival
    gate: Doorkeeper
    session: Session

    def __init__(self, gate: Doorkeeper) -> None:
        super().__init__(gate.flusher, gate.max_message_bytes)
        self.arrival = UNKNOWN
        self.gate = gate
        self.session = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"connection {self.session.socket_id}" if self.session is not None else "connection without a session"

    @property
    def address(self) -> str:
        """The client's address as far as it is known without its request: the peer's, or that of a PROXY header. Empty
        if there is none."""
        return (self.peer or ("",))[0]

    @property
    def is_http(self) -> bool:
        """It is open and speaks HTTP."""
        return self.state == HTTP

    # -- called by the engine -----------------------------------------------------------------------------

    def connected(self) -> None:
        self.gate.connected(self)

    def head_received(self, head: bytes) -> None:
        self.gate.head_received(self, head)

    def head_begun(self) -> None:
        self.gate.head_begun(self)

    def head_too_large(self) -> None:
        self.gate.head_too_large(self)

    def gone(self) -> None:
        self.gate.gone(self)

    def http_began(self, data: bytes) -> bool:
        self.gate.http_began(self, data)
        return True

    def http_received(self, data: bytes) -> None:
        self.gate.http_connections[self].received(data)

    def http_ended(self) -> bool:
        return self.gate.http_connections[self].ended()

    def message_received(self, message: bytes) -> None:
        if self.gate.debugging.any:
            self.gate.debugging.received(self, message)
        effects = self.session.receive(message, monotonic())
        if effects:
            self.gate.perform(self, effects)

    def binary_received(self) -> None:
        self.gate.perform(self, self.session.receive_binary(monotonic()))

    def pong_received(self) -> None:
        self.gate.pong_received(self)

    def closing(self) -> None:
        self.gate.closing(self)

    def closed(self, code: int, reason: str) -> None:
        if self.gate.debugging.any:
            self.gate.debugging.closed(self, code, reason)
        self.gate.closed(self)

    def released(self) -> None:
        self.gate.released(self)

    # -- called by the worker -----------------------------------------------------------------------------

    def shut(self, code: int, message: str) -> None:
        """Send an error frame, then a close frame with the same words (protocol/README.md "Close codes")."""
        if self.gate.debugging.any:
            self.gate.debugging.closing(self, code, message)
        self.send(_frame.text(frames.error(code, message)))
        self.close(code, close_reason(message))


class Introduced(Connection):
    """A connection of which a proxy or the TLS handshake says more than the kernel knows.

    `peer_address` is the client's address, or that of the proxy in front of us; None if unknown. `secure`: the
    connection uses TLS, or the proxy says that the client's connection to it does.
    """

    # Only these connections have them.
    __slots__ = ("peer_address", "secure")

    def __init__(self, gate: Doorkeeper, peer_address: tuple[str, int], secure: bool) -> None:
        super().__init__(gate)
        self.peer_address = peer_address
        self.secure = secure

    @property
    def address(self) -> str:
        return self.peer_address[0] if self.peer_address else ""
