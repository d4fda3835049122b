"""Since when users may have missed events, in Redis until the `user_resume_s` of their apps are over.

A user whom no worker holds any more has a point: it is written before the last worker lets go of the user. So who looks
for a user asks for the holders first.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from redpoll.cluster.redis.calls import Replies
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import RESUME_POINT

__all__ = ["ResumePoint", "ResumePoints"]


class ResumePoint(NamedTuple):
    """The user may have missed what came in the last `ago_s`. That counts for the next `lasts_s`."""

    app_id: str
    user: str
    ago_s: float
    lasts_s: int


class ResumePoints:
    """Those in Redis. Of a user's closed connections the last one counts."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def write(self, points: Sequence[ResumePoint]) -> asyncio.Future[Any]:
        """Queues them at once, at least one. The future is done when Redis has all; it raises LinkDown or
        hiredis.ReplyError."""
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done = Replies(len(points), written)
        for app_id, user, ago_s, lasts_s in points:
            key = self._keys.resumed(app_id, user)
            self._link.run(RESUME_POINT, (key,), (round(ago_s * 1_000_000), lasts_s), done)
        return written

    async def read(self, app_id: str, user: str) -> tuple[int, float] | None:
        """The user's point in Redis' time (µs), and for how many seconds it still counts. Raises LinkDown or
        hiredis.ReplyError."""
        key = self._keys.resumed(app_id, user)
        point, left_ms = await self._link.ask_all([(b"GET", key), (b"PTTL", key)])
        return None if point is None else (int(point), max(0, left_ms) / 1000)
