"""What subscribers were told of how many they are, on one channel of this worker.

Redis decides when a new count is told, so that it is told once in the cluster and at most each 250 ms, or each
5 s above 100 (cluster.md 5.6). Whoever made a change that could not be told yet calls again when it may be: here
is kept that one has to, and whether those attached here were all told the same. No Redis, no loop.
"""

from collections.abc import Callable
from typing import Protocol

__all__ = ["Tally"]


class _Timer(Protocol):
    def cancel(self) -> None: ...


class Tally:
    """Of a channel whose subscribers are told their number. `due`: the next call is to tell it.

    `told` is what everybody attached here was told last; None when they were told different things, as a joiner
    is told the present count at once and the others later.
    """

    __slots__ = ("_timer", "due", "told")

    def __init__(self) -> None:
        self.told: int | None = None
        self.due = False
        self._timer: _Timer | None = None

    @property
    def settled(self) -> bool:
        """Nothing of ours is left to be told."""
        return not self.due and self._timer is None

    def answered(self, total: int, due_ms: int, later: Callable[[float], _Timer]) -> bool:
        """A reply said that the count is `total`, and when it may be told (0: it was). `later(delay_s)` makes
        the timer for `hurry`. True: those attached are to be told."""
        if due_ms:
            if self._timer is None and not self.due:
                self._timer = later(due_ms / 1000)
            return False
        self.rest()
        return self.heard(total)

    def heard(self, total: int) -> bool:
        """The cluster was told `total`. True: those attached don't know it yet."""
        news = self.told != total
        self.told = total
        return news

    def pushed(self, total: int) -> bool:
        """As `heard`, from another worker: it counted after our last change, so that one is told."""
        self.rest()
        return self.heard(total)

    def joined(self, total: int, alone: bool) -> None:
        """Joiners were told `total`; `alone`: nobody else is attached."""
        if alone:
            self.told = total
        elif self.told != total:
            self.told = None

    def hurry(self) -> None:
        """The time has come, or there will be no later one."""
        self.rest()
        self.due = True

    def rest(self) -> None:
        """Nothing is to be told by us any more."""
        self.due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
