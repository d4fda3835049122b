"""Sends subscription_count to the subscribers of this worker, in apps that turned it on.

tally.py remembers which count was sent; Redis decides when a new one may be announced.
"""

import asyncio
from collections.abc import Iterable

from redpoll.cluster.envelopes import parse_count, worker_of
from redpoll.cluster.membership.hold_call import HoldReply
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents

__all__ = ["Counts"]


class Counts:
    def __init__(self, channels: LocalChannels, events: MembershipEvents) -> None:
        self._channels = channels
        self._events = events

    def make_due(self, local_channel: LocalChannel) -> None:
        """Makes a call that asks Redis for the count, and announces it if it may be."""
        if local_channel.tally is not None and not local_channel.dropped:
            local_channel.tally.make_due()
            self._channels.mark_dirty(local_channel)

    def make_all_due(self, local_channels: Iterable[LocalChannel]) -> None:
        """The worker ends: announces now what would be announced later."""
        for local_channel in list(local_channels):
            if local_channel.tally is not None and not local_channel.tally.settled:
                self.make_due(local_channel)

    def answered(self, local_channel: LocalChannel, reply: HoldReply, attached: bool) -> None:
        """Takes the reply to a call with Flag.COUNT. `attached`: somebody was attached before it."""
        if (
            local_channel.tally is not None
            and local_channel.tally.answered(reply.total, reply.due_ms, lambda s: self._later(local_channel, s))
            and attached
        ):
            self._events.counted(local_channel, reply.total)

    def push(self, local_channel: LocalChannel, payload: bytes, w: bytes) -> None:
        """Takes a COUNT envelope. `w` is our name: our own announcements come with the reply instead."""
        tally = local_channel.tally
        if tally is None or worker_of(payload) == w:
            return
        total = parse_count(payload)
        # During a re-assertion this number doesn't include our changes yet, so ours stay to be announced.
        is_new = tally.announced_elsewhere(total) if local_channel.asserted else tally.announced(total)
        if is_new and local_channel.attached:
            self._events.counted(local_channel, total)
        self._channels.mark_dirty(local_channel)

    def _later(self, local_channel: LocalChannel, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self.make_due, local_channel)
