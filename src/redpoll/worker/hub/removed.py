"""The users whom the app removed from presence channels (protocol/README.md "Grants")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from redpoll.protocol.grants import MAX_REVOKED

if TYPE_CHECKING:
    from redpoll.protocol.session import Session

__all__ = ["REMOVALS", "RemovalCount", "Removed"]


class RemovalCount:
    """How many removals this process has noted. Connections note it when they come, so it orders both: a clock may be
    set back, and has too few digits for what happens within a millisecond."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def next(self) -> int:
        """The number of one more removal."""
        self.value += 1
        return self.value


REMOVALS: Final = RemovalCount()


class Removed:
    """Who was removed, and with which number in the order of connections and removals; the latest 10,000 of each app.

    A user who had left the channel before the removal still has a signature for it. A signature is for one connection,
    so a connection that is older than the removal can't become this member again.
    """

    def __init__(self) -> None:
        # By app, then by channel and user.
        self._at: dict[str, dict[tuple[str, str], int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))

    def put(self, app_id: str, channel: str, user_id: str, at: int) -> None:
        of_app = self._at.setdefault(app_id, {})
        who = (channel, user_id)
        # The latest comes last.
        of_app.pop(who, None)
        of_app[who] = at
        if len(of_app) > MAX_REVOKED:
            del of_app[next(iter(of_app))]

    def forget(self, app_id: str) -> None:
        """The app has no connection here any more: the next ones are newer than all its removals."""
        self._at.pop(app_id, None)

    def at(self, session: Session, channel: str, user_id: str) -> int:
        """The number of the removal of the member in this session's pending subscribe. 0: there was none, or a grant
        opened the channel; a grant has its own time of issue."""
        if not self._at or session.channels[channel].grant is not None:
            return 0
        of_app = self._at.get(session.app.id)
        return 0 if of_app is None else of_app.get((channel, user_id), 0)
