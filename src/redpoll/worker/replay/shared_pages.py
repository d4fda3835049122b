"""Reads a channel's history page by page, and shares each page among the replays of that channel.

One page per channel is under way at a time. The replays that wait when a reading begins share it, from the lowest of
their offsets on. A replay that comes later joins when the reading reaches its offset, or waits for the next one.
`replayer.py` decides what each replay takes from a page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import structlog

from redpoll.cluster.history import MAX_PAGE_ROWS, History, Page
from redpoll.cluster.redis.link import LinkDown
from redpoll.worker.replay.page_frames import PageFrames
from redpoll.worker.replay.replay import HistoryReaders, Replay, State

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.hub.channel import Channel
    from redpoll.worker.replay.waiting import WaitingReplays

__all__ = ["SharedPages", "log_failure"]

log = structlog.get_logger()

# Replays that share one page, so that serving it takes a millisecond or two.
_MAX_SHARING: Final = 256

_AT = attrgetter("at")


class SharedPages:
    """Calls `on_page(replay, readers, page)` for each replay that shares a page, and `on_lost(readers)` when the
    history is gone or has another epoch: the replays of the channel must end then."""

    def __init__(
        self,
        history: History,
        waiting: WaitingReplays,
        on_page: Callable[[Replay, HistoryReaders, PageFrames], None],
        on_lost: Callable[[HistoryReaders], None],
    ) -> None:
        self.history = history
        self._waiting = waiting
        self._on_page = on_page
        self._on_lost = on_lost

    def read_next(self, local_channel: LocalChannel) -> None:
        """Ask for the next page, if a replay waits for one and none is under way."""
        channel: Channel | None = local_channel.audience
        readers = channel.readers if channel is not None else None
        if readers is None or readers.page_from is not None:
            return
        readers.sharing = _next_to_share(readers)[:_MAX_SHARING]
        if readers.sharing:
            readers.page_from = min(map(_AT, readers.sharing))
            answered = partial(self._answered, local_channel, readers)
            self.history.page(local_channel.app_id, local_channel.channel, readers.page_from, MAX_PAGE_ROWS, answered)

    def _answered(self, local_channel: LocalChannel, readers: HistoryReaders, outcome: Any) -> None:
        low = readers.page_from
        channel: Channel | None = local_channel.audience
        if channel is None or channel.readers is not readers:
            return
        history = local_channel.history
        try:
            if not isinstance(outcome, Page):
                log_failure(local_channel, outcome)
                for replay in readers.sharing:
                    if replay.state is State.WAITING_FOR_PAGE:
                        self._waiting.wait_retry(replay)
            elif history is None or outcome.epoch != history.epoch:
                self._on_lost(readers)
            else:
                assert low is not None
                page = PageFrames(outcome, channel.name)
                for replay in readers.sharing:
                    if replay.state is State.WAITING_FOR_PAGE and replay.at >= low:
                        self._on_page(replay, readers, page)
        except Exception:
            # The page would fail again the next time, so its replays continue with live events.
            self._on_lost(readers)
            raise
        finally:
            readers.page_from = None
            self.read_next(local_channel)
            if local_channel.audience is not None:
                local_channel.audience.drop_idle_readers()


def _next_to_share(readers: HistoryReaders) -> list[Replay]:
    """The replays that share the next page. A reading under way continues; others join it from its offset on."""
    waiting = [
        replay
        for replay in (*readers.replays.values(), *readers.fills.values())
        if replay.state is State.WAITING_FOR_PAGE
    ]
    sharing = [replay for replay in readers.sharing if replay.state is State.WAITING_FOR_PAGE]
    if not sharing:
        return sorted(waiting, key=_AT)
    low = min(map(_AT, sharing))
    already = set(sharing)
    return sharing + [replay for replay in waiting if replay.at >= low and replay not in already]


def log_failure(local_channel: LocalChannel, error: object) -> None:
    """Log that Redis answered with an error; a connection that is down is logged elsewhere."""
    if not isinstance(error, LinkDown):
        log.warning("history read failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(error))
