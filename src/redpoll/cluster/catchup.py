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
from redpoll.cluster.history import MOST_ROWS, History, Page
from redpoll.cluster.link import LinkDown
from redpoll.cluster.membership.local_channel import HistoryPosition, LocalChannel
from redpoll.protocol.history import MAX_STORED_MESSAGES

__all__ = ["Catchup"]

log = structlog.get_logger(__name__)

# Pages that a channel may need beyond all it keeps: a publisher faster than this reader is not waited for.
_MORE_PAGES: Final = 8


class _Filling:
    """One channel's catching up: what has been read, and what went wrong in a row."""

    __slots__ = ("failures", "kept", "rows")

    def __init__(self, kept: HistoryPosition) -> None:
        self.kept = kept
        self.rows = 0
        self.failures = 0


class Catchup:
    """Passes each event on with `on_event(local_channel, payload)`.

    Calls `on_lost(local_channel)` when missed messages can't be determined, or the history is another one. Then
    `local_channel.history` is the new place, and the events after it follow.

    `begun` counts catch-ups, `lost` the calls of `on_lost`, `errors` answers of Redis that were asked for again.
    """

    def __init__(
        self,
        history: History,
        *,
        on_event: Callable[[LocalChannel, bytes], None],
        on_lost: Callable[[LocalChannel], None],
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
        self._fillings: dict[LocalChannel, _Filling] = {}

    def heard(self, local_channel: LocalChannel, kept: HistoryPosition, payload: bytes) -> None:
        """An `e` envelope of a channel with history, which is `kept`."""
        offset, prev = _frame.offsets(payload)
        if offset == 0:
            self._on_event(local_channel, payload)
        elif not kept.live or offset <= kept.last:
            # A page has it, or had it.
            return
        elif prev == kept.last:
            kept.last = offset
            self._on_event(local_channel, payload)
        else:
            self._fill(local_channel, kept)

    def cleared(self, local_channel: LocalChannel, payload: bytes) -> None:
        """An `x` envelope. While the channel catches up, the next page says the same."""
        kept = local_channel.history
        if kept is not None and kept.live:
            kept.epoch = parse_cleared(payload)
            self._lose(local_channel)

    def told(self, local_channel: LocalChannel, epoch: bytes | None, top: int, attached: bool) -> None:
        """The reply to a `hold` says what the history is at this moment; without an epoch there is none. `attached`:
        there were subscribers before it."""
        kept = local_channel.history
        if epoch is None:
            return
        if kept is None:
            local_channel.history = HistoryPosition(epoch.decode(), top, True)
            if attached:
                # They missed nothing; but who stayed while there was no rule knows of another epoch, if of any.
                self._on_lost(local_channel)
        elif kept.live and kept.epoch != epoch.decode():
            kept.epoch, kept.last = epoch.decode(), top
            self._lose(local_channel)
        elif kept.live and kept.last != top:
            self._fill(local_channel, kept)

    def break_off(self, local_channels: Iterable[LocalChannel]) -> None:
        """The connection broke: nobody knows what is missed from here on."""
        self._fillings.clear()
        for local_channel in local_channels:
            if local_channel.history is not None:
                local_channel.history.live = False

    def resume(self, local_channels: Iterable[LocalChannel]) -> None:
        """The connection is back and topics are asked for: what isn't live catches up. A channel without a
        subscriber begins anew with the next one."""
        for local_channel in local_channels:
            kept = local_channel.history
            if kept is None or kept.live or local_channel in self._fillings:
                continue
            if local_channel.attached:
                self._fill(local_channel, kept)
            else:
                local_channel.history = None

    def forget(self, local_channel: LocalChannel) -> None:
        """The channel is held no longer."""
        self._fillings.pop(local_channel, None)

    def _fill(self, local_channel: LocalChannel, kept: HistoryPosition) -> None:
        self.begun += 1
        kept.live = False
        filling = self._fillings[local_channel] = _Filling(kept)
        self._read(local_channel, filling)

    def _read(self, local_channel: LocalChannel, filling: _Filling) -> None:
        # The history may have been turned off, or the connection lost.
        if self._fillings.get(local_channel) is not filling:
            return
        if local_channel.history is not filling.kept:
            del self._fillings[local_channel]
            return
        then = partial(self._answered, local_channel, filling)
        self._history.page(local_channel.app_id, local_channel.channel, filling.kept.last, MOST_ROWS, then)

    def _answered(self, local_channel: LocalChannel, filling: _Filling, outcome: Any) -> None:
        if self._fillings.get(local_channel) is not filling:
            return
        if local_channel.history is not filling.kept:
            del self._fillings[local_channel]
        elif isinstance(outcome, Page):
            filling.failures = 0
            self._take(local_channel, filling, outcome)
        elif isinstance(outcome, LinkDown):
            del self._fillings[local_channel]
        else:
            self.errors += 1
            delay_s = min(self._retry_s * 2**filling.failures, self._greatest_retry_s)
            filling.failures = min(filling.failures + 1, 16)
            log.warning("history failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(outcome))
            asyncio.get_running_loop().call_later(delay_s, self._read, local_channel, filling)

    def _take(self, local_channel: LocalChannel, filling: _Filling, page: Page) -> None:
        kept = filling.kept
        if not page.epoch:
            # Redis has forgotten it. The next event, or the next to join, makes another history, which is seen then:
            # no two epochs have a place in common.
            del self._fillings[local_channel]
            kept.live = True
            return
        end = page.rows[-1].offset if page.rows else 0
        filling.rows += len(page.rows)
        try:
            if not page.follows(kept.epoch, kept.last):
                kept.epoch = page.epoch
                kept.last = page.rows[0].prev if page.rows else page.top
                self._lose(local_channel)
            for row in page.rows:
                kept.last = row.offset
                self._on_event(local_channel, row.envelope())
        finally:
            # An event that nobody could take costs the others nothing.
            if kept.last < end:
                self._read(local_channel, filling)
            elif not page.more:
                del self._fillings[local_channel]
                kept.live = True
            elif filling.rows > self._most(local_channel):
                del self._fillings[local_channel]
                kept.last, kept.live = page.top, True
                self._lose(local_channel)
            else:
                self._read(local_channel, filling)

    @staticmethod
    def _most(local_channel: LocalChannel) -> int:
        return (
            local_channel.rule.keep if local_channel.rule is not None else MAX_STORED_MESSAGES
        ) + _MORE_PAGES * MOST_ROWS

    def _lose(self, local_channel: LocalChannel) -> None:
        self.lost += 1
        self._on_lost(local_channel)
