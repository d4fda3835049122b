"""Finds where the last events of a channel with a rate begin, as they are after joining.

A text may have thousands of parts, so the history is read backwards, page by page, until enough events are there.
Replays that ask for the same at one time share a reading.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from redpoll.cluster.history import History, Page
from redpoll.cluster.redis.link import Done
from redpoll.protocol.joining import LastJoined, Pace
from redpoll.worker.replay.gathering import Located
from redpoll.worker.replay.pacing import part_of

if TYPE_CHECKING:
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.worker.replay.pacing import ChannelPacing
    from redpoll.worker.replay.replay import Replay

__all__ = ["Locating"]


class _Reading(NamedTuple):
    """What is looked for. Equal ones share a reading."""

    local_channel: LocalChannel
    pace: Pace
    wanted: int
    neighbours: bool


class Locating:
    """The readings of a worker."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: dict[_Reading, list[Done]] = {}

    def locate(self, replay: Replay, done: Done) -> None:
        """Find the offset after which the replay's `look_back` begins. `done` gets it, or an error as of
        `History.locate`; never from within this call."""
        local_channel, (count, seconds) = replay.local_channel, replay.look_back
        readers = local_channel.audience.readers
        pacing = readers.pacing if readers is not None else None
        if count and pacing is not None:
            # `neighbours` as in Joiner.
            reading = _Reading(local_channel, pacing.pace, count, replay.recovers)
            self._join(reading, partial(self._located, replay, pacing, done))
        else:
            self._history.locate(local_channel.app_id, local_channel.channel, done, count=count, seconds=seconds)

    def _located(self, replay: Replay, pacing: ChannelPacing, done: Done, outcome: Any) -> None:
        if isinstance(outcome, Located):
            replay.locate(outcome, pacing)
            outcome = outcome.since
        done(outcome)

    def _join(self, reading: _Reading, done: Done) -> None:
        waiting = self._waiting.get(reading)
        if waiting is not None:
            waiting.append(done)
            return
        self._waiting[reading] = [done]
        self._read(reading, LastJoined(reading.pace, reading.wanted, reading.neighbours), None)

    def _read(self, reading: _Reading, last: LastJoined, before: int | None) -> None:
        local_channel = reading.local_channel
        answered = partial(self._answered, reading, last)
        self._history.page_before(local_channel.app_id, local_channel.channel, before, answered)

    def _answered(self, reading: _Reading, last: LastJoined, outcome: Any) -> None:
        if isinstance(outcome, Page):
            last.add(part_of(reading.pace, row.envelope()) for row in reversed(outcome.rows))
            if not last.complete and outcome.more and outcome.rows:
                self._read(reading, last, outcome.rows[0].offset)
                return
            outcome = Located(last.since, frozenset(last.keys), last.mixed_until)
        for done in self._waiting.pop(reading):
            done(outcome)
