"""The state of a worker's connection to Redis, in one place: for the modules that act on it, the log and /metrics.

    DOWN -> REGISTERING -> REASSERTING -> OPEN
                 ^                         |
                 +------- FENCED <---------+

Every state goes to DOWN when the connection breaks. cluster/README.md "Reconnecting" says what happens in each.
"""

from collections.abc import Callable
from enum import Enum

import structlog

__all__ = ["Connection", "ConnectionState", "Reach"]

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


class Reach(Enum):
    """How far a worker has come with Redis, in the words of its messages to the supervisor (cut_off.py)."""

    DOWN = "down"
    """There is no connection, or it delivers no messages."""
    CONNECTING = "connecting"
    """Connected, but not all topics are subscribed yet."""
    SUBSCRIBED = "subscribed"
    """All topics are subscribed: every event reaches this worker."""


def _ignore() -> None:
    pass


class Connection:
    """`state` is the present state. `number` counts breaks, so that work begun on one connection can tell that it
    ended. `subscribed`: all topics are subscribed on the present connection. `on_change` is called after each
    change."""

    __slots__ = ("number", "on_change", "state", "subscribed")

    def __init__(self) -> None:
        self.number = 0
        self.state = ConnectionState.DOWN
        self.subscribed = False
        self.on_change: Callable[[], None] = _ignore

    def change(self, state: ConnectionState) -> None:
        if state is not self.state:
            log.info("redis connection state changed", state=state.value, previous=self.state.value)
            self.state = state
            if state is ConnectionState.DOWN:
                self.subscribed = False
            self.on_change()

    def all_subscribed(self) -> None:
        """Redis has confirmed the last topic."""
        if not self.subscribed:
            self.subscribed = True
            self.on_change()
