"""Which page of a channel's history is read next, and which replays share it.

One page of a channel is under way at a time. Whoever waits when a reading begins takes part in it from the lowest
place of them; who comes later joins where it has got to, or waits for the next one. What a page is to each of them is
told by rewinds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import structlog

from redpoll.cluster.history import MOST_ROWS, Page
from redpoll.cluster.link import LinkDown
from redpoll.worker.replay.parking import AGAIN_S, Parking
from redpoll.worker.replay.replay import READY, Past, Replay, Sheet, tidy

if TYPE_CHECKING:
    from redpoll.cluster.history import History
    from redpoll.cluster.membership.registry import LocalChannel

__all__ = ["SharedPages", "complain"]

log = structlog.get_logger()

# Of one reading, so that a page is with all of them in a millisecond or two.
_MOST_SHARING = 256

_AT = attrgetter("at")


class SharedPages:
    """`on_page(replay, past, sheet)` for each that a page is for; `on_lost(past)`: the history is gone, or another, and
    nobody is to wait for it any longer."""

    def __init__(
        self,
        parking: Parking,
        on_page: Callable[[Replay, Past, Sheet], None],
        on_lost: Callable[[Past], None],
    ) -> None:
        self.history: History
        self._parking = parking
        self._on_page = on_page
        self._on_lost = on_lost

    def go_on(self, local_channel: LocalChannel) -> None:
        """Ask for the next page, if somebody waits for one and none is under way."""
        past: Past | None = local_channel.audience.past if local_channel.audience is not None else None
        if past is None or past.page_from is not None:
            return
        sharing = [each for each in past.round if each.state == READY]
        others = [each for each in (*past.replays.values(), *past.fills.values()) if each.state == READY]
        if sharing:
            low = min(map(_AT, sharing))
            taken = set(sharing)
            sharing += [each for each in others if each.at >= low and each not in taken]
        else:
            sharing = sorted(others, key=_AT)
        past.round = sharing[:_MOST_SHARING]
        if past.round:
            past.page_from = min(map(_AT, past.round))
            answered = partial(self._answered, local_channel, past)
            self.history.page(local_channel.app_id, local_channel.channel, past.page_from, MOST_ROWS, answered)

    def _answered(self, local_channel: LocalChannel, past: Past, outcome: Any) -> None:
        low = past.page_from
        if local_channel.audience is None or local_channel.audience.past is not past:
            return
        kept = local_channel.history
        try:
            if not isinstance(outcome, Page):
                complain(local_channel, outcome)
                for replay in past.round:
                    if replay.state == READY:
                        self._parking.put(replay, AGAIN_S)
            elif kept is None or outcome.epoch != kept.epoch:
                self._on_lost(past)
            else:
                assert low is not None
                sheet = Sheet(outcome, local_channel.audience.name)
                for replay in past.round:
                    if replay.state == READY and replay.at >= low:
                        self._on_page(replay, past, sheet)
        except Exception:
            # A page that nobody can make frames of would be the same the next time: they go on with what is new.
            self._on_lost(past)
            raise
        finally:
            past.page_from = None
            self.go_on(local_channel)
            tidy(local_channel.audience)


def complain(local_channel: LocalChannel, outcome: object) -> None:
    """Redis answered with an error, where it isn't away; it is asked again."""
    if not isinstance(outcome, LinkDown):
        log.warning("history failed", app=local_channel.app_id, channel=local_channel.channel, reason=str(outcome))
