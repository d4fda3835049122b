"""The life cycle of a node and of each of its processes: one state, which everything reads that admits clients, answers
health checks or describes the node.

    SERVING <-> EVACUATING
       |            |
       +-> DRAINING -> STOPPED

An operator's `redpoll node drain` evacuates a node; a signal drains it, and nothing leads back from there.
"""

import asyncio
from enum import Enum

import structlog

__all__ = ["Life", "Lifecycle"]

log = structlog.get_logger()


class Lifecycle(Enum):
    SERVING = "serving"
    EVACUATING = "evacuating"
    """Clients are closed over some time and none is admitted. Everything else goes on."""
    DRAINING = "draining"
    """The server stops: it accepts no connections, and closes those that it has."""
    STOPPED = "stopped"
    """All connections are closed."""


_LATER = {Lifecycle.DRAINING: (Lifecycle.STOPPED,), Lifecycle.STOPPED: ()}


class Life:
    """The state of one process. `admits` tells whether clients may come."""

    def __init__(self) -> None:
        self.state = Lifecycle.SERVING
        self._changed = asyncio.Event()

    @property
    def admits(self) -> bool:
        return self.state is Lifecycle.SERVING

    @property
    def ends(self) -> bool:
        """The process stops, or has stopped."""
        return self.state in _LATER

    def become(self, state: Lifecycle) -> bool:
        """Changes the state. False: it stays, because this is the state already or the process ends."""
        if state is self.state or state not in _LATER.get(self.state, Lifecycle):
            return False
        log.info("life cycle changed", state=state.value, before=self.state.value)
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    async def until(self, state: Lifecycle) -> None:
        """Returns when the process is in this state, or in one that only follows it."""
        while self.state not in (state, *_LATER.get(state, ())):
            await self._changed.wait()
