"""The control plane: creates its parts, connects them, and shuts them down in order.

It has no state of its own: durable data is in the record store, the rest in Redis.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, assert_never

import structlog

from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.history import History
from redpoll.cluster.idempotency import Idempotency
from redpoll.cluster.lifecycle import Life, Lifecycle
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.nodes import NodesView
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.questions import GrantRevoked
from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import PULLS_TOPIC, Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.shared_rate import SharedRate
from redpoll.cluster.stats import Stats
from redpoll.cluster.survey import NodeSurvey, Survey
from redpoll.config.proxies import TrustedProxies
from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.api.api import Api
from redpoll.control.api.browser_module import BrowserModule
from redpoll.control.api.grants import GrantRequests
from redpoll.control.api.history import ChannelHistory
from redpoll.control.api.middleware import Front
from redpoll.control.api.occupancy import Occupancy
from redpoll.control.api.pulls import PullRequests
from redpoll.control.api.routes import routes_of
from redpoll.control.commands.context import Cluster
from redpoll.control.counters import Counters
from redpoll.control.dashboard.dashboard import Dashboard, Dependencies
from redpoll.control.http.auth_failures import AuthFailures
from redpoll.control.http.control_port import ControlPort
from redpoll.control.http.entrance import Entrance
from redpoll.control.http.host_names import HostNames
from redpoll.control.http.port_tls import PortTls
from redpoll.control.http.ratelimit import RateLimit
from redpoll.control.http.router import Route, Routes
from redpoll.control.http.worker_requests import WorkerRequests
from redpoll.control.janitor import ControlJanitor
from redpoll.control.leader_work import LeaderWork
from redpoll.control.live_settings import LiveSettings
from redpoll.control.management.managed import Managed
from redpoll.control.management.routes import management_routes
from redpoll.control.nodes.fitness import FitnessReports
from redpoll.control.nodes.leadership import Leadership
from redpoll.control.nodes.nodes import NodeList
from redpoll.control.nodes.worker_figures import WorkerFigures
from redpoll.control.observation import Observation
from redpoll.control.observe.debugging import ControlDebugging
from redpoll.control.observe.health import Health
from redpoll.control.observe.metrics import Metrics
from redpoll.control.publish.fast_publish import FastPath
from redpoll.control.publish.publishing import Publishing
from redpoll.control.records.grants import Grants
from redpoll.control.records.records import Records
from redpoll.control.records.spreading import Spreading
from redpoll.control.records.store_sync import StoreSync
from redpoll.control.redis_check import RedisCheck
from redpoll.control.tracing.eventlog import EventTrace
from redpoll.control.webhooks.verify import Verify
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.messages import (
    BeginStop,
    CertificateChanged,
    DeafWorkers,
    DirectoryVersion,
    Evacuate,
    FromChild,
    Lead,
    LivingWorkers,
    NodesChanged,
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

__all__ = ["ControlPlane"]

log = structlog.get_logger(__name__)


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
        settings, store = start.settings, accounts.store
        self.finished = asyncio.Event()
        self.live_settings = LiveSettings(settings, tell)
        self.webhooks = webhooks
        self._life = Life()
        self.link = link = open_link(start.redis_url, is_answered_last=True)
        keys = Keys(settings.redis_prefix, sharded=link.sharded, shard_key=shard_key)
        self.view = NodesView(start.run)
        self._redis_check = RedisCheck(link, keys, tell)
        self.reaper = _reaper(link, keys, start, records)
        self.publishing = Publishing(link, keys, self.view, records, lambda: self.leadership.term is not None)
        outbox = Outbox(link, keys, settings.webhook_debounce_s)
        self.health = Health(
            self._life, lambda: self.janitor.redis_answers(), lambda request: self.dashboard.enter(request)
        )
        self.node_survey = NodeSurvey(link, keys, self.view)
        self.observation = Observation(start, link, keys, self.node_survey, event_log, charts)
        figures = WorkerFigures(Stats(link, keys), self.view)
        survey = Survey(link, keys, ready=self.publishing.publisher.opened)
        self.grants = Grants(store, link, keys, survey)
        self.node_survey.answerers.hear(GrantRevoked, self.grants.heard)
        spreading = Spreading(records, survey)
        nodes = NodeList(self.view, figures.all)
        self.cluster = Cluster(link, keys, History(link, keys), nodes, self.health, survey, self.grants, spreading)
        api = self._api(settings, survey)
        self.dashboard = self._dashboard(start, accounts, records, api, figures, charts)
        managed = Managed(records, webhooks, shard_key)
        self.routes = self._routes(api, figures, management_routes(managed, settings.app_id, spreading))
        per_minute = settings.trigger_rate_per_minute
        self.rate = RateLimit(per_minute, SharedRate(link, keys)) if per_minute else None
        self.auth_failures = _auth_failures(settings)
        self.front = self._front(settings, records, api)
        self.entrance = self._entrance(start, listener, records, body_timeout_s)
        self.store_sync = StoreSync(link, keys, records, store, self.dashboard.check_sessions)
        self.janitor = self._janitor(DirectoryWriter(link, keys), records)
        # Late, as `on_put` and `on_change` below: records are loaded before the parts that hear of their changes.
        records.on_rewound = lambda version: tell(DirectoryVersion(version))
        tracer, spans = self.observation.tracer, self.observation.spans
        self.leadership = Leadership(
            store, tell, LeaderWork(self.reaper, self.janitor, webhooks, outbox, tracer, spans)
        )
        # The leader needs all masters of a Cluster; to serve, one is enough.
        self.fitness = FitnessReports(tell, lambda: link.up and self.janitor.redis_answers(), store)
        webhooks.pulls.announce = self._announce_pulls
        webhooks.pulls.spans = spans
        self.counters = self._counters(records, outbox)

    def _announce_pulls(self, app_id: str, envelope: bytes) -> None:
        keys = self.cluster.keys
        self.cluster.link.call(keys.publish, keys.topic(app_id, PULLS_TOPIC), envelope)

    # -- the parts that answer requests

    def _api(self, settings: Settings, survey: Survey) -> Api:
        link, keys, publishing = self.cluster.link, self.cluster.keys, self.publishing
        return Api(
            publishing.publisher,
            Occupancy(link, keys),
            publishing.daily,
            Idempotency(link, keys),
            survey,
            settings.master_key(),
            self.observation.tracer,
        )

    def _dashboard(
        self,
        start: Start,
        accounts: Accounts,
        records: Records,
        api: Api,
        figures: WorkerFigures,
        charts: Charts | None,
    ) -> Dashboard:
        return Dashboard(
            Dependencies(
                start.settings,
                Path(start.data_dir),
                accounts,
                records,
                self.webhooks,
                self.cluster.link,
                self.cluster.keys,
                self.publishing.publisher,
                api,
                ChannelHistory(self.cluster.history),
                self.health,
                figures.all,
                self.cluster.nodes,
                self.cluster.survey,
                self.observation.cluster_log,
                self.observation.tracer,
                charts,
                self.observation.usage,
            )
        )

    def _routes(self, api: Api, figures: WorkerFigures, management: Sequence[Route]) -> Routes:
        tracer, publisher = self.observation.tracer, self.publishing.publisher
        metrics = Metrics(
            lambda: self.routes,
            figures.own,
            lambda: self.counters.read(),
            lambda: publisher.by_app,
            tracer.latency if tracer else None,
        )
        return routes_of(
            api,
            ChannelHistory(self.cluster.history),
            EventTrace(self.observation.cluster_log),
            BrowserModule(),
            self.observation.cluster_usage,
            Verify(self.webhooks.secrets_of),
            GrantRequests(self.grants),
            PullRequests(self.webhooks.pulls),
            self.health,
            metrics,
            (*management, *self.dashboard.routes()),
        )

    def _front(self, settings: Settings, records: Records, api: Api) -> Front:
        debugging = ControlDebugging(self.cluster.link, self.cluster.keys, settings.node_name, "control")
        for app in records.apps.values():
            debugging.app_changed(app.id, app)
        records.on_put = debugging.app_changed
        front = Front(
            self.routes,
            records,
            grants=self.grants.table,
            host_names=HostNames.of(settings),
            rate=self.rate,
            failures=self.auth_failures,
            tracer=self.observation.tracer,
            path_prefix=settings.path_prefix,
            fault_page=self.dashboard.fault,
            debugging=debugging,
            manage_publicly=settings.manage_on_public_port,
        )
        # Late: the routes lead to the API, and the front needs the routes.
        api.conclude = front.conclude
        return front

    def _entrance(self, start: Start, listener: socket.socket, records: Records, body_timeout_s: float) -> Entrance:
        publisher, tracer, settings = self.publishing.publisher, self.observation.tracer, start.settings
        fast = FastPath(self.front, self.routes, records, publisher, self.cluster.keys, self.rate, tracer)
        port = ControlPort(
            self.front.received,
            self.front.error_page,
            head_timeout_s=settings.head_timeout_s,
            body_timeout_s=body_timeout_s,
            trusted=TrustedProxies(settings.trusted_proxies),
            secure=bool(settings.tls_client_ca),
        )
        tls = None
        if settings.tls_client_ca:
            tls = PortTls(
                Path(settings.tls_cert[0]),
                settings.tls_client_ca,
                port,
                lambda: port.limit_reached("connections"),
                within_s=settings.head_timeout_s,
            )
        return Entrance(listener, port, WorkerRequests(start.requests_path, self.front.received, fast.take), tls)

    def _janitor(self, writer: DirectoryWriter, records: Records) -> ControlJanitor:
        janitor = ControlJanitor(
            self.link,
            writer,
            records,
            self.health,
            leader=self._leader,
            # The next report would come up to a second later, and a leader gives up after 0.9 s.
            on_redis_back=lambda: self.fitness.report(),
            before_fill=self.grants.fill,
        )
        records.on_change = janitor.record_changed
        records.on_changes = janitor.records_changed
        return janitor

    def _counters(self, records: Records, outbox: Outbox) -> Counters:
        return Counters(
            self.link,
            records,
            self.webhooks,
            outbox,
            self.publishing,
            self.observation,
            self.reaper,
            self.janitor,
            self.entrance.port,
            self.store_sync,
            lambda: self.auth_failures,
        )

    # -- from start to finish

    async def start(self) -> None:
        """Serve. Doesn't wait for Redis: `/healthz` works at once, `/readyz` reports when the server is ready."""
        asyncio.get_running_loop().set_exception_handler(self.counters.loop_exception)
        self.webhooks.prepare()
        await self.grants.load()
        self.grants.start()
        self.link.start(on_push=self._push_received, on_up=self._link_up, on_down=self._link_down)
        self.janitor.start()
        self.dashboard.start((route for route in self.routes.all if route.limited), self.front.times_by_app)
        self.publishing.start()
        self.store_sync.start()
        self.observation.start()
        self.leadership.start()
        self.fitness.start()
        await self.entrance.start()

    def receive(self, message: ToControl) -> None:
        """Handle a message from the supervisor."""
        match message:
            case LivingWorkers():
                self.view.alive = message.alive
                self.reaper.set_alive(set(message.alive), message.greatest)
            case NodesChanged():
                self.view.update(message.nodes, message.leader)
                self.reaper.set_nodes(self.view.others)
                self.node_survey.nodes_changed()
                if self.rate is not None:
                    self.rate.share(self.view.several)
            case Lead():
                self.leadership.set_term(message.term)
            case WorkersReady():
                self.health.workers_ready = True
            case DeafWorkers():
                self.health.deaf = message.numbers
            case WorkersCutOff():
                self.health.cut_off = message.numbers
                self.view.without_clients, self.view.down = message.without_clients, message.down
            case Evacuate():
                self._life.become(Lifecycle.EVACUATING)
            case Serve():
                self._life.become(Lifecycle.SERVING)
            case BeginStop():
                self._life.become(Lifecycle.DRAINING)
            case Stop():
                self.stop()
            case CertificateChanged():
                if self.entrance.tls is not None:
                    self.entrance.tls.reload()
            case SettingsChanged():
                self._settings_changed(message.changes)
            case Reloaded():
                self.live_settings.reloaded(message.answer)
            case _:
                assert_never(message)

    def _settings_changed(self, changes: dict[str, Any]) -> None:
        self.live_settings.changed(changes)
        settings = self.live_settings.now
        if "auth_failures_per_minute" in changes:
            self.auth_failures = _auth_failures(settings)
        self.front.settings_changed(
            HostNames.of(settings), self.auth_failures, settings.path_prefix, settings.manage_on_public_port
        )

    def _leader(self) -> str | None:
        """How our entry as the leader begins in Redis, while the supervisor says that this node leads."""
        term = self.leadership.named
        return None if term is None else f"{self.view.run} {term} "

    def stop(self) -> None:
        """Begin the shutdown: `finished` is set, and the process then calls `finish`."""
        self._life.become(Lifecycle.DRAINING)
        self.finished.set()

    async def finish(self) -> None:
        """Accept no more requests, finish the open ones, and close the connection to Redis."""
        await self.entrance.finish()
        await self.front.finish()
        await self.fitness.finish()
        await self.leadership.finish()
        self._redis_check.stop()
        self.janitor.stop()
        await self.store_sync.finish()
        await self.grants.finish()
        await self.node_survey.finish()
        # First, because its tasks use the parts below.
        await self.dashboard.finish()
        await self.webhooks.finish()
        await self.publishing.finish()
        await self.observation.finish()
        await self.link.close()
        self._life.become(Lifecycle.STOPPED)

    # -- Redis

    def _link_up(self) -> None:
        self.publishing.link_up()
        self.observation.link_up()
        self.janitor.link_up()
        self.fitness.report()
        self.node_survey.link_up()
        self.store_sync.link_up()
        self.grants.link_up()
        self._redis_check.link_up()

    def _link_down(self, reason: str) -> None:
        self.publishing.link_down()

    def _push_received(self, topic: bytes, payload: bytes) -> None:
        self.publishing.received(topic, payload)
        self.node_survey.received(topic, payload)
        self.store_sync.received(topic, payload)


def _reaper(link: Link, keys: Keys, start: Start, records: Records) -> Reaper:
    return Reaper(
        link,
        keys,
        start.run,
        hooks_of=lambda app_id: records.apps[app_id].hooks if app_id in records.apps else "",
        has_history=lambda app_id, channel: (
            app_id in records.apps and records.apps[app_id].history_rule(channel) is not None
        ),
        debounce_s=start.settings.webhook_debounce_s,
    )


def _auth_failures(settings: Settings) -> AuthFailures | None:
    return AuthFailures(settings.auth_failures_per_minute) if settings.auth_failures_per_minute else None
