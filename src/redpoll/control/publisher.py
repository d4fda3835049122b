"""An accepted event's way to Redis, and when that way is open.

Waits for Redis' answer, never longer than `confirm_s`: what is not confirmed by then is said to be unconfirmed.
After a break of the connection nothing is published until the workers hear again, else an event answered with 200
could reach nobody (cluster.md 6). Knows nothing of HTTP, and repeats nothing.
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

# Between two questions whether the workers hear again.
_ASK_AGAIN_S: Final = 0.02


def _settle(future: asyncio.Future[Any], reply: Any) -> None:
    # Late answers come too: the future was ended by its deadline, or its request is gone.
    if not future.done():
        future.set_result(reply)


class Publisher:
    """Publishes over `bus`, through a gate. `workers()` is how many workers the supervisor says are alive.

    `confirm_s` is for gate and confirmation together, and leaves some of the 2 s that a caller waits.

    `link_up` and `link_down` are to be called when the connection changes.
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
        # Events to publish, one a channel, by app id.
        self.by_app: dict[str, int] = {}
        self.unconfirmed = 0
        self._bus = bus
        self._link = link
        self._workers = workers
        self._confirm_s = confirm_s
        self._gate_s = gate_s
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        # All deadlines are equally far away, so the queue is in their order and one timer serves them: a timer
        # for each publish would cost as much as the publish.
        self._awaited: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Publishes are taken at once: Redis is there and the workers hear."""
        return self._open.is_set()

    def link_up(self) -> None:
        """The connection to Redis is there (again): open as soon as every worker hears."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = self._loop.create_task(self._open_when_heard(), name="publish gate")

    def link_down(self) -> None:
        self._open.clear()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _open_when_heard(self) -> None:
        deadline = self._loop.time() + self._gate_s
        while self._loop.time() < deadline and await self._bus.workers_listening() < self._workers():
            await asyncio.sleep(_ASK_AGAIN_S)
        # A worker that doesn't hear by now has no say: its clients are told nothing by anybody.
        self._asking = None
        self._open.set()

    def publish(
        self,
        app: App,
        item: Outgoing | tuple[str, str, str, str | None, str | None],
        trace: str | None,
        once: str | None = None,
        index: int = 0,
    ) -> asyncio.Future[Any]:
        """One event to one channel, while `open`: the path that is walked twenty thousand times a second.

        `once` and `index`: as in `Bus.post`. The future's result is the number of workers that got it, or the
        exception that is to be told (`confirmed` turns it into Unavailable).
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
        """Several events, adjacent and in order. Waits for the gate; raises Unavailable.

        Of the events of a call that raises, some may have been delivered; the same call with the same `once`
        delivers the others.
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
            raise Unavailable("Redis isn't there, or the workers don't hear it yet") from None

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
