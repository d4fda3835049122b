"""The daily limit of messages of an app, and the copy of its counters that survives a loss of Redis' data.

Workers and this process count in Redis (cluster/quota.py). Every minute the leader copies the counters to the record
store. At the start, and after every reconnect to Redis, each node writes the greater of both counters to Redis before
anything is published; the leader does so with each copy. So after a loss of Redis' data, counting continues from a copy
that is at most a minute old. In a Cluster, counters in shards that weren't lost are right, so their apps don't wait.
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
from redpoll.control.http.ratelimit import limit_lines
from redpoll.protocol.apps import App
from redpoll.store.errors import StoreUnavailable
from redpoll.store.sqlite import reason_of

__all__ = ["COPY_EVERY_S", "DailyLimit"]

log = structlog.get_logger(__name__)

COPY_EVERY_S: Final = 60.0
# Counters that are read at a time, so that 10,000 apps don't delay a publish.
_APPS_AT_ONCE: Final = 200
_RETRY_AFTER_S: Final = 0.2
_DAY_S: Final = 86_400


class Counters(Protocol):
    """The part of records.Records that the daily limit uses."""

    @property
    def apps(self) -> Mapping[str, App]: ...
    async def daily_used(self, day: str) -> dict[str, int]: ...
    async def save_daily(self, day: str, used: Mapping[str, int]) -> None: ...


class DailyLimit:
    """Counts messages, and copies the counters while `leads()`. `kept_shards()` are the link's. Call `link_up` and
    `link_down` when the connection to Redis changes."""

    def __init__(
        self,
        quota: Quota,
        records: Counters,
        kept_shards: Callable[[], frozenset[int]] = frozenset,
        *,
        leads: Callable[[], bool] = lambda: True,
        copy_every_s: float = COPY_EVERY_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._quota = quota
        self._records = records
        self._kept_shards = kept_shards
        self._leads = leads
        self._copy_every_s = copy_every_s
        self._wall_clock = wall_clock
        self._restored = asyncio.Event()
        # Until then: the shards that were restored and haven't been lost since.
        self._restored_shards: frozenset[int] = frozenset()
        self._restoring: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None
        # The greatest known count of each app on `_day`. If Redis has a smaller one, it lost its data.
        self._day = ""
        self._known: dict[str, int] = {}

    def start(self) -> None:
        self._copying = asyncio.get_running_loop().create_task(self._copy_each_minute(), name="daily counters")

    async def finish(self) -> None:
        """Copies the counters once more, if Redis is connected."""
        connected = self._restored.is_set()
        self.link_down()
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)
            if connected:
                await self._copy()

    def link_up(self) -> None:
        """Redis is connected (again). It may have lost its counters."""
        self.link_down()
        self._restoring = asyncio.get_running_loop().create_task(self._restore_all(), name="daily restore")

    def link_down(self) -> None:
        kept_shards = self._kept_shards()
        self._restored_shards = kept_shards if self._restored.is_set() else self._restored_shards & kept_shards
        self._restored.clear()
        if self._restoring is not None:
            self._restoring.cancel()
            self._restoring = None

    async def spend(self, app: App, messages: int, limit: int, once: str | None = None) -> Spent:
        """Counts `messages` before they are published; all of them or none; with `once`, once. Raises Unavailable.

        While Redis is away it waits; the caller sets a timeout.
        """
        if not self._restored.is_set() and self._quota.shard(app.id) not in self._restored_shards:
            await self._restored.wait()
        # Midnight may pass before Redis answers: the count isn't one of the new day.
        day = self._quota.today()
        spent = await self._quota.spend(app.id, messages, limit, once, day)
        if self._day == day and spent.used > self._known.get(app.id, 0):
            self._known[app.id] = spent.used
        return spent

    def headers(self, spent: Spent, limit: int) -> bytes:
        """The X-RateLimit header lines of this limit. It resets at midnight UTC."""
        remaining = max(0, limit - spent.used)
        return limit_lines("daily", limit, self._midnight_s()) + b"X-RateLimit-Remaining: %d\r\n" % remaining

    def left_s(self) -> int:
        """Whole seconds until the limit resets, at least 1."""
        return max(1, self._midnight_s() - int(self._wall_clock()))

    def _midnight_s(self) -> int:
        return (int(self._wall_clock()) // _DAY_S + 1) * _DAY_S

    # -- the copy

    async def _restore_all(self) -> None:
        while True:
            try:
                await self._read_copy()
                await self._for_all(list(self._known), self._restore)
                self._restored.set()
                return
            except (Unavailable, SQLAlchemyError) as error:
                log.warning("daily counters not restored", reason=reason_of(error))
                await asyncio.sleep(_RETRY_AFTER_S)

    async def _read_copy(self) -> None:
        """Reads today's counters from the record store: another node may have written greater ones than are known."""
        today = self._quota.today()
        try:
            copied = await self._records.daily_used(today)
        except StoreUnavailable as error:
            # Publishing must not wait for PostgreSQL. Redis still has the counters, unless it was lost too.
            log.warning("daily counters not read, counting continues from those in Redis", reason=str(error))
            copied = {}
        if today != self._day:
            self._day, self._known = today, {}
        for app_id, used in copied.items():
            self._known[app_id] = max(used, self._known.get(app_id, 0))

    async def _restore(self, app_id: str) -> None:
        # Keep both in local variables: midnight may pass before Redis answers.
        day, known = self._day, self._known
        known[app_id] = await self._quota.restore(app_id, day, known.get(app_id, 0))

    async def _copy_each_minute(self) -> None:
        while True:
            await asyncio.sleep(self._copy_every_s)
            await self._copy()

    async def _copy(self) -> None:
        """Copies the counters once. If Redis is away or the store fails, the next copy does it."""
        limited = [app.id for app in self._records.apps.values() if app.daily_limit is not None]
        if not limited or not self._leads():
            return
        try:
            await self._read_copy()
            await self._for_all(limited, self._read)
            if self._known:
                await self._records.save_daily(self._day, self._known)
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("daily counters not copied", reason=reason_of(error))

    async def _read(self, app_id: str) -> None:
        day, known = self._day, self._known
        used, before = await self._quota.used(app_id, day), known.get(app_id, 0)
        if used < before:
            # Redis was emptied without a reconnect.
            await self._quota.restore(app_id, day, before)
        elif used:
            known[app_id] = used

    async def _for_all(self, app_ids: Sequence[str], do: Callable[[str], Awaitable[None]]) -> None:
        for at in range(0, len(app_ids), _APPS_AT_ONCE):
            await asyncio.gather(*(do(app_id) for app_id in app_ids[at : at + _APPS_AT_ONCE]))
