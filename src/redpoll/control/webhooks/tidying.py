"""What the leader does every few seconds: it counts what waits, completes deletions, and removes what is too old or too
much."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.records.records import Records
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.control.webhooks.intake import Intake
from redpoll.control.webhooks.pulls import Pulls
from redpoll.control.webhooks.schedule import Schedule
from redpoll.control.webhooks.waiting_bound import WaitingBound
from redpoll.store import deliveries as delivery_rows
from redpoll.store import due_deliveries, old_deliveries
from redpoll.store.deliveries import Depth
from redpoll.store.leadership import Changes
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store

__all__ = ["MAX_FINISHED", "TIDY_EVERY_S", "Tidying"]

log = structlog.get_logger(__name__)

# Finished deliveries are kept for people to look at: for this long, and at most this many per endpoint and state.
_KEEP_S: Final = 7 * 86_400.0
MAX_FINISHED: Final = 1_000
# Those of the last minute in which Redis answered are always kept. After a power loss it may have rows again that it
# had deleted; their deliveries must still be in the store to be recognized as repeats.
_KEEP_ALL_S: Final = 60.0
TIDY_EVERY_S: Final = 5.0
_FORGET_EVERY_S: Final = 3_600.0
# A round removes for about this long: the other steps must not wait for millions of rows.
_REMOVE_WITHIN_S: Final = 1.0
# A look that may read millions of rows is made again after this many times the time that it took; after one that
# failed, no later than after a minute.
_PAUSES: Final = 50
_MAX_FAILED_PAUSE_S: Final = 60.0


class _Rare:
    """When a look that may take long is due: looks take at most 2 % of the time."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self.due_at = 0.0
        self._steady = steady

    @property
    def is_due(self) -> bool:
        return self._steady() >= self.due_at

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = self._steady()
        longest_s = _MAX_FAILED_PAUSE_S
        try:
            yield
            longest_s = math.inf
        finally:
            ended = self._steady()
            self.due_at = ended + min(_PAUSES * (ended - began), longest_s)


