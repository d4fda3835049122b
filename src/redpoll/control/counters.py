"""The control plane's own figures in /metrics (observe/metrics.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from redpoll.cluster.membership.reaper import Reaper
    from redpoll.cluster.outbox import Outbox
    from redpoll.cluster.redis.link import Link
    from redpoll.control.http.auth_failures import AuthFailures
    from redpoll.control.http.control_port import ControlPort
    from redpoll.control.janitor import ControlJanitor
    from redpoll.control.observation import Observation
    from redpoll.control.publish.publishing import Publishing
    from redpoll.control.records.records import Records
    from redpoll.control.records.store_sync import StoreSync
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["Counters"]

log = structlog.get_logger(__name__)


class Counters:
    """Reads them from the parts. `failures()` is the limit of failed authentications, None without one.
    `loop_exception` counts what reaches the loop."""

    def __init__(
        self,
        link: Link,
        records: Records,
        webhooks: Webhooks,
        outbox: Outbox,
        publishing: Publishing,
        observation: Observation,
        reaper: Reaper,
        janitor: ControlJanitor,
        port: ControlPort,
        store_sync: StoreSync,
        failures: Callable[[], AuthFailures | None],
    ) -> None:
        self._loop_exceptions_total = 0
        self._link = link
        self._records = records
        self._webhooks = webhooks
        self._outbox = outbox
        self._publishing = publishing
        self._observation = observation
        self._reaper = reaper
        self._janitor = janitor
        self._port = port
        self._store_sync = store_sync
        self._failures = failures

    def loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_exceptions_total += 1
        log.error("unhandled exception", what=context.get("message"), exc_info=context.get("exception"))

    def read(self) -> Mapping[str, float]:
        link, port, failures = self._link, self._port, self._failures()
        publisher, bus = self._publishing.publisher, self._publishing.bus
        tracer, otlp = self._observation.tracer, self._observation.otlp
        return {
            "apps": len(self._records.apps),
            "record_store_up": self._store_sync.store_up,
            "http_connections": len(port.connections),
            "http_refused_connections_total": port.refused["connections"],
            "auth_failures_limited_total": failures.limited_total if failures else 0,
            "publishes_fast_total": publisher.fast_requests,
            "events_published_total": publisher.events_published,
            "events_unconfirmed_total": publisher.unconfirmed,
            "events_uncached_total": bus.uncached,
            "events_unkept_total": bus.unkept,
            "webhook_rows_waiting": self._outbox.waiting,
            "webhook_rows_lost_total": self._outbox.lost,
            **self._webhooks.counters(),
            "workers_reaped_total": self._reaper.reaped,
            "loop_lag_seconds": self._janitor.loop_lag.take_s(),
            "loop_exceptions_total": self._loop_exceptions_total,
            "callback_errors_total": link.handler_errors,
            "redis_reconnects_total": link.reconnects,
            "redis_errors_total": link.errors,
            "calls_unlogged_total": tracer.unlogged if tracer else 0,
            "spans_sent_total": otlp.sent_total if otlp else 0,
            "spans_lost_total": otlp.lost_total if otlp else 0,
            "calls_untraced_total": tracer.sampled_out if tracer else 0,
        }
