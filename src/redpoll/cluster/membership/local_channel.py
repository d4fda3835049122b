"""One channel that this worker holds: who is attached, who waits, who is gone, and the call that tells Redis.

A user's signed-in connections (`%u:U`) and an app's connections (`%conn`) are held like channels, without a
topic; of a user's channel (`#server-to-user-U`) there is a topic and nothing that Redis is to know.

Bookkeeping only: no Redis, no loop. The registry sends what `plan` makes and hands the outcome back. Calls
say what is (absolute values), and at most one is under way per channel; what changes meanwhile goes into the
next (cluster.md rule 2).
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from redpoll.cluster.keys import cap_of_shard, shard
from redpoll.cluster.membership.hold_call import CHANNEL, PRESENCE, TOPIC, HoldCall, hook_flags
from redpoll.cluster.membership.tally import Tally
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.channels import is_cache
from redpoll.protocol.presence import Roster

__all__ = ["UNKNOWN", "HistoryPosition", "LocalChannel", "Ticket"]

MAX_JOINS: Final = 256
MAX_GONE: Final = 256

# `LocalChannel.confirmed` when nobody knows what Redis has: a call is due whatever is here.
UNKNOWN: Final = -1


class Ticket:
    """A subscribe that waits for Redis. `user` and `info` on presence channels; `owner` is the caller's.

    `local_channel` is set while it waits. A cancelled one may still be accepted, and then leaves without a frame.
    `wants` is the hub's: what of the channel's history is to come first; None for nothing.
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
    """How far a channel's history has come to this worker: `last` is the offset of the last message passed on, 0
    for none, in `epoch`. `live`: the next message is the one that Redis sends next; else the channel catches up."""

    __slots__ = ("epoch", "last", "live")

    def __init__(self, epoch: str, last: int, live: bool) -> None:
        self.epoch = epoch
        self.last = last
        self.live = live


