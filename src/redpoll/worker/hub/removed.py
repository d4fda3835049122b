"""The users whom the app removed from presence channels (protocol/README.md "Grants")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.protocol.grants import MAX_REVOKED

if TYPE_CHECKING:
    from redpoll.protocol.session import Session

__all__ = ["Removed"]


class Removed:
    """Who was removed, and when, by the clock by which connections are dated; the latest 10,000.

    Someone who had left the channel is nobody's connection at the removal, and still has the signature. It is for that
    connection alone, so one that is older than the removal doesn't become this member again.
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
        """When the member was removed whom this session's pending subscribe names; 0 if never, or if a grant opened the
        channel: grants say themselves when they were issued."""
        if not self._at or session.channels[channel].grant is not None:
            return 0
        return self._at.get((session.app.id, channel, user_id), 0)
