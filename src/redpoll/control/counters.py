"""The control plane's own figures in /metrics (observe/metrics.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from redpoll.cluster.outbox import Outbox
    from redpoll.control.plane import ControlPlane
    from redpoll.control.records.records import Records
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["Counters"]

log = structlog.get_logger(__name__)


class Counters:
    """Reads the parts of `plane`. `loop_exception` counts what reaches the loop."""

    def __init__(self, plane: ControlPlane, records: Records, webhooks: Webhooks, outbox: Outbox) -> None:
        self._loop_exceptions_total = 0
        self._plane = plane
        self._records = records
        self._webhooks = webhooks
        self._outbox = outbox

    def loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_exceptions_total += 1
        log.error("unhandled exception", what=context.get("message"), exc_info=context.get("exception"))

    def read(self) -> Mapping[str, float]:
        plane, port = self._plane, self._plane.entrance.port
        publisher, bus = plane.publishing.publisher, plane.publishing.bus
        failures, tracer, otlp = plane.auth_failures, plane.observation.tracer, plane.observation.otlp
        return {
            "apps": len(self._records.apps),
            "record_store_up": plane.store_sync.store_up,
            "http_connections": len(port.connections),
            "http_refused_connections_total": port.refused["connections"],
            "auth_failures_limited_total": failures.limited_total if failures else 0,
            "events_published_total": publisher.events_published,
            "events_unconfirmed_total": publisher.unconfirmed,
            "events_unkept_total": bus.unkept,
            "webhook_rows_waiting": self._outbox.waiting,
            "webhook_rows_lost_total": self._outbox.lost,
            **self._webhooks.counters(),
            "workers_reaped_total": plane.reaper.reaped,
            "loop_lag_seconds": plane.janitor.loop_lag.take_s(),
            "loop_exceptions_total": self._loop_exceptions_total,
            "callback_errors_total": plane.link.handler_errors,
            "redis_reconnects_total": plane.link.reconnects,
            "redis_errors_total": plane.link.errors,
            "calls_unlogged_total": tracer.unlogged if tracer else 0,
            "spans_sent_total": otlp.sent_total if otlp else 0,
            "spans_lost_total": otlp.lost_total if otlp else 0,
            "calls_untraced_total": tracer.sampled_out if tracer else 0,
        }
