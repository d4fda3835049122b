"""`SignedIn`: the user as whom a `Subscriber` is signed in, and who of the user's watchlist is online."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from redpoll_client.errors import Overflow, ProtocolError
from redpoll_client.names import USER_CHANNEL

__all__ = ["SignedIn", "WatchlistEvent"]


@dataclass(frozen=True)
class WatchlistEvent:
    """`name` is `online` or `offline`; `user_ids` are those of the watchlist who became so."""

    name: str
    user_ids: tuple[str, ...]


class SignedIn:
    """The user of this connection. It stays signed in over reconnects, until a sign-in is refused.

    `online` is the set of those of the watchlist who are online, live; `async for change in user` waits for changes.
    The iteration raises Overflow if more than `size` changes wait, SignInRefused, and what ends the subscriber.
    """

    def __init__(self, user: Mapping[str, Any] | None, size: int) -> None:
        # What the caller asked to be signed in as; None where the sign-in endpoint knows it.
        self.asked = user
        self.id = ""
        self.user_data: dict[str, Any] = {}
        self.online: set[str] = set()
        self.answered: asyncio.Future[None] | None = None
        self._size = size
        self._changes: asyncio.Queue[WatchlistEvent | BaseException] = asyncio.Queue()
        self._end: BaseException | None = None

    @property
    def channel(self) -> str:
        """The channel on which back ends send events to this user; subscribe to it."""
        return USER_CHANNEL + self.id

    def __aiter__(self) -> AsyncIterator[WatchlistEvent]:
        return self

    async def __anext__(self) -> WatchlistEvent:
        if self._end is not None and self._changes.empty():
            raise self._end
        change = await self._changes.get()
        if isinstance(change, WatchlistEvent):
            return change
        raise change

    # -- what the subscriber calls

    def asks(self) -> None:
        """A sign-in is about to be sent: after a reconnect, another answer is to come."""
        if self.answered is None or self.answered.done():
            self.answered = asyncio.get_running_loop().create_future()

    def succeeded(self, fields: Mapping[str, Any]) -> None:
        """Takes a `pusher:signin_success`. Raises ProtocolError."""
        user = fields.get("user_data")
        try:
            user = json.loads(user) if isinstance(user, str) else user
        except (ValueError, RecursionError):
            user = None
        if not isinstance(user, dict) or not isinstance(user.get("id"), str):
            raise ProtocolError("the server's signin_success has no user")
        self.id, self.user_data = user["id"], user
        # The server sends the whole list again.
        self.online.clear()
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(None)

    def changed(self, fields: Mapping[str, Any]) -> None:
        """Takes a `watchlist_events`. Raises ProtocolError."""
        events = fields.get("events")
        for event in events if isinstance(events, list) else [None]:
            ids = event.get("user_ids") if isinstance(event, dict) else None
            if (
                not isinstance(event, dict)
                or not isinstance(ids, list)
                or event.get("name") not in ("online", "offline")
            ):
                raise ProtocolError("the server's watchlist_events has no events")
            named = tuple(str(one) for one in ids)
            if event["name"] == "online":
                self.online.update(named)
            else:
                self.online.difference_update(named)
            if self._end is None and self._changes.qsize() >= self._size:
                self.end(Overflow("watchlist", self._size))
            if self._end is None:
                self._changes.put_nowait(WatchlistEvent(event["name"], named))

    @property
    def ended(self) -> bool:
        return self._end is not None

    def end(self, error: BaseException) -> None:
        """Ends the iteration, after what is queued."""
        if self._end is None:
            self._end = error
            self._changes.put_nowait(error)
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(error)
            self.answered.exception()
