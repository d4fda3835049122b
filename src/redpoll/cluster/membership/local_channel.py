"""What this worker knows of one channel: attached sockets, waiting subscribes, and what it last wrote to Redis.

Bookkeeping only: no Redis, no event loop. `plan` makes the next call of `hold`, sync.py sends it, and the outcome comes
back as `accept` or `fail`. Calls carry absolute values, and at most one per channel is in flight; changes that happen
meanwhile go into the next call (cluster/README.md "Ground rules").

A user's signed-in connections (`%u:U`) and an app's connections (`%conn`) are held in the same way, without a topic. A
user's own channel (`#server-to-user-U`) is the opposite: a topic that is not held.
"""

from array import array
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from redpoll.cluster.membership.hold_call import BEYOND_SHARE, CHANNEL, PRESENCE, TOPIC, Flag, HoldCall, hook_flags
from redpoll.cluster.membership.tally import Tally
from redpoll.cluster.redis.keys import cap_of_shard, shard_of_name, share_of_limit
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.channels import is_cache, needs_auth
from redpoll.protocol.presence import Roster

__all__ = ["UNKNOWN", "Activity", "ChannelSettings", "HistoryPosition", "LocalChannel", "Subscription", "Ticket"]

# Bounds of one call.
MAX_JOINS: Final = 256
MAX_GONE: Final = 256

# Offsets that a position remembers (HistoryPosition.delivered), of 8 bytes each.
MAX_DELIVERED: Final = 256

# `LocalChannel.confirmed` after a call with an unknown outcome: another call is due.
UNKNOWN: Final = -1

# The digits of HoldReply.accepted.
_ACCEPTED: Final = ord("1")
_BEYOND_SHARE: Final = ord(BEYOND_SHARE)


class Ticket:
    """A subscribe that waits for Redis. `user` and `info` are set on presence channels. `owner` belongs to the caller.

    `local_channel` is set while the ticket waits or is in flight. A cancelled ticket in flight may still be accepted;
    then it leaves in the next call, without a frame. `wants` belongs to the hub: which part of the channel's history
    the subscriber gets first, None for none. `since` is the link's clock when the wait began.
    """

    __slots__ = ("cancelled", "info", "local_channel", "owner", "since", "user", "wants")

    def __init__(self, owner: Any, user: str | None = None, info: bytes = b"") -> None:
        self.owner = owner
        self.user = user
        self.info = info
        self.local_channel: LocalChannel | None = None
        self.wants: Any = None
        self.since = 0.0
        self.cancelled = False


class HistoryPosition:
    """How far this worker has delivered a channel's history: `last` is the offset of the last delivered message (0 for
    none) in `epoch`. `live`: the next push follows `last`. Otherwise the channel catches up (catchup.py). `delivered`
    are `last` and the offsets before it, at least the newest MAX_DELIVERED of them."""

    __slots__ = ("delivered", "epoch", "last", "live")

    def __init__(self, epoch: str, last: int, live: bool) -> None:
        self.live = live
        self.begin(epoch, last)

    def begin(self, epoch: str, last: int) -> None:
        """The next message follows `last`; what was delivered before it is in no relation to it."""
        self.epoch = epoch
        self.last = last
        self.delivered = array("q", (last,))

    def advance(self, offset: int) -> None:
        """This message is delivered now."""
        self.last = offset
        self.delivered.append(offset)
        if len(self.delivered) > 2 * MAX_DELIVERED:
            del self.delivered[:MAX_DELIVERED]


class ChannelSettings(NamedTuple):
    """What the app's record says about a channel. `cap`: most members. `caches`: joiners get the cached event. `hooks`:
    the flags of `hold` for webhook rows. `rule`: the history rule, None without history. `max_histories`: cap on the
    app's channels with history in this shard. `share`: while fewer of the app's channels are occupied there, this one
    may become so without a place (places.py); None: always."""

    cap: int = 0
    caches: bool = False
    hooks: str = ""
    rule: HistoryRule | None = None
    max_histories: int = 0
    share: int | None = None


NO_SETTINGS: Final = ChannelSettings()


# Channels with the same settings share one object.
@lru_cache(maxsize=1024)
def _settings_of(
    cap: int, caches: bool, hooks: str, rule: HistoryRule | None, histories: int, occupied: int, signed: bool
) -> ChannelSettings:
    share = share_of_limit(occupied, signed=signed) if occupied else None
    return ChannelSettings(cap, caches, hooks, rule, cap_of_shard(histories), share)


