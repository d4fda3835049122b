"""Finds where the last events of a channel begin; on a channel with a rate, as they are after joining.

There a text may have thousands of parts, so the history is read backwards, page by page, until enough events are there.
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
    """What is looked for. Equal ones share a reading. `pace` is None on a channel without a rate."""

    local_channel: LocalChannel
    wanted: int
    pace: Pace | None = None
    neighbours: bool = False


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
        if not count:
            self._history.locate(local_channel.app_id, local_channel.channel, done, seconds=seconds)
        elif pacing is None:
            self._join(_Reading(local_channel, count), done)
        else:
            # `neighbours` as in Joiner.
            reading = _Reading(local_channel, count, pacing.pace, replay.recovers)
            self._join(reading, partial(self._located, replay, pacing, done))

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
        channel, pace, wanted = reading.local_channel, reading.pace, reading.wanted
        if pace is None:
            self._history.locate(channel.app_id, channel.channel, partial(self._finish, reading), count=wanted)
        else:
            self._read(reading, pace, LastJoined(pace, wanted, reading.neighbours), None)

    def _read(self, reading: _Reading, pace: Pace, last: LastJoined, before: int | None) -> None:
        local_channel = reading.local_channel
        answered = partial(self._answered, reading, pace, last)
        self._history.page_before(local_channel.app_id, local_channel.channel, before, answered)

    def _answered(self, reading: _Reading, pace: Pace, last: LastJoined, outcome: Any) -> None:
        if isinstance(outcome, Page):
            last.add(part_of(pace, row.envelope()) for row in reversed(outcome.rows))
            if not last.complete and outcome.more and outcome.rows:
                self._read(reading, pace, last, outcome.rows[0].offset)
                return
            outcome = Located(last.since, frozenset(last.keys), last.mixed_until)
        self._finish(reading, outcome)

    def _finish(self, reading: _Reading, outcome: Any) -> None:
        for done in self._waiting.pop(reading):
            done(outcome)
