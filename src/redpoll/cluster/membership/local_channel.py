"""What this worker knows of one channel: attached sockets, queued joins, and what it last wrote to Redis.

Bookkeeping only: no Redis, no event loop. `plan` makes the next call of `hold`, sync.py sends it, and the outcome comes
back as `accept` or `fail`. Calls carry absolute values, and at most one per channel is in flight; changes that happen
meanwhile go into the next call (cluster/README.md "Ground rules").

A user's signed-in connections (`%u:U`) and an app's connections (`%conn`) are held in the same way, without a topic. A
user's own channel (`#server-to-user-U`) is the opposite: a topic that is not held.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import Any, Final

from redpoll.cluster.history import HistoryPosition
from redpoll.cluster.membership.channel_settings import NO_SETTINGS, settings_of
from redpoll.cluster.membership.hold_call import BEYOND_SHARE, CHANNEL, PRESENCE, TOPIC, Flag, HoldCall
from redpoll.cluster.membership.join import Join, JoinState, Stage
from redpoll.cluster.membership.members import MAX_USERS, Members
from redpoll.cluster.membership.tally import Tally
from redpoll.cluster.redis.keys import shard_of_name
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.presence import Roster

__all__ = ["UNKNOWN", "LocalChannel", "TopicSubscription"]

# Most joins of one call.
MAX_JOINS: Final = MAX_USERS

# `LocalChannel.confirmed` after a call with an unknown outcome: another call is due.
UNKNOWN: Final = -1

# The digits of HoldReply.accepted.
_ACCEPTED: Final = ord("1")
_BEYOND_SHARE: Final = ord(BEYOND_SHARE)

_QUEUED: Final = JoinState.QUEUED
_IN_FLIGHT: Final = JoinState.IN_FLIGHT
_ATTACHED: Final = JoinState.ATTACHED
_REFUSED: Final = JoinState.REFUSED
_WITHDRAWN: Final = JoinState.WITHDRAWN
_CLEAN: Final = Stage.CLEAN
_SENDING: Final = Stage.SENDING
_DROPPED: Final = Stage.DROPPED


class TopicSubscription(Enum):
    """Whether this worker has subscribed to the channel's topic."""

    NONE = "none"
    REQUESTED = "requested"
    CONFIRMED = "confirmed"


