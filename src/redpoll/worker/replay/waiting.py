"""Replays that cannot continue now: the client has to read first, or Redis failed and is asked again.

Replays of one connection wait in a queue. When the connection is writable again, a few of them continue; the next
ones follow when one of these ends or waits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from redpoll.loop.writable import WritableSignal
from redpoll.protocol.errors import Code
from redpoll.worker.replay.replay import Replay, State

if TYPE_CHECKING:
    from redpoll.worker.hub.connection import Connection

__all__ = ["RETRY_S", "WaitingReplays"]

# When Redis is asked again, and a channel that has to catch up is looked at again.
RETRY_S: Final = 0.1
# As joins (cluster/README.md "Bounds"): after this time without a success frame the client is sent to another server.
_UNANSWERED_S: Final = 30.0
_EXPIRY_S: Final = 1.0
# Replays of one connection that go on at once. Each reads a page, and a full connection takes no more than a few.
_MAX_AT_ONCE: Final = 4


class WaitingReplays:
    """`on_go(replay)` is called for each replay that may continue; it sets the next state."""

    def __init__(self, writable: WritableSignal, on_go: Callable[[Replay], None]) -> None:
        self._writable = writable
        self._on_go = on_go
        self._queues: dict[Connection, dict[Replay, None]] = {}
        # Connections that are reported when they are writable.
        self._awaited: set[Connection] = set()
        # When each is tried again, by the loop's time. All wait equally long, so the first is due first.
        self._retries: dict[Replay, float] = {}
        self._retry_timer: asyncio.TimerHandle | None = None
        self._expiry_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._retries) + sum(map(len, self._queues.values()))

    def wait_writable(self, replay: Replay) -> None:
        """Let `replay` continue when its connection has less than WRITABLE_BELOW_BYTES unsent."""
        replay.state = State.WAITING_FOR_DRAIN
        self._queues.setdefault(replay.connection, {})[replay] = None
        self.advance(replay.connection)
        if self._expiry_timer is None:
            self._expiry_timer = asyncio.get_running_loop().call_later(_EXPIRY_S, self._expire)

    def wait_retry(self, replay: Replay) -> None:
        """Let `replay` continue after RETRY_S, and not before its channel has come as far as the replay."""
        loop = asyncio.get_running_loop()
        replay.state = State.WAITING_TO_RETRY
        self._retries[replay] = loop.time() + RETRY_S
        if self._retry_timer is None:
            self._retry_timer = loop.call_later(RETRY_S, self._retry)
        self.advance(replay.connection)

    def advance(self, connection: Connection) -> None:
        """A replay of this connection ended or waits: let the next ones continue when it is writable again."""
        if connection in self._queues and connection not in self._awaited:
            self._awaited.add(connection)
            self._writable.wait(connection, partial(self._now_writable, connection))

    def forget(self, replay: Replay) -> None:
        """`replay` is over or its connection left."""
        self._retries.pop(replay, None)
        queue = self._queues.get(replay.connection)
        if queue is not None:
            queue.pop(replay, None)
            if not queue:
                del self._queues[replay.connection]

    def closed(self, connection: Connection) -> None:
        """The connection has left all channels, and won't be reported as writable."""
        self._awaited.discard(connection)

    def _now_writable(self, connection: Connection) -> None:
        self._awaited.discard(connection)
        for replay in list(islice(self._queues.get(connection, ()), _MAX_AT_ONCE)):
            self.forget(replay)
            self._on_go(replay)

    def _retry(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        # First of all, so that an error below doesn't end the retries.
        self._retry_timer = loop.call_later(RETRY_S, self._retry)
        for replay, due in list(self._retries.items()):
            if due > now:
                break
            if replay not in self._retries:
                continue
            if _is_late(replay, now):
                self._give_up(replay)
                continue
            del self._retries[replay]
            if _is_ahead(replay):
                self.wait_retry(replay)
            else:
                self._on_go(replay)
        if not self._retries:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiry_timer = loop.call_later(_EXPIRY_S, self._expire) if self._queues else None
        now = loop.time()
        for replay in [replay for queue in self._queues.values() for replay in queue if _is_late(replay, now)]:
            self._give_up(replay)

    def _give_up(self, replay: Replay) -> None:
        self.forget(replay)
        replay.connection.shut(Code.OVER_CAPACITY, "the subscription could not be confirmed in time; connect again")


def _is_late(replay: Replay, now: float) -> bool:
    return replay.answer is not None and now - replay.begun > _UNANSWERED_S


def _is_ahead(replay: Replay) -> bool:
    """Whether the client knows a later offset than the channel, which still catches up after a break."""
    history = replay.local_channel.history
    return history is not None and not history.live and replay.exact and replay.at > history.last
