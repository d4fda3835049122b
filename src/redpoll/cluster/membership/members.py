"""The users of a presence channel on this worker, as far as Redis has to know them. Bookkeeping only."""

from collections.abc import Sequence
from typing import Final

from redpoll.cluster.membership.join import Join

__all__ = ["MAX_GONE", "MAX_USERS", "Members"]

# Bounds of one call of `hold`: users that it adds, and that it removes.
MAX_USERS: Final = 256
MAX_GONE: Final = 256


class Members:
    """The users of a presence channel on this worker.

    `sockets` counts attached sockets by user, `infos` has the last user_info that one of them brought. `gone` are users
    whom Redis may list under our name and who have no attached socket; a dict, for its order. `unasserted` are the
    users whom a re-assertion has yet to pass, None before its first call. `recheck`: read the roster again, because
    users were missing from it after a break.
    """

    __slots__ = ("gone", "infos", "recheck", "sockets", "unasserted")

    def __init__(self) -> None:
        self.sockets: dict[str, int] = {}
        self.infos: dict[str, bytes] = {}
        self.gone: dict[str, None] = {}
        self.unasserted: list[str] | None = None
        self.recheck = False

    def attach(self, user: str, info: bytes) -> None:
        self.sockets[user] = self.sockets.get(user, 0) + 1
        if info or user not in self.infos:
            self.infos[user] = info

    def detach(self, user: str) -> None:
        left = self.sockets[user] - 1
        if left:
            self.sockets[user] = left
        else:
            del self.sockets[user], self.infos[user]
            self.gone[user] = None

    def mark_gone(self, users: Sequence[str]) -> None:
        """Redis lists these users under our name: those without a socket here must be removed."""
        for user in users:
            if user not in self.sockets:
                self.gone[user] = None

    def next_asserted(self) -> list[tuple[str, bytes]]:
        """The next part of a re-assertion: up to MAX_USERS users with their infos."""
        if self.unasserted is None:
            self.unasserted = list(self.sockets)
        part, self.unasserted = self.unasserted[:MAX_USERS], self.unasserted[MAX_USERS:]
        return [(user, self.infos[user]) for user in part if user in self.sockets]

    def next_gone(self, joins: Sequence[Join], still_queued: dict[Join, None] | None) -> tuple[list[str], bool]:
        """The users to remove in the call that carries `joins`, and whether others remain. While others remain our
        count must stay above 0, because a reaper finds users by way of the counts."""
        if not self.gone:
            return [], False
        joining = {join.user for join in joins}
        queued = {join.user for join in still_queued} if still_queued else set()
        gone: list[str] = []
        back: list[str] = []
        remain = False
        for user in self.gone:
            if user in self.sockets:
                back.append(user)
            elif user in queued:
                remain = True
            elif user not in joining:
                if len(gone) == MAX_GONE:
                    remain = True
                    break
                gone.append(user)
        for user in back:
            del self.gone[user]
        return gone, remain
