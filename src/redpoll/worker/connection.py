"""One client's socket, from its first byte to its last.

The engine below (`redpoll._engine`) knows HTTP heads and RFC 6455; this class says what happens to what it
found: heads go to the gate, messages through the session, what the session wants done to the hub.
Knows nothing of Redis, and keeps no state that the session or the engine has already.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from redpoll import _frame
from redpoll._engine import WebSocket
from redpoll.protocol import frames
from redpoll.protocol.errors import close_reason
from redpoll.protocol.session import Session

if TYPE_CHECKING:
    from redpoll.worker.gate import Gate

__all__ = ["Connection"]


class Connection(WebSocket):
    """A client. `session` is there from the greeting on: before it, and where the door was kept shut, it is None
    for the gate alone to see."""

    # Every byte here is paid once a connection (design.md 7): two pointers, the rest is the engine's.
    __slots__ = ("gate", "session")

    gate: Gate
    session: Session

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.flusher, gate.settings.max_message_bytes)
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
            self.gate.hub.perform(self, effects)

    def binary_received(self) -> None:
        self.gate.hub.perform(self, self.session.receive_binary(monotonic()))

    def closing(self) -> None:
        self.gate.closing(self)

    def closed(self, code: int, reason: str) -> None:
        self.gate.closed(self)

    # -- called by the worker -----------------------------------------------------------------------------

    def shut(self, code: int, message: str) -> None:
        """Say why, then close: an error frame and a close frame with the same words (protocol.md 4.3)."""
        self.send(_frame.text(frames.error(code, message)))
        self.close(code, close_reason(message))
