"""Publishes accepted events to Redis and waits for their confirmation.

Each publish waits for Redis' answer, at most `confirm_s`; after that it is unconfirmed. After a reconnect to Redis,
nothing is published until the workers are subscribed again; otherwise an event answered with 200 could reach no client
(cluster/README.md "Reconnecting"). Nothing is retried here: the publisher of the event does that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from redpoll.cluster.bus import Bus, Outgoing, Unavailable
from redpoll.cluster.link import Link
from redpoll.protocol.apps import App

__all__ = ["Publisher"]

# The pause between two checks whether the workers are subscribed again.
_CHECK_EVERY_S: Final = 0.02


def _settle(future: asyncio.Future[Any], reply: Any) -> None:
    # A late answer: the deadline has passed, or the request was cancelled.
    if not future.done():
        future.set_result(reply)


class Publisher:
    """Publishes over `bus` while the gate is open. `workers()` returns the number of workers that are alive.

    `confirm_s` is the time limit for gate and confirmation together, less than the 2 s within which a caller gets an
    answer. The gate opens at the latest `gate_s` after a reconnect. Call `link_up` and `link_down` when the connection
    to Redis changes.
    """

    def __init__(
        self,
        bus: Bus,
        link: Link,
        workers: Callable[[], int],
        *,
        confirm_s: float = 1.8,
        gate_s: float = 2.0,
    ) -> None:
        self.events_published = 0
        # By app id: events to publish, counted per channel.
        self.by_app: dict[str, int] = {}
        self.unconfirmed = 0
        self._bus = bus
        self._link = link
        self._workers = workers
        self._confirm_s = confirm_s
        self._gate_s = gate_s
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        # Sorted by deadline, because all have the same time limit. One timer serves all: a timer for each publish would
        # cost as much as the publish.
        self._awaited: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """The gate is open: Redis is connected and the workers are subscribed."""
        return self._open.is_set()

    def link_up(self) -> None:
        """Redis is connected (again). The gate opens when every worker is subscribed."""
        if self._opening is not None:
            self._opening.cancel()
        self._opening = self._loop.create_task(self._open_when_subscribed(), name="publish gate")

    def link_down(self) -> None:
        self._open.clear()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _open_when_subscribed(self) -> None:
        deadline = self._loop.time() + self._gate_s
        while self._loop.time() < deadline and await self._bus.workers_listening() < self._workers():
            await asyncio.sleep(_CHECK_EVERY_S)
        # Don't wait longer for a worker that isn't subscribed by now: its clients get no events anyway.
        self._opening = None
        self._open.set()

    def publish(
        self,
        app: App,
        item: Outgoing | tuple[str, str, str, str | None, str | None],
        trace: str | None,
        once: str | None = None,
        index: int = 0,
    ) -> asyncio.Future[Any]:
        """Publishes one event to one channel; call it only while `open`. This is the hot path of the API.

        `once` and `index`: see `Bus.post`. The future's result is Redis' reply or an exception; `confirmed` turns the
        latter into Unavailable.
        """
        loop = self._loop
        future = loop.create_future()
        counts = self.by_app
        counts[app.id] = counts.get(app.id, 0) + 1
        self._bus.post(app, item, trace, once=once, index=index, done=partial(_settle, future))
        awaited = self._awaited
        while awaited and awaited[0][1].done():
            awaited.popleft()
        awaited.append((loop.time() + self._confirm_s, future))
        if self._timer is None:
            self._timer = loop.call_later(self._confirm_s, self._expire)
        return future

    def confirmed(self, reply: Any, count: int = 1) -> None:
        """Raises Unavailable unless `reply` says that Redis took the event."""
        if isinstance(reply, Exception):
            self.unconfirmed += count
            raise Unavailable(str(reply))
        self.events_published += count

    async def publish_all(
        self, app: App, items: Sequence[Outgoing], trace: str | None, once: str | None = None
    ) -> None:
        """Publishes several events in order, with no others between them. Waits for the gate. Raises Unavailable.

        If it raises, some of the events may have been delivered. The same call with the same `once` delivers the
        others.
        """
        if self._open.is_set():
            await self._publish_open(app, items, trace, once)
            return
        try:
            async with asyncio.timeout(self._confirm_s):
                await self._open.wait()
                await self._publish_open(app, items, trace, once)
        except TimeoutError:
            self.unconfirmed += len(items)
            raise Unavailable("Redis is not connected, or the workers are not subscribed yet") from None

    async def _publish_open(self, app: App, items: Sequence[Outgoing], trace: str | None, once: str | None) -> None:
        futures = [self.publish(app, item, trace, once, index) for index, item in enumerate(items)]
        for future in futures:
            self.confirmed(await future)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        awaited = self._awaited
        while awaited and (awaited[0][1].done() or awaited[0][0] <= now):
            _, future = awaited.popleft()
            if not future.done():
                future.set_result(TimeoutError(f"no answer from Redis within {self._confirm_s:g} s"))
        if awaited:
            self._timer = self._loop.call_at(awaited[0][0], self._expire)

    def close(self) -> None:
        self.link_down()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
