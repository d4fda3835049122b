"""The state of a worker's connection to Redis, in one place: for the modules that act on it, the log and /metrics.

    DOWN -> REGISTERING -> REASSERTING -> OPEN
                 ^              ^          |
                 |              +- PARTLY <+
                 +------- FENCED <---------+

Every state goes to DOWN when the connection breaks; in a Redis Cluster, REASSERTING and OPEN go to PARTLY when only
some shards are lost. cluster/membership/README.md "Reconnecting" says what happens in each.
"""

from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

import structlog

from redpoll.cluster.redis.keys import SHARDS

__all__ = ["ALL_SHARDS", "ConnectionState", "Reach", "RedisState"]

log = structlog.get_logger(__name__)


class ConnectionState(Enum):
    DOWN = "down"
    """There is no connection."""
    REGISTERING = "registering"
    """Connected; Redis is asked to accept this connection for our W."""
    REASSERTING = "reasserting"
    """This worker writes everything that it holds to Redis again. Changes are sent as well."""
    OPEN = "open"
    """Redis knows everything; changes are sent as they happen."""
    PARTLY = "partly"
    """Some shards of a Redis Cluster are lost or being registered again. The others go on."""
    FENCED = "fenced"
    """Redis gave our W up. The last calls under that name are answered before the next W is taken."""


class Reach(Enum):
    """How far a worker has come with Redis, in the words of its messages to the supervisor (cut_off.py)."""

    DOWN = "down"
    """There is no connection, not to all masters, or it delivers no messages."""
    CONNECTING = "connecting"
    """Connected, but not all topics are subscribed yet."""
    SUBSCRIBED = "subscribed"
    """All topics are subscribed: every event reaches this worker."""


ALL_SHARDS: Final = frozenset(range(SHARDS))
_SENDING: Final = (ConnectionState.REASSERTING, ConnectionState.OPEN, ConnectionState.PARTLY)


def _ignore() -> None:
    pass


class RedisState:
    """`state` is the present state; `sending`: calls are made in it, except for the shards that are `lost`, in which
    this connection isn't registered. `breaks` counts by shard how often it was lost, so that work begun before can
    tell. `on_change` is called after each change of what it tells."""

    __slots__ = ("_on_change", "_unsubscribed", "breaks", "lost", "sending", "state")

    def __init__(self, on_change: Callable[[], None] = _ignore) -> None:
        self.breaks = [0] * SHARDS
        self.lost: set[int] = set(ALL_SHARDS)
        self.state = ConnectionState.DOWN
        self._on_change = on_change
        self.sending = False
        # The shards in which Redis hasn't confirmed the last topic.
        self._unsubscribed: set[int] = set(ALL_SHARDS)

    @property
    def subscribed(self) -> bool:
        """All topics are subscribed on the present connection."""
        return not self._unsubscribed

    def sends(self, shard: int) -> bool:
        """Calls for channels of this shard are made now."""
        return self.sending and shard not in self.lost

    def change(self, state: ConnectionState) -> None:
        if state is not self.state:
            log.info("redis connection state changed", state=state.value, previous=self.state.value)
            self.state = state
            self.sending = state in _SENDING
            if state is ConnectionState.DOWN:
                self.lost.update(ALL_SHARDS)
                self._unsubscribed.update(ALL_SHARDS)
            self._on_change()

    def lose(self, shards: Collection[int]) -> None:
        """These shards are lost. With all of them, the connection is down."""
        for shard in shards:
            self.breaks[shard] += 1
        self.lost.update(shards)
        self._unsubscribed.update(shards)
        self.change(ConnectionState.DOWN if len(shards) == SHARDS else ConnectionState.PARTLY)

    def registered(self, shards: Collection[int]) -> None:
        """Redis knows this connection in these shards; what is held there is written again."""
        self.lost.difference_update(shards)
        self.change(ConnectionState.REASSERTING)

    def all_subscribed(self, shards: Collection[int]) -> None:
        """Redis has confirmed the last topic of these shards."""
        if self._unsubscribed:
            self._unsubscribed.difference_update(shards)
            if not self._unsubscribed:
                self._on_change()
