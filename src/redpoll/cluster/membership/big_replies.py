"""Replies that may be big wait for their turn: Redis closes a connection that leaves too much unread."""

from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.loop.slices import Queue

__all__ = ["BigReplies"]


class BigReplies:
    """Replies of one kind that may be big: at most `limit` are awaited, and further channels wait for their turn, those
    with subscribes first."""

    __slots__ = ("_joining", "_others", "awaited", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.awaited = 0
        self._joining: Queue[LocalChannel] = Queue()
        self._others: Queue[LocalChannel] = Queue()

    @property
    def full(self) -> bool:
        return self.awaited >= self.limit

    def wait(self, local_channel: LocalChannel) -> None:
        (self._joining if local_channel.waiting else self._others).add(local_channel)

    def next(self) -> LocalChannel | None:
        """The channel whose call may be made now."""
        if self.full:
            return None
        if self._joining:
            return self._joining.pop()
        return self._others.pop() if self._others else None

    def discard(self, local_channel: LocalChannel) -> None:
        self._joining.discard(local_channel)
        self._others.discard(local_channel)

    def clear(self) -> None:
        self._joining.clear()
        self._others.clear()
