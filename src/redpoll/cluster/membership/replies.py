"""Applies what Redis says of channels: the replies of `hold`, and the members that other workers add and remove.

A reply is applied completely before anything else from the connection is handled. So the state that it describes and
the frames that follow from it are one moment. Clients get a frame only for a real change of a roster: an unknown user
added, a known user removed. So a change that arrives twice, by a push and a reply or by two replies, makes one frame
(cluster/membership/README.md "Why snapshot and deltas agree").
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from redpoll.cluster.envelopes import Envelope, cached_envelope, parse_added, parse_removed, worker_of
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_limit import ConnectionLimit
from redpoll.cluster.membership.connection_state import RedisState
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.hold_call import CONNECTIONS, Flag, HoldCall, HoldReply
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.join_queue import JoinQueue
from redpoll.cluster.membership.local_channel import LocalChannel, TopicSubscription
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents, report
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.values import MemberEntry
from redpoll.protocol.presence import Roster

__all__ = ["Changes", "Replies", "Rosters", "apply_reply", "read_first", "reread"]

_MEMBER_ADDED: Final = ord(Envelope.MEMBER_ADDED)
_MEMBER_REMOVED: Final = ord(Envelope.MEMBER_REMOVED)


class Changes(NamedTuple):
    """What to tell clients, in this order: `removed` users, then `added` users with their infos (JSON or b"").

    `ours` are users whom Redis lists under our name. `missing` are users of the roster whom Redis doesn't list.
    """

    added: Sequence[tuple[str, bytes]] = ()
    removed: Sequence[str] = ()
    ours: Sequence[str] = ()
    missing: Sequence[str] = ()


def apply_reply(roster: Roster, call: HoldCall[Any], added: Sequence[int], removed: Sequence[int]) -> Changes:
    """Applies what `call` itself changed: `added` indexes its users, `removed` its gone users."""
    removed_users = [call.gone[at] for at in removed if roster.remove(call.gone[at])]
    added_users = [call.users[at] for at in added if roster.add(*call.users[at])]
    return Changes(added_users, removed_users)


def read_first(flat: Sequence[bytes], w: bytes) -> tuple[Roster, Changes]:
    """The first roster of a channel, from the flat HGETALL of its members. `w` is our name."""
    roster = Roster()
    ours: list[str] = []
    for user, holders, info in _entries(flat):
        roster[user] = info
        if w in holders:
            ours.append(user)
    return roster, Changes(ours=ours)


def reread(roster: Roster, flat: Sequence[bytes], w: bytes, *, final: bool) -> Changes:
    """Compares a roster with what Redis lists. Unknown users are added. Missing users are removed only if `final`:
    after a break, other workers may not have written them to Redis yet."""
    added: list[tuple[str, bytes]] = []
    ours: list[str] = []
    listed: set[str] = set()
    for user, holders, info in _entries(flat):
        listed.add(user)
        if user not in roster:
            added.append((user, info))
        roster[user] = info
        if w in holders:
            ours.append(user)
    missing = [user for user in roster if user not in listed]
    if not final:
        return Changes(added, (), ours, missing)
    for user in missing:
        del roster[user]
    return Changes(added, missing, ours)


def _entries(flat: Sequence[bytes]) -> list[tuple[str, list[bytes], bytes]]:
    return [(user.decode(), *MemberEntry.parse(entry)) for user, entry in zip(flat[::2], flat[1::2], strict=True)]


class Rosters:
    """Reports each change to `events.member_added` and `events.member_removed`."""

    def __init__(
        self,
        events: MembershipEvents,
        incarnation: Incarnation,
        connection: RedisState,
        channels: LocalChannels,
        timings: Timings,
    ) -> None:
        self._events = events
        self._incarnation = incarnation
        self._connection = connection
        self._channels = channels
        self._second_look_s = timings.second_look_s

    def answered(self, local_channel: LocalChannel, call: HoldCall[Any], reply: HoldReply) -> None:
        """Takes the reply to a call for a presence channel."""
        if reply.roster is not None:
            changes = self._read(local_channel, reply.roster, call.final)
        elif local_channel.roster is not None:
            changes = apply_reply(local_channel.roster, call, reply.added, reply.removed)
        else:
            return
        for user in changes.removed:
            report(self._events.member_removed, local_channel, user)
        for user, info in changes.added:
            report(self._events.member_added, local_channel, user, info)

    def push(self, local_channel: LocalChannel, payload: bytes) -> None:
        """Takes a MEMBER_ADDED or MEMBER_REMOVED envelope."""
        # Without a roster there is nothing to change yet. Our own changes come with the reply: pushes of them arrive
        # before it on one server and after it on another.
        roster = local_channel.roster
        if roster is None or worker_of(payload) == self._incarnation.name:
            return
        if payload[0] == _MEMBER_ADDED:
            added = parse_added(payload)
            if roster.add(added.user, added.info):
                self._events.member_added(local_channel, added.user, added.info)
        elif payload[0] == _MEMBER_REMOVED:
            user = parse_removed(payload).user
            if roster.remove(user):
                self._events.member_removed(local_channel, user)

    def _read(self, local_channel: LocalChannel, flat: Sequence[bytes], final: bool) -> Changes:
        w = self._incarnation.name
        if local_channel.roster is None:
            local_channel.roster, changes = read_first(flat, w)
        else:
            changes = reread(local_channel.roster, flat, w, final=final)
        if local_channel.members is not None:
            # A user under our name without a socket here: the reply to its join was lost, or Redis lost its leave.
            local_channel.members.mark_gone(changes.ours)
        if local_channel.subscription is TopicSubscription.NONE:
            # No changes come, so the next joiner needs another roster.
            local_channel.roster = None
        if changes.missing:
            loop = asyncio.get_running_loop()
            breaks = self._connection.breaks[local_channel.shard]
            loop.call_later(self._second_look_s, self._recheck, local_channel, breaks)
        return changes

    def _recheck(self, local_channel: LocalChannel, breaks: int) -> None:
        # After another break the other workers must be given their time again.
        if breaks != self._connection.breaks[local_channel.shard] or local_channel.dropped:
            return
        if local_channel.members is not None:
            local_channel.members.recheck = True
            self._channels.mark_dirty(local_channel)


class Replies:
    """Attaches joiners, updates rosters and counts, and reports it all to the hub."""

    def __init__(
        self,
        events: MembershipEvents,
        joins: JoinQueue,
        channels: LocalChannels,
        rosters: Rosters,
        counts: Counts,
        catchup: Catchup,
        connection_limit: ConnectionLimit,
    ) -> None:
        self._events = events
        self._joins = joins
        self._channels = channels
        self._rosters = rosters
        self._counts = counts
        self._catchup = catchup
        self._connection_limit = connection_limit

    def topic_subscribed(self, local_channel: LocalChannel) -> None:
        """The topic of a channel that is not held is subscribed: its queued joins are attached."""
        before = local_channel.attached
        joined = local_channel.attach_queued()
        self._channels.attached_changed(local_channel, before)
        self._joins.answered(joined)
        self._events.joined(local_channel, joined, None, None)

    def apply(self, local_channel: LocalChannel, call: HoldCall[Join], reply: HoldReply) -> None:
        """Redis carried out `call`."""
        before = local_channel.attached
        attached = before > 0
        joined, refused = local_channel.accept(call, reply.accepted)
        self._channels.attached_changed(local_channel, before)
        if local_channel.kind == CONNECTIONS:
            self._connection_limit.answered(local_channel, joined, refused)
            return
        self._joins.answered(joined)
        self._joins.answered(refused)
        # Those who joined count from here on, so nothing that fails below may keep them from being attached.
        if local_channel.members is not None:
            self._rosters.answered(local_channel, call, reply)
        cached = None
        if Flag.CACHED in call.flags:
            cached = b"" if reply.cached is None else cached_envelope(reply.cached)
        if reply.epoch is not None:
            report(self._catchup.position, local_channel, reply.epoch, reply.top, attached)
        total = None
        if Flag.COUNT in call.flags and local_channel.tally is not None:
            total = reply.total
            report(self._counts.answered, local_channel, reply, attached)
        if joined:
            if total is not None and local_channel.tally is not None:
                local_channel.tally.joined(total, alone=not attached)
            report(self._events.joined, local_channel, joined, cached, total)
        for join in refused:
            report(self._events.refused, local_channel, join, "members")

    def refuse(self, local_channel: LocalChannel) -> None:
        """The channel may not become occupied: its queued joins are refused."""
        refused = local_channel.refuse_queued()
        self._joins.answered(refused)
        for join in refused:
            report(self._events.refused, local_channel, join, "channels")
