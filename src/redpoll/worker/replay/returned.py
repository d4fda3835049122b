"""What is known about the return of a connection's user: from which offset messages may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["Returned"]

# A client may leave a presence channel and come back as often as it likes: so many users are remembered as looked up.
_MAX_USERS: Final = 8

Then = Callable[[int | None], None]


class Returned:
    """`point` is the offset from which messages may be missing, None for none. It counts until `until`, by the loop's
    clock.
    """

    __slots__ = ("_users", "_waiting", "point", "until")

    def __init__(self) -> None:
        self.point: int | None = None
        self.until = 0.0
        self._waiting: list[Then] | None = []
        # Those that were looked up last.
        self._users: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return self._waiting is None

    def needs(self, user: str) -> bool:
        """Whether this user must be looked up. False the next time."""
        if user in self._users:
            return False
        self._users = (*self._users, user)[-_MAX_USERS:]
        return True

    def when_known(self, then: Then) -> None:
        """Call `then(point)`, at once if it is known."""
        if self._waiting is None:
            then(self.point)
        else:
            self._waiting.append(then)

    def forget(self) -> None:
        """The connection closes, so what waits for the point leaves by itself."""
        self._waiting = None

    def settle(self, point: int | None, until: float) -> None:
        """Set the point. With several user ids on one connection, the smallest offset wins."""
        if point is not None:
            self.point = point if self.point is None else min(self.point, point)
            self.until = max(self.until, until)
        waiting, self._waiting = self._waiting, None
        for then in waiting or ():
            then(self.point)
