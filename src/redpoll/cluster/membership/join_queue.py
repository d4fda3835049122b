"""All joins of a worker that aren't answered, in one place: whose turn it is, and who has waited too long.

All connections share one way to Redis. A connection has at most MAX_IN_TURN joins on it, so that the other clients
don't wait for the thousand that one client sends at once. Its further ones wait here, and each answer lets the next go.

A join that had its turn is also in `LocalChannel.queued`, or in the call that carries it. `Join.state` says which.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from redpoll.cluster.directory import Directory
from redpoll.cluster.membership.join import Join, JoinState
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.timings import Timings
from redpoll.protocol.apps import App

__all__ = ["MAX_IN_TURN", "JoinQueue"]

# Most clients subscribe to fewer channels. A client that is alone gets a thousand channels in about 60 round trips.
MAX_IN_TURN: Final = 16
# Joins that waited too long and are refused in one pass of the loop.
_MAX_REFUSED: Final = 100
# Joins that wait for so long are worth a line of `redpoll debug`.
_NOTED_S: Final = 1.0

_WAITING_TURN: Final = JoinState.WAITING_TURN


class JoinQueue:
    """Reports to `events.refused` what waited for longer than `wait_s`: 4100 makes a client connect
    elsewhere. `clock` is the link's. False when there is no join."""

    def __init__(
        self,
        channels: LocalChannels,
        directory: Directory,
        events: MembershipEvents,
        timings: Timings,
        clock: Callable[[], float],
    ) -> None:
        self._channels = channels
        self._directory = directory
        self._events = events
        self.wait_s = timings.join_wait_s
        self._clock = clock
        # All that aren't answered, by connection and channel.
        self._by_owner: dict[Any, dict[str, Join]] = {}
        # Those that wait for their turn, and those that had it, in the order in which it came.
        self._waiting: dict[Any, OrderedDict[str, Join]] = {}
        self._begun: dict[Join, None] = {}
        # By connection: how many withdrawn ones Redis has yet to answer. Until then they take room.
        self.withdrawn: dict[Any, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def add(self, join: Join) -> None:
        """The outcome comes as `joined` or `refused`, never from within this call. The connection has no other join to
        this channel."""
        owner = join.owner
        joins = self._by_owner.get(owner)
        if joins is None:
            joins = self._by_owner[owner] = {}
        joins[join.channel] = join
        withdrawn = self.withdrawn.get(owner, 0) if self.withdrawn else 0
        if len(joins) + withdrawn > MAX_IN_TURN:
            join.state = _WAITING_TURN
            join.since = self._clock()
            self._waiting.setdefault(owner, OrderedDict())[join.channel] = join
        else:
            self._begin(join, join.app)

    def answered(self, joins: Iterable[Join]) -> None:
        """Redis has answered these."""
        for join in joins:
            del self._begun[join]
            self._remove(join)
            if self._waiting:
                self._begin_next(join.owner)

    def withdraw(self, owner: Any, channel: str) -> bool:
        """The client no longer wants this channel. False: there is no join."""
        joins = self._by_owner.get(owner)
        if joins is None or channel not in joins:
            return False
        join = joins[channel]
        if join.state is _WAITING_TURN:
            self._remove(join)
            join.state = JoinState.WITHDRAWN
            waiting = self._waiting.get(owner)
            if waiting is not None:
                del waiting[channel]
                if not waiting:
                    del self._waiting[owner]
        else:
            self._withdraw(join)
        return True

    def withdrawn_answered(self, join: Join) -> None:
        """The call with this join, which was withdrawn meanwhile, has ended."""
        count = self.withdrawn.pop(join.owner, 0)
        if count > 1:
            self.withdrawn[join.owner] = count - 1
        if count:
            self._begin_next(join.owner)

    def stop(self, owner: Any) -> None:
        """The connection ends, and all its joins are withdrawn next: those that wait don't go to Redis."""
        self._waiting.pop(owner, None)

    def start(self) -> None:
        """Begins to look for joins that waited too long."""
        self._timer = asyncio.get_running_loop().call_later(min(1.0, self.wait_s / 4), self.start)
        self._events.still_waiting(self._since(self._clock() - _NOTED_S))
        self._refuse_late()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _since(self, before: float) -> Iterator[Join]:
        return (join for joins in self._by_owner.values() for join in joins.values() if join.since <= before)

    def _begin(self, join: Join, app: App) -> None:
        local_channel = self._channels.channel(app.id, join.channel)
        local_channel.apply_settings(app)
        join.since = self._clock()
        join.local_channel = local_channel
        local_channel.queue(join)
        self._begun[join] = None
        self._channels.mark_dirty(local_channel)

    def _begin_next(self, owner: Any) -> None:
        waiting = self._waiting.get(owner)
        if waiting is None:
            return
        _, join = waiting.popitem(last=False)
        if not waiting:
            del self._waiting[owner]
        # The record may have changed since. If the app is gone, its connections are closed.
        self._begin(join, self._directory.by_id.get(join.app.id, join.app))

    def _remove(self, join: Join) -> None:
        joins = self._by_owner[join.owner]
        del joins[join.channel]
        if not joins:
            del self._by_owner[join.owner]

    def _withdraw(self, join: Join) -> None:
        # One that had its turn.
        del self._begun[join]
        self._remove(join)
        local_channel = self._channels.by_name[join.app.id, join.channel]
        if local_channel.withdraw(join):
            self.withdrawn[join.owner] = self.withdrawn.get(join.owner, 0) + 1
        else:
            self._begin_next(join.owner)
        self._channels.mark_dirty(local_channel)

    def _refuse_late(self) -> None:
        before = self._clock() - self.wait_s
        late: list[Join] = []
        for join in self._begun:
            if join.since > before or len(late) == _MAX_REFUSED:
                break
            late.append(join)
        if len(late) == _MAX_REFUSED:
            asyncio.get_running_loop().call_soon(self._refuse_late)
        for join in late:
            # What a refusal leads to may withdraw others of them.
            if join.unanswered:
                local_channel = self._channels.by_name[join.app.id, join.channel]
                self._withdraw(join)
                self._events.refused(local_channel, join, "unavailable")
