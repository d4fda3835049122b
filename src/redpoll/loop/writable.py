"""Calls back when a client has read most of what was sent to it.

Replays and answers to `pusher:history` can be larger than what a connection may have unsent. Their senders stop at
MAX_UNSENT_BYTES and wait here; the fan-out reports the connection as soon as it has less than that unsent.
Other connections cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from redpoll._fanout import Flusher, Sink

__all__ = ["MAX_UNSENT_BYTES", "DrainSignal"]

# A connection with more unsent gets no further page. With one more page and its live events it stays below
# `max_owed_bytes`, which would close it.
MAX_UNSENT_BYTES: Final = 256 * 1024


class DrainSignal:
    """One per worker; sets the flusher's `on_drained`."""

    def __init__(self, flusher: Flusher) -> None:
        flusher.drained_bytes = MAX_UNSENT_BYTES
        flusher.on_drained = self._drained
        self._waiting: dict[Sink, list[Callable[[], None]]] = {}

    def wait(self, connection: Sink, then: Callable[[], None]) -> None:
        """Call `then` once when `connection` has less than MAX_UNSENT_BYTES unsent, never from within this call.

        It is not called if the connection closes first.
        """
        self._waiting.setdefault(connection, []).append(then)
        if not connection.await_drained():
            asyncio.get_running_loop().call_soon(self._drained, (connection,))

    def closed(self, connection: Sink) -> None:
        """Forget the callbacks for this connection."""
        self._waiting.pop(connection, None)

    def _drained(self, connections: Iterable[Sink]) -> None:
        loop = asyncio.get_running_loop()
        for connection in connections:
            for then in self._waiting.pop(connection, ()):
                # Each on its own: an error in one must not lose the others' signal.
                loop.call_soon(then)
