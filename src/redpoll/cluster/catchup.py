"""Events of channels with history, each exactly once and in order, whatever was missed between two of them.

An event says its offset and that of the one before it. While the one before is the last that we passed on, events go on
as they come. Otherwise, and after every break of the connection, the channel catches up: it is filled from its
history, page by page, and what comes meanwhile is ignored, since a later page has it; from the page with nothing behind
it the channel is live again (cluster.md 8). That leans on one connection bringing pages and events in the order in
which Redis made them (cluster.md rule 1), and needs no buffer.

What isn't kept (offset 0) is passed on at once: no page has it. Knows no sockets.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import structlog

from redpoll import _frame
from redpoll.cluster.envelopes import parse_cleared
from redpoll.cluster.held import Held, Kept
from redpoll.cluster.history import MOST_ROWS, History, Page
from redpoll.cluster.link import LinkDown

__all__ = ["Catchup"]

log = structlog.get_logger(__name__)

# Pages that a channel may need beyond all it keeps: a publisher faster than this reader is not waited for.
_MORE_PAGES: Final = 8
# Of a channel whose rule was taken away meanwhile: the most that a rule keeps.
_MOST_KEPT: Final = 10_000


class _Filling:
    """One channel's catching up: what has been read, and what went wrong in a row."""

    __slots__ = ("failures", "kept", "rows")

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.rows = 0
        self.failures = 0


class Catchup:
    """`on_event(held, payload)` gets each event; `on_lost(held)` is called when there is no telling what was missed, or
    the history is another: `held.history` is the place from which events follow, and they come after it.

    `begun` counts catch-ups, `lost` the calls of `on_lost`, `errors` answers of Redis that were asked for again.
    """

    def __init__(
        self,
        history: History,
        *,
        on_event: Callable[[Held, bytes], None],
        on_lost: Callable[[Held], None],
        retry_s: float,
        greatest_retry_s: float,
    ) -> None:
        self.begun = 0
        self.lost = 0
        self.errors = 0
        self._history = history
        self._on_event = on_event
        self._on_lost = on_lost
        self._retry_s = retry_s
        self._greatest_retry_s = greatest_retry_s
        self._fillings: dict[Held, _Filling] = {}

    def heard(self, held: Held, kept: Kept, payload: bytes) -> None:
        """An `e` envelope of a channel with history, which is `kept`."""
        offset, prev = _frame.offsets(payload)
        if offset == 0:
            self._on_event(held, payload)
        elif not kept.live or offset <= kept.last:
            # A page has it, or had it.
            return
        elif prev == kept.last:
            kept.last = offset
            self._on_event(held, payload)
        else:
            self._fill(held, kept)

    def cleared(self, held: Held, payload: bytes) -> None:
        """An `x` envelope. While the channel catches up, the next page says the same."""
        kept = held.history
        if kept is not None and kept.live:
            kept.epoch = parse_cleared(payload)
            self._lose(held)

    def told(self, held: Held, epoch: bytes | None, top: int, attached: bool) -> None:
        """The reply to a `hold` says what the history is at this moment; without an epoch there is none. `attached`:
        there were subscribers before it."""
        kept = held.history
        if epoch is None:
            return
        if kept is None:
            held.history = Kept(epoch.decode(), top, True)
            if attached:
                # They missed nothing; but who stayed while there was no rule knows of another epoch, if of any.
                self._on_lost(held)
        elif kept.live and kept.epoch != epoch.decode():
            kept.epoch, kept.last = epoch.decode(), top
            self._lose(held)
        elif kept.live and kept.last != top:
            self._fill(held, kept)

    def break_off(self, helds: Iterable[Held]) -> None:
        """The connection broke: nobody knows what is missed from here on."""
        self._fillings.clear()
        for held in helds:
            if held.history is not None:
                held.history.live = False

    def resume(self, helds: Iterable[Held]) -> None:
        """The connection is back and topics are asked for: what isn't live catches up. A channel without a
        subscriber begins anew with the next one."""
        for held in helds:
            kept = held.history
            if kept is None or kept.live or held in self._fillings:
                continue
            if held.attached:
                self._fill(held, kept)
            else:
                held.history = None

    def forget(self, held: Held) -> None:
        """The channel is held no longer."""
        self._fillings.pop(held, None)

    def _fill(self, held: Held, kept: Kept) -> None:
        self.begun += 1
        kept.live = False
        filling = self._fillings[held] = _Filling(kept)
        self._read(held, filling)

    def _read(self, held: Held, filling: _Filling) -> None:
        # The history may have been turned off, or the connection lost.
        if self._fillings.get(held) is not filling:
            return
        if held.history is not filling.kept:
            del self._fillings[held]
            return
        then = partial(self._answered, held, filling)
        self._history.page(held.app_id, held.channel, filling.kept.last, MOST_ROWS, then)

    def _answered(self, held: Held, filling: _Filling, outcome: Any) -> None:
        if self._fillings.get(held) is not filling:
            return
        if held.history is not filling.kept:
            del self._fillings[held]
        elif isinstance(outcome, Page):
            filling.failures = 0
            self._take(held, filling, outcome)
        elif isinstance(outcome, LinkDown):
            del self._fillings[held]
        else:
            self.errors += 1
            delay_s = min(self._retry_s * 2**filling.failures, self._greatest_retry_s)
            filling.failures = min(filling.failures + 1, 16)
            log.warning("history failed", app=held.app_id, channel=held.channel, reason=str(outcome))
            asyncio.get_running_loop().call_later(delay_s, self._read, held, filling)

    def _take(self, held: Held, filling: _Filling, page: Page) -> None:
        kept = filling.kept
        if not page.epoch:
            # Redis has forgotten it. The next event, or the next to join, makes another history, which is seen then:
            # no two epochs have a place in common.
            del self._fillings[held]
            kept.live = True
            return
        end = page.rows[-1].offset if page.rows else 0
        filling.rows += len(page.rows)
        try:
            if not page.follows(kept.epoch, kept.last):
                kept.epoch = page.epoch
                kept.last = page.rows[0].prev if page.rows else page.top
                self._lose(held)
            for row in page.rows:
                kept.last = row.offset
                self._on_event(held, row.envelope())
        finally:
            # An event that nobody could take costs the others nothing.
            if kept.last < end:
                self._read(held, filling)
            elif not page.more:
                del self._fillings[held]
                kept.live = True
            elif filling.rows > self._most(held):
                del self._fillings[held]
                kept.last, kept.live = page.top, True
                self._lose(held)
            else:
                self._read(held, filling)

    @staticmethod
    def _most(held: Held) -> int:
        return (held.rule.keep if held.rule is not None else _MOST_KEPT) + _MORE_PAGES * MOST_ROWS

    def _lose(self, held: Held) -> None:
        self.lost += 1
        self._on_lost(held)