class LocalChannel:
    """A channel of this worker. `audience` is the listener's, set in its `opened`.

    `attached` counts sockets, `roster` is everybody on the channel, in the whole cluster (presence only; None
    until Redis has told it). `caches`: joiners are told the cached event; `tally` is there where subscribers are
    told how many they are. `rule` is what is kept of the channel's messages, None for nothing; then `history` is
    there as soon as Redis has said where it stands, if the app may have another. Everything else is between this
    and the registry.
    """

    __slots__ = (
        "app_id",
        "asks",
        "asserted",
        "attached",
        "audience",
        "blocked",
        "caches",
        "call",
        "cap",
        "channel",
        "confirmed",
        "dropped",
        "failures",
        "gone",
        "history",
        "hooks",
        "infos",
        "kind",
        "listening",
        "look",
        "most_histories",
        "passing",
        "roster",
        "rule",
        "scan",
        "shard",
        "sockets",
        "subscribed",
        "tally",
        "topic",
        "waiting",
    )

    def __init__(self, app_id: str, channel: str, kind: str, topic: bytes) -> None:
        presence = kind == PRESENCE
        self.app_id = app_id
        self.channel = channel
        self.kind = kind
        self.shard = shard(app_id, channel)
        self.topic = topic
        self.audience: Any = None
        self.roster: Roster | None = None
        self.attached = 0
        # Presence: attached sockets by user, and the last info that one of them brought. None: no presence.
        self.sockets: dict[str, int] | None = {} if presence else None
        self.infos: dict[str, bytes] | None = {} if presence else None
        # Users that Redis may list in our name, whom no attached socket is. Ordered, as `waiting` is.
        self.gone: dict[str, None] | None = {} if presence else None
        self.waiting: dict[Ticket, None] | None = None
        self.cap = 0
        self.caches = False
        # Flags of the calls: which rows for webhooks they are to write.
        self.hooks = ""
        self.tally: Tally | None = None
        self.rule: HistoryRule | None = None
        self.history: HistoryPosition | None = None
        # Redis is to be asked where the history stands, though nobody joins; and beyond how many channels with
        # history of the app in this shard there is to be no new one.
        self.asks = False
        self.most_histories = 0
        self.call: HoldCall | None = None
        self.confirmed = 0
        self.failures = 0
        # Its topic is asked for; Redis has confirmed it.
        self.subscribed = False
        self.listening = False
        self.dropped = False
        # Busy with something else than a call: a delay after an error, or the scan of a lost channel's users.
        self.blocked = False
        self.scan = False
        # A second look at the roster is due.
        self.look = False
        # False from a break until Redis has been told everything again; `passing` are the users still to
        # tell.
        self.asserted = True
        self.passing: list[str] | None = None

    def follow(self, app: App) -> None:
        """Takes from the app's record what it says of this channel: the cap on members, whether events are cached
        or kept, and what webhooks want to hear. To be called at every join, and whenever the record changed or
        Redis lost the history. What of that Redis is to be told now, `plan` knows."""
        if self.kind not in (CHANNEL, PRESENCE):
            return
        presence = self.kind == PRESENCE
        if presence:
            self.cap = app.max_presence_members
        self.caches = is_cache(self.channel)
        self.hooks = hook_flags(app.hooks, self.channel, self.kind)
        self.rule = app.history_rule(self.channel)
        if self.rule is None:
            self.history = None
        self.most_histories = cap_of_shard(app.max_history_channels)
        self.asks = self.rule is not None and self.history is None

    @property
    def listens(self) -> bool:
        """Whether it has a topic that this worker subscribes."""
        return self.kind in (CHANNEL, PRESENCE, TOPIC)

    @property
    def idle(self) -> bool:
        """Nothing here and nothing in Redis: it can be forgotten."""
        return (
            self.attached == 0
            and self.confirmed == 0
            and not self.waiting
            and not self.gone
            and self.call is None
            and not self.blocked
            and (self.tally is None or self.tally.settled)
        )

    @property
    def wants_roster(self) -> bool:
        """Whether the next call will bring a roster, of which only so many may be awaited."""
        if self.sockets is None:
            return False
        if not self.asserted and self.attached:
            return self.passing is None or len(self.passing) <= MAX_JOINS
        if not self.asserted:
            return bool(self.waiting)
        return self.look or (self.roster is None and bool(self.waiting))

    @property
    def wants(self) -> str:
        """What the next call is likely to bring, as `HoldCall.brings`."""
        if self.wants_roster:
            return "r"
        return "c" if self.caches and self.waiting else ""

    def wait(self, ticket: Ticket) -> None:
        """Takes a subscribe in, behind those that wait already."""
        ticket.local_channel = self
        if self.waiting is None:
            self.waiting = {}
        self.waiting[ticket] = None

    def withdraw(self, ticket: Ticket) -> None:
        """A subscribe that isn't wanted any more: out if it waits, marked if it is under way."""
        if self.waiting and ticket in self.waiting:
            del self.waiting[ticket]
            ticket.local_channel = None
        else:
            ticket.cancelled = True

    def attach(self, ticket: Ticket) -> None:
        """A subscribe was accepted; its socket counts from now on."""
        self.attached += 1
        if self.sockets is not None and self.infos is not None:
            assert ticket.user is not None
            self.sockets[ticket.user] = self.sockets.get(ticket.user, 0) + 1
            if ticket.info or ticket.user not in self.infos:
                self.infos[ticket.user] = ticket.info

    def detach(self, user: str | None) -> None:
        """An attached socket left, whatever the cause."""
        self.attached -= 1
        if self.sockets is not None and self.infos is not None and self.gone is not None:
            assert user is not None
            left = self.sockets[user] - 1
            if left:
                self.sockets[user] = left
            else:
                del self.sockets[user], self.infos[user]
                self.gone[user] = None

    def forsake(self, users: Sequence[str]) -> None:
        """Redis lists these in our name; whoever has no socket here is to be removed."""
        if self.gone is not None and self.sockets is not None:
            for user in users:
                if user not in self.sockets:
                    self.gone[user] = None

    def plan(self) -> HoldCall | None:
        """The next call, or None where Redis knows everything. Takes the tickets that go with it."""
        if not self.asserted and self.attached == 0:
            # What Redis may still list for us is in `gone`, so an ordinary call says all. The roster missed
            # what happened meanwhile, and nobody looks at it: the next to join asks for another.
            self.asserted, self.passing, self.roster = True, None, None
        return self._tell_changes() if self.asserted else self._tell_again()

    def _tell_again(self) -> HoldCall:
        joins: list[tuple[str, bytes]] = []
        if self.sockets is not None and self.infos is not None:
            if self.passing is None:
                self.passing = list(self.sockets)
            now, self.passing = self.passing[:MAX_JOINS], self.passing[MAX_JOINS:]
            joins = [(user, self.infos[user]) for user in now if user in self.sockets]
        last = not self.passing
        # k: what a user's tab on another worker brought since the break is newer than what we know.
        flags = ("kr" if last and self.sockets is not None else "k") + self.hooks
        return HoldCall(self.attached - len(joins), 0, flags, (), joins, (), last, False)

    def _tell_changes(self) -> HoldCall | None:
        tickets: list[Ticket] = []
        if self.waiting:
            tickets = list(islice(self.waiting, MAX_JOINS))
            for ticket in tickets:
                del self.waiting[ticket]
        gone, more = self._leavers(tickets)
        counting = self.tally is not None and self.tally.due
        asking = self.asks and self.attached > 0
        if not (tickets or gone or self.look or counting or asking) and self.attached == self.confirmed:
            return None
        joins = [(ticket.user or "", ticket.info) for ticket in tickets] if self.sockets is not None else ()
        flags = ("u" if more else "") + ("r" if self._reads(tickets) else "")
        if self.caches and tickets:
            flags += "c"
        if self.tally is not None:
            flags += "s"
            self.tally.due = False
        if self.rule is not None and (tickets or asking):
            flags += "h"
            self.asks = False
        flags += self.hooks
        return HoldCall(self.attached, self.cap, flags, gone, joins, tickets, True, self.look)

    def _reads(self, tickets: Sequence[Ticket]) -> bool:
        return self.sockets is not None and (self.look or (self.roster is None and bool(tickets)))

    def _leavers(self, tickets: Sequence[Ticket]) -> tuple[list[str], bool]:
        # The users to remove now, and whether some remain: until the last of them is told, our count stays
        # above 0, since a reaper finds users by way of channels.
        if not self.gone or self.sockets is None:
            return [], False
        joining = {ticket.user for ticket in tickets}
        queued = {ticket.user for ticket in self.waiting} if self.waiting else set()
        gone: list[str] = []
        back: list[str] = []
        more = False
        for user in self.gone:
            if user in self.sockets:
                back.append(user)
            elif user in queued:
                more = True
            elif user not in joining:
                if len(gone) == MAX_GONE:
                    more = True
                    break
                gone.append(user)
        for user in back:
            del self.gone[user]
        return gone, more

    def accept(self, call: HoldCall, accepted: bytes) -> tuple[list[Ticket], list[Ticket]]:
        """Redis took `call`; `accepted` has a digit per subscription asked for. Returns the tickets that are
        attached now and those refused, both without the cancelled ones."""
        self.confirmed = call.base + accepted.count(b"1")
        self.failures = 0
        if self.gone is not None:
            for user in call.gone:
                self.gone.pop(user, None)
        if call.look:
            self.look = False
        if not self.asserted and call.last:
            self.asserted, self.passing = True, None
        joined: list[Ticket] = []
        refused: list[Ticket] = []
        left: list[str] = []
        for ticket, digit in zip(call.tickets, accepted, strict=False):
            ticket.local_channel = None
            if digit == 0x31:
                if not ticket.cancelled:
                    self.attach(ticket)
                    joined.append(ticket)
                elif ticket.user is not None:
                    left.append(ticket.user)
            elif not ticket.cancelled:
                refused.append(ticket)
        if self.gone is not None and self.sockets is not None:
            for user in left:
                if user not in self.sockets:
                    self.gone[user] = None
        return joined, refused

    def take_back(self, call: HoldCall) -> None:
        """`call` failed, or nobody knows: its subscribes wait again, ahead of the others."""
        self.confirmed = UNKNOWN
        front: dict[Ticket, None] = {}
        for ticket in call.tickets:
            if ticket.cancelled:
                ticket.local_channel = None
            else:
                front[ticket] = None
            if self.gone is not None and ticket.user is not None:
                # Redis may have taken it. A ticket that still waits keeps the user from being told gone.
                self.gone[ticket.user] = None
        if front:
            self.waiting = {**front, **(self.waiting or {})}
        if not self.asserted:
            self.passing = None
        if self.rule is not None and self.history is None:
            self.asks = True
        self._count_again()

    def _count_again(self) -> None:
        # Changes of ours may not have been told, and others' may have passed us by.
        if self.tally is not None:
            self.tally.hurry()

    def listen(self) -> list[Ticket]:
        """The topic of a user's channel is heard: those who wait are attached. Returns them."""
        joined = list(self.waiting or ())
        self.waiting = None
        for ticket in joined:
            ticket.local_channel = None
            self.attach(ticket)
        return joined

    def lose(self) -> None:
        """The connection broke: Redis has to be told everything again, and what it has nobody knows."""
        self.subscribed = self.listening = False
        if self.kind == TOPIC:
            return
        self._count_again()
        self.look = False
        self.asserted = False
        self.passing = None
        if self.confirmed or self.call is not None:
            self.confirmed = UNKNOWN

    def renew(self) -> None:
        """This worker has a new name, in which Redis has nothing yet."""
        if self.kind == TOPIC:
            return
        self._count_again()
        self.asserted = False
        self.passing = None
        self.look = False
        self.confirmed = 0
        if self.gone:
            self.gone.clear()
