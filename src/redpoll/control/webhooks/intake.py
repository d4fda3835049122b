"""Moves transitions from the outbox in Redis to the record store, as one delivery per endpoint that wants them.

The order is: read rows from Redis, write their deliveries, and only after the commit let Redis delete the rows. If the
process is killed before the commit, the rows are read again. If it is killed after the commit, they are read again
too, and the unique delivery ids show that they are repeats. Nothing here waits for a receiver.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final
from uuid import UUID, uuid5

import hiredis
import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.cluster.outbox import Outbox, Subject
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.transition import Transition
from redpoll.control.webhooks.announced import EVENTS, READ_BACK_S, Announced, States
from redpoll.control.webhooks.payloads import render
from redpoll.control.webhooks.waiting_bound import WaitingBound
from redpoll.control.webhooks.wanted import wants, wants_client_event
from redpoll.store import deliveries as delivery_rows
from redpoll.store import dropped as dropped_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import Waiting
from redpoll.store.leadership import Changes
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Versions, versions
from redpoll.store.webhooks import Endpoint

__all__ = ["Intake", "delivery_id"]

log = structlog.get_logger(__name__)

# The pause between two reads (cluster/README.md "Webhook rows").
TAKE_EVERY_S: Final = 0.1
# The pause while no endpoint is enabled and the outbox is empty.
IDLE_TAKE_EVERY_S: Final = 1.0
# The pause after an error of the store, or of Redis. The rows wait in Redis.
_RETRY_AFTER_S: Final = 1.0
# A transaction ends with the row that reaches one of these, deliveries or bytes of bodies. A row may have as many
# deliveries as an app has endpoints, and all other changes wait for this one.
_MAX_WRITTEN: Final = 500
_MAX_WRITTEN_BYTES: Final = 4 * 1024 * 1024
# The UUID namespace of delivery ids. It must never change.
_NAMESPACE: Final = UUID("6f1c3f5e-9a0e-4d0c-8a5b-3f3f6d2b7c11")


def delivery_id(shard: int, stamp: int, endpoint_id: str) -> str:
    """The delivery's id: the same each time this transition is read for this endpoint."""
    return str(uuid5(_NAMESPACE, f"{shard}:{stamp}:{endpoint_id}"))


class _Outdated(Exception):
    """The store has newer records than this process. It reads them within half a second; the rows wait."""


