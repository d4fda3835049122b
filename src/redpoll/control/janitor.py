"""What the control plane does because time went by: the directory kept right, dead workers reaped, deadlines.

Redis may lose or be given another directory than the record store's; this puts it right within a second
(cluster.md 6). Who is dead is the reaper's to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

import hiredis
import structlog

from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.link import Link, LinkDown
from redpoll.control.connections import Connections
from redpoll.control.health import Health
from redpoll.control.response import dateline
from redpoll.protocol.apps import App

__all__ = ["AppRecords", "Janitor"]

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 1.0
# Redis has hung: as good as away, and then as good as a broken connection (cluster.md 6).
_AWAY_AFTER_S: Final = 5.0
_BROKEN_AFTER_S: Final = 10.0


class AppRecords(Protocol):
    """What is needed of control.records.Records."""

    apps: dict[str, App]
    version: int


class Janitor:
    """Looks once a second. `connections` are swept, `writer` and `records` compared, `health` is told."""

    def __init__(
        self,
        link: Link,
        writer: DirectoryWriter,
        records: AppRecords,
        connections: Connections,
        health: Health,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop_lag_s = 0.0
        self._link = link
        self._writer = writer
        self._records = records
        self._connections = connections
        self._health = health
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._answered_at = -_AWAY_AFTER_S
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expected_at = 0.0
        # A record's change and a refill at once would leave the older version behind.
        self._writing = asyncio.Lock()

    def start(self) -> None:
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def redis_answers(self) -> bool:
        """Redis is there and isn't hanging; up to 5 s old."""
        return self._link.up and self._clock() - self._answered_at < _AWAY_AFTER_S

    def link_up(self) -> None:
        """The connection is there (again): what it leads to may be another Redis."""
        self._answered_at = self._clock()
        self._ask()

    async def record_changed(self, app_id: str, app: App | None, version: int) -> None:
        """Tell the workers of a record's change. Without Redis the next look will, when it is back."""
        try:
            async with self._writing:
                await self._writer.put(app_id, app, version)
        except (LinkDown, hiredis.ReplyError) as error:
            log.warning("directory not written", app=app_id, reason=str(error))

    def take_loop_lag_s(self) -> float:
        """The greatest lateness of a look since the last call."""
        lag_s, self.loop_lag_s = self.loop_lag_s, 0.0
        return lag_s

    def _look(self) -> None:
        now = self._loop.time()
        if self._expected_at:
            self.loop_lag_s = max(self.loop_lag_s, now - self._expected_at)
        self._expected_at = now + LOOK_EVERY_S
        self._timer = self._loop.call_at(self._expected_at, self._look)
        dateline.tick()
        self._connections.sweep()
        if self._asked_at is not None and self._clock() - self._asked_at > _BROKEN_AFTER_S:
            self._asked_at = None
            self._link.drop(f"no answer for {_BROKEN_AFTER_S:g} s")
        elif self._link.up:
            self._ask()

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._compare(), name="directory check")

    async def _compare(self) -> None:
        """Is the directory in Redis the record store's? Its answer is also the proof that Redis is well."""
        self._asked_at = self._clock()
        try:
            found = await self._writer.version()
            self._answered_at = self._clock()
            if found != self._records.version or not self._health.directory_written:
                await self._fill()
        except (LinkDown, hiredis.ReplyError) as error:
            log.warning("directory not checked", reason=str(error))
        finally:
            self._asked_at = None

    async def _fill(self) -> None:
        async with self._writing:
            apps, version = list(self._records.apps.values()), self._records.version
            await self._writer.fill(apps, version)
        self._health.directory_written = True
        log.info("directory written", apps=len(apps), version=version)
