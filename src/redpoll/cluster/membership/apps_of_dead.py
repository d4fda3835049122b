"""What the reaper knows of the apps of a dead worker: whether its counts are announced, and from when on its users may
have missed events (worker/replay/user_resume.py)."""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from redpoll.cluster.directory import read_apps
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.resume_points import ResumePoint, ResumePoints
from redpoll.cluster.stats import MAX_HANG_S, Stats

__all__ = ["AppsOfDead"]

# Messages that were sent so long before a worker died may not have arrived.
_IN_FLIGHT_S: Final = 1.0


class _App(NamedTuple):
    counting: bool
    resume_s: int


class AppsOfDead:
    """Those of one dead worker. `read` an app before the other methods are called with it."""

    def __init__(self, link: Link, keys: Keys, w: str) -> None:
        self._link = link
        self._keys = keys
        self._w = w
        self._points = ResumePoints(link, keys)
        self._stats = Stats(link, keys)
        self._apps: dict[str, _App] = {}
        # Since when, by the link's clock, the worker may have sent nothing. None: no app asked for it yet.
        self._silent_since: float | None = None

    async def read(self, app_ids: Collection[str]) -> None:
        """Read the records of these apps, at most a page of names, unless they were read before. Raises LinkDown or
        hiredis.ReplyError."""
        unread = [app_id for app_id in app_ids if app_id not in self._apps]
        apps = await read_apps(self._link, self._keys, unread)
        if self._silent_since is None and any(app is not None and app.user_resume_s for app in apps):
            self._silent_since = self._link.clock() - await self._stats.silent_s(self._w)
        for app_id, app in zip(unread, apps, strict=True):
            self._apps[app_id] = _App(False, 0) if app is None else _App(app.subscription_count, app.user_resume_s)

    def counts(self, app_id: str) -> bool:
        """Whether subscription_count is turned on."""
        return self._apps[app_id].counting

    async def users_leave(self, users: Iterable[tuple[str, str]]) -> None:
        """Write for user resume from when on these users, each with its app, may have missed events. Await this before
        `hold` removes the dead worker (cluster/resume_points.py). Raises LinkDown or hiredis.ReplyError."""
        points = [
            ResumePoint(app_id, user, self._silent_s(app.resume_s) + _IN_FLIGHT_S, app.resume_s)
            for app_id, user in users
            if (app := self._apps[app_id]).resume_s
        ]
        if points:
            await self._points.write(points)

    def _silent_s(self, resume_s: int) -> float:
        assert self._silent_since is not None
        return min(self._link.clock() - self._silent_since, resume_s + MAX_HANG_S)
