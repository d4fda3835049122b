"""Calls back when a client has read most of what was sent to it.

Replays and answers to `pusher:history` can be larger than what a connection may have unsent. Their senders stop at
WRITABLE_BELOW_BYTES and wait here; the fan-out reports the connection as soon as it has less than that unsent.
Other connections cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from redpoll._fanout import Flusher, Sink

__all__ = ["WRITABLE_BELOW_BYTES", "WritableSignal"]

# A connection with more unsent gets no further page. With one more page and its live events it stays below
# `max_unsent_bytes`, which would close it.
WRITABLE_BELOW_BYTES: Final = 256 * 1024


class WritableSignal:
    """One per worker; sets the flusher's `on_writable`."""

    def __init__(self, flusher: Flusher) -> None:
        flusher.writable_below_bytes = WRITABLE_BELOW_BYTES
        # Late: the flusher of a worker is made before all that needs it.
        flusher.on_writable = self._now_writable
        self._waiting: dict[Sink, list[Callable[[], None]]] = {}
        self._draining: dict[Sink, list[Callable[[], None]]] = {}

    def wait(self, connection: Sink, then: Callable[[], None]) -> None:
        """Call `then` once when `connection` has less than WRITABLE_BELOW_BYTES unsent, never from within this call.

        It is not called if the connection closes first.
        """
        self._waiting.setdefault(connection, []).append(then)
        if not connection.await_writable():
            asyncio.get_running_loop().call_soon(self._now_writable, (connection,))

    def wait_drained(self, connection: Sink, then: Callable[[], None]) -> None:
        """As `wait`, when nothing is unsent."""
        self._draining.setdefault(connection, []).append(then)
        # The fan-out reports a connection for one thing at a time: this one comes after the other.
        if connection not in self._waiting and not connection.await_drained():
            asyncio.get_running_loop().call_soon(self._now_writable, (connection,))

    def closed(self, connection: Sink) -> None:
        """Forget the callbacks for this connection."""
        self._waiting.pop(connection, None)
        self._draining.pop(connection, None)

    def _now_writable(self, connections: Iterable[Sink]) -> None:
        loop = asyncio.get_running_loop()
        for connection in connections:
            for then in self._waiting.pop(connection, ()):
                # Each on its own: an error in one must not lose the others' signal.
                loop.call_soon(then)
            if connection in self._draining and not connection.await_drained():
                for then in self._draining.pop(connection):
                    loop.call_soon(then)
