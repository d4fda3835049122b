"""Delivers the events of channels with history exactly once and in order, across breaks of the connection.

Every stored event carries its own offset and that of the event before it. While the one before is the last that was
delivered, events pass through. Otherwise, and after every break, the channel catches up: it reads its history page by
page and ignores pushes meanwhile, because a later page has them. After the last page it is live again. This needs no
buffer, because one connection brings pages and pushes in the order in which Redis made them (cluster/README.md
"History").

A history may have lost messages that were delivered: a Redis that was cut off took them, and its successor has others
from the same time. Then the page doesn't continue at the last delivered offset, and the channel looks back for the last
message that both have: it reads from the oldest offset that it remembers, and skips what it has delivered.

Events that are not stored (offset 0) are delivered at once: no page has them. This module knows no sockets.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import structlog

from redpoll import _frame
from redpoll.cluster.envelopes import parse_cleared
from redpoll.cluster.history import MAX_PAGE_ROWS, History, HistoryPosition, Page
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.membership_events import MembershipEvents
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.link import LinkDown
from redpoll.protocol.history import MAX_STORED_MESSAGES

__all__ = ["Catchup"]

log = structlog.get_logger(__name__)

# Pages beyond all that a channel keeps. A reader that is slower than the publisher gives up after them.
_MAX_EXTRA_PAGES: Final = 8


class _Run:
    """One channel that catches up: its position, the rows read so far, and the failures in a row.

    `since` is the offset after which the next page begins: `position.last`, or an earlier one while the channel looks
    back for a message in `known`, the offsets that were delivered."""

    __slots__ = ("failures", "known", "position", "rows", "since")

    def __init__(self, position: HistoryPosition) -> None:
        self.position = position
        self.since = position.last
        self.known: frozenset[int] = frozenset()
        self.rows = 0
        self.failures = 0


class Catchup:
    """Reports each event to `events.event`.

    Calls `events.lost` when missed messages can't be determined, or the history is another one. `local_channel.history`
    is the new position then, and the events after it follow.

    `begun` counts catch-ups, `errors` the error answers, which are repeated.
    """

    def __init__(self, history: History, events: MembershipEvents, timings: Timings) -> None:
        self.begun = 0
        self.errors = 0
        self._history = history
        self._events = events
        self._on_event = events.event
        self._timings = timings
        self._runs: dict[LocalChannel, _Run] = {}

    def push(self, local_channel: LocalChannel, position: HistoryPosition, payload: bytes) -> None:
        """Takes an EVENT envelope of a channel with history."""
        offset, prev = _frame.offsets(payload)
        if offset == 0:
            self._on_event(local_channel, payload)
        elif not position.live or offset <= position.last:
            # A page had it, or will have it.
            return
        elif prev == position.last:
            position.advance(offset)
            self._on_event(local_channel, payload)
        else:
            self._begin(local_channel, position)

    def cleared(self, local_channel: LocalChannel, payload: bytes) -> None:
        """Takes a HISTORY_CLEARED envelope. While the channel catches up, the next page says the same."""
        position = local_channel.history
        if position is not None and position.live:
            position.begin(parse_cleared(payload), position.last)
            self._events.lost(local_channel)

    def position(self, local_channel: LocalChannel, epoch: str, top: int, attached: bool) -> None:
        """Takes the position of the history from a reply of `hold`. `attached`: there were subscribers before it."""
        position = local_channel.history
        if position is None:
            local_channel.history = HistoryPosition(epoch, top, True)
            if attached:
                # They missed nothing, but they have no epoch, or the epoch of an earlier rule.
                self._events.lost(local_channel)
        elif position.live and position.epoch != epoch:
            position.begin(epoch, top)
            self._events.lost(local_channel)
        elif position.live and position.last != top:
            self._begin(local_channel, position)

    def resume(self, local_channels: Iterable[LocalChannel]) -> None:
        """The connection is back and the topics are subscribed: channels that aren't live catch up. A channel without
        subscribers forgets its position; its next subscriber brings a new one."""
        for local_channel in local_channels:
            position = local_channel.history
            if position is None or position.live or local_channel in self._runs:
                continue
            if local_channel.attached:
                self._begin(local_channel, position)
            else:
                local_channel.history = None

    def forget(self, local_channel: LocalChannel) -> None:
        """The channel is no longer held, or its shard was lost: from then on messages may be missed, and it isn't live
        (`LocalChannel.connection_lost`)."""
        self._runs.pop(local_channel, None)

    def _begin(self, local_channel: LocalChannel, position: HistoryPosition) -> None:
        self.begun += 1
        position.live = False
        run = self._runs[local_channel] = _Run(position)
        self._read(local_channel, run)

    def _ended(self, local_channel: LocalChannel, run: _Run) -> bool:
        # The connection broke, or the app turned the history off.
        if self._runs.get(local_channel) is not run:
            return True
        if local_channel.history is not run.position:
            del self._runs[local_channel]
            return True
        return False

    def _read(self, local_channel: LocalChannel, run: _Run) -> None:
        if not self._ended(local_channel, run):
            done = partial(self._answered, local_channel, run)
            self._history.page(local_channel.app_id, local_channel.channel, run.since, MAX_PAGE_ROWS, done)

    def _answered(self, local_channel: LocalChannel, run: _Run, outcome: Any) -> None:
        if self._ended(local_channel, run):
            return
        if isinstance(outcome, Page):
            run.failures = 0
            self._apply_page(local_channel, run, outcome)
        elif isinstance(outcome, LinkDown):
            del self._runs[local_channel]
        else:
            self.errors += 1
            delay_s = self._timings.retry_delay_s(run.failures)
            run.failures += 1
            log.warning(
                "history read failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(outcome)
            )
            asyncio.get_running_loop().call_later(delay_s, self._read, local_channel, run)

    def _apply_page(self, local_channel: LocalChannel, run: _Run, page: Page) -> None:
        position = run.position
        if not page.epoch:
            # Redis has forgotten the history. The next event or subscribe creates another one, which is noticed then:
            # two epochs have no offset in common.
            del self._runs[local_channel]
            position.live = True
            return
        run.rows += len(page.rows)
        rows = page.rows
        lost = not page.follows(position.epoch, position.last)
        if lost and page.epoch == position.epoch:
            if not run.known:
                run.known = frozenset(position.delivered)
                self._read_from(local_channel, run, min(run.known))
                return
            rows = [row for row in rows if row.offset not in run.known]
            if not rows and page.more:
                self._read_from(local_channel, run, page.rows[-1].offset)
                return
        if lost:
            before = rows[0].prev if rows else page.top
            if page.epoch == position.epoch and before in run.known:
                # The last message that both have: nothing is missing, but the history isn't the one that clients know.
                position.last = before
            else:
                position.begin(page.epoch, before)
        end = rows[-1].offset if rows else 0
        try:
            if lost:
                self._events.lost(local_channel)
            for row in rows:
                position.advance(row.offset)
                self._on_event(local_channel, row.envelope())
        finally:
            # If the delivery of an event raised, the events after it are read again.
            if position.last < end:
                self._read_from(local_channel, run, position.last)
            elif not page.more:
                del self._runs[local_channel]
                position.live = True
            elif run.rows > self._max_rows(local_channel):
                del self._runs[local_channel]
                position.begin(position.epoch, page.top)
                position.live = True
                self._events.lost(local_channel)
            else:
                self._read_from(local_channel, run, position.last)

    def _read_from(self, local_channel: LocalChannel, run: _Run, since: int) -> None:
        run.since = since
        self._read(local_channel, run)

    @staticmethod
    def _max_rows(local_channel: LocalChannel) -> int:
        # The rule may have been taken away meanwhile.
        keep = local_channel.rule.keep if local_channel.rule is not None else MAX_STORED_MESSAGES
        return keep + _MAX_EXTRA_PAGES * MAX_PAGE_ROWS
