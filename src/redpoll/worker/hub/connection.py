"""One client's connection, as the hub sees it: its session, and what the worker sends it.

The engine (`redpoll._engine`) parses HTTP heads and WebSocket frames, and calls
`worker.ingress.client_connection.ClientConnection`, which is the class of all connections. This class doesn't know
Redis, and has no state that the session or the engine has.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from redpoll import _frame
from redpoll._engine import HTTP, WebSocket
from redpoll._memory import untracked
from redpoll.protocol import frames
from redpoll.protocol.errors import close_reason
from redpoll.protocol.session import Session
from redpoll.worker.hub.client_libraries import ClientSeen

__all__ = ["Connection"]


class _Observer(Protocol):
    """debugging.py, which imports this module. `any`: a connection is being debugged."""

    any: bool

    def closing(self, connection: Connection, code: int, reason: str) -> None:
        """The server closes the connection."""


class _Gate(Protocol):
    """The part of worker/ingress/gate.py, a room above, that is used here."""

    @property
    def debugging(self) -> _Observer: ...


@untracked
class Connection(WebSocket):
    """A client's connection. `session` is set when the client is greeted; before that, and for refused clients, it is
    None, which only the gate sees."""

    # The engine has the fields: with slots, the garbage collector would visit each connection
    # (ext/README.md "Ownership").
    __slots__ = ()

    client_seen: ClientSeen
    gate: _Gate
    session: Session

    def __str__(self) -> str:
        return f"connection {self.session.socket_id}" if self.session is not None else "connection without a session"

    @property
    def address(self) -> str:
        """The client's address as far as it is known without its request: the peer's, or that of a PROXY header. Empty
        if there is none."""
        return (self.peer or ("",))[0]

    @property
    def proxied_peer(self) -> tuple[tuple[str, int], bool] | None:
        """The peer's address and whether it used TLS, as a PROXY header or the TLS port says. None without these."""
        return None

    @property
    def transport_name(self) -> str:
        """How the client is connected: by a WebSocket, or a transport of the HTTP fallback."""
        return "websocket"

    @property
    def is_http(self) -> bool:
        """It is open and speaks HTTP."""
        return self.state == HTTP

    def shut(self, code: int, message: str) -> None:
        """Send an error frame, then a close frame with the same words (protocol/README.md "Close codes")."""
        if self.gate.debugging.any:
            self.gate.debugging.closing(self, code, message)
        self.send(_frame.text(frames.error(code, message)))
        self.close(code, close_reason(message))

    def report(self, fault: Exception) -> None:
        """An exception of ours in what concerns this connection, which must not stop what concerns others."""
        context = {"message": "exception in the service of a connection", "exception": fault, "protocol": self}
        asyncio.get_running_loop().call_exception_handler(context)
