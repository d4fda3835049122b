"""Stops reading clients while Redis is behind with what they asked for already (cluster.md 9, bounds).

What they send meanwhile waits in the kernel, and in the end with them. Decides nothing but that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll._fanout import Audience

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["Backpressure"]


class Backpressure:
    """`look(tick)` is called at every beat of the worker; `on` while nobody is read. New clients are kept out by the
    gate then."""

    def __init__(self, everyone: Audience, congested: Callable[[], bool]) -> None:
        self.on = False
        self.times_on = 0
        self._everyone = everyone
        self._congested = congested

    def look(self, tick: int) -> None:
        """Ask whether Redis has caught up, and read or don't. `tick` counts as life of whoever is read again:
        time in which we didn't listen is nobody's silence."""
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
        """Its answer to our goodbye is to be read in any case."""
        if self.on:
            connection.resume_reading()
