"""Publishes accepted events to Redis and waits for their confirmation.

Each publish waits for Redis' answer, at most `confirm_s`; after that it is unconfirmed. While Redis is silent,
congested or refuses writes, publishes are refused at once. After a reconnect to Redis, nothing is published until
publish_gate.py says so: when all workers are subscribed again. Callers get 503 meanwhile. Nothing is retried here: the
publisher of the event does that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from redpoll._publish import Call, Commands
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.publish_call import PublishRefused
from redpoll.cluster.redis.link import Done
from redpoll.protocol.errors import ApiError

__all__ = ["NothingPublished", "Publisher", "Waiting"]

# Takes None, or why the events are not confirmed; ApiError: Redis refused some of them.
Published = Callable[[Unavailable | ApiError | None], None]


class NothingPublished(ApiError):
    """Redis refused all events of a call."""


class _Awaited:
    """The replies that one call waits for: called with each, it calls `published` after the last or the first error."""

    __slots__ = ("app_id", "left", "published", "publisher", "refusal", "refused", "size")

    def __init__(self, publisher: Publisher, app_id: str, size: int, replies: int, published: Published) -> None:
        self.publisher = publisher
        self.app_id = app_id
        self.size = size
        self.left = replies
        self.published = published
        self.refusal: PublishRefused | None = None
        self.refused = 0

    @property
    def over(self) -> bool:
        """It has its outcome: if it isn't written yet, it needn't be."""
        return not self.left

    def __call__(self, reply: Any) -> None:
        # Replies come late, too: 0 is left after the deadline.
        if not self.left:
            return
        if isinstance(reply, PublishRefused):
            # The events on other channels are published, and the answer waits for them.
            self.refusal = reply
            self.refused += 1
        elif isinstance(reply, Exception):
            self.left = 0
            self.publisher.count(self.app_id, self.size, is_confirmed=False)
            self.published(Unavailable(str(reply)))
            return
        self.left -= 1
        if not self.left:
            self.publisher.count(self.app_id, self.size - self.refused, is_confirmed=True)
            self.published(self._fault())

    def _fault(self) -> ApiError | None:
        refusal, others = self.refusal, self.size - self.refused
        if refusal is None:
            return None
        if not others:
            return NothingPublished(refusal.code, str(refusal))
        return ApiError(refusal.code, f"{refusal} ({others} of the {self.size} events of this request were published)")

    def of_each(self) -> Sequence[Done]:
        return [self] * self.size

    def expire(self, error: Exception) -> None:
        self(error)


class Waiting(Protocol):
    """Publishes that wait for Redis: called with each reply or error. `left` is 0 when all have their outcome."""

    @property
    def left(self) -> int: ...
    def __call__(self, reply: Any) -> None: ...
    def of_each(self) -> Sequence[Done]: ...
    def expire(self, error: Exception) -> None: ...


def _settle(future: asyncio.Future[None], fault: Unavailable | ApiError | None) -> None:
    if future.done():
        return
    if fault is None:
        future.set_result(None)
    else:
        future.set_exception(fault)


class Publisher:
    """Publishes over `bus` while the gate is open. After each reconnect it opens when `subscribed()` returns
    (PublishGate.wait). In a Cluster it stays open for the shards whose master's connection didn't break, the link's
    `kept_shards()`: there, no worker needs to subscribe again.

    `confirm_s` is the time limit for the gate, and again for the confirmation. The API's handler ends both before the
    2 s within which a request is answered. Call `link_up` and `link_down` when the connection to Redis changes.
    """

    def __init__(
        self,
        bus: Bus,
        subscribed: Callable[[], Awaitable[None]],
        kept_shards: Callable[[], frozenset[int]] = frozenset,
        *,
        confirm_s: float = 1.8,
    ) -> None:
        # The gate is open: Redis is connected and the workers are subscribed.
        self.open = False
        self.events_published = 0
        # Requests that fast_publish.py answered.
        self.fast_requests = 0
        # By app id: events that Redis confirmed, counted per channel.
        self.by_app: dict[str, int] = {}
        self.unconfirmed = 0
        self._bus = bus
        self._subscribed = subscribed
        self._kept_shards = kept_shards
        # While the gate is closed: the shards for which it isn't.
        self._open_shards: frozenset[int] = frozenset()
        self._confirm_s = confirm_s
        self._checks = bus.checks
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        # Sorted by deadline, because all have the same time limit. One timer serves all: a timer for each publish would
        # cost as much as the publish.
        self._awaited: deque[tuple[float, Waiting]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def link_up(self) -> None:
        """Redis is connected (again). The gate opens when every worker is subscribed."""
        if self._opening is not None:
            self._opening.cancel()
        self._open_shards &= self._kept_shards()
        self._opening = self._loop.create_task(self._open_when_subscribed(), name="publish gate")

    def link_down(self) -> None:
        kept_shards = self._kept_shards()
        self._open_shards = kept_shards if self.open else self._open_shards & kept_shards
        self.open = False
        self._opened.clear()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _open_when_subscribed(self) -> None:
        await self._subscribed()
        self._opening = None
        self.open = True
        self._opened.set()

    def publish(self, call: Call, trace: str | None, published: Published, once: str | None = None) -> None:
        """Publish a request's events, adjacent and in order, while `open`. `published` is called once, later.

        `once` is as in `Bus.post`. Of the events of a call that isn't confirmed some may have been delivered; the same
        call with the same `once` delivers the others.
        """
        app_id, size = call.app.id, call.count
        reason = self._bus.refusal
        if reason:
            self.count(app_id, size, is_confirmed=False)
            self._loop.call_soon(published, Unavailable(reason))
            return
        waiting = _Awaited(self, app_id, size, size + self._checks, published)
        self._bus.post(call, trace, once=once, done=waiting)
        self._await(waiting)

    def send(self, commands: Commands, waiting: Waiting) -> None:
        """Publish events that are commands already, of any apps, now. The caller counts them when they have their
        outcome."""
        self._bus.send_now(commands, waiting)
        self._await(waiting)

    def count(self, app_id: str, events: int, *, is_confirmed: bool) -> None:
        """An app's events were confirmed by Redis, or will not be."""
        if is_confirmed:
            self.by_app[app_id] = self.by_app.get(app_id, 0) + events
            self.events_published += events
        else:
            self.unconfirmed += events

    @property
    def takes(self) -> bool:
        """The gate is open, and nothing is known that keeps Redis from confirming publishes."""
        return self.open and not self._bus.refusal

    @property
    def checks(self) -> bool:
        """As `Bus.checks`."""
        return self._checks

    async def opened(self) -> None:
        """Returns when the gate is open."""
        await self._opened.wait()

    def _await(self, waiting: Waiting) -> None:
        loop, awaited = self._loop, self._awaited
        while awaited and not awaited[0][1].left:
            awaited.popleft()
        awaited.append((loop.time() + self._confirm_s, waiting))
        if self._timer is None:
            self._timer = loop.call_later(self._confirm_s, self._expire)

    async def publish_all(self, call: Call, trace: str | None, once: str | None = None) -> None:
        """As `publish`, but waits until publishes are taken and for the confirmation. Raises Unavailable, and ApiError
        if Redis refused some of the events."""
        if not call.count:
            return
        if not self.open and not self._is_open_for(call):
            try:
                async with asyncio.timeout(self._confirm_s):
                    await self._opened.wait()
            except asyncio.CancelledError:
                # The caller's own time limit ended first.
                self.unconfirmed += call.count
                raise
            except TimeoutError:
                self.unconfirmed += call.count
                raise Unavailable("Redis is disconnected, or not all workers are subscribed again") from None
        future: asyncio.Future[None] = self._loop.create_future()
        self.publish(call, trace, partial(_settle, future), once)
        await future

    def _is_open_for(self, call: Call) -> bool:
        shards = self._open_shards
        return bool(shards) and all(
            self._bus.shard(call.app.id, channel) in shards
            for _, _, channels, _ in call.events_of()
            for channel in channels
        )

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        awaited = self._awaited
        while awaited and (not awaited[0][1].left or awaited[0][0] <= now):
            _, waiting = awaited.popleft()
            waiting.expire(TimeoutError(f"no answer from Redis within {self._confirm_s:g} s"))
        if awaited:
            self._timer = self._loop.call_at(awaited[0][0], self._expire)

    def close(self) -> None:
        self.link_down()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
