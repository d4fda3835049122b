"""/metrics in Prometheus' text format: the counters of the workers and of the control plane.

The table FAMILIES names every counter. Workers may be on other machines, so they write their counters to Redis every
5 s, and the figures here are that old. This module only renders counters; it doesn't count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from redpoll import __version__
from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, header_line
from redpoll.control.http.router import Access, Route, Routes, slot_bound_s
from redpoll.control.tracing.latency import PublishLatency
from redpoll.control.webhooks.outcomes import Outcome
from redpoll.loop.slices import walk

__all__ = ["FAMILIES", "Family", "Metrics", "catalog"]

# The `worker` label of the control plane's own counters.
CONTROL: Final = "control"
_TYPE: Final = header_line("Content-Type", CONTENT_TYPE_LATEST)


class Family(NamedTuple):
    """The metric that shows a counter. A name that ends in `_total` is a counter, any other a gauge.

    `reason`: the value of the label `label`, if several counters share one metric.
    """

    name: str
    help: str
    reason: str = ""
    label: str = "reason"


def _family(name: str, help: str) -> tuple[str, Family]:
    return name, Family(f"redpoll_{name}", help)


_ATTEMPTS: Final = "Attempts to deliver to webhooks, by outcome: one for each event of a request."
# Prometheus stores every label value, so their number must be bounded.
_MAX_APPS: Final = 100

_REFUSED: Final = "HTTP requests and connections refused with 503, by the limit that was reached."
_READS: Final = "Requests to read a channel that were allowed, by how they wait for messages."
_DROPPED: Final = "Connections that the server closed, by reason."

# Every counter, by the name under which a process reports it.
FAMILIES: Final[Mapping[str, Family]] = dict(
    [
        _family("connections", "Sockets that are open now, including those in the handshake."),
        _family("connections_total", "Sockets accepted."),
        _family("http_forwarded_total", "HTTP requests that a worker sent to the control plane."),
        _family("http_usual_total", "Of these, requests of the usual shape, which a worker reads in one step."),
        _family("http_unconfirmed_total", "HTTP requests sent to the control plane that it didn't answer."),
        ("http_refused_connections_total", Family("redpoll_http_refused_total", _REFUSED, "connections")),
        ("http_refused_requests_total", Family("redpoll_http_refused_total", _REFUSED, "requests")),
        ("http_refused_bodies_total", Family("redpoll_http_refused_total", _REFUSED, "bodies")),
        ("http_refused_address_total", Family("redpoll_http_refused_total", _REFUSED, "address")),
        _family(
            "upgrades_refused_total",
            "WebSocket upgrades refused because the server was not ready or full, or the key unknown.",
        ),
        _family("fallback_sessions", "Connections without a WebSocket, by pusher-js' HTTP transports."),
        _family("fallback_sessions_total", "Such connections that were opened."),
        _family("fallback_relayed_total", "Requests of such connections that a worker passed on to another one."),
        _family("address_limited_total", "WebSockets refused because of max_connections_per_address."),
        _family("crowded_out_total", "Connections of callers who hadn't authenticated, closed to make room."),
        _family("channels_limited_total", "Subscribes refused because of an app's max_occupied_channels."),
        _family("subscribes_limited_total", "Subscribes refused because of subscribes_per_second."),
        _family("address_subscribes_limited_total", "Subscribes refused because of subscribes_per_second_per_address."),
        _family("channels", "Channels with subscribers on this worker."),
        _family("subscriptions", "Subscriptions on this worker."),
        _family("stream_readers", "Clients that read a channel live over HTTP: streams and long polls."),
        _family("stream_channels", "Channels that are read over HTTP, or were in the last seconds."),
        ("stream_no_total", Family("redpoll_stream_requests_total", _READS, "catch-up", "live")),
        ("stream_long_poll_total", Family("redpoll_stream_requests_total", _READS, "long-poll", "live")),
        ("stream_sse_total", Family("redpoll_stream_requests_total", _READS, "sse", "live")),
        ("stream_event_source_total", Family("redpoll_stream_requests_total", _READS, "event-source", "live")),
        _family("rewinds_total", "Replays of a channel's history that were started."),
        _family("replayed_total", "Messages sent in replays."),
        _family("join_passed_total", "Events that a rule should join, and whose data has no text at its path."),
        _family(
            "paced_lagging_total", "Slow connections that got less often what a rule with a rate joins or replaces."
        ),
        _family("history_pages_total", "Answers to `pusher:history`."),
        _family(
            "catchups_total",
            "Channels whose missed messages a worker read from their history after a reconnect to Redis.",
        ),
        _family(
            "history_lost_total", "Notices (`pusher:position`) to subscribers of a gap, or of a cleared or new history."
        ),
        _family("messages_received_total", "WebSocket messages received."),
        _family("frames_posted_total", "WebSocket frames queued for a socket."),
        _family("frames_written_total", "WebSocket frames and HTTP responses written."),
        _family("bytes_received_total", "Bytes received from sockets."),
        _family("bytes_written_total", "Bytes written to sockets."),
        _family("unsent_bytes", "Bytes that wait to be sent."),
        ("slow_consumers_closed_total", Family("redpoll_dropped_total", _DROPPED, "slow_consumer")),
        ("send_errors_total", Family("redpoll_dropped_total", _DROPPED, "send_error")),
        _family("protocol_faults_total", "Connections closed for violations of RFC 6455."),
        _family("callback_errors_total", "Internal errors that closed one connection."),
        _family("loop_exceptions_total", "Exceptions that reached the event loop."),
        _family("loop_lag_seconds", "The longest time since the last report in which the event loop stood still."),
        _family("redis_reconnects_total", "Reconnects to Redis."),
        _family("redis_errors_total", "Error replies from Redis."),
        _family("redis_lag_seconds", "How long a worker's last message to itself took through Redis."),
        _family("redis_canaries_missed_total", "Messages of workers to themselves that Redis did not deliver in 2 s."),
        _family("http_connections", "HTTP connections that are open; of control, those of its own port."),
        _family(
            "auth_failures_limited_total",
            "HTTP requests answered 429 because too many from their address had failed to authenticate.",
        ),
        _family("publishes_fast_total", "HTTP requests to publish that the control plane answered by its fast path."),
        _family("events_published_total", "Events that Redis confirmed, counted per channel."),
        _family("events_unconfirmed_total", "Events that Redis did not confirm in time (answered with 503)."),
        _family(
            "events_uncached_total",
            "Events delivered but not cached, because their app has its maximum of channels with a cached event.",
        ),
        _family(
            "events_unkept_total",
            "Events delivered but not stored, because their app has its maximum of channels with history.",
        ),
        _family("events_unhooked_total", "Events without a webhook, because too many rows waited in Redis."),
        _family("apps", "Apps in the record store."),
        _family("record_store_up", "0 while PostgreSQL is away: records can't be changed."),
        _family("webhook_rows_waiting", "Transitions in Redis that are not yet deliveries."),
        _family("webhook_rows_lost_total", "Transitions lost for webhooks, because too many waited in Redis."),
        _family("webhook_rows_unreadable_total", "Transitions lost for webhooks, because no body could be rendered."),
        _family("webhook_transitions_total", "Transitions moved from Redis to the record store."),
        _family("webhook_deliveries_waiting", "Webhook deliveries that wait for an attempt."),
        _family(
            "webhook_deliveries_dropped_total",
            "Webhook deliveries that were never stored, because webhook_max_waiting of their endpoint waited.",
        ),
        _family("webhook_oldest_seconds", "Age of the oldest waiting webhook delivery."),
        _family("webhook_attempts_running", "Webhook requests that are running."),
        _family("webhook_failed_total", "Webhook deliveries that became dead letters."),
        _family("webhook_dead_letters", "Dead letters that wait for the operator."),
        _family(
            "webhook_dead_letters_removed_total",
            "Dead letters removed because their endpoint had more than webhook_max_dead_letters.",
        ),
        _family("webhook_endpoints_failing", "Webhooks whose attempts have all failed for at least 5 minutes."),
        *(
            (f"webhook_attempts_{outcome}_total", Family("redpoll_webhook_attempts_total", _ATTEMPTS, outcome))
            for outcome in Outcome
        ),
        _family("calls_unlogged_total", "Trigger calls whose row in the event log was lost."),
        _family("calls_untraced_total", "Trigger calls beyond trace_calls_per_second: logged, not traced."),
        _family("spans_sent_total", "Spans that the OpenTelemetry collector accepted."),
        _family("spans_lost_total", "Spans that the OpenTelemetry collector did not accept in time."),
        _family("workers_reaped_total", "Dead workers whose subscriptions and members were removed."),
    ]
)

Counters = Mapping[str, Any]


class Metrics:
    """The handler. `read_workers` returns the counters of each worker, `own` those of the control plane, and
    `published` the number of events published over HTTP by app. `latency` is None if no events are traced."""

    def __init__(
        self,
        routes: Callable[[], Routes],
        read_workers: Callable[[], Awaitable[Mapping[str, Counters]]],
        own: Callable[[], Counters],
        published: Callable[[], Mapping[str, int]] = dict,
        latency: PublishLatency | None = None,
    ) -> None:
        self._routes = routes
        self._read_workers = read_workers
        self._own = own
        self._published = published
        self._latency = latency

    async def metrics(self, request: Request) -> Response:
        """GET /metrics. Without Redis the workers' counters are missing, all but the state of their connections."""
        counters = {**await self._read_workers(), CONTROL: self._own()}
        apps = await _busiest_apps(counters.values(), self._published())
        registry = CollectorRegistry()
        registry.register(_Snapshot(counters, apps, self._routes(), self._latency))
        return Response(200, generate_latest(registry), _TYPE)


