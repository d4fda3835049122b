"""Applies the replies of `hold`: attaches joiners, updates rosters and counts, and reports it all to the hub.

A reply is applied completely before anything else from the connection is handled. So the state that it describes and
the frames that follow from it are one moment (cluster/membership/README.md "Why snapshot and deltas agree").
"""

from redpoll.cluster.envelopes import cached_envelope
from redpoll.cluster.membership.catchup import Catchup
from redpoll.cluster.membership.connection_limit import ConnectionLimit
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.hold_call import CONNECTIONS, Flag, HoldCall, HoldReply
from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.join_queue import JoinQueue
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents, report
from redpoll.cluster.membership.rosters import Rosters

__all__ = ["Replies"]


class Replies:
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
