"""Puts the dashboard together: creates its pages from their dependencies, and renders the error page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.values import WorkerId
from redpoll.cluster.survey import Survey
from redpoll.config.settings import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.api.api import Api
from redpoll.control.api.history import ChannelHistory
from redpoll.control.api.occupancy import Occupancy
from redpoll.control.dashboard.access import HOME, AccessControl, redirect
from redpoll.control.dashboard.apps import AppPages
from redpoll.control.dashboard.audit import AuditPages
from redpoll.control.dashboard.channels import ChannelPages
from redpoll.control.dashboard.check import CheckPages
from redpoll.control.dashboard.connections import ConnectionPages
from redpoll.control.dashboard.console import ConsolePages
from redpoll.control.dashboard.deadletters import DeadLetterPages
from redpoll.control.dashboard.exports import Exports
from redpoll.control.dashboard.history import HistoryPages
from redpoll.control.dashboard.jobs import Jobs
from redpoll.control.dashboard.keys import KeyPages
from redpoll.control.dashboard.login import Login
from redpoll.control.dashboard.nodes import NodePages
from redpoll.control.dashboard.overview import Overview
from redpoll.control.dashboard.pages import Pages, StaticFiles
from redpoll.control.dashboard.series import Sampler, Workers
from redpoll.control.dashboard.setup import PublicAddress
from redpoll.control.dashboard.tokens import TokenPages
from redpoll.control.dashboard.trace import TracePages
from redpoll.control.dashboard.users import UserPages
from redpoll.control.dashboard.webhooks import WebhookPages
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.router import Access, Place, Route
from redpoll.control.nodes.nodes import NodeList
from redpoll.control.observe.health import Health
from redpoll.control.observe.usage import Usage
from redpoll.control.publish.publisher import Publisher
from redpoll.control.records.records import Records
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.control.tracing.tracing import Tracer
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.errors import ApiError
from redpoll.store.charts import Charts

__all__ = ["Dashboard", "Dependencies"]

_TITLES: Final = {
    400: "Bad request",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Not done",
    413: "Too large",
    429: "Too many requests",
    500: "Internal error",
    503: "Temporarily unavailable",
}


class Dependencies(NamedTuple):
    """The parts of the control plane that the dashboard uses."""

    settings: Settings
    data_dir: Path
    accounts: Accounts
    records: Records
    webhooks: Webhooks
    link: Link
    keys: Keys
    publisher: Publisher
    api: Api
    history: ChannelHistory
    health: Health
    read_workers: Callable[[Iterable[str]], Awaitable[Workers]]
    nodes: NodeList
    survey: Survey
    event_log: ClusterLog | None
    tracer: Tracer | None
    charts: Charts | None
    usage: Usage


class Dashboard:
    """All pages. `start` and `finish` control the sampling for the charts and the background jobs.

    `login` has the pages for people without a session, `jobs` the background jobs; `survey` asks the workers.
    """

    def __init__(self, dependencies: Dependencies) -> None:
        settings, records, accounts = dependencies.settings, dependencies.records, dependencies.accounts
        webhooks, publisher = dependencies.webhooks, dependencies.publisher
        self.accounts = accounts
        files = StaticFiles()
        self._files = files
        self._pages = Pages(files)
        # A circle: each page needs the access control, which shows pages of the login.
        self.access = access = AccessControl(
            accounts,
            records,
            self._pages,
            expired=lambda request, typed: self.login.expired(request, typed),
            offered=lambda visit, path, typed: self.login.offer_again(visit, path, typed),
        )
        sign_on = None
        if settings.oidc_issuer:
            # Here, because its HTTP client takes a seventh of a start, and most servers have local users.
            from redpoll.control.accounts.sign_on import SignOn

            sign_on = SignOn(settings)
        self.login = Login(access, accounts, dependencies.data_dir, sign_on=sign_on)
        nodes = dependencies.nodes.view
        run = nodes.run
        self.sampler = Sampler(
            dependencies.read_workers,
            webhooks.counters,
            lambda: publisher.by_app,
            lambda: webhooks.attempts_by_app,
            charts=dependencies.charts,
            usage=dependencies.usage,
            is_own=lambda worker: WorkerId.parse(worker).run == run,
            apps=records.apps,
        )
        self.jobs = Jobs(access)
        address = PublicAddress(settings.public_url, settings.port)
        exports = Exports(self.jobs)
        occupancy = Occupancy(dependencies.link, dependencies.keys)
        self.survey = survey = dependencies.survey
        connections = ConnectionPages(access, survey, exports)
        self._console = ConsolePages(access, records, dependencies.api, survey, dependencies.tracer, address, nodes)
        self._parts = (
            self.login,
            Overview(access, records, self.sampler, webhooks, dependencies.health),
            AppPages(access, records, webhooks, address, settings.app_id),
            KeyPages(access, records),
            TokenPages(access, records),
            ChannelPages(access, occupancy, connections, exports),
            connections,
            self._console,
            CheckPages(access, address),
            TracePages(access, dependencies.event_log),
            HistoryPages(access, records, dependencies.history, occupancy, exports),
            WebhookPages(access, webhooks, exports),
            DeadLetterPages(access, webhooks, self.jobs, exports),
            NodePages(access, dependencies.nodes),
            AuditPages(access, accounts.store, exports),
            UserPages(access, accounts),
            self.jobs,
        )

    def start(self, timed: Iterable[Route], times_by_app: MutableMapping[str, list[int]]) -> None:
        """`timed` are the routes whose response times are the publish latency; `times_by_app` has the same by app."""
        self.sampler.timed = tuple(timed)
        self.sampler.times_by_app = times_by_app
        self.sampler.start()
        self._console.start()

    def check_sessions(self) -> None:
        """Users or sessions may have changed on another machine."""
        self._console.check_now()

    async def finish(self) -> None:
        await self.sampler.finish()
        await self._console.finish()
        await self.jobs.finish()

    def routes(self) -> list[Route]:
        """The routes of all pages, on the control port."""
        static = Route(
            "GET",
            f"{HOME}/static/{{edition}}/{{name}}",
            "dashboard_static",
            self._files.show,
            Access.OPEN,
            Place.CONTROL,
        )
        return [static, *(route for part in self._parts for route in part.routes())]

    async def enter(self, request: Request) -> Response:
        """GET / on the control port."""
        return redirect(HOME)

    def fault(self, request: Request, error: ApiError, status: int = 0) -> Response | None:
        """The error page for a dashboard request; None for other requests, which get the API's error body, and for
        those of a page's own scripts."""
        if request.path != HOME and not request.path.startswith(f"{HOME}/"):
            return None
        if "X-CSRF-Token" in request.headers and "HX-Request" not in request.headers:
            return None
        status = status or error.status
        text = error.message[:1].upper() + error.message[1:]
        context = {
            "title": _TITLES.get(status, _TITLES[400]),
            "text": text if text.endswith((".", "!", "?")) else f"{text}.",
            "status": status,
            "trace_id": request.trace_id,
        }
        return self._pages.answer("error.html", context, status=status, headers=request.more_headers)