class LocalChannel:
    """One channel of this worker.

    `audience` belongs to the hub, which sets it in `opened`. `attached` counts sockets. `roster` has every user of the
    channel in the cluster, on presence channels; None until Redis has sent it. `members` is None on other channels.
    `tally` exists while subscribers get subscription_count. `history` exists once Redis has sent the position of the
    channel's history; `needs_position`: a call must ask for it even if nobody joins. `settings` were taken from the
    record `app`.

    `shard` is that of its topic and keys. `stage` is changed by the agenda. `confirmed` is the count that Redis has.
    `asserted` is False from a break until Redis has everything again. `has_place`: it may become occupied, whatever
    its shard has.
    """

    __slots__ = (
        "app",
        "app_id",
        "asserted",
        "attached",
        "audience",
        "channel",
        "confirmed",
        "failures",
        "has_place",
        "history",
        "kind",
        "members",
        "needs_position",
        "queued",
        "roster",
        "settings",
        "shard",
        "stage",
        "subscription",
        "tally",
        "topic",
    )

    def __init__(self, app_id: str, channel: str, kind: str, topic: bytes) -> None:
        self.app_id = app_id
        self.channel = channel
        self.kind = kind
        self.topic = topic
        self.shard = shard_of_name(topic)
        self.audience: Any = None
        self.attached = 0
        self.roster: Roster | None = None
        self.members: Members | None = Members() if kind == PRESENCE else None
        self.queued: dict[Join, None] | None = None
        self.app: App | None = None
        self.settings = NO_SETTINGS
        self.tally: Tally | None = None
        self.history: HistoryPosition | None = None
        self.needs_position = False
        self.confirmed = 0
        self.failures = 0
        self.has_place = False
        self.subscription = TopicSubscription.NONE
        self.stage = _CLEAN
        self.asserted = True

    def apply_settings(self, app: App) -> bool:
        """Takes the channel's settings from the app's record. Call it at every join, when the record changed, and when
        Redis lost the history. True: subscription_count was turned on."""
        if app is not self.app:
            if self.kind != CHANNEL and self.kind != PRESENCE:
                return False
            self.app = app
            self.settings = settings_of(app, self.channel, self.kind)
            if self.settings.rule is None:
                self.history = None
        self.needs_position = self.settings.rule is not None and (self.history is None or self.needs_position)
        if self.kind != CHANNEL or app.subscription_count == (self.tally is not None):
            return False
        if self.tally is not None:
            self.tally.settle()
        self.tally = Tally() if app.subscription_count else None
        return app.subscription_count

    @property
    def rule(self) -> HistoryRule | None:
        """The history rule of this channel; None without history."""
        return self.settings.rule

    def is_plain(self, app: App | None) -> bool:
        """Whether sockets may come and go without waiting for Redis: it knows that the channel is occupied, the topic
        is subscribed, and `app`, the present record, asks for nothing but a count that is nearly exact."""
        settings = self.settings
        return (
            self.attached > 0
            and self.asserted
            and self.app is app
            and self.kind == CHANNEL
            and self.tally is None
            and settings.rule is None
            and not settings.caches
            and not settings.hooks
        )

    def lacks_at_most_count(self) -> bool:
        """Whether Redis has everything but perhaps the present number of sockets, which may wait a moment."""
        return not self.queued and self.is_plain(self.app)

    @property
    def dropped(self) -> bool:
        """The channel is no longer held."""
        return self.stage is _DROPPED

    @property
    def has_topic(self) -> bool:
        """Whether this worker subscribes to a topic for it."""
        return self.kind in (CHANNEL, PRESENCE, TOPIC)

    @property
    def busy(self) -> bool:
        """No call can be made now: one is in flight, or the channel is dropped, scanned, or waits to retry."""
        return self.stage >= _SENDING

    @property
    def idle(self) -> bool:
        """Nothing is left here or in Redis: the channel can be dropped."""
        return (
            self.attached == 0
            and self.confirmed == 0
            and not self.queued
            and (self.members is None or not self.members.gone)
            and not self.busy
            and (self.tally is None or self.tally.settled)
        )

    @property
    def settled(self) -> bool:
        """Redis has everything: no call is due."""
        return (
            self.attached == self.confirmed
            and self.asserted
            and not self.queued
            and self.members is None
            and self.tally is None
            and not self.needs_position
        )

    @property
    def needs_roster(self) -> bool:
        """The next call will ask for the roster."""
        members = self.members
        if members is None:
            return False
        if not self.asserted:
            return members.unasserted is None or len(members.unasserted) <= MAX_JOINS
        return members.recheck or (self.roster is None and bool(self.queued))

    @property
    def big_reply(self) -> str:
        """What the next call's reply is likely to carry, as `HoldCall.big_reply`."""
        if self.needs_roster:
            return Flag.ROSTER
        return Flag.CACHED if self.settings.caches and self.queued else ""

    def queue(self, join: Join) -> None:
        """The join goes into the next call."""
        join.state = _QUEUED
        if self.queued is None:
            self.queued = {}
        self.queued[join] = None

    def withdraw(self, join: Join) -> bool:
        """Cancels an unanswered join. True: a call carries it, and Redis may yet accept it."""
        in_flight = join.state is _IN_FLIGHT
        join.state = _WITHDRAWN
        if not in_flight:
            assert self.queued is not None
            del self.queued[join]
            self.queued = self.queued or None
        return in_flight

    def attach(self, join: Join) -> None:
        """A join was accepted: its socket counts from now on."""
        join.state = _ATTACHED
        self.attached += 1
        if self.members is not None:
            assert join.user is not None
            self.members.attach(join.user, join.info)

    def detach(self, user: str | None) -> None:
        """An attached socket left."""
        self.attached -= 1
        if self.members is not None:
            assert user is not None
            self.members.detach(user)

    def plan(self) -> HoldCall[Join] | None:
        """The next call, or None if Redis knows everything. Takes the joins that the call carries off the queue."""
        if not self.asserted and self.attached == 0:
            # The roster missed changes during the break, and it isn't used: the next joiner reads another one.
            self.roster = None
            if self.members is None:
                self._assertion_done()
        return self._plan_changes() if self.asserted else self._plan_assertion()

    def _assertion_done(self) -> None:
        self.asserted = True
        if self.members is not None:
            self.members.unasserted = None

    def _plan_assertion(self) -> HoldCall[Join]:
        users: list[tuple[str, bytes]] = []
        last = True
        flags = ""
        if self.members is not None:
            # Another worker may have got a newer user_info since the break, so ours doesn't replace it.
            flags = Flag.KEEP_INFO
            users = self.members.next_asserted()
            last = not self.members.unasserted
            if last:
                flags += Flag.ROSTER
            if not self.attached:
                # A Redis that lost writes may list users for us whom we don't know: the roster shows them. Until they
                # are removed, our count must stay above 0.
                flags += Flag.USERS_REMAIN
        elif self.tally is not None:
            flags, self.tally.due = Flag.COUNT, False
        return HoldCall(self.attached - len(users), 0, flags + self.settings.hooks, (), users, (), last, False)

    def _plan_changes(self) -> HoldCall[Join] | None:
        joins: list[Join] = []
        queued = self.queued
        if queued:
            if len(queued) <= MAX_JOINS:
                # None and not an empty dict, which takes as much memory as one join.
                joins, self.queued = list(queued), None
            else:
                joins = list(islice(queued, MAX_JOINS))
                for join in joins:
                    del queued[join]
            for join in joins:
                join.state = _IN_FLIGHT
        members, tally, settings = self.members, self.tally, self.settings
        gone: Sequence[str] = ()
        users: Sequence[tuple[str, bytes]] = ()
        recheck = users_remain = False
        if members is not None:
            gone, users_remain = members.next_gone(joins, self.queued)
            users = [(join.user or "", join.info) for join in joins]
            recheck = members.recheck
        counting = tally is not None and tally.due
        asking = self.needs_position and self.attached > 0
        if not (joins or gone or recheck or counting or asking) and self.attached == self.confirmed:
            return None
        flags = Flag.USERS_REMAIN if users_remain else ""
        if recheck or (members is not None and self.roster is None and joins):
            flags += Flag.ROSTER
        if settings.caches and joins:
            flags += Flag.CACHED
        if tally is not None:
            flags += Flag.COUNT
            tally.due = False
        if settings.rule is not None:
            if joins or asking:
                flags += Flag.HISTORY
                self.needs_position = False
            elif not self.attached:
                flags += Flag.HISTORY_ENDS
        if settings.share is not None and joins and not self.attached and not self.has_place:
            flags += Flag.OCCUPIED_LIMIT
        return HoldCall(self.attached, settings.cap, flags + settings.hooks, gone, users, joins, True, recheck)

    def accept(self, call: HoldCall[Join], accepted: bytes) -> tuple[list[Join], list[Join]]:
        """Redis carried out `call`; `accepted` has a digit for each subscription. Returns the joins that are attached
        now and those that were refused; withdrawn ones are in neither. Those of a channel that needs a place are queued
        again."""
        self.confirmed = call.base + accepted.count(b"1")
        if not self.confirmed and Flag.USERS_REMAIN in call.flags:
            # Redis may have kept it at 1.
            self.confirmed = UNKNOWN
        self.failures = 0
        members = self.members
        if members is not None:
            for user in call.gone:
                members.gone.pop(user, None)
            if call.final:
                members.recheck = False
        if not self.asserted and call.last:
            self._assertion_done()
        if not call.joins:
            return [], []
        joined: list[Join] = []
        others: list[tuple[Join, int]] = []
        for join, digit in zip(call.joins, accepted, strict=False):
            if digit == _ACCEPTED and join.state is _IN_FLIGHT:
                self.attach(join)
                joined.append(join)
            else:
                others.append((join, digit))
        return joined, self._not_attached(others) if others else []

    def _not_attached(self, joins: list[tuple[Join, int]]) -> list[Join]:
        # Returns those that were refused.
        refused: list[Join] = []
        left: list[str] = []
        again: dict[Join, None] = {}
        for join, digit in joins:
            if join.state is _WITHDRAWN:
                if digit == _ACCEPTED and join.user is not None:
                    left.append(join.user)
            elif digit == _BEYOND_SHARE:
                join.state = _QUEUED
                again[join] = None
            else:
                join.state = _REFUSED
                refused.append(join)
        if left and self.members is not None:
            self.members.mark_gone(left)
        if again:
            self.queued = {**again, **(self.queued or {})}
        return refused

    def refuse_queued(self) -> list[Join]:
        """Refuses all that are queued, and returns them."""
        joins, self.queued = list(self.queued or ()), None
        for join in joins:
            join.state = _REFUSED
        return joins

    def attach_queued(self) -> list[Join]:
        """The topic of a channel that isn't held is subscribed: attaches all that are queued, and returns them."""
        joins, self.queued = list(self.queued or ()), None
        for join in joins:
            self.attach(join)
        return joins

    def fail(self, call: HoldCall[Join]) -> None:
        """`call` failed or its outcome is unknown: its joins are queued again, ahead of the others."""
        self.confirmed = UNKNOWN
        front: dict[Join, None] = {}
        for join in call.joins:
            if join.state is not _WITHDRAWN:
                join.state = _QUEUED
                front[join] = None
            if self.members is not None and join.user is not None:
                # Redis may have carried it out. `next_gone` skips users for whom a join is still queued.
                self.members.gone[join.user] = None
        if front:
            self.queued = {**front, **(self.queued or {})}
        if not self.asserted and self.members is not None:
            self.members.unasserted = None
        self._ask_again(Flag.HISTORY in call.flags)

    def _ask_again(self, position: bool = False) -> None:
        # Our changes may not have been announced, and we may have missed announcements of others, or the first message.
        if self.tally is not None:
            self.tally.make_due()
        if self.settings.rule is not None and (self.history is None or position):
            self.needs_position = True

    def connection_lost(self) -> None:
        """Everything must be written to Redis again, whose present state is unknown."""
        self.subscription = TopicSubscription.NONE
        if self.kind == TOPIC:
            return
        if self.history is not None:
            self.history.live = False
        self._begin_assertion()
        if self.confirmed or self.stage is _SENDING:
            self.confirmed = UNKNOWN

    def listed(self) -> None:
        """Redis lists the channel under our name. If it was opened a moment ago, it must not be dropped before Redis
        knows that nobody is left."""
        if self.confirmed == 0:
            self.confirmed = UNKNOWN
            if self.members is not None:
                self._begin_assertion()

    def renamed(self) -> None:
        """This worker has a new W, and Redis has nothing under that name."""
        if self.kind == TOPIC:
            return
        self._begin_assertion()
        # A reaper took us for dead: if nobody else was subscribed, the history ends soon.
        self.needs_position = self.settings.rule is not None
        self.confirmed = 0
        if self.members is not None:
            self.members.gone.clear()
        if not self.attached:
            self._assertion_done()
            self.roster = None

    def _begin_assertion(self) -> None:
        self._ask_again()
        self.asserted = False
        self.has_place = False
        if self.members is not None:
            self.members.unasserted = None
            self.members.recheck = False