class Subscription(Enum):
    """Whether this worker has subscribed to the channel's topic."""

    NONE = "none"
    REQUESTED = "requested"
    CONFIRMED = "confirmed"


class Activity(Enum):
    """What keeps the next call of a channel from being made."""

    NONE = "none"
    RETRY_DELAY = "retry delay"
    """The last call failed with an error; the same call is made again after a delay."""
    SCAN = "scan"
    """Redis lists the channel under our name, though we don't hold it: its users are being read."""
    PLACE = "place"
    """Its shard has its share of occupied channels: the app's total is being read (places.py)."""
    DROPPED = "dropped"
    """The channel is no longer held. Final."""


class Members:
    """The users of a presence channel on this worker.

    `sockets` counts attached sockets by user, `infos` has the last user_info that one of them brought. `gone` are users
    whom Redis may list under our name and who have no attached socket; a dict, for its order. `unasserted` are the
    users whom a re-assertion has yet to pass, None before its first call. `recheck`: read the roster again, because
    users were missing from it after a break.
    """

    __slots__ = ("gone", "infos", "recheck", "sockets", "unasserted")

    def __init__(self) -> None:
        self.sockets: dict[str, int] = {}
        self.infos: dict[str, bytes] = {}
        self.gone: dict[str, None] = {}
        self.unasserted: list[str] | None = None
        self.recheck = False

    def attach(self, user: str, info: bytes) -> None:
        self.sockets[user] = self.sockets.get(user, 0) + 1
        if info or user not in self.infos:
            self.infos[user] = info

    def detach(self, user: str) -> None:
        left = self.sockets[user] - 1
        if left:
            self.sockets[user] = left
        else:
            del self.sockets[user], self.infos[user]
            self.gone[user] = None

    def mark_gone(self, users: Sequence[str]) -> None:
        """Redis lists these users under our name: those without a socket here must be removed."""
        for user in users:
            if user not in self.sockets:
                self.gone[user] = None

    def next_asserted(self) -> list[tuple[str, bytes]]:
        """The next part of a re-assertion: up to MAX_JOINS users with their infos."""
        if self.unasserted is None:
            self.unasserted = list(self.sockets)
        part, self.unasserted = self.unasserted[:MAX_JOINS], self.unasserted[MAX_JOINS:]
        return [(user, self.infos[user]) for user in part if user in self.sockets]

    def next_gone(self, tickets: Sequence[Ticket], waiting: dict[Ticket, None] | None) -> tuple[list[str], bool]:
        """The users to remove in the call that carries `tickets`, and whether others remain. While others remain our
        count must stay above 0, because a reaper finds users by way of the counts."""
        if not self.gone:
            return [], False
        joining = {ticket.user for ticket in tickets}
        queued = {ticket.user for ticket in waiting} if waiting else set()
        gone: list[str] = []
        back: list[str] = []
        remain = False
        for user in self.gone:
            if user in self.sockets:
                back.append(user)
            elif user in queued:
                remain = True
            elif user not in joining:
                if len(gone) == MAX_GONE:
                    remain = True
                    break
                gone.append(user)
        for user in back:
            del self.gone[user]
        return gone, remain


