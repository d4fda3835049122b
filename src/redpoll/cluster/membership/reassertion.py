"""How far this worker has come with telling Redis again what it holds."""

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.redis.keys import SHARDS
from redpoll.loop.slices import Cursor

__all__ = ["Reassertion"]

# Channels whose topics are subscribed in one step after a break, about; those with history also ask for a page.
_MAX_RESUBSCRIBED: Final = 250


class Reassertion:
    """How far the worker has come with telling Redis again what it holds, after a start, a break or a new name. First
    the topics are subscribed, part by part; each part is asserted after that.

    `unasserted` are the channels whose topics are subscribed again, and of which Redis doesn't know everything yet.
    """

    def __init__(self) -> None:
        self.unasserted: set[LocalChannel] = set()
        # What is held in some shards, as far as its topics are not subscribed again.
        self._walks: deque[tuple[set[int], Cursor[LocalChannel]]] = deque()
        self._has_turn = False

    @property
    def subscribing(self) -> bool:
        """Topics are yet to be subscribed."""
        return bool(self._walks)

    def takes_turn(self) -> bool:
        """Whether topics are to be subscribed now: by turns with the joins, because established clients wait for
        them."""
        self._has_turn = not self._has_turn
        return self._has_turn and bool(self._walks)

    @property
    def done(self) -> bool:
        """Redis knows everything."""
        return not self._walks and not self.unasserted

    def begin(self, shards: Collection[int], held: Iterable[LocalChannel]) -> None:
        """Redis knows this connection in these shards. `held` are all channels."""
        self._walks.append((set(shards), Cursor(held)))

    def next_part(self) -> tuple[list[LocalChannel], Collection[int]]:
        """The next channels to subscribe, and the shards in which these were the last."""
        shards, cursor = self._walks[0]
        count = _MAX_RESUBSCRIBED * SHARDS // len(shards)
        part = [local_channel for local_channel in cursor.next(count) if local_channel.shard in shards]
        if not cursor.done:
            return part, ()
        self._walks.popleft()
        return part, shards

    def lose(self, shards: Collection[int]) -> None:
        """These shards are lost: `begin` follows when they are back."""
        for walk in list(self._walks):
            walk[0].difference_update(shards)
            if not walk[0]:
                self._walks.remove(walk)

    def stop(self) -> None:
        """The worker's name was given up, or all shards are lost."""
        self._walks.clear()
        self.unasserted.clear()
