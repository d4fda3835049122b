"""Keeps the records of this control plane equal to a record store that several servers share.

A control plane that commits a change publishes the store's version on the topic `records` in Redis; the others then
read what changed. Messages may be lost, and commands may change the store while their server doesn't run, so the
version is also read twice a second. While the store is away, the records that are loaded stay in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.records.loaded_records import LoadedRecords
from redpoll.store.errors import reason_of

__all__ = ["RecordSync"]

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 0.5
# How often the log repeats that the store is away.
_LOG_AGAIN_AFTER_S: Final = 60.0


def _ignore() -> None:
    pass


class RecordSync:
    """Call `link_up` when Redis is connected, `received` with each message on the topic, and `committed` with the
    store's version after each commit.

    `store_up` is 1 while the store answers, else 0. `on_synced()` is called each time that changes of others were read.
    """

    def __init__(
        self, link: Link, keys: Keys, records: LoadedRecords, name: str, on_synced: Callable[[], None] = _ignore
    ) -> None:
        self.store_up = 1
        # When the last read that the store answered began, on the loop's clock.
        self.read_at = asyncio.get_running_loop().time()
        self._on_synced = on_synced
        self._link = link
        self._keys = keys
        self._records = records
        self._name = name
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="record sync")

    async def finish(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def link_up(self) -> None:
        self._link.subscribe([self._keys.records])

    def received(self, topic: bytes, payload: bytes) -> None:
        if topic == self._keys.records and payload != b"%d" % self._records.known.records:
            self._wake.set()

    def committed(self, version: int) -> None:
        self._link.call(self._keys.publish, self._keys.records, version)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        away_since = log_at = 0.0
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            asked_at = clock()
            try:
                changed = await self._records.sync()
            except SQLAlchemyError as error:
                if self.store_up:
                    away_since, log_at, self.store_up = clock(), 0.0, 0
                if clock() >= log_at:
                    log.error("record store not available, records can't be changed", reason=reason_of(error))
                    log_at = clock() + _LOG_AGAIN_AFTER_S
                continue
            except Exception:
                # Our own bug must not end the task.
                log.exception("records not read")
                continue
            self.read_at = asked_at
            if not self.store_up:
                self.store_up = 1
                log.info("record store available again", store=self._name, away_s=round(clock() - away_since, 1))
            if changed:
                self._on_synced()
