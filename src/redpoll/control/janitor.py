"""The control plane's periodic work: it keeps the app directory in Redis equal to the record store, and checks Redis.

Redis may lose the directory or have a different one; it is rewritten within a second (cluster/README.md "Directory").
Each check also shows whether Redis still answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import hiredis
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.directory import DirectoryVersion, DirectoryWriter
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.control.http.response import dateline
from redpoll.control.observe.health import Health
from redpoll.control.records.loaded_records import LoadedRecords
from redpoll.loop.loop_lag import LoopLag
from redpoll.protocol.apps import App
from redpoll.store.errors import reason_of

__all__ = ["ControlJanitor", "LoadedRecords"]

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 1.0
# Changes of records wait meanwhile. Redis looks at about a million keys a second.
_FORGOTTEN_WITHIN_S: Final = 10.0
# Redis is connected but doesn't answer: after the first time it counts as away, after the second the connection is
# closed, in a Cluster the one to the master of the directory.
_AWAY_AFTER_S: Final = 5.0
_BROKEN_AFTER_S: Final = 10.0
_STORE_ANSWERS_WITHIN_S: Final = 1.0


def _nothing() -> None:
    pass


async def _prepared() -> None:
    pass


class ControlJanitor:
    """Runs once a second: compares the directory (`writer`) with `records`.

    `leader()` is `<run> <term> ` while this node leads, and only then the whole directory is written; otherwise None.
    Changed records are written by the node that changed them. `on_redis_back()` is called when a connected Redis
    answers again after 5 s or more. `before_fill` writes what workers must know before they know the apps."""

    def __init__(
        self,
        link: Link,
        writer: DirectoryWriter,
        records: LoadedRecords,
        health: Health,
        *,
        leader: Callable[[], str | None] = lambda: "",
        on_redis_back: Callable[[], None] = _nothing,
        before_fill: Callable[[], Awaitable[None]] = _prepared,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop_lag = LoopLag()
        self._on_redis_back = on_redis_back
        self._before_fill = before_fill
        self._link = link
        self._writer = writer
        self._records = records
        self._health = health
        self._leader = leader
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._answered_at = -_AWAY_AFTER_S
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Only one write at a time: a change of a record during a refill could leave an older version in Redis.
        self._writing = asyncio.Lock()

    def start(self) -> None:
        self.loop_lag.start()
        self._look()

    def stop(self) -> None:
        self.loop_lag.stop()
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._asking, self._syncing):
            if task is not None:
                task.cancel()

    def redis_answers(self) -> bool:
        """Whether Redis is connected and has answered within the last 5 s. In a Cluster the master of shard 0 is asked:
        other nodes lack another one just as this node does, so the load balancer must not take all of them away."""
        return self._link.is_usable(0) and self._clock() - self._answered_at < _AWAY_AFTER_S

    def link_up(self) -> None:
        """Redis is connected (again). It may be another Redis, so the directory is checked."""
        self._answered_at = self._clock()
        self._ask()

    def check_now(self) -> None:
        """This node leads now, so it is the one that writes the directory."""
        if self._link.is_usable(0):
            self._ask()

    async def record_changed(
        self, app_id: str, app: App | None, before: DirectoryVersion, after: DirectoryVersion
    ) -> None:
        """Writes a changed record to the directory. If Redis is away or lacks an earlier change, a later check rewrites
        the directory. What Redis stores for a deleted app is removed before the next change here, so before one that
        uses its id again. An event that another node is publishing at that moment may come later."""
        try:
            async with self._writing:
                written = await self._writer.put(app_id, app, after.number, after.id, before.id)
            if not written:
                self._ask()
        except (LinkDown, hiredis.ReplyError) as error:
            log.warning("directory not written", app=app_id, reason=str(error))
        if app is None:
            try:
                async with asyncio.timeout(_FORGOTTEN_WITHIN_S):
                    await self._writer.forget(app_id)
            except (LinkDown, hiredis.ReplyError, TimeoutError) as error:
                log.warning("deleted app's data not removed from redis", app=app_id, reason=str(error) or "too slow")

    def records_changed(self) -> None:
        """Writes the directory again after a change of several records."""
        self._ask()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)
        dateline.tick()
        if self._asked_at is not None and self._clock() - self._asked_at > _BROKEN_AFTER_S:
            self._asked_at = None
            self._link.drop_connection(0, f"no answer for {_BROKEN_AFTER_S:g} s")
        elif self._link.is_usable(0):
            self._ask()

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._compare(), name="directory check")

    async def _compare(self) -> None:
        """Compares the directory's version with the record store's. An answer also shows that Redis works."""
        self._asked_at = self._clock()
        try:
            written = await self._writer.version()
            was_away = not self.redis_answers()
            self._answered_at = self._clock()
            if was_away:
                self._on_redis_back()
        except (LinkDown, hiredis.ReplyError) as error:
            log.warning("directory not checked", reason=str(error))
            return
        finally:
            # What follows may wait for the record store.
            self._asked_at = None
        try:
            await self._settle(written)
        except (LinkDown, hiredis.ReplyError) as error:
            log.warning("directory not written", reason=str(error))

    async def _settle(self, written: DirectoryVersion | None) -> None:
        if written != self._records.directory:
            synced = await self._sync()
            if not synced and written is not None and written.number >= self._records.directory.number:
                # The directory has changes that this control plane can't read at present.
                return
        leader = self._leader()
        if leader is None:
            self._health.directory_written = written is not None
        elif written != self._records.directory or not self._health.directory_written:
            await self._fill(leader)

    async def _sync(self) -> bool:
        """Takes what another control plane may have changed and written to the directory. Returns whether the record
        store answered."""
        if self._syncing is None or self._syncing.done():
            self._syncing = self._loop.create_task(self._read_store(), name="records read")
        # It may hang for longer than Redis may be left unasked.
        await asyncio.wait({self._syncing}, timeout=_STORE_ANSWERS_WITHIN_S)
        return self._syncing.done() and self._syncing.result()

    async def _read_store(self) -> bool:
        try:
            await self._records.sync()
        except SQLAlchemyError as error:
            log.warning("records not read", reason=reason_of(error))
            return False
        return True

    async def _fill(self, leader: str) -> None:
        await self._before_fill()
        async with self._writing:
            apps, version = list(self._records.apps.values()), self._records.directory
            written = await self._writer.fill(apps, *version, leads_with=leader)
        if written:
            self._health.directory_written = True
            log.info("directory written", apps=len(apps), version=version.number)
