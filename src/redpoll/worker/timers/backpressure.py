"""Stops reading from clients while Redis is too slow for what they have sent (cluster/README.md "Bounds").

What clients send during that time waits in the kernel's buffers, and then in their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll import _engine
from redpoll.loop.slices import walk

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.hub.open_connections import OpenConnections

__all__ = ["Backpressure"]


class Backpressure:
    """`on` while no client is to be read; the gate refuses new clients then. `times_on` is for /metrics."""

    def __init__(self, open_connections: OpenConnections, congested: Callable[[], bool]) -> None:
        self.on = False
        self.times_on = 0
        self._open_connections = open_connections
        self._congested = congested
        self._tick = 0
        # Goes through the connections, a slice in each pass of the loop.
        self._walk: asyncio.Task[None] | None = None

    @property
    def unsettled(self) -> bool:
        """Some connections are not read, or were not until a moment ago: no silence counts as idle."""
        return self.on or (self._walk is not None and not self._walk.done())

    def check(self, tick: int) -> None:
        """Stop reading, or read again, as Redis needs it. Called four times a second with the present tick.

        Time in which we were not reading doesn't count as idle.
        """
        self._tick = tick
        congested = self._congested()
        if congested is self.on:
            return
        self.on = congested
        self.times_on += congested
        if self._walk is not None:
            self._walk.cancel()
        self._walk = asyncio.get_running_loop().create_task(walk(self._open_connections.each(), self._follow))

    def _follow(self, connection: Connection) -> None:
        if self.on:
            if connection.state == _engine.OPEN:
                connection.pause_reading()
        else:
            connection.heard_tick = self._tick
            connection.resume_reading()

    def closing(self, connection: Connection) -> None:
        """Read a connection that is closing, to receive its Close frame."""
        if self.unsettled:
            connection.resume_reading()