class LocalChannel:
    """One channel of this worker.

    `audience` belongs to the hub, which sets it in `opened`. `attached` counts sockets. `roster` has every user of the
    channel in the cluster, on presence channels; None until Redis has sent it. `members` is None on other channels.
    `tally` exists while subscribers get subscription_count. `history` exists once Redis has sent the position of the
    channel's history; `needs_position`: a call must ask for it even if nobody joins. `settings` were taken from the
    record `app`.

    `shard` is that of its topic and keys. `call` is the call in flight. `confirmed` is the count that Redis has.
    `asserted` is False from a break until Redis has everything again. `has_place`: it may become occupied, whatever
    its shard has.
    """

    __slots__ = (
        "activity",
        "app",
        "app_id",
        "asserted",
        "attached",
        "audience",
        "call",
        "channel",
        "confirmed",
        "failures",
        "has_place",
        "history",
        "kind",
        "members",
        "needs_position",
        "roster",
        "settings",
        "shard",
        "subscription",
        "tally",
        "topic",
        "waiting",
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
        self.waiting: dict[Ticket, None] | None = None
        self.app: App | None = None
        self.settings = NO_SETTINGS
        self.tally: Tally | None = None
        self.history: HistoryPosition | None = None
        self.needs_position = False
        self.call: HoldCall[Ticket] | None = None
        self.confirmed = 0
        self.failures = 0
        self.has_place = False
        self.subscription = Subscription.NONE
        self.activity = Activity.NONE
        self.asserted = True

    def apply_settings(self, app: App) -> None:
        """Takes the channel's settings from the app's record. Call it at every join, when the record changed, and when
        Redis lost the history."""
        if app is self.app:
            self.needs_position = self.settings.rule is not None and self.history is None
            return
        kind, channel = self.kind, self.channel
        if kind != CHANNEL and kind != PRESENCE:
            return
        self.app = app
        cap = app.max_presence_members if kind == PRESENCE else 0
        rule = app.history_rule(channel)
        if rule is None:
            self.history = None
        hooks = hook_flags(app.hooks, channel, kind)
        caps = app.max_history_channels, app.max_occupied_channels
        self.settings = _settings_of(cap, is_cache(channel), hooks, rule, *caps, needs_auth(channel))
        self.needs_position = rule is not None and self.history is None

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
        return not self.waiting and self.is_plain(self.app)

    @property
    def dropped(self) -> bool:
        """The channel is no longer held."""
        return self.activity is Activity.DROPPED

    @property
    def has_topic(self) -> bool:
        """Whether this worker subscribes to a topic for it."""
        return self.kind in (CHANNEL, PRESENCE, TOPIC)

    @property
    def busy(self) -> bool:
        """No call can be made now: one is in flight, or the channel is dropped, scanned, or waits to retry."""
        return self.call is not None or self.activity is not Activity.NONE

    @property
    def idle(self) -> bool:
        """Nothing is left here or in Redis: the channel can be dropped."""
        return (
            self.attached == 0
            and self.confirmed == 0
            and not self.waiting
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
            and not self.waiting
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
        return members.recheck or (self.roster is None and bool(self.waiting))

    @property
    def big_reply(self) -> str:
        """What the next call's reply is likely to carry, as `HoldCall.big_reply`."""
        if self.needs_roster:
            return Flag.ROSTER
        return Flag.CACHED if self.settings.caches and self.waiting else ""

    def wait(self, ticket: Ticket) -> None:
        """Queues a subscribe."""
        ticket.local_channel = self
        if self.waiting is None:
            self.waiting = {}
        self.waiting[ticket] = None

    def withdraw(self, ticket: Ticket) -> None:
        """Cancels a subscribe: removes it from the queue, or marks it if it is in flight."""
        if self.waiting and ticket in self.waiting:
            del self.waiting[ticket]
            self.waiting = self.waiting or None
            ticket.local_channel = None
        else:
            ticket.cancelled = True

    def attach(self, ticket: Ticket) -> None:
        """A subscribe was accepted: its socket counts from now on."""
        self.attached += 1
        if self.members is not None:
            assert ticket.user is not None
            self.members.attach(ticket.user, ticket.info)

    def detach(self, user: str | None) -> None:
        """An attached socket left."""
        self.attached -= 1
        if self.members is not None:
            assert user is not None
            self.members.detach(user)

    def plan(self) -> HoldCall[Ticket] | None:
        """The next call, or None if Redis knows everything. Takes the tickets that the call carries off the queue."""
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

    def _plan_assertion(self) -> HoldCall[Ticket]:
        joins: list[tuple[str, bytes]] = []
        last = True
        flags = ""
        if self.members is not None:
            # Another worker may have got a newer user_info since the break, so ours doesn't replace it.
            flags = Flag.KEEP_INFO
            joins = self.members.next_asserted()
            last = not self.members.unasserted
            if last:
                flags += Flag.ROSTER
            if not self.attached:
                # A Redis that lost writes may list users for us whom we don't know: the roster shows them. Until they
                # are removed, our count must stay above 0.
                flags += Flag.USERS_REMAIN
        return HoldCall(self.attached - len(joins), 0, flags + self.settings.hooks, (), joins, (), last, False)

    def _plan_changes(self) -> HoldCall[Ticket] | None:
        tickets: list[Ticket] = []
        waiting = self.waiting
        if waiting:
            if len(waiting) <= MAX_JOINS:
                # None and not an empty dict, which takes as much memory as one ticket.
                tickets, self.waiting = list(waiting), None
            else:
                tickets = list(islice(waiting, MAX_JOINS))
                for ticket in tickets:
                    del waiting[ticket]
        members, tally, settings = self.members, self.tally, self.settings
        gone: Sequence[str] = ()
        joins: Sequence[tuple[str, bytes]] = ()
        recheck = users_remain = False
        if members is not None:
            gone, users_remain = members.next_gone(tickets, self.waiting)
            joins = [(ticket.user or "", ticket.info) for ticket in tickets]
            recheck = members.recheck
        counting = tally is not None and tally.due
        asking = self.needs_position and self.attached > 0
        if not (tickets or gone or recheck or counting or asking) and self.attached == self.confirmed:
            return None
        flags = Flag.USERS_REMAIN if users_remain else ""
        if recheck or (members is not None and self.roster is None and tickets):
            flags += Flag.ROSTER
        if settings.caches and tickets:
            flags += Flag.CACHED
        if tally is not None:
            flags += Flag.COUNT
            tally.due = False
        if settings.rule is not None:
            if tickets or asking:
                flags += Flag.HISTORY
                self.needs_position = False
            elif not self.attached:
                flags += Flag.HISTORY_ENDS
        if settings.share is not None and tickets and not self.attached and not self.has_place:
            flags += Flag.OCCUPIED_LIMIT
        return HoldCall(self.attached, settings.cap, flags + settings.hooks, gone, joins, tickets, True, recheck)

    def accept(self, call: HoldCall[Ticket], accepted: bytes) -> tuple[list[Ticket], list[Ticket]]:
        """Redis carried out `call`; `accepted` has a digit for each subscription. Returns the tickets that are attached
        now and those that were refused; cancelled tickets are in neither. Those of a channel that needs a place wait
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
        joined: list[Ticket] = []
        refused: list[Ticket] = []
        left: list[str] = []
        again: dict[Ticket, None] = {}
        for ticket, digit in zip(call.tickets, accepted, strict=False):
            if digit == _BEYOND_SHARE and not ticket.cancelled:
                again[ticket] = None
                continue
            ticket.local_channel = None
            if digit == _ACCEPTED:
                if not ticket.cancelled:
                    self.attach(ticket)
                    joined.append(ticket)
                elif ticket.user is not None:
                    left.append(ticket.user)
            elif not ticket.cancelled:
                refused.append(ticket)
        if left and members is not None:
            members.mark_gone(left)
        if again:
            self.waiting = {**again, **(self.waiting or {})}
        return joined, refused

    def take_waiting(self) -> list[Ticket]:
        """Takes all subscribes off the queue."""
        tickets, self.waiting = list(self.waiting or ()), None
        for ticket in tickets:
            ticket.local_channel = None
        return tickets

    def fail(self, call: HoldCall[Ticket]) -> None:
        """`call` failed or its outcome is unknown: its subscribes wait again, ahead of the others."""
        self.confirmed = UNKNOWN
        front: dict[Ticket, None] = {}
        for ticket in call.tickets:
            if ticket.cancelled:
                ticket.local_channel = None
            else:
                front[ticket] = None
            if self.members is not None and ticket.user is not None:
                # Redis may have carried it out. `next_gone` skips users for whom a ticket still waits.
                self.members.gone[ticket.user] = None
        if front:
            self.waiting = {**front, **(self.waiting or {})}
        if not self.asserted and self.members is not None:
            self.members.unasserted = None
        if self.settings.rule is not None and self.history is None:
            self.needs_position = True
        self._recount()

    def _recount(self) -> None:
        # Our changes may not have been announced, and we may have missed announcements of others.
        if self.tally is not None:
            self.tally.make_due()

    def attach_waiting(self) -> list[Ticket]:
        """The topic of a channel that isn't held is subscribed: attaches all that wait, and returns them."""
        joined = self.take_waiting()
        for ticket in joined:
            self.attach(ticket)
        return joined

    def connection_lost(self) -> None:
        """Everything must be written to Redis again, whose present state is unknown."""
        self.subscription = Subscription.NONE
        if self.kind == TOPIC:
            return
        if self.history is not None:
            self.history.live = False
        self._begin_assertion()
        if self.confirmed or self.call is not None:
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
        self.confirmed = 0
        if self.members is not None:
            self.members.gone.clear()
        if not self.attached:
            self._assertion_done()
            self.roster = None

    def _begin_assertion(self) -> None:
        self._recount()
        self.asserted = False
        self.has_place = False
        if self.members is not None:
            self.members.unasserted = None
            self.members.recheck = False
