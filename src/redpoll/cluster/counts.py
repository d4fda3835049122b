"""Subscribers are told how many they are, in apps that want it: when this worker has to see to that.

What a channel's subscribers were told tally.py remembers, and when a count may be told Redis decides.
"""

import asyncio
from collections.abc import Callable, Iterable

from redpoll.cluster.calls import CHANNEL
from redpoll.cluster.envelopes import parse_count
from redpoll.cluster.held import Held
from redpoll.cluster.tally import Tally

__all__ = ["Counts"]


class Counts:
    """`touch(held)` has Redis told of a change. `on_counted(held, total)`: everyone attached is to be told."""

    def __init__(self, touch: Callable[[Held], None], on_counted: Callable[[Held, int], None]) -> None:
        self._touch = touch
        self._on_counted = on_counted

    def switch(self, held: Held, on: bool) -> bool:
        """Follows the app's setting. True: from now on subscribers of this channel are told their number."""
        if held.kind != CHANNEL or on == (held.tally is not None):
            return False
        if held.tally is not None:
            held.tally.rest()
        held.tally = Tally() if on else None
        return on

    def hurry(self, held: Held) -> None:
        """Redis is asked now what the count is, and whether it may be told."""
        if held.tally is not None and not held.dropped:
            held.tally.hurry()
            self._touch(held)

    def hurry_all(self, helds: Iterable[Held]) -> None:
        """The worker ends: what would be told later is told now."""
        for held in list(helds):
            if held.tally is not None and not held.tally.settled:
                self.hurry(held)

    def answered(self, held: Held, total: int, due_ms: int, attached: bool) -> None:
        """The reply to a call with flag `s`; `attached`: somebody was before it."""
        if held.tally is not None and held.tally.answered(total, due_ms, lambda s: self._later(held, s)) and attached:
            self._on_counted(held, total)

    def heard(self, held: Held, payload: bytes, name: bytes) -> None:
        """An `n` envelope; `name` is our W: what we told ourselves the reply says."""
        tally = held.tally
        if tally is None or payload[2 : payload.index(b" ", 2)] == name:
            return
        total = parse_count(payload)
        # While Redis is being told again after a break, our changes aren't in this number yet.
        news = tally.pushed(total) if held.asserted else tally.heard(total)
        if news and held.attached:
            self._on_counted(held, total)
        self._touch(held)

    def _later(self, held: Held, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self.hurry, held)
