"""What became of attempts, written to the store many at a time: a commit for each would be a sync of the disk for each.

Killed before they are written, those attempts are made again, under the same delivery ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import Result
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store

__all__ = ["Results"]

log = structlog.get_logger(__name__)

# Between two commits, unless there are many by then.
_COMMIT_EVERY_S: Final = 0.02
_COMMIT_AT_ONCE: Final = 32
_MAX_PER_COMMIT: Final = 1_000
_AGAIN_AFTER_S: Final = 1.0


class Results:
    """Takes results with `put`; `run()` writes them, and tells `on_written` which are safe."""

    def __init__(self, store: Store, on_written: Callable[[Sequence[Result]], None]) -> None:
        self._store = store
        self._on_written = on_written
        self._waiting: list[Result] = []
        # Endpoint id -> since when it fails, as it is to be written.
        self._failing: dict[str, float | None] = {}
        self._has_any = asyncio.Event()
        self._has_many = asyncio.Event()
        self._stopping = False

    @property
    def unwritten(self) -> int:
        """Results that the store hasn't got: many, where it can't be written."""
        return len(self._waiting)

    def put(self, result: Result) -> None:
        self._waiting.append(result)
        self._has_any.set()
        if len(self._waiting) >= _COMMIT_AT_ONCE:
            self._has_many.set()

    def put_failing(self, endpoint_id: str, since: float | None) -> None:
        self._failing[endpoint_id] = since
        self._has_any.set()

    def shift_retries(self, by_s: float) -> None:
        """The clock was set: what waits for a retry is due so much later. Called behind a change of the store."""
        self._waiting = [
            each._replace(at=each.at + by_s) if each.state == "waiting" else each for each in self._waiting
        ]

    async def run(self) -> None:
        """Goes on until `stop`, and to the end of what there is by then. Not to be cancelled in a commit."""
        while not self._stopping or self._waiting or self._failing:
            await self._has_any.wait()
            try:
                written = await self.write()
            except Exception:
                # A fault of ours, by which nothing more would ever be written.
                log.exception("writing results of webhooks failed")
                written = False
            if not written:
                if self._stopping:
                    return
                await asyncio.sleep(_AGAIN_AFTER_S)
            try:
                async with asyncio.timeout(0 if self._stopping else _COMMIT_EVERY_S):
                    await self._has_many.wait()
            except TimeoutError:
                pass

    def stop(self) -> None:
        self._stopping = True
        self._has_any.set()

    async def write(self) -> bool:
        """Writes what there is, a thousand of them at most. False: the store can't be written; they are kept."""
        self._has_many.clear()
        if not self._waiting and not self._failing:
            return True
        try:
            async with self._store.change() as connection:
                # Only now: see `move`.
                results, failing = self._waiting[:_MAX_PER_COMMIT], dict(self._failing)
                if results:
                    await delivery_rows.put_results(connection, results)
                for endpoint_id, since in failing.items():
                    await endpoint_rows.set_failing_since(connection, endpoint_id, since)
        except SQLAlchemyError as error:
            log.error(
                "results of webhooks can't be written to the store", waiting=self.unwritten, reason=reason_of(error)
            )
            return False
        del self._waiting[: len(results)]
        for endpoint_id, since in failing.items():
            if self._failing.get(endpoint_id, ...) == since:
                del self._failing[endpoint_id]
        if not self._waiting and not self._failing and not self._stopping:
            self._has_any.clear()
        self._on_written(results)
        return True
