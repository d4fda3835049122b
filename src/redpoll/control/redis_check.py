"""Checks the Redis of each new connection, and says what it lacks."""

import asyncio
from collections.abc import Callable

import structlog

from redpoll.cluster.redis.check import examine
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.ipc.messages import Fatal, FromChild

__all__ = ["RedisCheck"]

log = structlog.get_logger(__name__)


class RedisCheck:
    """During the start, a fault ends the process with its text: `tell` sends it to the supervisor."""

    def __init__(self, link: Link, keys: Keys, tell: Callable[[FromChild], None]) -> None:
        self._link = link
        self._keys = keys
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def link_up(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._examine(), name="redis examined")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _examine(self) -> None:
        try:
            faults, warnings = await examine(self._link, self._keys)
        except LinkDown:
            return
        for warning in warnings:
            log.warning("redis setting unsuitable", what=warning)
        for fault in faults:
            log.error("redis not usable", what=fault)
        if faults:
            self._tell(Fatal("; ".join(faults)))
