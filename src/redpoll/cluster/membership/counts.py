"""Subscribers are told how many they are, in apps that want it: when this worker has to see to that.

What a channel's subscribers were told tally.py remembers, and when a count may be told Redis decides.
"""

import asyncio
from collections.abc import Callable, Iterable

from redpoll.cluster.envelopes import parse_count
from redpoll.cluster.membership.hold_call import CHANNEL
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.tally import Tally

__all__ = ["Counts"]


class Counts:
    """`touch(local_channel)` has Redis told of a change. `on_counted(local_channel, total)`:
    everyone attached is to be told."""

    def __init__(self, touch: Callable[[LocalChannel], None], on_counted: Callable[[LocalChannel, int], None]) -> None:
        self._touch = touch
        self._on_counted = on_counted

    def switch(self, local_channel: LocalChannel, on: bool) -> bool:
        """Follows the app's setting. True: from now on subscribers of this channel are told their number."""
        if local_channel.kind != CHANNEL or on == (local_channel.tally is not None):
            return False
        if local_channel.tally is not None:
            local_channel.tally.rest()
        local_channel.tally = Tally() if on else None
        return on

    def hurry(self, local_channel: LocalChannel) -> None:
        """Redis is asked now what the count is, and whether it may be told."""
        if local_channel.tally is not None and not local_channel.dropped:
            local_channel.tally.hurry()
            self._touch(local_channel)

    def hurry_all(self, local_channels: Iterable[LocalChannel]) -> None:
        """The worker ends: what would be told later is told now."""
        for local_channel in list(local_channels):
            if local_channel.tally is not None and not local_channel.tally.settled:
                self.hurry(local_channel)

    def answered(self, local_channel: LocalChannel, total: int, due_ms: int, attached: bool) -> None:
        """The reply to a call with flag `s`; `attached`: somebody was before it."""
        if (
            local_channel.tally is not None
            and local_channel.tally.answered(total, due_ms, lambda s: self._later(local_channel, s))
            and attached
        ):
            self._on_counted(local_channel, total)

    def heard(self, local_channel: LocalChannel, payload: bytes, name: bytes) -> None:
        """An `n` envelope; `name` is our W: what we told ourselves the reply says."""
        tally = local_channel.tally
        if tally is None or payload[2 : payload.index(b" ", 2)] == name:
            return
        total = parse_count(payload)
        # While Redis is being told again after a break, our changes aren't in this number yet.
        news = tally.pushed(total) if local_channel.asserted else tally.heard(total)
        if news and local_channel.attached:
            self._on_counted(local_channel, total)
        self._touch(local_channel)

    def _later(self, local_channel: LocalChannel, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self.hurry, local_channel)
