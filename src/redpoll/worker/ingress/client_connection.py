"""What the engine calls for each connection, from its first byte to its last.

The engine (`redpoll._engine`) parses HTTP heads and WebSocket frames. This class passes on what it found: request heads
to the gate, messages to the session, and the session's effects to the hub.
"""

from __future__ import annotations

from time import monotonic

from redpoll._memory import untracked
from redpoll.worker.hub.client_libraries import UNKNOWN
from redpoll.worker.hub.connection import Connection
from redpoll.worker.ingress.gate import Gate

__all__ = ["ClientConnection", "ProxiedPeer"]


@untracked
class ClientConnection(Connection):
    """A connection of the public port."""

    __slots__ = ()

    gate: Gate

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.flusher, gate.max_message_bytes)
        self.client_seen = UNKNOWN
        self.gate = gate
        self.session = None  # type: ignore[assignment]

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
        self.gate.http.connections[self].received(data)

    def http_ended(self) -> bool:
        return self.gate.http.connections[self].ended()

    def message_received(self, message: bytes) -> None:
        if self.gate.debugging.any:
            self.gate.debugging.received(self, message)
        effects = self.session.receive(message, monotonic())
        if effects:
            self.gate.hub.perform(self, effects)

    def binary_received(self) -> None:
        self.gate.hub.perform(self, self.session.receive_binary(monotonic()))

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


class ProxiedPeer(ClientConnection):
    """A connection of which a proxy or the TLS handshake says more than the kernel knows.

    `peer_address` is the client's address, or that of the proxy in front of us; None if unknown. `secure`: the
    connection uses TLS, or the proxy says that the client's connection to it does.
    """

    # Only these connections have them.
    __slots__ = ("peer_address", "secure")

    def __init__(self, gate: Gate, peer_address: tuple[str, int], secure: bool) -> None:
        super().__init__(gate)
        self.peer_address = peer_address
        self.secure = secure

    @property
    def address(self) -> str:
        return self.peer_address[0] if self.peer_address else ""

    @property
    def proxied_peer(self) -> tuple[tuple[str, int], bool]:
        return self.peer_address, self.secure