class Intake:
    """Reads the outbox every 100 ms, or every second while `any_enabled()` is false and the outbox is empty.

    `endpoints_of(app_id)` returns an app's endpoints. `on_new(deliveries)` is called after each commit,
    `on_found(endpoint ids)` if the store had deliveries of these rows already, and
    `on_traced(transition, delivery id, endpoint id)` for each new delivery of a traced client event. `announced` keeps
    endpoints from repeats after Redis lost writes. `known()` are the versions of the records that `endpoints_of`
    answers from; None if no other server changes the store. `taken_total` counts transitions whose deliveries are in
    the store, `unreadable_total` rows for which no body could be rendered.
    """

    def __init__(
        self,
        outbox: Outbox,
        store: Changes,
        endpoints_of: Callable[[str], Sequence[Endpoint]],
        any_enabled: Callable[[], bool],
        on_new: Callable[[Sequence[Waiting]], None],
        on_found: Callable[[Collection[str]], None],
        on_traced: Callable[[Transition, str, str], None],
        announced: Announced,
        bound: WaitingBound,
        clock: Callable[[], float] = time.time,
        known: Callable[[], Versions] | None = None,
    ) -> None:
        self.taken_total = 0
        self.unreadable_total = 0
        self._outbox = outbox
        self._store = store
        self._endpoints_of = endpoints_of
        self._any_enabled = any_enabled
        self._on_new = on_new
        self._on_found = on_found
        self._on_traced = on_traced
        self._announced = announced
        self._bound = bound
        self._clock = clock
        self._known = known
        # All rows that an earlier process committed, but Redis may still have, have been read again.
        self._caught_up = False
        self._reached_end = False
        # When the oldest committed rows were committed that Redis may still have.
        self._undeleted_since: float | None = None
        # When all shards answered last and their rows were stored: what Redis lost since is of the time before.
        self._answered_at: float | None = None
        # Why the store can't be written; empty if it can.
        self._store_error = ""
        # Endpoints that we know and the store doesn't.
        self._missing: set[str] = set()
        # The last take found neither rows nor delayed leaves.
        self._outbox_empty = False
        # When to take next while idle, on the loop's clock.
        self._idle_until_s = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled, which is safe at any moment."""
        while True:
            try:
                wait_s = TAKE_EVERY_S if self._idle() else await self.take_once()
            except Exception:
                # Our own bug. The rows stay in Redis and are read again.
                log.exception("webhook intake failed")
                wait_s = _RETRY_AFTER_S
            await asyncio.sleep(wait_s)

    def _idle(self) -> bool:
        # Checked every 100 ms, so intake is at full speed from the first row of a new endpoint on.
        idle = self._outbox_empty and not self._any_enabled()
        return idle and asyncio.get_running_loop().time() < self._idle_until_s

    async def take_once(self) -> float:
        """Takes rows once and writes their deliveries. Returns the seconds until the next take is due."""
        errors = self._outbox.errors
        began_at = self._clock()
        self._outbox_empty = False
        self._idle_until_s = asyncio.get_running_loop().time() + IDLE_TAKE_EVERY_S
        try:
            taken = await self._outbox.take()
            all_answered = self._outbox.errors == errors
            if all_answered:
                # Redis has deleted the rows that were committed before this take.
                self._undeleted_since = None
                self._caught_up = self._caught_up or self._reached_end
            self._reached_end = False
            if self._announced.is_due():
                await self._read_announced()
            rows: Sequence[Transition] = taken.rows
            while rows:
                rows = rows[await self._store_deliveries(rows) :]
                # Requests and other changes get their turn.
                await asyncio.sleep(0)
            if all_answered:
                self._answered_at = began_at
            self._reached_end = all_answered and not taken.more
            self._outbox_empty = self._reached_end and not (taken.rows or self._outbox.waiting or self._outbox.leaves)
            await self._announced.compare()
        except (LinkDown, hiredis.ReplyError, TimeoutError) as error:
            log.debug("outbox not read", reason=str(error))
            # A Redis that refuses does so for longer than a lost connection is away.
            return _RETRY_AFTER_S if isinstance(error, hiredis.ReplyError) else TAKE_EVERY_S
        except _Outdated:
            log.debug("outbox not taken, the records are read first")
            return TAKE_EVERY_S
        except SQLAlchemyError as error:
            if reason_of(error) != self._store_error:
                self._store_error = reason_of(error)
                log.error("webhook deliveries not written, they wait in Redis", reason=self._store_error)
            self._announced.begin_again()
            return _RETRY_AFTER_S
        self._store_error = ""
        return 0.0 if taken.more else TAKE_EVERY_S

    def forgotten_before(self) -> float:
        """Rows whose deliveries were written before this Unix time were no longer in Redis when it answered last. So
        they can be repeated only if it loses writes."""
        if not self._caught_up or self._answered_at is None:
            return 0.0
        return self._answered_at if self._undeleted_since is None else min(self._undeleted_since, self._answered_at)

    async def _store_deliveries(self, rows: Sequence[Transition]) -> int:
        """Writes the deliveries of the first of these rows, in one transaction. Returns of how many."""
        now_s = self._clock()
        read = None if self._known is None else self._known()
        count, new = self._first_deliveries(rows, now_s)
        rows = rows[:count]
        # The endpoints of deliveries that were committed before, perhaps without an answer: then nobody knows them.
        found: set[str] = set()
        written: list[Waiting] = []
        dropped: Counter[str] = Counter()
        states: dict[tuple[str, Subject], bool] = {}
        # Also without deliveries: the transaction checks that this node still leads. A former leader may not know the
        # endpoints of these rows, and must not let Redis delete them.
        async with self._store.change() as connection:
            if read is not None and read != await versions(connection):
                # Another server may have created an endpoint whose first rows these are.
                raise _Outdated
            if new:
                if self._announced.active:
                    known = await delivery_rows.known(connection, [delivery["id"] for _, delivery in new])
                    found = {delivery["endpoint_id"] for _, delivery in new if delivery["id"] in known}
                    new, states = self._announced.without_repeats(new, known)
                deliveries = await self._with_endpoint(connection, [delivery for _, delivery in new])
                fitting, others = await self._divide(connection, deliveries)
                if others:
                    present = await delivery_rows.known(connection, [delivery["id"] for delivery in others])
                    dropped.update(one["endpoint_id"] for one in others if one["id"] not in present)
                    await dropped_rows.note(connection, dropped, now_s)
                written = await delivery_rows.add(connection, fitting)
                if len(written) < len(fitting):
                    added = {delivery.id for delivery in written}
                    found |= {delivery["endpoint_id"] for delivery in fitting if delivery["id"] not in added}
        self._bound.wrote([(delivery.endpoint_id, len(delivery.body)) for delivery in written], dropped)
        self._announced.stored(states)
        if self._undeleted_since is None:
            self._undeleted_since = now_s
        self._outbox.committed(rows)
        self.taken_total += len(rows)
        if found:
            self._on_found(found)
        if written:
            self._on_new(written)
            written_ids = {delivery.id for delivery in written}
            for row, delivery in new:
                if row.trace is not None and delivery["id"] in written_ids:
                    self._on_traced(row, delivery["id"], delivery["endpoint_id"])
        return count

    def _first_deliveries(
        self, rows: Sequence[Transition], now_s: float
    ) -> tuple[int, list[tuple[Transition, dict[str, Any]]]]:
        """The deliveries of as many rows as one transaction takes, and how many rows these are."""
        new: list[tuple[Transition, dict[str, Any]]] = []
        size = 0
        for count, row in enumerate(rows, 1):
            of_row = self._deliveries(row, now_s)
            new += [(row, delivery) for delivery in of_row]
            size += sum(len(delivery["body"]) for delivery in of_row)
            if len(new) >= _MAX_WRITTEN or size >= _MAX_WRITTEN_BYTES:
                return count, new
        return len(rows), new

    async def _divide(
        self, connection: AsyncConnection, deliveries: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """As WaitingBound.divide. Nothing is dropped because of deliveries that wait no longer."""
        fitting, others = self._bound.divide(deliveries)
        if to_count := self._bound.to_count(others):
            depths = await delivery_rows.depths(connection, to_count, sum_from=self._bound.sum_from)
            self._bound.counted(to_count, depths)
            fitting, others = self._bound.divide(deliveries)
        return fitting, others

    async def _read_announced(self) -> None:
        connects = self._outbox.connects
        async with self._store.reading() as connection:
            # Not back from now: the outage may have lasted longer. A new leader doesn't know when it began, nor by how
            # much its clock differs from that of the former leader.
            answered_at = None if self._answered_at is None else min(self._answered_at, self._clock())
            states: States = {}
            async for page in delivery_rows.since(connection, answered_at, READ_BACK_S, EVENTS):
                self._announced.take(page, states)
        self._announced.begin(connects, states)

    async def _with_endpoint(
        self, connection: AsyncConnection, deliveries: Sequence[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        # Without those for endpoints that another node just deleted, or that a failover of the database lost. They
        # must not block the others.
        ids = {delivery["endpoint_id"] for delivery in deliveries}
        missing = ids - await endpoint_rows.existing(connection, ids)
        for endpoint_id in missing - self._missing:
            log.warning("webhook endpoint is not in the record store, it gets no deliveries", endpoint=endpoint_id)
        self._missing = (self._missing - ids) | missing
        return [delivery for delivery in deliveries if delivery["endpoint_id"] not in missing]

    def _deliveries(self, row: Transition, now_s: float) -> list[dict[str, Any]]:
        deliveries: list[dict[str, Any]] = []
        bodies: dict[str, bytes] = {}
        for endpoint in self._endpoints_of(row.app_id):
            # A transition from before the endpoint was disabled still gets a delivery, which waits.
            after_disabling = endpoint.disabled_at is not None and row.time_ms >= endpoint.disabled_at * 1000
            if after_disabling or not wants(endpoint, row.event, row.channel):
                continue
            try:
                if row.event == "client_event" and not wants_client_event(endpoint, row.detail):
                    continue
                body = bodies.get(endpoint.format)
                if body is None:
                    body = bodies[endpoint.format] = render(endpoint.format, row)
            except (msgspec.MsgspecError, KeyError, ValueError):
                # Our own bug; it must not block the rows after this one.
                self.unreadable_total += 1
                log.error("webhook row unreadable", shard=row.shard, stamp=row.stamp, kind=row.event)
                break
            deliveries.append(
                {
                    "id": delivery_id(row.shard, row.stamp, endpoint.id),
                    "endpoint_id": endpoint.id,
                    "event": row.event,
                    "channel": row.channel,
                    "user": row.user,
                    "stamp": row.stamp,
                    "time_ms": row.time_ms,
                    "trace": row.trace,
                    "body": body,
                    "at": now_s,
                    "created_at": now_s,
                }
            )
        return deliveries
