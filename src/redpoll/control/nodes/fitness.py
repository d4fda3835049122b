"""Reports to the supervisor once a second how much of the leader's work this control plane can do.

It is fit if Redis and the record store answer it, and the store takes changes. A loop that hangs sends no
reports, so the supervisor notices that, too (cluster/README.md "Nodes and the leader").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.nodes import Fitness
from redpoll.ipc.messages import FitnessReport, FromChild
from redpoll.store.leadership import is_standby, stored_term
from redpoll.store.store import Store

__all__ = ["FitnessReports"]

log = structlog.get_logger(__name__)

REPORT_EVERY_S: Final = 1.0
_ASK_EVERY_S: Final = 0.5
# A read of the record store that takes longer has failed, at first. It may still be answered.
_ANSWER_WITHIN_S: Final = 2.0


class FitnessReports:
    """`tell` sends a message to the supervisor. `redis_answers()`: Redis has answered control's commands lately.

    A store that no other process shares, an SQLite file, is not checked: no other node could do the work.
    """

    def __init__(
        self,
        tell: Callable[[FromChild], None],
        redis_answers: Callable[[], bool],
        store: Store,
        *,
        every_s: float = REPORT_EVERY_S,
        ask_every_s: float = _ASK_EVERY_S,
        answer_within_s: float = _ANSWER_WITHIN_S,
    ) -> None:
        self._tell = tell
        self._redis_answers = redis_answers
        self._store = store
        self._every_s = every_s
        self._ask_every_s = ask_every_s
        self._answer_within_s = answer_within_s
        self._loop = asyncio.get_running_loop()
        self._store_failed = False
        self._on_standby = False
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._store.shared:
            self._asking = self._loop.create_task(self._ask_repeatedly(), name="fitness")
        self._report_repeatedly()

    async def finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def fitness(self) -> Fitness:
        """As of now."""
        if not self._redis_answers():
            return Fitness.UNFIT
        waited_s = 0.0 if self._asked_at is None else self._loop.time() - self._asked_at
        return Fitness.WITHOUT_STORE if self._store_failed or waited_s > self._answer_within_s else Fitness.FIT

    def report(self) -> None:
        """Reports at once, because something has changed."""
        self._tell(FitnessReport(self.fitness()))

    def _report_repeatedly(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._report_repeatedly)
        self.report()

    async def _ask_repeatedly(self) -> None:
        while True:
            self._asked_at = self._loop.time()
            failed = True
            try:
                async with self._store.reading() as connection:
                    await stored_term(connection)
                    failed = await is_standby(connection)
                if failed and not self._on_standby:
                    log.error("record store is a standby, it takes no changes")
                self._on_standby = failed
            except SQLAlchemyError:
                # record_sync.py logs it.
                pass
            except Exception:
                # Our own bug must not end the task.
                log.exception("record store not checked")
            self._asked_at = None
            if failed != self._store_failed:
                self._store_failed = failed
                self.report()
            await asyncio.sleep(self._ask_every_s)