class Tidying:
    """`run` while this node leads, `forget_repeatedly` on every node of a running server.

    `depths` are those of the last count, `dead_letters_removed` counts those beyond `max_dead_letters`. `clock()`
    returns Unix seconds, `steady()` seconds of a clock that is never set.
    """

    def __init__(
        self,
        store: Store,
        records: Records,
        endpoints: Endpoints,
        pulls: Pulls,
        bound: WaitingBound,
        max_dead_letters: int,
        clock: Callable[[], float],
        steady: Callable[[], float],
        every_s: float,
        max_finished: int,
    ) -> None:
        self.depths: Mapping[str, Depth] = {}
        self.dead_letters_removed = 0
        self._store = store
        self._records = records
        self._endpoints = endpoints
        self._pulls = pulls
        self._bound = bound
        self._max_dead_letters = max_dead_letters
        self._clock = clock
        self._steady = steady
        self._every_s = every_s
        self._max_finished = max_finished
        self._counts = _Rare(steady)
        self._looks_for_ended = _Rare(steady)
        self._looks_for_finished = _Rare(steady)
        self._looks_for_letters = _Rare(steady)
        # The endpoints of the last look of which there may be more to remove.
        self._to_prune: dict[str, None] = {}
        self._to_limit: dict[str, None] = {}

    async def forget_repeatedly(self) -> None:
        """On nodes that don't lead, deleted endpoints would stay in memory."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S)
            try:
                await self._endpoints.forget_removed()
            except SQLAlchemyError as error:
                log.debug("removed webhooks not forgotten", reason=reason_of(error))
            except Exception:
                # Our own bug must not end it.
                log.exception("removed webhooks not forgotten")

    async def run(self, store: Changes, schedule: Schedule, intake: Intake) -> None:
        """`store` is used for what only the leader may change."""
        for look in (self._counts, self._looks_for_ended, self._looks_for_finished, self._looks_for_letters):
            look.due_at = 0.0
        while True:
            await self.tidy(store, schedule, intake)
            await asyncio.sleep(self._every_s)

    async def tidy(self, store: Changes, schedule: Schedule, intake: Intake) -> None:
        """One round. A step that fails doesn't stop the others: a count may take longer than a statement may."""

        async def forget() -> None:
            await self._endpoints.forget_deleted()
            schedule.forget(self._endpoints.known)

        steps: tuple[Callable[[], Awaitable[object]], ...] = (
            self._count,
            lambda: self._follow_others(schedule),
            lambda: self._end_leases(store),
            lambda: self._remove_finished(store, intake),
            lambda: self._limit_dead_letters(store, intake),
            forget,
            self._store.shrink,
        )
        reasons: dict[str, None] = {}
        for step in steps:
            try:
                await step()
            except SQLAlchemyError as error:
                reasons[reason_of(error)] = None
            except Exception:
                # Our own bug must not end the tidying.
                log.exception("webhook tidying failed")
        if reasons:
            log.warning("webhook tidying failed", reason="; ".join(reasons))

    async def _count(self) -> None:
        if not self._counts.is_due:
            return
        async with self._store.reading() as connection:
            with self._counts.timed():
                self.depths = await delivery_rows.depths(connection, None, sum_from=self._bound.sum_from)
        self._bound.look(self.depths)

    async def _end_leases(self, store: Changes) -> None:
        if self._looks_for_ended.is_due:
            with self._looks_for_ended.timed():
                await self._pulls.run_out(store)

    async def _follow_others(self, schedule: Schedule) -> None:
        """Completes deletions that a kill interrupted, and finds what another node made due."""
        async with self._store.reading() as connection:
            with_waiting = await due_deliveries.endpoints_with_waiting(connection)
        for endpoint in self._endpoints.every():
            waits = endpoint.id in with_waiting
            if endpoint.deleted_at is not None and endpoint.app_id not in self._records.apps:
                await self._endpoints.remove_deliveries(endpoint.id)
            elif endpoint.deleted_at is not None and waits:
                await self._endpoints.discard_waiting(endpoint.id)
            elif self._store.shared and waits:
                schedule.look_again(endpoint.id)

    def _removable_before(self, intake: Intake) -> float:
        return min(self._clock(), intake.forgotten_before()) - _KEEP_ALL_S

    async def _remove_finished(self, store: Changes, intake: Intake) -> None:
        keep, older_than, before = self._max_finished, self._clock() - _KEEP_S, self._removable_before(intake)
        if self._looks_for_finished.is_due:
            async with self._store.reading() as connection:
                with self._looks_for_finished.timed():
                    found = await old_deliveries.endpoints_to_prune(connection, keep=keep, older_than=older_than)
            self._to_prune = dict.fromkeys(found)

        async def remove(endpoint_id: str) -> int:
            async with store.change() as connection:
                return await old_deliveries.remove_finished(
                    connection, endpoint_id, keep=keep, older_than=older_than, before=before
                )

        await self._remove_of_each(self._to_prune, remove)

    async def _limit_dead_letters(self, store: Changes, intake: Intake) -> None:
        """Clients can cause deliveries without end, by joining and leaving, so dead letters need a bound."""
        keep, before = self._max_dead_letters, self._removable_before(intake)
        if self._looks_for_letters.is_due:
            async with self._store.reading() as connection:
                with self._looks_for_letters.timed():
                    found = await old_deliveries.endpoints_to_limit(connection, keep=keep)
            self._to_limit = dict.fromkeys(found)

        async def remove(endpoint_id: str) -> int:
            async with store.change() as connection:
                return await old_deliveries.remove_dead_letters(connection, endpoint_id, keep=keep, before=before)

        for endpoint_id, count in (await self._remove_of_each(self._to_limit, remove)).items():
            self.dead_letters_removed += count
            log.warning("oldest dead letters removed", endpoint=endpoint_id, count=count)

    async def _remove_of_each(
        self, endpoint_ids: dict[str, None], remove: Callable[[str], Awaitable[int]]
    ) -> Counter[str]:
        """Removes rows of these endpoints, some of one after the other, until there are none or the time is over. Those
        that may have more are left in `endpoint_ids`. Returns the numbers."""
        counts: Counter[str] = Counter()
        until = self._steady() + _REMOVE_WITHIN_S
        while endpoint_ids and self._steady() < until:
            endpoint_id = next(iter(endpoint_ids))
            del endpoint_ids[endpoint_id]
            removed = await remove(endpoint_id)
            if removed:
                counts[endpoint_id] += removed
                endpoint_ids[endpoint_id] = None
        return counts
