"""The worker's figures, which it writes to Redis every few seconds: /metrics, the dashboard and `redpoll node list`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING, Any, Final

import structlog

from redpoll import _engine
from redpoll.cluster.stats import Stats
from redpoll.worker.hub.open_connections import UnsentBytes
from redpoll.worker.timers.janitor import STATS_EVERY_TICKS

if TYPE_CHECKING:
    import asyncio

    from redpoll.cluster.membership.registry import Registry
    from redpoll.cluster.redis.link import Link
    from redpoll.worker.fallback.fallback import Fallback
    from redpoll.worker.ingress.gate import Gate
    from redpoll.worker.ingress.listeners import Listeners
    from redpoll.worker.timers.backpressure import Backpressure

__all__ = ["Statistics"]

log = structlog.get_logger()

# Apps whose readers are counted for /metrics, those with the most: all are one value in Redis.
_MAX_APPS_REPORTED: Final = 100
# Reports with the last figures of a deleted app, a minute: control has counted them by then. After that they are
# forgotten: each app would cost this worker and control a part of every report.
_REPORTS_OF_DELETED: Final = 12


class Statistics:
    """Call `write` at times and `unsent.advance` at each tick. `loop_exception` counts what reaches the loop. `apps`
    are those that exist."""

    def __init__(
        self,
        link: Link,
        stats: Stats,
        registry: Registry,
        gate: Gate,
        listeners: Listeners,
        backpressure: Backpressure,
        fallback: Fallback,
        apps: Container[str],
    ) -> None:
        self.loop_exceptions_total = 0
        self.unsent = UnsentBytes(gate.hub.open_connections, STATS_EVERY_TICKS)
        self._link = link
        self._stats = stats
        self._registry = registry
        self._gate = gate
        self._listeners = listeners
        self._backpressure = backpressure
        self._fallback = fallback
        self._existing = apps
        # By deleted app: its figures, and how many reports have had them.
        self._deleted: dict[str, tuple[list[int], int]] = {}

    def loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.loop_exceptions_total += 1
        log.error("unhandled exception", what=context.get("message"), exc_info=context.get("exception"))

    def write(self) -> None:
        if not self._link.up:
            return
        engine, flusher, gate, registry = _engine.counters(), self._gate.flusher, self._gate, self._registry
        self._stats.write(
            registry.worker_id,
            {
                "connections": gate.connections,
                "connections_total": gate.connections_total,
                "messages_received_total": engine["messages_received"],
                "bytes_received_total": engine["bytes_received"],
                "frames_posted_total": flusher.frames_posted,
                "frames_written_total": flusher.frames_written,
                "bytes_written_total": flusher.bytes_written,
                "unsent_bytes": self.unsent.total,
                "slow_consumers_closed_total": flusher.overruns,
                "send_errors_total": flusher.sinks_closed_on_error,
                "callback_errors_total": engine["callback_errors"],
                "protocol_faults_total": engine["protocol_faults"],
                "loop_exceptions_total": self.loop_exceptions_total,
                "loop_lag_seconds": gate.janitor.loop_lag.take_s(),
                "redis_reconnects_total": self._link.reconnects,
                "redis_errors_total": self._link.errors,
                "redis_lag_seconds": registry.canary.lag_s,
                "redis_canaries_missed_total": registry.canary.missed,
                "redis_connection_state": registry.connection_state.value,
                "channels": registry.occupied_channels,
                "subscriptions": registry.subscriptions,
                "users": len(gate.hub.users),
                "brakes_total": self._backpressure.times_on,
                "handshakes_failed_total": self._listeners.handshakes_failed_total,
                "upgrades_refused_total": gate.upgrades_refused_total,
                "fallback_sessions": len(self._fallback.sessions.by_name),
                "fallback_sessions_total": self._fallback.sessions.begun_total,
                "fallback_relayed_total": self._fallback.relay.relayed_total,
                "address_limited_total": gate.addresses.refused,
                "crowded_out_total": gate.strangers.closed_total,
                "channels_limited_total": gate.hub.channels_refused,
                "subscribes_limited_total": gate.refusals.subscribes,
                "address_subscribes_limited_total": gate.hub.subscribe_rates.refused,
                **self._http(),
                "rewinds_total": gate.hub.replayer.begun,
                "replayed_total": gate.hub.replayer.replayed,
                "join_passed_total": gate.hub.pacing.passed,
                "paced_lagging_total": gate.hub.pacing.lagged,
                "history_pages_total": gate.hub.history_requests.answered,
                "catchups_total": registry.catchups,
                "history_lost_total": gate.hub.replayer.positions_sent,
                "events_unkept_total": gate.hub.client_events.bus.unkept,
                "events_unhooked_total": gate.hub.client_events.bus.unhooked + registry.unhooked,
            },
            self._apps(),
        )

    def _http(self) -> dict[str, Any]:
        """HTTP connections, and the readers among them."""
        http, streams = self._gate.http, self._gate.streams
        return {
            "http_connections": len(http.connections),
            "http_forwarded_total": http.link.requests_total,
            "http_usual_total": http.link.usual_total,
            "http_unconfirmed_total": http.link.unconfirmed_total,
            **{f"http_refused_{limit}_total": count for limit, count in http.refused.items()},
            "stream_readers": len(streams),
            "stream_channels": streams.tails,
            **{f"stream_{live.name.lower()}_total": n for live, n in streams.requests.items()},
            "readers_by_app": dict(Counter(streams.by_app).most_common(_MAX_APPS_REPORTED)),
        }

    def _apps(self) -> dict[str, list[int]]:
        """By app its connections, client events and events sent to clients. Apps without connections, too: what they
        sent last isn't counted yet."""
        connections = self._gate.hub.open_connections.counts()
        client_events, sent = self._gate.hub.client_events.received, self._gate.hub.events_sent
        apps = {
            app_id: [connections.get(app_id, 0), client_events.get(app_id, 0), sent.get(app_id, 0)]
            for app_id in {**connections, **sent, **client_events}
        }
        deleted: dict[str, tuple[list[int], int]] = {}
        for app_id in [app_id for app_id in apps if app_id not in self._existing]:
            figures, reports = self._deleted.get(app_id, (None, 0))
            reports = reports + 1 if figures == apps[app_id] else 1
            if reports > _REPORTS_OF_DELETED and app_id not in connections:
                del apps[app_id]
                client_events.pop(app_id, None)
                sent.pop(app_id, None)
            else:
                deleted[app_id] = apps[app_id], reports
        self._deleted = deleted
        return apps
