"""Events on their way into Redis.

Both the HTTP API and client events go through here, so there is one path and one order. Nothing is repeated:
what Redis did not confirm is said to be unconfirmed, and the publisher decides.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import hiredis

from redpoll.cluster.envelopes import event_envelope
from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Done, Link, LinkDown

__all__ = ["Bus", "Outgoing", "Unavailable"]

# The answer that says so is to be with the publisher within 2 s.
CONFIRM_S: Final = 1.9

_HELLO: Final = b"{}"


class Unavailable(Exception):
    """Redis didn't confirm in time: HTTP 503, which means *not confirmed*, with `Retry-After`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"not confirmed: {self.reason}"


class Outgoing(NamedTuple):
    """One event for one channel. `skip` is a socket id; any tuple of this shape will do."""

    channel: str
    event: str
    data: str
    skip: str | None = None
    user: str | None = None


class _Answers:
    """Gathers the answers to the publishes of one call; the future's result is the receivers of each."""

    __slots__ = ("future", "left", "receivers")

    def __init__(self, count: int, future: "asyncio.Future[list[int]]") -> None:
        self.left = count
        self.future = future
        self.receivers: list[int] = []

    def __call__(self, reply: Any) -> None:
        if self.future.done():
            return
        if isinstance(reply, Exception):
            self.future.set_exception(Unavailable(str(reply)))
            return
        self.receivers.append(reply)
        self.left -= 1
        if self.left == 0:
            self.future.set_result(self.receivers)


class Bus:
    """Publishes over a link. `confirm_s`: how long a publish may wait for Redis, being away included."""

    def __init__(self, link: Link, keys: Keys, *, confirm_s: float = CONFIRM_S) -> None:
        self.published = 0
        self.unconfirmed = 0
        self._link = link
        self._keys = keys
        self._confirm_s = confirm_s

    def publish(
        self,
        app_id: str,
        channel: str,
        event: str,
        data: str,
        *,
        skip: str | None = None,
        trace: str | None = None,
        user: str | None = None,
        done: Done,
    ) -> None:
        """One event, for callers that don't wait. `done` gets the number of receiving workers, a ReplyError
        or a LinkDown; the last at once while Redis is away, which for a client event is 4301."""
        envelope = event_envelope(event, data, skip=skip, trace=trace, user=user)
        self.published += 1
        self._link.call(self._keys.publish, self._keys.topic(app_id, channel), envelope, done=done)

    async def publish_all(
        self,
        app_id: str,
        items: Sequence[Outgoing | tuple[str, str, str, str | None, str | None]],
        trace: str | None = None,
    ) -> list[int]:
        """All events in one write and in the order given; returns the number of receiving workers of each.

        Raises Unavailable when Redis hasn't confirmed every one of them within `confirm_s`. Some of them may
        have been delivered then.
        """
        if not items:
            return []
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._confirm_s):
                if not self._link.up:
                    await self._link.wait_up()
                answers = _Answers(len(items), future)
                for channel, event, data, skip, user in items:
                    self.publish(app_id, channel, event, data, skip=skip, trace=trace, user=user, done=answers)
                return await future
        except TimeoutError:
            self.unconfirmed += len(items)
            raise Unavailable(f"no answer from Redis within {self._confirm_s:g} s") from None
        except Unavailable:
            self.unconfirmed += len(items)
            raise

    async def workers_listening(self) -> int:
        """How many workers would hear a message on `sys` now: after a break, publishes wait until that is
        all of them (cluster.md 6). 0 while Redis is away."""
        if not self._link.up:
            return 0
        try:
            async with asyncio.timeout(self._confirm_s):
                return int(await self._link.ask(self._keys.publish, self._keys.sys, _HELLO))
        except (TimeoutError, LinkDown, hiredis.ReplyError):
            return 0
