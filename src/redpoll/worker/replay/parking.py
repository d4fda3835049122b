"""Replays that can't go on now: their socket owes too much, or Redis didn't answer. They are looked at now and then.

There is no word from a socket when it has been read, and one timer for all of these costs nothing while there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from redpoll.worker.replay.replay import PARKED, Replay

if TYPE_CHECKING:
    from redpoll.worker.connection import Connection

__all__ = ["AGAIN_S", "LOOK_S", "MOST_OWED_BYTES", "Parking"]

# A socket that owes more gets no page: with one more of them and what other channels send it is below what closes it.
MOST_OWED_BYTES = 256 * 1024
# How often those are looked at that owe too much, and when Redis is asked again that didn't answer.
LOOK_S = 0.02
AGAIN_S = 0.1
# As joins (cluster.md 6): who waits so long for its success frame is sent elsewhere.
_UNANSWERED_S = 30.0
# Of one socket, at a look: each gets a page, and with more of them most would be read for nothing.
_MOST_AT_ONCE = 4


class Parking:
    """`on_go(replay)` is called for each that may go on; its state is the callee's to change."""

    def __init__(self, on_go: Callable[[Replay], None]) -> None:
        self._on_go = on_go
        self._parked: dict[Replay, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._parked)

    def put(self, replay: Replay, wait_s: float) -> None:
        """It isn't looked at before `wait_s` have passed."""
        loop = asyncio.get_running_loop()
        replay.state = PARKED
        replay.due = loop.time() + wait_s
        self._parked[replay] = None
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def forget(self, replay: Replay) -> None:
        self._parked.pop(replay, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        # Before anything can go wrong: whatever does, the others are looked at again.
        self._timer = loop.call_later(LOOK_S, self._look)
        going: dict[Connection, int] = {}
        for replay in list(self._parked):
            if not replay.told and now - replay.begun > _UNANSWERED_S:
                del self._parked[replay]
                replay.connection.shut(4100, "the subscription could not be confirmed in time; connect again")
            elif replay.due <= now and going.get(replay.connection, 0) < _MOST_AT_ONCE and _may_go_on(replay):
                going[replay.connection] = going.get(replay.connection, 0) + 1
                del self._parked[replay]
                self._on_go(replay)
        if not self._parked:
            self._timer.cancel()
            self._timer = None


def _may_go_on(replay: Replay) -> bool:
    kept = replay.local_channel.history
    if kept is not None and not kept.live and replay.exact and replay.at > kept.last:
        # It knows more than the channel, which catches up.
        return False
    return replay.connection.bytes_owed < MOST_OWED_BYTES
