"""/metrics in Prometheus' text format: the workers' counters as they lie in Redis, and the control plane's own.

One table says which counters there are. Workers put theirs into Redis every 5 s, since they may be on other
machines; what is seen here of them is that old. Counts nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
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
from redpoll.control.request import Request
from redpoll.control.response import Response, header_line
from redpoll.control.router import Routes, slot_bound_s
from redpoll.control.webhooks.outcomes import Outcome

__all__ = ["FAMILIES", "Family", "Metrics"]

# The control plane's own counters carry this where a worker's carry its id.
CONTROL: Final = "control"
_TYPE: Final = header_line("Content-Type", CONTENT_TYPE_LATEST)


class Family(NamedTuple):
    """Where a process' counter is shown. A name that ends in `_total` only grows; any other goes up and down.

    `reason`: several counters are one family, told apart by this label.
    """

    name: str
    help: str
    reason: str = ""


def _family(name: str, help: str) -> tuple[str, Family]:
    return name, Family(f"redpoll_{name}", help)


_ATTEMPTS: Final = "Attempts at deliveries to webhooks, by what became of them."
# Labels are kept by whoever reads the metrics, so there must not be any number of them.
_MAX_APPS: Final = 100

_DROPPED: Final = "Connections that the server gave up, by reason."

# Every counter that a process may tell, by the name it tells it under.
FAMILIES: Final[Mapping[str, Family]] = dict(
    [
        _family("connections", "Sockets that are open now, those still at the door included."),
        _family("connections_total", "Sockets accepted."),
        _family("handed_over_total", "HTTP connections handed to the control plane."),
        _family("upgrades_refused_total", "WebSocket upgrades refused: not ready, full, unknown key."),
        _family("channels", "Channels with a subscriber on this worker."),
        _family("subscriptions", "Subscriptions on this worker."),
        _family("rewinds_total", "Replays begun: subscribers told of a channel's past."),
        _family("replayed_total", "Messages told in replays."),
        _family("history_pages_total", "Answers to `pusher:history`."),
        _family("catchups_total", "Channels that a worker filled from their history after a gap."),
        _family("history_lost_total", "Times that subscribers were told of a gap, or a cleared history."),
        _family("messages_received_total", "WebSocket messages received."),
        _family("frames_posted_total", "WebSocket frames noted for a socket."),
        _family("frames_written_total", "WebSocket frames written."),
        _family("bytes_received_total", "Bytes received from sockets."),
        _family("bytes_written_total", "Bytes written to sockets."),
        _family("bytes_owed", "Bytes that sockets have yet to take."),
        ("slow_consumers_closed_total", Family("redpoll_dropped_total", _DROPPED, "slow_consumer")),
        ("send_errors_total", Family("redpoll_dropped_total", _DROPPED, "send_error")),
        _family("protocol_faults_total", "Connections closed for what RFC 6455 forbids."),
        _family("callback_errors_total", "Errors of ours that cost one connection."),
        _family("loop_exceptions_total", "Exceptions that reached the event loop."),
        _family("loop_lag_seconds", "Greatest delay of a timer since the last report."),
        _family("redis_reconnects_total", "Connections to Redis made anew."),
        _family("redis_errors_total", "Errors that Redis answered with."),
        _family("http_connections", "HTTP connections that the control plane has."),
        _family("events_published_total", "Events that Redis confirmed, one a channel."),
        _family("events_unconfirmed_total", "Events answered with 503."),
        _family("events_unkept_total", "Events sent but not kept: their app has all the channels with history it may."),
        _family("events_unhooked_total", "Events told to no webhook, as too many waited to be fetched."),
        _family("apps", "Apps in the record store."),
        _family("webhook_rows_waiting", "Transitions in Redis that are not yet deliveries."),
        _family("webhook_rows_lost_total", "Transitions told to no webhook: too many waited in Redis."),
        _family("webhook_rows_unreadable_total", "Transitions told to no webhook: no body can be made of them."),
        _family("webhook_transitions_total", "Transitions taken over from Redis."),
        _family("webhook_deliveries_waiting", "Deliveries to webhooks that wait for their next attempt."),
        _family("webhook_oldest_seconds", "Age of the oldest of them."),
        _family("webhook_attempts_running", "Attempts that are under way."),
        _family("webhook_failed_total", "Deliveries that became dead letters."),
        _family("webhook_dead_letters", "Dead letters that wait for the operator."),
        _family("webhook_endpoints_failing", "Webhooks at which every attempt has failed for 5 minutes."),
        *(
            (f"webhook_attempts_{outcome}_total", Family("redpoll_webhook_attempts_total", _ATTEMPTS, outcome))
            for outcome in Outcome
        ),
        _family("calls_unlogged_total", "Trigger calls whose row in the event log was lost."),
        _family("calls_untraced_total", "Trigger calls beyond trace_calls_per_second: logged, not traced."),
        _family("workers_reaped_total", "Dead workers whose counts and members were taken away."),
    ]
)

Counters = Mapping[str, Any]


class Metrics:
    """Handler of GET /metrics. `read_workers` gives each worker's counters, `own` the control plane's,
    `published` the events that it published by app."""

    def __init__(
        self,
        routes: Callable[[], Routes],
        read_workers: Callable[[], Awaitable[Mapping[str, Counters]]],
        own: Callable[[], Counters],
        published: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._routes = routes
        self._read_workers = read_workers
        self._own = own
        self._published = published

    async def metrics(self, call: Request) -> Response:
        """Without Redis the workers' counters are left out; the control plane's are always there."""
        told = {**await self._read_workers(), CONTROL: self._own()}
        registry = CollectorRegistry()
        registry.register(_Snapshot(told, self._published(), self._routes()))
        return Response(200, generate_latest(registry), _TYPE)


class _Snapshot:
    """A Collector (prometheus_client) over what was gathered for one answer."""

    def __init__(self, told: Mapping[str, Counters], published: Mapping[str, int], routes: Routes) -> None:
        self._told = told
        self._published = published
        self._routes = routes

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("redpoll_info", "The version that runs.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield from self._of_processes()
        yield self._of_connections()
        yield from self._of_apps()
        yield from self._of_routes()

    def _of_processes(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, counters in self._told.items():
            for name, value in counters.items():
                row = FAMILIES.get(name)
                if row is None:
                    # Told by a worker of another version.
                    continue
                labels = {"worker": worker, "reason": row.reason} if row.reason else {"worker": worker}
                family = families.get(row.name)
                if family is None:
                    kind = CounterMetricFamily if row.name.endswith("_total") else GaugeMetricFamily
                    family = families[row.name] = kind(row.name, row.help, labels=list(labels))
                family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
        return families.values()

    def _of_connections(self) -> Metric:
        family = GaugeMetricFamily(
            "redpoll_redis_connection_state",
            "1 for the state that a worker's connection to Redis had last, 0 for the others.",
            labels=["worker", "state"],
        )
        for worker, counters in self._told.items():
            if present := counters.get("redis_connection_state"):
                for state in ConnectionState:
                    family.add_metric([worker, state.value], float(state.value == present))
        return family

    def _of_apps(self) -> Iterable[Metric]:
        """What each process tells by app, added up; the hundred apps with most connections, then most events."""
        connections: Counter[str] = Counter()
        client_events: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for counters in self._told.values():
            # Workers of an earlier version say less.
            for app_id, (count, events, *written) in counters.get("by_app", {}).items():
                connections[app_id] += count
                client_events[app_id] += events
                sent[app_id] += sum(written)
        published = Counter(self._published)
        busiest = [app_id for app_id, _ in connections.most_common(_MAX_APPS)]
        busiest += [app_id for app_id, _ in published.most_common(_MAX_APPS) if app_id not in connections]
        families: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
            GaugeMetricFamily("redpoll_app_connections", "Connections of an app.", labels=["app"]),
            CounterMetricFamily("redpoll_app_client_events_total", "Events that clients triggered.", labels=["app"]),
            CounterMetricFamily("redpoll_app_events_sent_total", "Events, once for each socket.", labels=["app"]),
            CounterMetricFamily("redpoll_app_events_published_total", "Events published over HTTP.", labels=["app"]),
        )
        for app_id in busiest[:_MAX_APPS]:
            for family, counts in zip(families, (connections, client_events, sent, published), strict=True):
                family.add_metric([app_id], counts[app_id])
        return families

    def _of_routes(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "redpoll_http_requests_total", "HTTP requests answered.", labels=["route", "status"]
        )
        seconds = HistogramMetricFamily(
            "redpoll_http_request_seconds", "From a request's head to its answer.", labels=["route"]
        )
        for route in (*self._routes.all, self._routes.unmatched):
            if not route.answers:
                continue
            for status, count in sorted(route.answers.items()):
                requests.add_metric([route.name, str(status)], count)
            seen, buckets = 0, []
            for slot, count in enumerate(route.times):
                seen += count
                bound_s = slot_bound_s(slot)
                buckets.append(("+Inf" if bound_s == float("inf") else repr(bound_s), float(seen)))
            seconds.add_metric([route.name], buckets=buckets, sum_value=route.microseconds / 1e6)
        return requests, seconds
