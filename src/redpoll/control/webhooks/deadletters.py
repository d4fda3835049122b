"""Dead letters: deliveries whose last retry failed. An operator can retry or discard them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.store import audit
from redpoll.store import deliveries as delivery_rows
from redpoll.store.audit import Actor
from redpoll.store.deliveries import Delivery
from redpoll.store.store import Store, raise_version

__all__ = ["DeadLetters"]


class DeadLetters:
    """`on_retry(endpoint_id)` is called when an endpoint has due deliveries again, `on_discard(deliveries)` when
    deliveries need no more attempts. `by` is who made the change, for the audit log. Methods raise RecordError if
    something isn't possible."""

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

    async def retry(self, ids: Sequence[str], *, skip: bool = False, by: Actor | None = None) -> list[Delivery]:
        """Retries all of them or none; with `skip`, those that can be. They are due at once and get the full number of
        attempts again.

        If no server runs, the next one sends them.
        """
        async with self._store.change() as connection:
            ids = await _possible(connection, ids, self._cant_be_retried, skip)
            if not ids:
                return []
            await delivery_rows.retry(connection, ids, self._clock())
            changed = await _deliveries(connection, ids)
            # The control plane that sends webhooks may be another one. It reads the store again, also after a discard.
            await raise_version(connection, webhooks={delivery.endpoint_id for delivery in changed})
            await self._note(connection, by, "dead-letter retry", changed)
        for endpoint_id in {delivery.endpoint_id for delivery in changed}:
            self._on_retry(endpoint_id)
        return changed

    async def discard(self, ids: Sequence[str], *, skip: bool = False, by: Actor | None = None) -> list[Delivery]:
        """Discards all of them or none; with `skip`, those that can be. Dead letters that are being retried can be
        discarded too."""
        async with self._store.change() as connection:
            ids = await _possible(connection, ids, lambda delivery: _not_one_of(delivery, "pending", "retrying"), skip)
            if not ids:
                return []
            await delivery_rows.discard(connection, ids, self._clock())
            changed = await _deliveries(connection, ids)
            await raise_version(connection, webhooks={delivery.endpoint_id for delivery in changed})
            await self._note(connection, by, "dead-letter discard", changed)
        self._on_discard(changed)
        return changed

    async def _note(
        self, connection: AsyncConnection, by: Actor | None, action: str, changed: Sequence[Delivery]
    ) -> None:
        """Adds an entry for each app to the audit log."""
        ids_by_app: dict[str, list[str]] = {}
        for delivery in changed:
            endpoint = self._endpoints.known(delivery.endpoint_id)
            ids_by_app.setdefault("" if endpoint is None else endpoint.app_id, []).append(delivery.id)
        for app_id, ids in ids_by_app.items():
            await audit.add(connection, by, action, app_id, str(len(ids)), " ".join(ids))

    def _cant_be_retried(self, delivery: Delivery) -> str | None:
        fault = _not_one_of(delivery, "pending")
        endpoint = self._endpoints.known(delivery.endpoint_id)
        if fault is None and (endpoint is None or endpoint.deleted_at is not None):
            return f"{delivery.id} can't be retried: its webhook {delivery.endpoint_id} was deleted"
        return fault


async def _deliveries(connection: AsyncConnection, ids: Sequence[str]) -> list[Delivery]:
    """The deliveries with these ids, in their order, without those that don't exist."""
    by_id = {delivery.id: delivery for delivery in await delivery_rows.find_by_ids(connection, ids)}
    return [by_id[delivery_id] for delivery_id in ids if delivery_id in by_id]


async def _possible(
    connection: AsyncConnection, ids: Sequence[str], fault_of: Callable[[Delivery], str | None], skip: bool
) -> list[str]:
    """The ids of those without a fault. Raises RecordError for the first one with a fault, unless `skip`."""
    faults = {delivery.id: fault_of(delivery) for delivery in await _deliveries(connection, ids)}
    possible = []
    for delivery_id in ids:
        fault = faults.get(delivery_id, f"there is no delivery with the id {delivery_id}")
        if fault is None:
            possible.append(delivery_id)
        elif not skip:
            raise RecordError(fault)
    return possible


def _not_one_of(delivery: Delivery, *states: str) -> str | None:
    if delivery.dead_letter in states:
        return None
    state = delivery.dead_letter or ("still being tried" if delivery.state == "waiting" else delivery.state)
    return f"{delivery.id} is not a failed delivery: it is {state}"
