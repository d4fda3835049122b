"""The daily limit of an app's plan at the HTTP API, and the copy of its counter that outlives Redis (spec section 8).

Redis counts (cluster/quota.py), workers and this process alike. Each minute the counts go to the record store; at
start, and after every break of the connection to Redis, the greater of both is put back before anything is
published: a Redis that lost its data goes on from the last minute's copy (decisions.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.quota import Quota, Spent
from redpoll.control.ratelimit import limit_lines
from redpoll.protocol.apps import App
from redpoll.store.sqlite import reason_of

__all__ = ["COPY_EVERY_S", "DailyLimit"]

log = structlog.get_logger(__name__)

COPY_EVERY_S: Final = 60.0
# Counters asked for at a time: 10,000 apps must not hold up a publish.
_APPS_AT_ONCE: Final = 200
_AGAIN_S: Final = 0.2
_DAY_S: Final = 86_400


class Counters(Protocol):
    """What is needed of the records (control/records.py)."""

    @property
    def apps(self) -> Mapping[str, App]: ...
    async def daily_used(self, day: str) -> dict[str, int]: ...
    async def save_daily(self, day: str, used: Mapping[str, int]) -> None: ...


class DailyLimit:
    """Spends, and keeps the copy. `link_up` and `link_down` are to be called when the connection changes."""

    def __init__(
        self,
        quota: Quota,
        records: Counters,
        *,
        copy_every_s: float = COPY_EVERY_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._quota = quota
        self._records = records
        self._copy_every_s = copy_every_s
        self._wall_clock = wall_clock
        self._restored = asyncio.Event()
        self._restoring: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None
        # The greatest count known of each app on `_day`; what Redis has is no smaller, or was lost.
        self._day = ""
        self._known: dict[str, int] = {}

    def start(self) -> None:
        self._copying = asyncio.get_running_loop().create_task(self._copy_each_minute(), name="daily counters")

    async def finish(self) -> None:
        """The last copy, where Redis is still there."""
        there = self._restored.is_set()
        self.link_down()
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)
            if there:
                await self._copy()

    def link_up(self) -> None:
        """The connection is there (again): what it leads to may have lost its counters."""
        self.link_down()
        self._restoring = asyncio.get_running_loop().create_task(self._restore_all(), name="daily restore")

    def link_down(self) -> None:
        self._restored.clear()
        if self._restoring is not None:
            self._restoring.cancel()
            self._restoring = None

    async def spend(self, app: App, messages: int, limit: int) -> Spent:
        """Counts `messages` that are about to be published, or none of them. Raises Unavailable; bounded by
        the caller while Redis is away."""
        if not self._restored.is_set():
            await self._restored.wait()
        spent = await self._quota.spend(app.id, messages, limit)
        if spent.used > self._known.get(app.id, 0) and self._day == self._quota.today():
            self._known[app.id] = spent.used
        return spent

    def headers(self, spent: Spent, limit: int) -> bytes:
        """The X-RateLimit lines of this limit; it begins anew at midnight, UTC."""
        remaining = max(0, limit - spent.used)
        return limit_lines("daily", limit, self._midnight_s()) + b"X-RateLimit-Remaining: %d\r\n" % remaining

    def left_s(self) -> int:
        """Whole seconds until the count begins anew, at least 1."""
        return max(1, self._midnight_s() - int(self._wall_clock()))

    def _midnight_s(self) -> int:
        return (int(self._wall_clock()) // _DAY_S + 1) * _DAY_S

    # -- the copy

    async def _restore_all(self) -> None:
        while True:
            try:
                await self._begin_day()
                await self._each(list(self._known), self._restore)
                self._restored.set()
                return
            except (Unavailable, SQLAlchemyError) as error:
                log.warning("daily counters not restored", reason=reason_of(error))
                await asyncio.sleep(_AGAIN_S)

    async def _begin_day(self) -> None:
        """What the record store knows of today, added to what we know."""
        today = self._quota.today()
        if today == self._day:
            return
        kept = await self._records.daily_used(today)
        self._day, self._known = today, kept

    async def _restore(self, app_id: str) -> None:
        # Midnight may come while Redis answers.
        day, known = self._day, self._known
        known[app_id] = await self._quota.restore(app_id, day, known.get(app_id, 0))

    async def _copy_each_minute(self) -> None:
        while True:
            await asyncio.sleep(self._copy_every_s)
            await self._copy()

    async def _copy(self) -> None:
        """One copy. Where Redis is away or the store fails, the next one does it."""
        limited = [app.id for app in self._records.apps.values() if app.daily_limit is not None]
        if not limited:
            return
        try:
            await self._begin_day()
            await self._each(limited, self._read)
            if self._known:
                await self._records.save_daily(self._day, self._known)
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("daily counters not copied", reason=reason_of(error))

    async def _read(self, app_id: str) -> None:
        day, known = self._day, self._known
        used, before = await self._quota.used(app_id, day), known.get(app_id, 0)
        if used < before:
            # Emptied under us, without a break of the connection.
            await self._quota.restore(app_id, day, before)
        elif used:
            known[app_id] = used

    async def _each(self, app_ids: Sequence[str], do: Callable[[str], Awaitable[None]]) -> None:
        for at in range(0, len(app_ids), _APPS_AT_ONCE):
            await asyncio.gather(*(do(app_id) for app_id in app_ids[at : at + _APPS_AT_ONCE]))
