"""The users whom the app removed from presence channels (protocol/README.md "Grants")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.protocol.grants import MAX_REVOKED

if TYPE_CHECKING:
    from redpoll.protocol.session import Session

__all__ = ["Removed"]


class Removed:
    """Who was removed, and when, by the clock that dates connections; the latest 10,000.

    A user who had left the channel before the removal still has a signature for it. A signature is for one connection,
    so a connection that is older than the removal can't become this member again.
    """

    def __init__(self) -> None:
        self._at: dict[tuple[str, str, str], int] = {}

    def __len__(self) -> int:
        return len(self._at)

    def put(self, app_id: str, channel: str, user_id: str, at: int) -> None:
        who = (app_id, channel, user_id)
        # The latest comes last.
        self._at.pop(who, None)
        self._at[who] = at
        if len(self._at) > MAX_REVOKED:
            del self._at[next(iter(self._at))]

    def at(self, session: Session, channel: str, user_id: str) -> int:
        """When the member in this session's pending subscribe was removed. 0: never, or a grant opened the channel; a
        grant has its own time of issue."""
        if not self._at or session.channels[channel].grant is not None:
            return 0
        return self._at.get((session.app.id, channel, user_id), 0)
