"""Where a subscribe stands on its way to Redis and back (`print(join)`), and where its channel stands."""

from enum import Enum, IntEnum
from time import monotonic
from typing import Any, Final, Protocol

from redpoll.protocol.apps import App

__all__ = ["Join", "JoinState", "Stage"]


class Stage(IntEnum):
    """A channel is in one stage at a time. In the middle ones it is in a queue of the agenda; in the last ones (`busy`)
    no call can be made for it."""

    CLEAN = 0
    """Redis has everything, or the channel's shard is lost."""

    SUBSCRIBING = 1
    """Joins wait; the topic is subscribed next. Outlives a break of the connection."""
    LOST = 2
    """Joins wait; their shard is lost."""
    CALLING = 3
    """Joins wait, and the topic is subscribed: a call is made next."""
    ROSTER_FOR_JOINS = 4
    """Joins wait, and the call would ask for the roster, of which enough are on their way."""
    CACHED_FOR_JOINS = 5
    """As ROSTER_FOR_JOINS, for the cached event."""
    DIRTY = 6
    """Something changed that no client waits for."""
    ASSERTING = 7
    """After a break: Redis has to get again what is held."""
    ROSTER = 8
    """As ROSTER_FOR_JOINS, while no join waits."""

    SENDING = 9
    """A call is in flight."""
    RETRY_DELAY = 10
    """The last call failed with an error; the same call is made again after a delay."""
    PLACE = 11
    """The channel's shard has its share of occupied channels: the app's total is being read (places.py)."""
    SCAN = 12
    """Redis lists the channel under our name, though we don't hold it: its users are being read."""
    DROPPED = 13
    """The channel is no longer held. Final."""

    @property
    def waits_for(self) -> str:
        """What the next call waits for, for people."""
        return _WAITS_FOR[self]


_WAITS_FOR: Final = {
    Stage.CLEAN: "the connection to Redis",
    Stage.SUBSCRIBING: "the SUBSCRIBE of its topic",
    Stage.LOST: "its shard in Redis",
    Stage.CALLING: "its call",
    Stage.ROSTER_FOR_JOINS: "the rosters of other channels",
    Stage.CACHED_FOR_JOINS: "the cached events of other channels",
    Stage.DIRTY: "its call",
    Stage.ASSERTING: "its call",
    Stage.ROSTER: "the rosters of other channels",
    Stage.SENDING: "the answer to an earlier call",
    Stage.RETRY_DELAY: "the repetition of a call that failed",
    Stage.PLACE: "the number of the app's occupied channels",
    Stage.SCAN: "the users that Redis lists",
    Stage.DROPPED: "nothing",
}


class _Channel(Protocol):
    """local_channel.py, which imports this module."""

    stage: Stage


class JoinState(Enum):
    NEW = "new"
    WAITING_TURN = "waits for its turn"
    """The connection has as many subscribes on their way as it may have (join_queue.py)."""
    QUEUED = "queued"
    """It goes into the channel's next call."""
    IN_FLIGHT = "in flight"
    """Redis hasn't answered the call that carries it."""
    ATTACHED = "attached"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    """The client no longer wants it. If a call carries it, Redis may still accept it; then it leaves in the next
    call, without a frame."""


_NEW, _QUEUED, _IN_FLIGHT = JoinState.NEW, JoinState.QUEUED, JoinState.IN_FLIGHT


class Join:
    """A subscribe of `owner` to `channel`; `user` and `info` are set on presence channels. `owner`, which is hashable
    and prints as a connection, and `wants` belong to the caller: which part of the channel's history the subscriber
    gets first, None for none.

    `app` is the record by which it was asked for. `local_channel` is set once it had its turn. `since` is the link's
    clock (`time.monotonic`) when its turn began, or before that, when it came.

    A connection that asks for one of its app's places (connection_limit.py) is a join of `%conn`.
    """

    __slots__ = ("app", "channel", "info", "local_channel", "owner", "since", "state", "user", "wants")

    def __init__(self, owner: Any, app: App, channel: str, user: str | None = None, info: bytes = b"") -> None:
        self.owner = owner
        self.app = app
        self.channel = channel
        self.user = user
        self.info = info
        self.wants: Any = None
        self.local_channel: _Channel | None = None
        self.state = _NEW
        self.since = 0.0

    @property
    def unanswered(self) -> bool:
        """It waits in its channel's queue or is in flight, and is still wanted."""
        return self.state is _QUEUED or self.state is _IN_FLIGHT

    @property
    def waits_for(self) -> str:
        """What the answer waits for, for people; "" after it."""
        if self.state is JoinState.WAITING_TURN:
            return "the answer to an earlier subscribe of its connection"
        if self.state is _QUEUED and self.local_channel is not None:
            return self.local_channel.stage.waits_for
        return "Redis' answer" if self.state is _IN_FLIGHT else ""

    def __str__(self) -> str:
        text = f"{self.owner} to {self.channel} of app {self.app.id}: {self.state.value}"
        return f"{text} for {monotonic() - self.since:.1f} s, waits for {self.waits_for}" if self.waits_for else text
