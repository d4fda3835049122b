"""One client's socket, from its first byte to its last.

The engine below (`redpoll._engine`) knows HTTP heads and RFC 6455; this class says what happens to what it
found: heads go to the gate, messages through the session, what the session wants done to the hub.
Knows nothing of Redis, and keeps no state that the session or the engine has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from redpoll import _frame
from redpoll._engine import WebSocket
from redpoll._fanout import Flusher
from redpoll.protocol import frames
from redpoll.protocol.errors import close_reason
from redpoll.protocol.session import Effect, Session
from redpoll.worker.client_libraries import UNKNOWN, Arrival

__all__ = ["Connection", "Doorkeeper", "Introduced"]


class Doorkeeper(Protocol):
    """Who is told what becomes of a connection, in the order in which it happens: the gate."""

    flusher: Flusher
    max_message_bytes: int

    def connected(self, connection: Connection) -> None:
        """The transport is there."""

    def head_received(self, connection: Connection, head: bytes) -> None:
        """A complete request head; decide."""

    def head_too_large(self, connection: Connection) -> None:
        """16 KiB and no end of the head."""

    def gone(self, connection: Connection) -> None:
        """Lost, answered or handed over; it never was a WebSocket."""

    def perform(self, connection: Connection, effects: Sequence[Effect]) -> None:
        """What its session wants done."""

    def closing(self, connection: Connection) -> None:
        """A close has begun, whoever began it."""

    def closed(self, connection: Connection) -> None:
        """It is no WebSocket any more."""


class Connection(WebSocket):
    """A client. `session` is there from the greeting on: before it, and where the door was kept shut, it is None
    for the gate alone to see."""

    # Every byte here is paid once a connection (design.md 7): three pointers, the rest is the engine's.
    __slots__ = ("arrival", "gate", "session")

    arrival: Arrival
    gate: Doorkeeper
    session: Session

    def __init__(self, gate: Doorkeeper) -> None:
        super().__init__(gate.flusher, gate.max_message_bytes)
        self.arrival = UNKNOWN
        self.gate = gate
        self.session = None  # type: ignore[assignment]

    # -- called by the engine -----------------------------------------------------------------------------

    def connected(self) -> None:
        self.gate.connected(self)

    def head_received(self, head: bytes) -> None:
        self.gate.head_received(self, head)

    def head_too_large(self) -> None:
        self.gate.head_too_large(self)

    def gone(self) -> None:
        self.gate.gone(self)

    def message_received(self, message: bytes) -> None:
        effects = self.session.receive(message, monotonic())
        if effects:
            self.gate.perform(self, effects)

    def binary_received(self) -> None:
        self.gate.perform(self, self.session.receive_binary(monotonic()))

    def closing(self) -> None:
        self.gate.closing(self)

    def closed(self, code: int, reason: str) -> None:
        self.gate.closed(self)

    # -- called by the worker -----------------------------------------------------------------------------

    def shut(self, code: int, message: str) -> None:
        """Say why, then close: an error frame and a close frame with the same words (protocol.md 4.3)."""
        self.send(_frame.text(frames.error(code, message)))
        self.close(code, close_reason(message))


class Introduced(Connection):
    """A connection of which more is known than the kernel says.

    `peer_address`: the client's, or that of whoever is in front of us (None where there is none to know). `secure`:
    this connection is TLS, or the proxy in front says that its own was.
    """

    # Paid by these connections alone.
    __slots__ = ("peer_address", "secure")

    def __init__(self, gate: Doorkeeper, peer_address: tuple[str, int], secure: bool) -> None:
        super().__init__(gate)
        self.peer_address = peer_address
        self.secure = secure