class _App(NamedTuple):
    connections: int
    client_events: int
    sent: int
    published: int
    readers: int


async def _busiest_apps(processes: Iterable[Counters], published: Mapping[str, int]) -> dict[str, _App]:
    """Sums over all processes, for at most _MAX_APPS apps: those with most connections, then with most events. In
    slices: there may be a hundred thousand apps, and publishes wait meanwhile."""
    connections: Counter[str] = Counter()
    client_events: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    readers: Counter[str] = Counter()
    published = Counter(published)

    def add(app: tuple[str, Sequence[int]]) -> None:
        # Workers of an earlier version report two figures only.
        app_id, (count, events, *written) = app
        connections[app_id] += count
        client_events[app_id] += events
        sent[app_id] += sum(written)

    for counters in processes:
        readers.update(counters.get("readers_by_app", {}))
        await walk(counters.get("by_app", {}).items(), add)
    busiest = [app_id for app_id, _ in connections.most_common(_MAX_APPS)]
    for counts in (readers, published):
        await asyncio.sleep(0)
        busiest += [app_id for app_id, _ in counts.most_common(_MAX_APPS) if app_id not in connections]
    return {
        app_id: _App(*(counts[app_id] for counts in (connections, client_events, sent, published, readers)))
        for app_id in list(dict.fromkeys(busiest))[:_MAX_APPS]
    }


