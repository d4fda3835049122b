"""What the leading node's control plane does and no other: it reaps dead workers, writes the whole directory, and sends
webhooks. leadership.py decides when; this module connects the parts that do it."""

from __future__ import annotations

import asyncio

from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.transition import Transition
from redpoll.control.janitor import ControlJanitor
from redpoll.control.nodes.leadership import LeaderStore
from redpoll.control.tracing.spans import Spans
from redpoll.control.tracing.tracing import Tracer
from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["LeaderWork"]


class LeaderWork:
    """The `leadership.Work` of a control plane. `end` may be called without `begin`."""

    def __init__(
        self,
        reaper: Reaper,
        janitor: ControlJanitor,
        webhooks: Webhooks,
        outbox: Outbox,
        tracer: Tracer | None,
        spans: Spans | None,
    ) -> None:
        self._reaper = reaper
        self._janitor = janitor
        self._webhooks = webhooks
        self._outbox = outbox
        self._tracer = tracer
        self._spans = spans
        self._reaping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Reaps, and writes the directory if it isn't right."""
        self._reaping = asyncio.get_running_loop().create_task(self._reaper.run(), name="reaper")
        self._janitor.check_now()

    def end(self) -> None:
        """Reaps no more. A reap that is under way stops in the middle; the next leader repeats it."""
        if self._reaping is not None:
            self._reaping.cancel()
            self._reaping = None

    def begin_with_store(self, store: LeaderStore) -> None:
        """Sends webhooks."""
        self._webhooks.start(self._outbox, self._traced, store, self._spans)

    async def end_with_store(self) -> None:
        """Another node leads: stops at once, because that node does the same work again."""
        await self._webhooks.stop(0.0)
        # Only the leader reads the outbox, so these figures would stay in /metrics.
        self._outbox.waiting = self._outbox.leaves = 0
        self._outbox.oldest_ms = None

    def _traced(self, row: Transition, delivery_id: str, endpoint_id: str) -> None:
        if self._tracer is not None and row.trace is not None:
            detail = {"delivery": delivery_id, "endpoint": endpoint_id, "event": row.event}
            self._tracer.span(row.trace, row.app_id, "webhook", **detail)
