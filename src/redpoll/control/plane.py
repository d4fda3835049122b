"""The control plane: creates its parts, connects them, and shuts them down in order.

It has no state of its own: durable data is in the record store, the rest in Redis.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, assert_never

import hiredis
import structlog

from redpoll.cluster.bus import Bus
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.history import History
from redpoll.cluster.idempotency import Idempotency
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.nodes import NodesView
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.check import examine
from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.shared_rate import SharedRate
from redpoll.cluster.stats import Stats
from redpoll.cluster.survey import NodeSurvey, Survey
from redpoll.cluster.traces import TraceReader
from redpoll.config.proxies import TrustedProxies
from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.api.api import Api
from redpoll.control.api.browser_module import BrowserModule
from redpoll.control.api.history import ChannelHistory
from redpoll.control.api.middleware import Front
from redpoll.control.api.occupancy import Occupancy
from redpoll.control.api.routes import routes_of
from redpoll.control.commands.context import Cluster
from redpoll.control.dashboard.dashboard import Dashboard, Dependencies
from redpoll.control.http.auth_failures import AuthFailures
from redpoll.control.http.control_port import ControlPort
from redpoll.control.http.host_names import HostNames
from redpoll.control.http.ratelimit import RateLimit
from redpoll.control.http.worker_requests import WorkerRequests
from redpoll.control.janitor import Janitor
from redpoll.control.leader_work import LeaderWork
from redpoll.control.nodes.fitness import FitnessReports
from redpoll.control.nodes.leadership import Leadership
from redpoll.control.nodes.nodes import NodeList
from redpoll.control.observe.debugging import Debugging
from redpoll.control.observe.health import Health
from redpoll.control.observe.metrics import Metrics
from redpoll.control.observe.usage import Usage
from redpoll.control.publish.daily_limit import DailyLimit
from redpoll.control.publish.fast_publish import FastPath
from redpoll.control.publish.publish_gate import PublishGate
from redpoll.control.publish.publisher import Publisher
from redpoll.control.records.record_sync import RecordSync
from redpoll.control.records.records import Records
from redpoll.control.records.redis_sync import RedisSync
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.control.tracing.eventlog import EventTrace
from redpoll.control.tracing.otlp import open_sender
from redpoll.control.tracing.spans import Spans
from redpoll.control.tracing.tracing import Tracer
from redpoll.control.webhooks.verify import Verify
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.messages import (
    BeginStop,
    DeafWorkers,
    DirectoryVersion,
    Evacuate,
    Fatal,
    FromChild,
    Lead,
    LivingWorkers,
    NodesChanged,
    Ready,
    Reload,
    Reloaded,
    Serve,
    SettingsChanged,
    Start,
    Stop,
    ToControl,
    WorkersCutOff,
    WorkersReady,
)
from redpoll.store.charts import Charts
from redpoll.store.eventlog import EventLog
from redpoll.text import logs

__all__ = ["ControlPlane"]

log = structlog.get_logger(__name__)

# Open requests get this long at shutdown. Each waits for Redis for at most 2 s.
_FINISH_WITHIN_S: Final = 5.0
_BACKLOG: Final = 1024


class ControlPlane:
    """Creates and connects the parts of the control plane: call `start()`, later `finish()`.

    `records` and `webhooks` are already loaded; the caller closes their store. `tell` sends a message to the
    supervisor. `shard_key` is that of the store (store/shard_key.py). One table of routes serves the control port
    (`listener`) and the requests that workers forward over a Unix socket (`start.requests_path`).
    """

    def __init__(
        self,
        start: Start,
        records: Records,
        webhooks: Webhooks,
        listener: socket.socket,
        tell: Callable[[FromChild], None],
        *,
        shard_key: bytes,
        accounts: Accounts,
        event_log: EventLog | None = None,
        charts: Charts | None = None,
        body_timeout_s: float = 15.0,
    ) -> None:
        settings = start.settings
        self.loop = asyncio.get_running_loop()
        self.finished = asyncio.Event()
        self._listener = listener
        self._tell = tell
        self._settings = settings
        self._reloads: list[asyncio.Future[dict[str, Any]]] = []
        self._store = accounts.store
        self._records = records
        self._webhooks = webhooks
        self.link = open_link(start.redis_url)
        self._keys = Keys(settings.redis_prefix, sharded=self.link.sharded, shard_key=shard_key)
        self._view = view = NodesView(start.run)
        self._loop_exceptions_total = 0
        self._server: asyncio.Server | None = None
        self._examining: asyncio.Task[None] | None = None

        self.link.on_up, self.link.on_down = self._link_up, self._link_down
        self.bus = Bus(self.link, self._keys)
        self.publish_gate = PublishGate(self.bus, self.link, self._keys.nodes, view)
        self.publisher = Publisher(self.bus, self.publish_gate.wait, lambda: self.link.kept_shards)
        self.daily = DailyLimit(Quota(self.link, self._keys), records, leads=lambda: self.leadership.term is not None)
        self.reaper = Reaper(
            self.link,
            self._keys,
            start.run,
            hooks_of=lambda app_id: records.apps[app_id].hooks if app_id in records.apps else "",
            has_history=lambda app_id, channel: (
                app_id in records.apps and records.apps[app_id].history_rule(channel) is not None
            ),
            debounce_s=settings.webhook_debounce_s,
        )
        self.outbox = Outbox(self.link, self._keys, settings.webhook_debounce_s)
        self._life = Life()
        self.health = Health(
            self._life, lambda: self.janitor.redis_answers(), lambda request: self.dashboard.enter(request)
        )
        self.tracer = None
        self.otlp = open_sender(settings)
        self.spans = Spans(self.otlp.put, settings.trace_calls_per_second) if self.otlp else None
        if event_log is not None:
            self.tracer = Tracer(
                event_log,
                TraceReader(self.link, self._keys, start.run),
                settings.trace_calls_per_second,
                spans=self.spans,
            )
        self.metrics = Metrics(
            lambda: self.routes,
            self._read_own_workers,
            self._own_counters,
            lambda: self.publisher.by_app,
            self.tracer.latency if self.tracer else None,
        )
        api = Api(
            self.publisher,
            Occupancy(self.link, self._keys),
            self.daily,
            Idempotency(self.link, self._keys),
            Survey(self.link, self._keys),
            settings.master_key(),
            self.tracer,
        )
        self.history = History(self.link, self._keys)
        self.node_survey = NodeSurvey(self.link, self._keys, view)
        cluster_log = None
        if event_log is not None:
            cluster_log = ClusterLog(event_log, self.node_survey, settings.node_name or socket.gethostname())
        self.usage = Usage(charts)
        self.nodes = NodeList(view, self._read_workers)
        self.dashboard = Dashboard(
            Dependencies(
                settings,
                Path(start.data_dir),
                accounts,
                records,
                webhooks,
                self.link,
                self._keys,
                self.publisher,
                api,
                ChannelHistory(self.history),
                self.health,
                self._read_workers,
                self.nodes,
                cluster_log,
                self.tracer,
                charts,
                self.usage,
            )
        )
        self.routes = routes_of(
            api,
            ChannelHistory(self.history),
            EventTrace(cluster_log),
            BrowserModule(),
            self.usage,
            Verify(webhooks.secrets_of),
            self.health,
            self.metrics,
            self.dashboard.routes(),
        )
        per_minute = settings.trigger_rate_per_minute
        self.rate = RateLimit(per_minute, SharedRate(self.link, self._keys)) if per_minute else None
        self.auth_failures = _auth_failures(settings)
        self.front = Front(
            self.routes,
            records,
            host_names=HostNames.of(settings),
            rate=self.rate,
            failures=self.auth_failures,
            tracer=self.tracer,
            path_prefix=settings.path_prefix,
        )
        self.front.fault_page = self.dashboard.fault
        self.front.debugging = debugging = Debugging(self.link, self._keys, settings.node_name, "control")
        for app in records.apps.values():
            debugging.app_changed(app.id, app)
        records.on_put = debugging.app_changed
        api.conclude = self.front.conclude
        self.port = ControlPort(
            self.front.received,
            self.front.error_page,
            head_timeout_s=settings.head_timeout_s,
            body_timeout_s=body_timeout_s,
            trusted=TrustedProxies(settings.trusted_proxies),
        )
        fast = FastPath(self.front, self.routes, records, self.publisher, self._keys, self.rate, self.tracer)
        self.link.on_handed_out = fast.finish
        self.worker_requests = WorkerRequests(start.requests_path, self.front.received, fast.take)
        self.record_sync: RecordSync | None = None
        self.redis_sync: RedisSync | None = None
        if accounts.store.shared:
            self.record_sync = RecordSync(self.link, self._keys, records, accounts.store.name)
            self.record_sync.on_synced = self.dashboard.check_sessions
            self.redis_sync = RedisSync(self.link, self._keys, records, self.record_sync)
            accounts.store.on_version = self.record_sync.committed
        self.link.on_push = self._push_received
        writer = DirectoryWriter(self.link, self._keys)
        self.janitor = Janitor(self.link, writer, records, self.health, leader=self._leader)
        records.on_change = self.janitor.record_changed
        records.on_rewound = lambda version: tell(DirectoryVersion(version))
        self.work = LeaderWork(self.reaper, self.janitor, webhooks, self.outbox, self.tracer, self.spans)
        self.leadership = Leadership(accounts.store, tell, self.work)
        self.fitness = FitnessReports(tell, self.janitor.redis_answers, accounts.store)
        # The next report would come up to a second later, and a leader gives up after 0.9 s.
        self.janitor.on_redis_back = self.fitness.report

    @property
    def cluster(self) -> Cluster:
        """The Redis connection and stores that operators' commands use."""
        return Cluster(self.link, self._keys, self.history, self.nodes)

    async def start(self) -> None:
        """Serve. Doesn't wait for Redis: `/healthz` works at once, `/readyz` reports when the server is ready."""
        self.loop.set_exception_handler(self._loop_exception)
        self._webhooks.prepare()
        self.link.start()
        self.janitor.start()
        self.dashboard.start((route for route in self.routes.all if route.limited), self.front.times_by_app)
        self.daily.start()
        if self.record_sync is not None:
            self.record_sync.start()
        if self.redis_sync is not None:
            self.redis_sync.start()
        if self.tracer is not None:
            self.tracer.start()
        self.leadership.start()
        self.fitness.start()
        self._server = await self.loop.create_server(self.port, sock=self._listener, backlog=_BACKLOG)
        await self.worker_requests.start()
        self._tell(Ready())

    def receive(self, message: ToControl) -> None:
        """Handle a message from the supervisor."""
        match message:
            case LivingWorkers():
                self._view.alive = message.alive
                self.reaper.set_alive(set(message.alive), message.greatest)
            case NodesChanged():
                self._view.take(message.nodes, message.leader)
                self.reaper.set_nodes(self._view.others)
                self.node_survey.nodes_changed()
                if self.rate is not None:
                    self.rate.share(self._view.several)
            case Lead():
                self.leadership.set_term(message.term)
            case WorkersReady():
                self.health.workers_ready = True
            case DeafWorkers():
                self.health.deaf = message.numbers
            case WorkersCutOff():
                self.health.cut_off = message.numbers
                self._view.without_clients = message.without_clients
            case Evacuate():
                self._life.become(Lifecycle.EVACUATING)
            case Serve():
                self._life.become(Lifecycle.SERVING)
            case BeginStop():
                self._life.become(Lifecycle.DRAINING)
            case Stop():
                self.stop()
            case SettingsChanged():
                self._settings_changed(message.changes)
            case Reloaded():
                for waiting in self._reloads:
                    if not waiting.done():
                        waiting.set_result(message.answer)
                self._reloads.clear()
            case _:
                assert_never(message)

    async def reload(self) -> dict[str, Any]:
        """Makes the supervisor read the settings and the certificate again. Returns `Reloaded.answer`."""
        waiting: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._reloads.append(waiting)
        self._tell(Reload())
        return await waiting

    def _settings_changed(self, changes: dict[str, Any]) -> None:
        """A reload changed these settings (Setting.is_live)."""
        self._settings = settings = self._settings.changed_by(changes)
        if "log_level" in changes:
            logs.configure(settings, "control")
        if "auth_failures_per_minute" in changes:
            self.auth_failures = _auth_failures(settings)
        self.front.settings_changed(HostNames.of(settings), self.auth_failures, settings.path_prefix)

    def _leader(self) -> str | None:
        """How our entry as the leader begins in Redis, while the supervisor says that this node leads."""
        term = self.leadership.named
        return None if term is None else f"{self._view.run} {term} "

    def stop(self) -> None:
        """Begin the shutdown: `finished` is set, and the process then calls `finish`."""
        self._life.become(Lifecycle.DRAINING)
        self.finished.set()

    async def finish(self) -> None:
        """Accept no more requests, finish the open ones, and close the connection to Redis.

        If a worker still has a request, it finds no socket and responds with 503 itself.
        """
        if self._server is not None:
            self._server.close()
        await asyncio.gather(self.worker_requests.finish(_FINISH_WITHIN_S), self.port.finish(_FINISH_WITHIN_S))
        await self.fitness.finish()
        await self.leadership.finish()
        self.work.end()
        if self._examining is not None:
            self._examining.cancel()
        self.janitor.stop()
        if self.record_sync is not None:
            await self.record_sync.finish()
        if self.redis_sync is not None:
            await self.redis_sync.finish()
        await self.node_survey.finish()
        # First, because its tasks use the parts below.
        await self.dashboard.finish()
        await self._webhooks.finish()
        self.publisher.close()
        await self.daily.finish()
        if self.tracer is not None:
            await self.tracer.finish()
        if self.otlp is not None:
            await self.otlp.finish()
        await self.link.close()
        self._life.become(Lifecycle.STOPPED)

    def _link_up(self) -> None:
        self.publisher.link_up()
        self.daily.link_up()
        if self.tracer is not None:
            self.tracer.link_up()
        self.janitor.link_up()
        self.fitness.report()
        self.node_survey.link_up()
        if self.record_sync is not None:
            self.record_sync.link_up()
        self._examining = self.loop.create_task(self._examine(), name="redis examined")

    async def _examine(self) -> None:
        """Check this Redis and log what it lacks. During the start, a fault ends the process with that text."""
        try:
            faults, warnings = await examine(self.link, self._keys)
        except LinkDown:
            return
        for warning in warnings:
            log.warning("redis setting unsuitable", what=warning)
        for fault in faults:
            log.error("redis not usable", what=fault)
        if faults:
            self._tell(Fatal("; ".join(faults)))

    def _push_received(self, topic: bytes, payload: bytes) -> None:
        self.node_survey.received(topic, payload)
        if self.record_sync is not None:
            self.record_sync.received(topic, payload)

    def _link_down(self, reason: str) -> None:
        self.publisher.link_down()
        self.daily.link_down()

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._loop_exceptions_total += 1
        log.error("unhandled exception", what=context.get("message"), exc_info=context.get("exception"))

    async def _read_workers(self) -> Mapping[str, Mapping[str, float]]:
        return await _counters(Stats(self.link, self._keys).read_all())

    async def _read_own_workers(self) -> Mapping[str, Mapping[str, float]]:
        """The counters of this node's workers: each node's /metrics is scraped; sums must count a worker once. The
        others' aren't read, which would cost Redis the square of the workers for each scrape of all nodes."""
        stats = Stats(self.link, self._keys)
        return await _counters(stats.read([f"{self._view.run}.{k}" for k in self._view.alive]))

    def _own_counters(self) -> Mapping[str, float]:
        return {
            "apps": len(self._records.apps),
            "record_store_up": self.record_sync.store_up if self.record_sync else 1,
            "http_connections": len(self.port.connections),
            "http_refused_connections_total": self.port.refused["connections"],
            "auth_failures_limited_total": self.auth_failures.limited_total if self.auth_failures else 0,
            "events_published_total": self.publisher.events_published,
            "events_unconfirmed_total": self.publisher.unconfirmed,
            "events_unkept_total": self.bus.unkept,
            "webhook_rows_waiting": self.outbox.waiting,
            "webhook_rows_lost_total": self.outbox.lost,
            **self._webhooks.counters(),
            "workers_reaped_total": self.reaper.reaped,
            "loop_lag_seconds": self.janitor.loop_lag.take_s(),
            "loop_exceptions_total": self._loop_exceptions_total,
            "callback_errors_total": self.link.handler_errors,
            "redis_reconnects_total": self.link.reconnects,
            "redis_errors_total": self.link.errors,
            "calls_unlogged_total": self.tracer.unlogged if self.tracer else 0,
            "spans_sent_total": self.otlp.sent_total if self.otlp else 0,
            "spans_lost_total": self.otlp.lost_total if self.otlp else 0,
            "calls_untraced_total": self.tracer.sampled_out if self.tracer else 0,
        }


async def _counters(reading: Awaitable[Mapping[str, Mapping[str, float]]]) -> Mapping[str, Mapping[str, float]]:
    # Without Redis there are none.
    try:
        async with asyncio.timeout(2.0):
            return await reading
    except (LinkDown, hiredis.ReplyError, TimeoutError):
        return {}


def _auth_failures(settings: Settings) -> AuthFailures | None:
    return AuthFailures(settings.auth_failures_per_minute) if settings.auth_failures_per_minute else None
