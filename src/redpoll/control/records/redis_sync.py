"""Keys and tokens that were revoked reach a control plane through Redis while the record store doesn't answer it.

The directory has every app with its keys. Hashes of revoked tokens are in a set of their own, which each control plane
that reads a revocation from the store writes. If PostgreSQL is away for all nodes, nobody can revoke anything, so what
is loaded stays right; the store or Redis has to answer, or nobody knows (deploy/failures.md "PostgreSQL is away").
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

import hiredis
import structlog

from redpoll.cluster.directory import DirectoryWriter, read_directory
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.revocations import Revocations
from redpoll.control.records.loaded_records import LoadedRecords
from redpoll.control.records.record_sync import RecordSync

__all__ = ["RedisSync"]

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 0.5
# The records are read from Redis when the store hasn't answered for this long; it is asked twice a second.
_STORE_SILENT_S: Final = 1.5
# Credentials count as known for this long after the last answer of the store or Redis.
_CURRENT_FOR_S: Final = 4.0


class RedisSync:
    """Only for a record store that other control planes change. `store.read_at` is when the store was read last, on
    the loop's clock. Sets `records.on_revoked` and `records.is_current`."""

    def __init__(self, link: Link, keys: Keys, records: LoadedRecords, store: RecordSync) -> None:
        self._link = link
        self._keys = keys
        self._records = records
        self._store = store
        self._directory = DirectoryWriter(link, keys)
        self._revocations = Revocations(link, keys)
        self._clock = asyncio.get_running_loop().time
        self._read_at = self._clock()
        # Hashes that Redis doesn't have yet, each with a version at or after its revocation.
        self._unwritten: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Late: records are loaded before there is a link to Redis.
        records.on_revoked = self._revoked
        records.is_current = self.is_current

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="redis sync")

    async def finish(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def is_current(self) -> bool:
        """Whether a key or token that another node has revoked would be known here, 5 s later at most."""
        return self._clock() - max(self._read_at, self._store.read_at) < _CURRENT_FOR_S

    def _revoked(self, hashes: Collection[str]) -> None:
        version = self._records.known.records
        self._unwritten |= dict.fromkeys(hashes, version)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._link.wait_up()
            try:
                await self._look()
            except (LinkDown, hiredis.ReplyError) as error:
                log.warning("revocations not written or read", reason=str(error))
            except Exception:
                # Our own bug must not end the task.
                log.exception("records not followed in redis")

    async def _look(self) -> None:
        if self._unwritten:
            written = dict(self._unwritten)
            await self._revocations.add(written)
            for token_hash in written:
                del self._unwritten[token_hash]
        asked_at = self._clock()
        if asked_at - self._store.read_at < _STORE_SILENT_S:
            return
        self._records.forget_revoked(await self._revocations.since(self._records.known.records))
        stored = await self._directory.version()
        if stored is not None and stored.number > self._records.directory.number:
            directory = await read_directory(self._link, self._keys)
            if directory is None:
                # It is being written.
                return
            self._records.adopt_directory(*directory)
            log.info("app records read from redis, the record store doesn't answer", version=directory[0].number)
        self._read_at = asked_at
