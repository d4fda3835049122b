"""The subscription_count of one channel, as far as this worker's subscribers know it.

Redis decides when a new count is announced: once in the cluster, and at most every 250 ms, or every 5 s above 100
subscribers (cluster/membership/README.md "hold"). The worker whose change could not be announced yet calls `hold` again
when it may be. A tally remembers that, and the count that all subscribers of this worker were sent. No Redis, no event
loop.
"""

from asyncio import TimerHandle
from collections.abc import Callable

__all__ = ["Tally"]


class Tally:
    """`due`: the next call announces the count. `sent` is the count that every attached subscriber was sent last; None
    if they were sent different ones, because a joiner gets the present count at once and the others get it later."""

    __slots__ = ("_timer", "due", "sent")

    def __init__(self) -> None:
        self.sent: int | None = None
        self.due = False
        self._timer: TimerHandle | None = None

    @property
    def settled(self) -> bool:
        """This worker has no change left to announce."""
        return not self.due and self._timer is None

    def answered(self, total: int, due_ms: int, later: Callable[[float], TimerHandle]) -> bool:
        """Takes the reply of a call: the count, and in how many ms it may be announced (0: it was). `later(delay_s)`
        starts the timer that calls `make_due`. True: the subscribers must be sent the count."""
        if due_ms:
            if self._timer is None and not self.due:
                self._timer = later(due_ms / 1000)
            return False
        self.settle()
        return self.announced(total)

    def announced(self, total: int) -> bool:
        """`total` was announced. True: the subscribers of this worker must be sent it."""
        is_new = self.sent != total
        self.sent = total
        return is_new

    def announced_elsewhere(self, total: int) -> bool:
        """As `announced`, for another worker's announcement. It counted after our last change, so ours is included."""
        self.settle()
        return self.announced(total)

    def joined(self, total: int, alone: bool) -> None:
        """Joiners were sent `total`; `alone`: nobody else is attached."""
        if alone:
            self.sent = total
        elif self.sent != total:
            self.sent = None

    def make_due(self) -> None:
        """The next call is to announce the count."""
        self.settle()
        self.due = True

    def settle(self) -> None:
        """This worker has nothing left to announce."""
        self.due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
