"""Publishes several events over a bus and waits for Redis, as the control plane's publisher does. Not a test."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redpoll.cluster.bus import Bus, Outgoing, Unavailable
from redpoll.protocol.apps import App

__all__ = ["publish_all"]


async def publish_all(
    bus: Bus,
    app: App,
    items: Sequence[Outgoing | tuple[str, str, str, str | None, str | None]],
    trace: str | None = None,
    once: str | None = None,
    within_s: float = 60.0,
) -> list[int]:
    """Publishes the events in one write and in this order. Returns the number of receiving workers of each.

    Raises Unavailable if Redis hasn't confirmed all of them within `within_s`.
    """
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[Any]] = [loop.create_future() for _ in items]
    try:
        async with asyncio.timeout(within_s):
            if not bus._link.up:
                await bus._link.wait_up()
            for index, (item, answer) in enumerate(zip(items, answers, strict=True)):
                done = lambda reply, answer=answer: answer.done() or answer.set_result(reply)  # noqa: E731
                bus.post(app, item, trace, once=once, index=index, done=done)
            replies = await asyncio.gather(*answers)
    except TimeoutError:
        raise Unavailable("no answer from Redis") from None
    for reply in replies:
        if isinstance(reply, Exception):
            raise Unavailable(str(reply))
    return replies
