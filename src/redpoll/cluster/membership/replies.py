"""What the reply to a `hold` means for those who are attached, and for those who wait to be.

A reply is taken whole before anything else that the connection brings, so that what it says and the frames that follow
from it are one moment (cluster.md 5). Which call it answers, and whether it succeeded, commits.py knows.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from redpoll.cluster.catchup import Catchup
from redpoll.cluster.connection_limit import ConnectionLimit
from redpoll.cluster.envelopes import cached_envelope
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.hold_call import CONNECTIONS, HoldCall
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.reconnect import Reconnect
from redpoll.cluster.membership.rosters import Changes, apply_reply, read_again, read_first

__all__ = ["Replies"]


class Replies:
    """`touch(local_channel)` has Redis told of a change; `second_look_s` is how long others may need after a break
    to say again who is there."""

    def __init__(
        self,
        listener: MembershipEvents,
        standing: Reconnect,
        counts: Counts,
        catchup: Catchup,
        admissions: ConnectionLimit,
        touch: Callable[[LocalChannel], None],
        *,
        second_look_s: float,
    ) -> None:
        self._listener = listener
        self._standing = standing
        self._counts = counts
        self._catchup = catchup
        self._admissions = admissions
        self._touch = touch
        self._second_look_s = second_look_s

    def listening(self, local_channel: LocalChannel) -> None:
        """The topic of a channel that is no more than that is heard."""
        self._listener.joined(local_channel, local_channel.listen(), None, None)

    def apply(self, local_channel: LocalChannel, call: HoldCall, reply: list[Any]) -> None:
        """Redis took the call; `reply` as hold.lua says at its head."""
        _, _, accepted, added, removed = reply[:5]
        rest = reply[5:]
        attached = local_channel.attached
        joined, refused = local_channel.accept(call, accepted)
        if local_channel.kind == CONNECTIONS:
            self._admissions.answered(local_channel, joined, refused)
            return
        changes = Changes()
        if call.roster:
            changes = self._read_roster(local_channel, call, rest.pop(0))
        elif local_channel.roster is not None:
            changes = apply_reply(local_channel.roster, call, added, removed)
        for user in changes.removed:
            self._listener.member_removed(local_channel, user)
        for user, info in changes.added:
            self._listener.member_added(local_channel, user, info)
        cached = self._read_cached(rest.pop(0)) if "c" in call.flags else None
        if "h" in call.flags:
            epoch, top = rest.pop(0), rest.pop(0)
            self._catchup.told(local_channel, epoch, int(top), attached > 0)
        total = None
        if "s" in call.flags and local_channel.tally is not None:
            total, due_ms = rest
            self._counts.answered(local_channel, total, due_ms, attached > 0)
        if joined:
            if total is not None and local_channel.tally is not None:
                local_channel.tally.joined(total, alone=not attached)
            self._listener.joined(local_channel, joined, cached, total)
        for ticket in refused:
            self._listener.refused(local_channel, ticket, "members")

    @staticmethod
    def _read_cached(tail: bytes | None) -> bytes:
        return b"" if tail is None else cached_envelope(tail)

    def _read_roster(self, local_channel: LocalChannel, call: HoldCall, flat: list[bytes]) -> Changes:
        name = self._standing.name
        if local_channel.roster is None:
            local_channel.roster, changes = read_first(flat, name)
        else:
            changes = read_again(local_channel.roster, flat, name, final=call.look)
        # Listed in our name without a socket: a join whose reply was lost.
        local_channel.forsake(changes.ours)
        if changes.missing:
            loop = asyncio.get_running_loop()
            loop.call_later(self._second_look_s, self._look_again, local_channel, self._standing.connection)
        return changes

    def _look_again(self, local_channel: LocalChannel, connection: int) -> None:
        # A later connection looks for itself, since the other workers may be just as far behind again.
        if connection == self._standing.connection and not local_channel.dropped:
            local_channel.look = True
            self._touch(local_channel)
