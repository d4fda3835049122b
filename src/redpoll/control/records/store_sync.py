"""How this control plane follows a record store that others change, too; nothing to do for a store of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redpoll.control.records.record_sync import RecordSync
from redpoll.control.records.redis_sync import RedisSync

if TYPE_CHECKING:
    from collections.abc import Callable

    from redpoll.cluster.redis.keys import Keys
    from redpoll.cluster.redis.link import Link
    from redpoll.control.records.records import Records
    from redpoll.store.store import Store

__all__ = ["StoreSync"]


class StoreSync:
    """`synced()` is called after each time that the records were read from the store."""

    def __init__(self, link: Link, keys: Keys, records: Records, store: Store, synced: Callable[[], None]) -> None:
        self._records: RecordSync | None = None
        self._redis: RedisSync | None = None
        if store.shared:
            self._records = RecordSync(link, keys, records, store.name, synced)
            self._redis = RedisSync(link, keys, records, self._records)
            # Late: the records are read from the store before there is a link to Redis.
            store.on_version = self._records.committed

    @property
    def store_up(self) -> int:
        """1 while the record store answers, otherwise 0."""
        return 1 if self._records is None else self._records.store_up

    def start(self) -> None:
        if self._records is not None and self._redis is not None:
            self._records.start()
            self._redis.start()

    def link_up(self) -> None:
        if self._records is not None:
            self._records.link_up()

    def received(self, topic: bytes, payload: bytes) -> None:
        if self._records is not None:
            self._records.received(topic, payload)

    async def finish(self) -> None:
        if self._records is not None and self._redis is not None:
            await self._records.finish()
            await self._redis.finish()
