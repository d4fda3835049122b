"""The state of a worker's connection to Redis, in one place: for the modules that act on it, the log and /metrics.

    DOWN -> REGISTERING -> REASSERTING -> OPEN
                 ^                         |
                 +------- FENCED <---------+

Every state goes to DOWN when the connection breaks. cluster/README.md "Reconnecting" says what happens in each.
"""

from enum import Enum

import structlog

__all__ = ["Connection", "ConnectionState"]

log = structlog.get_logger(__name__)


class ConnectionState(Enum):
    DOWN = "down"
    """There is no connection."""
    REGISTERING = "registering"
    """Connected; Redis is asked to accept this connection for our W."""
    REASSERTING = "reasserting"
    """This worker writes everything that it holds to Redis again. Changes wait."""
    OPEN = "open"
    """Redis knows everything; changes are sent as they happen."""
    FENCED = "fenced"
    """Redis gave our W up. The last calls under that name are answered before the next W is taken."""


class Connection:
    """`state` is the present state. `number` counts breaks, so that work begun on one connection can tell that it
    ended."""

    __slots__ = ("number", "state")

    def __init__(self) -> None:
        self.number = 0
        self.state = ConnectionState.DOWN

    def change(self, state: ConnectionState) -> None:
        if state is not self.state:
            log.info("redis connection state changed", state=state.value, previous=self.state.value)
            self.state = state
