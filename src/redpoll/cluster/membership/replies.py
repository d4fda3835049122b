"""Applies the replies of `hold`: attaches joiners, updates rosters and counts, and reports it all to the hub.

A reply is applied completely before anything else from the connection is handled. So the state that it describes and
the frames that follow from it are one moment (cluster/membership/README.md "Why snapshot and deltas agree").
"""

import asyncio
from collections.abc import Callable, Sequence

from redpoll.cluster.envelopes import cached_envelope
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_limit import ConnectionLimit
from redpoll.cluster.membership.connection_state import Connection
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.hold_call import CONNECTIONS, Flag, HoldCall, HoldReply
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.local_channel import LocalChannel, Subscription, Ticket
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.pending import Pending
from redpoll.cluster.membership.rosters import Changes, apply_reply, read_first, reread
from redpoll.cluster.membership.timings import Timings

__all__ = ["Replies"]


def _carry_out(report: Callable[..., None], *values: object) -> None:
    # An exception is reported to the loop, and doesn't keep the rest of the reply from being applied.
    try:
        report(*values)
    except Exception as fault:
        context = {"message": "a reply of hold was not carried out completely", "exception": fault}
        asyncio.get_running_loop().call_exception_handler(context)


class Replies:
    def __init__(
        self,
        events: MembershipEvents,
        pending: Pending,
        incarnation: Incarnation,
        connection: Connection,
        channels: LocalChannels,
        counts: Counts,
        catchup: Catchup,
        connection_limit: ConnectionLimit,
        timings: Timings,
    ) -> None:
        self._events = events
        self._pending = pending
        self._incarnation = incarnation
        self._connection = connection
        self._channels = channels
        self._counts = counts
        self._catchup = catchup
        self._connection_limit = connection_limit
        self._second_look_s = timings.second_look_s

    def topic_subscribed(self, local_channel: LocalChannel) -> None:
        """The topic of a channel that is not held is subscribed: its waiting sockets join."""
        before = local_channel.attached
        joined = local_channel.attach_waiting()
        self._channels.attached_changed(local_channel, before)
        self._pending.discard(joined)
        self._events.joined(local_channel, joined, None, None)

    def forget(self, local_channel: LocalChannel) -> None:
        """The channel is about to be dropped."""
        self._catchup.forget(local_channel)

    def apply(self, local_channel: LocalChannel, call: HoldCall[Ticket], reply: HoldReply) -> None:
        """Redis carried out `call`."""
        before = local_channel.attached
        attached = before > 0
        joined, refused = local_channel.accept(call, reply.accepted)
        self._channels.attached_changed(local_channel, before)
        self._pending.discard(ticket for ticket in call.tickets if ticket.local_channel is None)
        if local_channel.kind == CONNECTIONS:
            self._connection_limit.answered(local_channel, joined, refused)
            return
        # Those who joined count from here on, so nothing that fails below may keep them from being attached.
        if reply.roster is not None:
            self._report(local_channel, self._read_roster(local_channel, reply.roster, call.final))
        elif local_channel.roster is not None:
            self._report(local_channel, apply_reply(local_channel.roster, call, reply.added, reply.removed))
        flags = call.flags
        cached = None
        if Flag.CACHED in flags:
            cached = b"" if reply.cached is None else cached_envelope(reply.cached)
        if reply.epoch is not None:
            _carry_out(self._catchup.position, local_channel, reply.epoch, reply.top, attached)
        total = None
        if Flag.COUNT in flags and local_channel.tally is not None:
            total = reply.total
            _carry_out(self._counts.answered, local_channel, reply, attached)
        if joined:
            if total is not None and local_channel.tally is not None:
                local_channel.tally.joined(total, alone=not attached)
            _carry_out(self._events.joined, local_channel, joined, cached, total)
        for ticket in refused:
            _carry_out(self._events.refused, local_channel, ticket, "members")

    def refuse(self, local_channel: LocalChannel) -> None:
        """The channel may not become occupied: its waiting sockets are refused."""
        refused = local_channel.take_waiting()
        self._pending.discard(refused)
        for ticket in refused:
            _carry_out(self._events.refused, local_channel, ticket, "channels")

    def withdrawn(self, ticket: Ticket) -> None:
        """The call with this subscribe, which was cancelled meanwhile, has ended."""
        _carry_out(self._events.withdrawn, ticket)

    def _report(self, local_channel: LocalChannel, changes: Changes) -> None:
        for user in changes.removed:
            _carry_out(self._events.member_removed, local_channel, user)
        for user, info in changes.added:
            _carry_out(self._events.member_added, local_channel, user, info)

    def _read_roster(self, local_channel: LocalChannel, flat: Sequence[bytes], final: bool) -> Changes:
        w = self._incarnation.name
        if local_channel.roster is None:
            local_channel.roster, changes = read_first(flat, w)
        else:
            changes = reread(local_channel.roster, flat, w, final=final)
        if local_channel.members is not None:
            # A user under our name without a socket here: the reply to its join was lost, or Redis lost its leave.
            local_channel.members.mark_gone(changes.ours)
        if local_channel.subscription is Subscription.NONE:
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
