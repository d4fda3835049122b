"""Decides whether a new subscriber of a cache channel gets the cached event itself, or with the messages of its replay.

The cached event is the last one that a server published. If there is a server's event among the messages that the
replay sends, it is that one or older, and it isn't sent again. Otherwise it is older than all of them, so it comes
first, with the answer to the subscribe. The first page nearly always shows which. If it has client events only, later
pages are searched before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from redpoll.cluster.history import MAX_PAGE_ROWS, History, Page
from redpoll.worker.replay.page_frames import PageFrames, is_by_server
from redpoll.worker.replay.replay import Kind, Replay, State
from redpoll.worker.replay.shared_pages import log_failure

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel

__all__ = ["CachedEvents"]


class _Search(NamedTuple):
    """Messages after one offset, up to another. Replays whose first page was the same share a search."""

    local_channel: LocalChannel
    after: int
    until: int


class CachedEvents:
    """`go_on(replay)` is called when a search is over, `retry(replay)` when Redis failed."""

    def __init__(self, history: History, go_on: Callable[[Replay], None], retry: Callable[[Replay], None]) -> None:
        self._history = history
        self._go_on = go_on
        self._retry = retry
        self._waiting: dict[_Search, list[Replay]] = {}

    def decided(self, replay: Replay, page: PageFrames, start: int, stop: int) -> bool:
        """`replay` sends the messages `start` to `stop` of this page first, and nothing is missing before them. Removes
        its cached event if it comes with the messages. False: later pages are searched, `go_on` follows."""
        if not replay.cached or replay.cached_is_older:
            return True
        if replay.kind is Kind.CONTINUING or page.has_server_event(start, stop, replay.cached, replay.gathering):
            # A client that named a right offset has it already, or gets it with the messages after that.
            replay.cached = None
            return True
        if start >= stop or stop < len(page.offsets) or not page.page.more:
            return True
        self._search(replay, page.offsets[-1])
        return False

    def _search(self, replay: Replay, after: int) -> None:
        history = replay.local_channel.history
        assert history is not None
        replay.state = State.SEARCHING
        # What comes later than now is newer than the cached event.
        search = _Search(replay.local_channel, after, history.last)
        if search in self._waiting:
            self._waiting[search].append(replay)
        else:
            self._waiting[search] = [replay]
            self._read(search, after)

    def _read(self, search: _Search, after: int) -> None:
        local_channel = search.local_channel
        answered = partial(self._answered, search)
        self._history.page(local_channel.app_id, local_channel.channel, after, MAX_PAGE_ROWS, answered)

    def _answered(self, search: _Search, outcome: Any) -> None:
        found = False
        if isinstance(outcome, Page):
            cached = {replay.cached for replay in self._waiting[search] if replay.cached}
            rows = [row for row in outcome.rows if row.offset <= search.until]
            # All these replays send these messages, and with a server's event among them none needs its cached event
            # before.
            found = any(is_by_server(row, one) for row in rows for one in cached)
            at = outcome.rows[-1].offset if outcome.rows else search.until
            wanted = any(replay.state is State.SEARCHING for replay in self._waiting[search])
            if not found and wanted and outcome.more and at < search.until:
                self._read(search, at)
                return
        for replay in self._waiting.pop(search):
            if replay.state is not State.SEARCHING:
                continue
            if not isinstance(outcome, Page):
                log_failure(search.local_channel, outcome)
                self._retry(replay)
                continue
            if found:
                replay.cached = None
            replay.cached_is_older = True
            self._go_on(replay)