class _Snapshot:
    """A prometheus_client Collector for one answer."""

    def __init__(
        self,
        counters: Mapping[str, Counters],
        apps: Mapping[str, _App],
        routes: Routes,
        latency: PublishLatency | None,
    ) -> None:
        self._counters = counters
        self._apps = apps
        self._routes = routes
        self._latency = latency

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("redpoll_info", "The version that runs.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from self._of_processes()
        yield self._of_connections()
        yield from self._of_apps()
        yield from self._of_routes()
        if self._latency is not None:
            yield self._of_events(self._latency)

    def _of_processes(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, counters in self._counters.items():
            for name, value in counters.items():
                row = FAMILIES.get(name)
                if row is None:
                    # From a worker of another version.
                    continue
                labels = {"worker": worker, row.label: row.reason} if row.reason else {"worker": worker}
                family = families.get(row.name)
                if family is None:
                    kind = CounterMetricFamily if row.name.endswith("_total") else GaugeMetricFamily
                    family = families[row.name] = kind(row.name, row.help, labels=list(labels))
                family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
        return families.values()

    def _of_connections(self) -> Metric:
        family = GaugeMetricFamily(
            "redpoll_redis_connection_state",
            "1 for the last state of a worker's connection to Redis, 0 for the others; `down` comes up to 15 s late.",
            labels=["worker", "state"],
        )
        for worker, counters in self._counters.items():
            if present := counters.get("redis_connection_state"):
                for state in ConnectionState:
                    family.add_metric([worker, state.value], float(state.value == present))
        return family

    def _of_apps(self) -> Iterable[Metric]:
        families: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
            GaugeMetricFamily("redpoll_app_connections", "Connections of an app.", labels=["app"]),
            CounterMetricFamily("redpoll_app_client_events_total", "Events that clients triggered.", labels=["app"]),
            CounterMetricFamily(
                "redpoll_app_events_sent_total", "Events sent to clients, counted per socket.", labels=["app"]
            ),
            CounterMetricFamily("redpoll_app_events_published_total", "Events published over HTTP.", labels=["app"]),
            GaugeMetricFamily("redpoll_app_stream_readers", "Clients that read live over HTTP.", labels=["app"]),
        )
        for app_id, app in self._apps.items():
            for family, count in zip(families, app, strict=True):
                family.add_metric([app_id], count)
        return families

    def _of_routes(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "redpoll_http_requests_total", "HTTP requests answered.", labels=["route", "status"]
        )
        seconds = HistogramMetricFamily(
            "redpoll_http_request_seconds", "Seconds from a request's head to its answer.", labels=["route"]
        )
        for route in (*self._routes.all, self._routes.unmatched):
            if not route.answers:
                continue
            for status, count in sorted(route.answers.items()):
                requests.add_metric([route.name, str(status)], count)
            seconds.add_metric([route.name], _buckets(route.times), sum_value=route.microseconds / 1e6)
        return requests, seconds

    def _of_events(self, latency: PublishLatency) -> Metric:
        family = HistogramMetricFamily(
            "redpoll_publish_to_socket_seconds",
            "Seconds from the arrival of a traced event until a worker wrote it to the sockets of a channel.",
            labels=["source"],
        )
        for source, times in latency.times.items():
            family.add_metric([source], _buckets(times), sum_value=latency.microseconds[source] / 1e6)
        return family


def _buckets(times: Sequence[int]) -> list[tuple[str, float]]:
    """The cumulative buckets of a histogram that counts as `Route.times` does."""
    seen, buckets = 0, []
    for slot, count in enumerate(times):
        seen += count
        bound_s = slot_bound_s(slot)
        buckets.append(("+Inf" if bound_s == float("inf") else repr(bound_s), float(seen)))
    return buckets


def catalog() -> list[Metric]:
    """Every metric that /metrics can show, with one made-up sample or more each, for documentation and its tests."""
    route = Route("", "", "events", lambda request: None, Access.OPEN)
    route.count(200, 0.0)
    counters = {
        **dict.fromkeys(FAMILIES, 0.0),
        "redis_connection_state": ConnectionState.OPEN,
    }
    apps = {"1": _App(0, 0, 0, 0, 0)}
    return list(_Snapshot({"": counters}, apps, Routes([route]), PublishLatency()).collect())
