"""Writes the results of attempts to the store, many per transaction, because each commit is a sync of the disk.

If the process is killed before a result is written, the next process repeats that attempt under the same delivery id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.webhooks.outcomes import Attempt
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import AttemptRow, Result, Waiting
from redpoll.store.leadership import Changes
from redpoll.store.sqlite import reason_of
from redpoll.store.store import raise_version

__all__ = ["Results", "result_of"]

log = structlog.get_logger(__name__)

# The pause between two commits; it ends early when this many results wait.
_COMMIT_EVERY_S: Final = 0.02
_COMMIT_AT_ONCE: Final = 32
_MAX_PER_COMMIT: Final = 1_000
_RETRY_AFTER_S: Final = 1.0
# The pause between two changes of `failing_since`. Each raises the records' version: other servers read them again, and
# no webhook is taken meanwhile (intake.py).
_FAILING_EVERY_S: Final = 5.0


def result_of(
    item: Waiting,
    attempt: Attempt,
    reason: str,
    begun_s: float,
    now_s: float,
    due_from_s: float,
    retry_after_s: Sequence[float],
) -> Result:
    """What an attempt means for its delivery: delivered, due again after the next pause, or a dead letter.

    `begun_s` and `now_s` are Unix seconds by the system clock, `due_from_s` those by which retries are due: they differ
    until a change of the clock was followed.
    """
    attempts = item.attempts + 1 - item.cycle_from
    if attempt.ok:
        state, at = "delivered", now_s
    elif attempts <= len(retry_after_s):
        state, at = "waiting", due_from_s + retry_after_s[attempts - 1]
    else:
        state, at = "failed", now_s
    row = AttemptRow(
        item.attempts + 1, begun_s, attempt.status, attempt.duration_ms, attempt.outcome, reason, attempt.response
    )
    return Result(item.number, item.id, state, at, row)


class Results:
    """`put` takes results and `run()` writes them. `on_written(results)` is called after each commit."""

    def __init__(
        self,
        store: Changes,
        on_written: Callable[[Sequence[Result]], None],
        failing_every_s: float = _FAILING_EVERY_S,
    ) -> None:
        self._store = store
        self._failing_every_s = failing_every_s
        self._on_written = on_written
        self._waiting: list[Result] = []
        # Endpoint id -> since when it has been failing; not written yet.
        self._failing: dict[str, float | None] = {}
        self._failing_timer: asyncio.TimerHandle | None = None
        self._failing_is_due = False
        # When they may be written again, on the loop's clock.
        self._failing_next_at = 0.0
        self._has_any = asyncio.Event()
        self._has_many = asyncio.Event()
        self._stopping = False

    @property
    def unwritten(self) -> int:
        """The number of results that are not in the store yet."""
        return len(self._waiting)

    def put(self, result: Result) -> None:
        self._waiting.append(result)
        self._has_any.set()
        if len(self._waiting) >= _COMMIT_AT_ONCE:
            self._has_many.set()

    def put_failing(self, endpoint_id: str, since: float | None) -> None:
        self._failing[endpoint_id] = since
        self._plan_failing()

    def _plan_failing(self) -> None:
        if self._failing_timer is None and not self._failing_is_due:
            loop = asyncio.get_running_loop()
            self._failing_timer = loop.call_at(max(loop.time(), self._failing_next_at), self._make_failing_due)

    def _make_failing_due(self) -> None:
        self._failing_timer = None
        self._failing_is_due = True
        self._has_any.set()

    def shift_retries(self, by_s: float) -> None:
        """The clock was set: moves the due times of unwritten retries. Call it after the same change in the store."""
        self._waiting = [
            result._replace(at=result.at + by_s) if result.state == "waiting" else result for result in self._waiting
        ]

    async def run(self) -> None:
        """Writes until `stop` is called and everything put by then is written. Don't cancel it during a commit."""
        while not self._stopping or self._waiting or self._failing:
            await self._has_any.wait()
            try:
                written = await self.write()
            except Exception:
                # Our own bug must not end the writing.
                log.exception("webhook results not written")
                written = False
            if not written:
                if self._stopping:
                    return
                await asyncio.sleep(_RETRY_AFTER_S)
            try:
                async with asyncio.timeout(0 if self._stopping else _COMMIT_EVERY_S):
                    await self._has_many.wait()
            except TimeoutError:
                pass

    def stop(self) -> None:
        self._stopping = True
        self._has_any.set()

    async def write(self) -> bool:
        """Writes up to _MAX_PER_COMMIT results in one transaction. Returns False, and keeps them, if the store
        fails."""
        self._has_many.clear()
        with_failing = bool(self._failing) and (self._failing_is_due or self._stopping)
        if not self._waiting and not with_failing:
            if not self._stopping:
                self._has_any.clear()
            return True
        try:
            async with self._store.change() as connection:
                # Only now, because `shift_retries` may have replaced them while we waited for the transaction.
                results, failing = self._waiting[:_MAX_PER_COMMIT], dict(self._failing) if with_failing else {}
                if results:
                    await delivery_rows.put_results(connection, results)
                for endpoint_id, since in failing.items():
                    await endpoint_rows.set_failing_since(connection, endpoint_id, since)
                if failing:
                    await raise_version(connection, webhooks=failing)
        except SQLAlchemyError as error:
            log.error("webhook results not written", waiting=self.unwritten, reason=reason_of(error))
            return False
        del self._waiting[: len(results)]
        for endpoint_id, since in failing.items():
            if self._failing.get(endpoint_id, ...) == since:
                del self._failing[endpoint_id]
        if with_failing or not self._failing:
            self._failing_is_due = False
        if with_failing:
            self._failing_next_at = asyncio.get_running_loop().time() + self._failing_every_s
            if self._failing:
                self._plan_failing()
        if not self._waiting and not self._failing_is_due and not self._stopping:
            self._has_any.clear()
        self._on_written(results)
        return True
