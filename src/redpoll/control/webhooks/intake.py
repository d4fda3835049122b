"""From the outbox into the record store: every transition becomes a delivery for each endpoint that wants it.

In this order: drain, write the deliveries in one transaction, and only then let Redis forget the rows. Killed before
the commit, all of it is read again; behind it, it is read again and known by the deliveries' ids. Nothing waits for a
receiver here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol
from uuid import UUID, uuid5

import hiredis
import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.link import LinkDown
from redpoll.cluster.outbox import Drained, Transition
from redpoll.control.webhooks.endpoints import wants
from redpoll.control.webhooks.payloads import render
from redpoll.store import deliveries as delivery_rows
from redpoll.store.deliveries import Waiting
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["Intake", "Rows", "delivery_id"]

log = structlog.get_logger(__name__)

# What a webhook waits at most for the next look (cluster.md 9).
DRAIN_EVERY_S: Final = 0.1
# While no endpoint is enabled and nothing waits: what workers write by then, since they have not heard of it, is for
# nobody.
IDLE_DRAIN_EVERY_S: Final = 1.0
# Behind an error of the store, while its rows wait in Redis.
_AGAIN_AFTER_S: Final = 1.0
# Names the ids of our deliveries; any number would do, as long as it stays.
_NAMESPACE: Final = UUID("6f1c3f5e-9a0e-4d0c-8a5b-3f3f6d2b7c11")


def delivery_id(shard: int, stamp: int, endpoint_id: str) -> str:
    """The same for the same transition and endpoint, whenever it is read (cluster.md 9)."""
    return str(uuid5(_NAMESPACE, f"{shard}:{stamp}:{endpoint_id}"))


class Rows(Protocol):
    """What is needed of cluster.outbox.Outbox."""

    errors: int
    waiting: int
    leaves: int

    async def drain(self) -> Drained: ...

    def committed(self, rows: Iterable[Transition]) -> None: ...


class Intake:
    """Looks every 100 ms, or every second while no endpoint is enabled, which `any_enabled` tells. `endpoints_of` gives
    an app's endpoints; `on_new` is told what was written, `on_traced(transition, delivery id, endpoint id)` each of a
    client event that is traced.

    `taken_total` counts transitions whose deliveries are safe, `unreadable_total` rows that no body can be made of.
    """

    def __init__(
        self,
        outbox: Rows,
        store: Store,
        endpoints_of: Callable[[str], Sequence[Endpoint]],
        any_enabled: Callable[[], bool],
        on_new: Callable[[Sequence[Waiting]], None],
        on_traced: Callable[[Transition, str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.taken_total = 0
        self.unreadable_total = 0
        self._outbox = outbox
        self._store = store
        self._endpoints_of = endpoints_of
        self._any_enabled = any_enabled
        self._on_new = on_new
        self._on_traced = on_traced
        self._clock = clock
        # Everything that an earlier process wrote and Redis may not have forgotten has been read again.
        self._caught_up = False
        self._reached_end = False
        # When the first of the rows was committed that Redis has not been told to forget yet.
        self._unforgotten_since: float | None = None
        self._failing = False
        # The last look found nothing, neither rows nor leaves held back; and when the next one is due for all that.
        self._nothing_there = False
        self._rests_until_s = 0.0

    async def run(self) -> None:
        """Goes on until it is cancelled, which may be at any moment."""
        while True:
            try:
                wait_s = DRAIN_EVERY_S if self._rests() else await self.drain_once()
            except Exception:
                # A fault of ours. Nothing is forgotten by it, and the next rows may be others.
                log.exception("intake of webhooks failed")
                wait_s = _AGAIN_AFTER_S
            await asyncio.sleep(wait_s)

    def _rests(self) -> bool:
        # Asked every 100 ms, so an endpoint that is made or enabled is looked for from its first row on.
        resting = self._nothing_there and not self._any_enabled()
        return resting and asyncio.get_running_loop().time() < self._rests_until_s

    async def drain_once(self) -> float:
        """One drain and what comes of it; returns after how many seconds the next one is due."""
        errors = self._outbox.errors
        self._nothing_there = False
        self._rests_until_s = asyncio.get_running_loop().time() + IDLE_DRAIN_EVERY_S
        try:
            drained = await self._outbox.drain()
            all_answered = self._outbox.errors == errors
            if all_answered:
                # What was committed before this call is forgotten now.
                self._unforgotten_since = None
                self._caught_up = self._caught_up or self._reached_end
            self._reached_end = False
            if drained.rows:
                await self._take(drained.rows)
            self._reached_end = all_answered and not drained.more
            self._nothing_there = self._reached_end and not (
                drained.rows or self._outbox.waiting or self._outbox.leaves
            )
        except (LinkDown, hiredis.ReplyError, TimeoutError) as error:
            log.debug("outbox not drained", reason=str(error))
            return DRAIN_EVERY_S
        except SQLAlchemyError as error:
            if not self._failing:
                log.error("webhooks can't be written to the store; they wait in Redis", reason=reason_of(error))
            self._failing = True
            return _AGAIN_AFTER_S
        self._failing = False
        return 0.0 if drained.more else DRAIN_EVERY_S

    def forgotten_before(self) -> float:
        """What was written before this Unix time is in Redis no longer, so it can't come again."""
        if not self._caught_up:
            return 0.0
        return self._clock() if self._unforgotten_since is None else self._unforgotten_since

    async def _take(self, rows: Sequence[Transition]) -> None:
        now_s = self._clock()
        new = [(row, each) for row in rows for each in self._deliveries(row, now_s)]
        written: list[Waiting] = []
        if new:
            async with self._store.change() as connection:
                written = await delivery_rows.add(connection, [each for _, each in new])
        if self._unforgotten_since is None:
            self._unforgotten_since = now_s
        self._outbox.committed(rows)
        self.taken_total += len(rows)
        if written:
            self._on_new(written)
            fresh = {each.id for each in written}
            for row, each in new:
                if row.trace is not None and each["id"] in fresh:
                    self._on_traced(row, each["id"], each["endpoint_id"])

    def _deliveries(self, row: Transition, now_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        bodies: dict[str, bytes] = {}
        for endpoint in self._endpoints_of(row.app_id):
            # What happened before it was disabled waits for it, like what had been read by then.
            missed = endpoint.disabled_at is not None and row.time_ms >= endpoint.disabled_at * 1000
            if missed or not wants(endpoint, row.event, row.channel):
                continue
            body = bodies.get(endpoint.format)
            if body is None:
                try:
                    body = bodies[endpoint.format] = render(endpoint.format, row)
                except (msgspec.MsgspecError, KeyError, ValueError):
                    # A fault of ours, and one that must not hold up everything behind it.
                    self.unreadable_total += 1
                    log.error("a webhook's row can't be read", shard=row.shard, stamp=row.stamp, kind=row.event)
                    break
            found.append(
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
        return found
