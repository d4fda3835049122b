"""What the reaper knows of the apps of a dead worker: whether its counts are announced, and from when on its users may
have missed events (worker/replay/user_resume.py)."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from redpoll.cluster.directory import read_app
from redpoll.cluster.redis.calls import Replies
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import WRITE
from redpoll.cluster.stats import Stats

__all__ = ["AppsOfDead"]

# Messages that were sent so long before a worker died may not have arrived.
_IN_FLIGHT_S: Final = 1.0


class _App(NamedTuple):
    """`missed_since`: the Redis time (µs) from which users may have missed events, if `resume_s` isn't 0."""

    counting: bool
    resume_s: int
    missed_since: int


class AppsOfDead:
    """Those of one dead worker. `read` an app before the other methods are called with it."""

    def __init__(self, link: Link, keys: Keys, w: str) -> None:
        self._link = link
        self._keys = keys
        self._w = w
        self._stats = Stats(link, keys)
        self._apps: dict[str, _App] = {}

    async def read(self, app_id: str) -> None:
        """Read an app's record, unless it was read before. Raises LinkDown or hiredis.ReplyError."""
        if app_id in self._apps:
            return
        app = await read_app(self._link, self._keys, app_id)
        resume_s, missed_since = 0 if app is None else app.user_resume_s, 0
        if resume_s:
            now, silent_s = await asyncio.gather(self._link.ask(b"TIME"), self._stats.silent_s(self._w, resume_s))
            silent_us = round((silent_s + _IN_FLIGHT_S) * 1_000_000)
            missed_since = max(0, int(now[0]) * 1_000_000 + int(now[1]) - silent_us)
        self._apps[app_id] = _App(app is not None and app.subscription_count, resume_s, missed_since)

    def counts(self, app_id: str) -> bool:
        """Whether subscription_count is turned on."""
        return self._apps[app_id].counting

    async def users_leave(self, users: Iterable[tuple[str, str]]) -> None:
        """Write for user resume from when on these users, each with its app, may have missed events. The worker to
        which a user returns looks for holders first, and a Redis Cluster may have them in another master: so await this
        before `hold` removes the dead worker. Raises LinkDown or hiredis.ReplyError."""
        calls = [
            (self._keys.resumed(app_id, user), (b"SET", app.missed_since, b"EX", app.resume_s))
            for app_id, user in users
            if (app := self._apps[app_id]).resume_s
        ]
        if calls:
            written: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            done = Replies(len(calls), written)
            for key, args in calls:
                self._link.run(WRITE, (key,), args, done)
            await written
