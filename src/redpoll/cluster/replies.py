"""What the reply to a `hold` means for those who are attached, and for those who wait to be.

A reply is taken whole before anything else that the connection brings, so that what it says and the frames that follow
from it are one moment (cluster.md 5). Which call it answers, and whether it succeeded, commits.py knows.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from redpoll.cluster.admissions import Admissions
from redpoll.cluster.calls import CONNECTIONS, Call
from redpoll.cluster.catchup import Catchup
from redpoll.cluster.counts import Counts
from redpoll.cluster.envelopes import cached_envelope
from redpoll.cluster.held import Held
from redpoll.cluster.listener import Listener
from redpoll.cluster.rosters import Changes, apply_reply, read_again, read_first
from redpoll.cluster.standing import Standing

__all__ = ["Replies"]


class Replies:
    """`touch(held)` has Redis told of a change; `second_look_s` is how long others may need after a break to say again
    who is there."""

    def __init__(
        self,
        listener: Listener,
        standing: Standing,
        counts: Counts,
        catchup: Catchup,
        admissions: Admissions,
        touch: Callable[[Held], None],
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

    def listening(self, held: Held) -> None:
        """The topic of a channel that is no more than that is heard."""
        self._listener.joined(held, held.listen(), None, None)

    def apply(self, held: Held, call: Call, reply: list[Any]) -> None:
        """Redis took the call; `reply` as hold.lua says at its head."""
        _, _, accepted, added, removed = reply[:5]
        rest = reply[5:]
        attached = held.attached
        joined, refused = held.accept(call, accepted)
        if held.kind == CONNECTIONS:
            self._admissions.answered(held, joined, refused)
            return
        changes = Changes()
        if call.roster:
            changes = self._read_roster(held, call, rest.pop(0))
        elif held.roster is not None:
            changes = apply_reply(held.roster, call, added, removed)
        for user in changes.removed:
            self._listener.member_removed(held, user)
        for user, info in changes.added:
            self._listener.member_added(held, user, info)
        cached = self._read_cached(rest.pop(0)) if "c" in call.flags else None
        if "h" in call.flags:
            epoch, top = rest.pop(0), rest.pop(0)
            self._catchup.told(held, epoch, int(top), attached > 0)
        total = None
        if "s" in call.flags and held.tally is not None:
            total, due_ms = rest
            self._counts.answered(held, total, due_ms, attached > 0)
        if joined:
            if total is not None and held.tally is not None:
                held.tally.joined(total, alone=not attached)
            self._listener.joined(held, joined, cached, total)
        for ticket in refused:
            self._listener.refused(held, ticket, "members")

    @staticmethod
    def _read_cached(tail: bytes | None) -> bytes:
        return b"" if tail is None else cached_envelope(tail)

    def _read_roster(self, held: Held, call: Call, flat: list[bytes]) -> Changes:
        name = self._standing.name
        if held.roster is None:
            held.roster, changes = read_first(flat, name)
        else:
            changes = read_again(held.roster, flat, name, final=call.look)
        # Listed in our name without a socket: a join whose reply was lost.
        held.forsake(changes.ours)
        if changes.missing:
            loop = asyncio.get_running_loop()
            loop.call_later(self._second_look_s, self._look_again, held, self._standing.connection)
        return changes

    def _look_again(self, held: Held, connection: int) -> None:
        # A later connection looks for itself, since the other workers may be just as far behind again.
        if connection == self._standing.connection and not held.dropped:
            held.look = True
            self._touch(held)
