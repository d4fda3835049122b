"""Deliveries that failed for good, and what an operator may do about them: have them tried anew, or give them up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.records import RecordError
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.store import deliveries as delivery_rows
from redpoll.store.deliveries import Delivery
from redpoll.store.store import Store

__all__ = ["DeadLetters"]


class DeadLetters:
    """`on_retry(endpoint_id)` is told that something is due there, `on_discard(deliveries)` what needs no attempt any
    more. What can't be done raises RecordError."""

    def __init__(
        self,
        store: Store,
        endpoints: Endpoints,
        clock: Callable[[], float],
        on_retry: Callable[[str], None],
        on_discard: Callable[[Sequence[Delivery]], None],
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._clock = clock
        self._on_retry = on_retry
        self._on_discard = on_discard

    async def retry(self, ids: Sequence[str]) -> list[Delivery]:
        """All of them or none; due at once, with all their retries."""
        async with self._store.change() as connection:
            for each in await _chosen(connection, ids):
                if each.dead_letter != "pending":
                    raise RecordError(f"{each.id} is no failed delivery: it is {_told(each)}")
                self._check_there(each.endpoint_id, f"{each.id} can't be retried")
            await delivery_rows.retry(connection, ids, self._clock())
            changed = await _chosen(connection, ids)
        for endpoint_id in {each.endpoint_id for each in changed}:
            self._on_retry(endpoint_id)
        return changed

    async def discard(self, ids: Sequence[str]) -> list[Delivery]:
        """All of them or none; those that are being tried anew can be given up too."""
        async with self._store.change() as connection:
            for each in await _chosen(connection, ids):
                if each.dead_letter not in ("pending", "retrying"):
                    raise RecordError(f"{each.id} is no failed delivery: it is {_told(each)}")
            await delivery_rows.discard(connection, ids, self._clock())
            changed = await _chosen(connection, ids)
        self._on_discard(changed)
        return changed

    async def retry_all(self, endpoint_ids: Collection[str]) -> int:
        """Everything that has failed by now at these endpoints; deleted ones are left out."""
        there = [each for each in endpoint_ids if self._is_there(each)]
        total = 0
        for some in await self._failed(there):
            async with self._store.change() as connection:
                total += await delivery_rows.retry(connection, some, self._clock())
            for endpoint_id in there:
                self._on_retry(endpoint_id)
        return total

    async def discard_all(self, endpoint_ids: Collection[str]) -> int:
        """Everything that has failed by now at these endpoints."""
        total = 0
        for some in await self._failed(endpoint_ids):
            async with self._store.change() as connection:
                total += await delivery_rows.discard(connection, some, self._clock(), ("failed",))
        return total

    async def _failed(self, endpoint_ids: Collection[str]) -> list[list[int]]:
        """The numbers of all dead letters, in pieces: in between others may write. What is tried anew and fails anew
        meanwhile is none of them, nor is what nobody has seen."""
        async with self._store.reading() as connection:
            found = await delivery_rows.numbers(connection, endpoint_ids, ("failed",))
        return [found[at : at + delivery_rows.AT_ONCE] for at in range(0, len(found), delivery_rows.AT_ONCE)]

    def _is_there(self, endpoint_id: str) -> bool:
        endpoint = self._endpoints.known(endpoint_id)
        return endpoint is not None and endpoint.deleted_at is None

    def _check_there(self, endpoint_id: str, what: str) -> None:
        if not self._is_there(endpoint_id):
            raise RecordError(f"{what}: its webhook {endpoint_id} was deleted")


async def _chosen(connection: AsyncConnection, ids: Sequence[str]) -> list[Delivery]:
    """In the order of the ids."""
    found = {each.id: each for each in await delivery_rows.some(connection, ids)}
    for delivery_id in ids:
        if delivery_id not in found:
            raise RecordError(f"there is no delivery with the id {delivery_id}")
    return [found[delivery_id] for delivery_id in ids]


def _told(delivery: Delivery) -> str:
    return delivery.dead_letter or {"waiting": "still being tried"}.get(delivery.state, delivery.state)
