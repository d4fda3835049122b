"""Publishes several events over a bus and waits for Redis, as the control plane's publisher does. Not a test."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from redpoll._publish import Call
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.protocol.apps import App
from redpoll.protocol.messages import limits_of

__all__ = ["Outgoing", "Replies", "call_of", "publish_all"]


class Outgoing(NamedTuple):
    """One event for one channel. `skip` is the socket id that doesn't get it."""

    channel: str
    event: str
    data: str
    skip: str | None = None


def call_of(app: App, items: Sequence[Outgoing]) -> Call:
    """A call that publishes these events, without its checks."""
    call = Call(limits_of(app), True)
    for channel, event, data, skip in items:
        call.add((channel,), event, data, skip)
    return call


class Replies:
    """`done` of a call: the reply to each of its events, and nothing of what follows them."""

    over = False

    def __init__(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self.of_events: list[asyncio.Future[Any]] = [loop.create_future() for _ in range(count)]
        self._next = 0

    def __call__(self, reply: Any) -> None:
        self._next += 1
        if self._next <= len(self.of_events):
            self._set(self._next - 1, reply)

    def of_each(self) -> list[Callable[[Any], None]]:
        self._next = len(self.of_events)
        return [partial(self._set, at) for at in range(len(self.of_events))]

    def _set(self, at: int, reply: Any) -> None:
        if not self.of_events[at].done():
            self.of_events[at].set_result(reply)


async def publish_all(
    bus: Bus,
    app: App,
    items: Sequence[Outgoing],
    trace: str | None = None,
    once: str | None = None,
    within_s: float = 60.0,
) -> list[int]:
    """Publishes the events in one write and in this order. Returns the number of receiving workers of each.

    Raises Unavailable if Redis hasn't confirmed all of them within `within_s`.
    """
    replies = Replies(len(items))
    try:
        async with asyncio.timeout(within_s):
            if not bus.link.up:
                await bus.link.wait_up()
            bus.post(call_of(app, items), trace, once=once, done=replies)
            answers = await asyncio.gather(*replies.of_events)
    except TimeoutError:
        raise Unavailable("no answer from Redis") from None
    for answer in answers:
        if isinstance(answer, Exception):
            raise Unavailable(str(answer))
    return answers
