"""`Channel`: one subscription's queue of events, its members and its position in the history."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from redpoll_client.errors import Overflow, RedpollError
from redpoll_client.names import check_event, needs_signature
from redpoll_client.signatures import from_json, to_json

__all__ = ["Channel", "Event", "Members", "Position"]


@dataclass(frozen=True)
class Position:
    """A place in a channel's history (redpoll only): everything up to `offset` of `epoch` was handed out."""

    epoch: str
    offset: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `data` is the publisher's string, byte for byte, decrypted on encrypted channels. `user_id` is the
    sender of a client event on a presence channel. `offset` is the place in the history, where the channel has one."""

    channel: str
    name: str
    data: str
    user_id: str | None = None
    offset: int | None = None

    def json(self) -> Any:
        """The parsed data. Raises ValueError if it isn't JSON."""
        return from_json(self.data)


class Members(Mapping[str, Any]):
    """The members of a presence channel: user id to info, live. `me` is this connection's own id, or None where it
    isn't known. Empty on other channels and while the connection is away for the first time."""

    def __init__(self) -> None:
        self._infos: dict[str, Any] = {}
        self.me: str | None = None

    def __getitem__(self, user_id: str) -> Any:
        return self._infos[user_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"Members({self._infos!r})"

    def replace(self, presence: object) -> None:
        """Takes the list of a success frame. Its ids and its infos both count, whatever its `count` says. Raises
        ValueError for a list that isn't one."""
        if not isinstance(presence, dict):
            raise ValueError("the member list is no object")
        ids, infos = presence.get("ids", []), presence.get("hash", {})
        if not isinstance(ids, list) or not isinstance(infos, dict):
            raise ValueError("the member list's ids or hash have the wrong type")
        # Some servers send numbers, and leave members without info out of `hash`.
        self._infos = {_user_id(one): {} for one in ids} | dict(infos)

    def add(self, member: object) -> str:
        """Takes a `member_added`. Returns the id. Raises ValueError."""
        user_id = _user_id(member.get("user_id") if isinstance(member, dict) else None)
        self._infos[user_id] = member.get("user_info") or {} if isinstance(member, dict) else {}
        return user_id

    def remove(self, member: object) -> str:
        """Takes a `member_removed`. Returns the id. Raises ValueError."""
        user_id = _user_id(member.get("user_id") if isinstance(member, dict) else None)
        self._infos.pop(user_id, None)
        return user_id


def _user_id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a member has no user_id")
    return str(value)


class Channel:
    """A subscription: `async with subscriber.subscribe("news") as channel: async for event in channel: …`.

    The iteration never ends by itself. It raises Overflow, SubscriptionRefused, ConnectionRefused or another
    RedpollError when the subscription is over, after what was received before; DecryptionFailed in the place of one
    event.
    """

    def __init__(
        self,
        name: str,
        size: int,
        join: Callable[[Channel], Awaitable[None]],
        leave: Callable[[Channel], Awaitable[None]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
        *,
        lifecycle: bool,
        since: Position | None,
        rewind: Mapping[str, int] | None,
    ) -> None:
        self.name = name
        self.members = Members()
        # How many connections are subscribed, where the app sends it.
        self.subscription_count: int | None = None
        # False once something may be missing: after a reconnect without recovery, or when the history was lost.
        self.recovered = True
        self.position = since
        self.received = since
        self.rewind = rewind
        self.lifecycle = lifecycle
        self.key: bytes | None = None
        self.key_fetched_at = 0.0
        self.joined: asyncio.Future[None] | None = None
        self._ever_joined = False
        # Until the answer to a subscribe that asks for history. What comes before it belongs to an earlier subscription
        # to the channel on the same connection, and comes once more.
        self._is_early = False
        self.asked()
        self._size = size
        self._join, self._leave, self._send = join, leave, send
        self._queue: deque[tuple[Event | RedpollError, Position | None]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._end: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Channel {self.name}: {len(self._queue)} events wait>"

    async def __aenter__(self) -> Self:
        """Subscribes. Raises SubscriptionRefused, or Unavailable without an answer in time."""
        await self._join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._queue:
            if self._end is not None:
                raise self._end
            if self._waiting is not None:
                raise RuntimeError(f"{self.name}: two tasks read this channel; let one of them pass events on")
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        item, position = self._queue.popleft()
        if position is not None:
            self.position = position
        if isinstance(item, Event):
            return item
        raise item

    async def trigger(self, event: str, data: Any) -> None:
        """Sends a client event, whose name begins with `client-`, to the channel's other subscribers.

        Raises ValueError on channels that take none, and Unreachable while the connection is away. The server doesn't
        confirm client events; a refusal (10 a second, sizes) arrives as an error of the connection, `on_error`.
        """
        if not check_event(event).startswith("client-"):
            raise ValueError(f"{event!r:.80}: names of client events begin with client-")
        if not needs_signature(self.name) or self.key is not None:
            raise ValueError(f"{self.name}: only private and presence channels, not encrypted, take client events")
        text = data if isinstance(data, str) else to_json(data)
        await self._send({"event": event, "channel": self.name, "data": text})

    # -- what the subscriber calls

    def asked(self) -> None:
        """A subscribe is to be sent: its answer comes before the first event."""
        self._is_early = self.received is not None or self.rewind is not None

    def put(self, item: Event | RedpollError, offset: int | None = None) -> bool:
        """Queues an event. False if the reader is too slow: the channel is over then."""
        if self._is_early:
            return True
        position = None
        if offset is not None and self.received is not None:
            if offset <= self.received.offset:
                return True
            self.received = position = Position(self.received.epoch, offset)
        if len(self._queue) >= self._size:
            self.end(Overflow(self.name, self._size))
            return False
        self._queue.append((item, position))
        self._wake()
        return True

    def succeeded(self, fields: Mapping[str, Any]) -> None:
        """Takes a success frame: members, position, and whether something is missing. Raises ValueError."""
        if "presence" in fields:
            self.members.replace(fields["presence"])
        self._is_early = False
        again = self._ever_joined or self.received is not None
        continues = again and fields.get("recovered") is True
        if again:
            # A later recovery doesn't bring back what is missing already.
            self.recovered = self.recovered and continues
        self._ever_joined = True
        self._move(fields, keep=continues)
        if self.joined is not None and not self.joined.done():
            self.joined.set_result(None)

    def moved(self, fields: Mapping[str, Any]) -> None:
        """Takes a `pusher:position`: the history was lost or cleared."""
        if not self._is_early:
            self.recovered = self.recovered and fields.get("recovered") is True
            self._move(fields)

    def _move(self, fields: Mapping[str, Any], *, keep: bool = False) -> None:
        # `keep`: what follows begins at the old position.
        epoch, offset = fields.get("epoch"), fields.get("offset")
        if not isinstance(epoch, str) or not isinstance(offset, int) or keep:
            return
        self.received = Position(epoch, offset)
        if not self._queue:
            self.position = self.received

    def end(self, error: BaseException) -> None:
        """Ends the iteration, after what is queued."""
        if self._end is None:
            self._end = error
        if self.joined is not None and not self.joined.done():
            self.joined.set_exception(error)
            # Nobody may wait for it any more.
            self.joined.exception()
        self._wake()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
