"""Stops reading from clients while Redis is too slow for what they have sent (cluster/README.md "Bounds").

What clients send during that time waits in the kernel's buffers, and then in their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll._fanout import Audience

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["Backpressure"]


class Backpressure:
    """`on` while no client is read; the gate refuses new clients then. `times_on` is for /metrics."""

    def __init__(self, everyone: Audience, congested: Callable[[], bool]) -> None:
        self.on = False
        self.times_on = 0
        self._everyone = everyone
        self._congested = congested

    def check(self, tick: int) -> None:
        """Stop reading, or read again, as Redis needs it. Called four times a second with the present tick.

        Time in which we were not reading doesn't count as idle.
        """
        congested = self._congested()
        if congested is self.on:
            return
        self.on = congested
        self.times_on += congested
        for connection in self._everyone:
            if congested:
                connection.pause_reading()
            else:
                connection.heard_tick = tick
                connection.resume_reading()

    def closing(self, connection: Connection) -> None:
        """Read a connection that is closing, to receive its Close frame."""
        if self.on:
            connection.resume_reading()
