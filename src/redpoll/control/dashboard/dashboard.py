"""The dashboard put together: its pages, what they stand on, and the page that tells of a fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link
from redpoll.cluster.survey import Survey
from redpoll.control.api import Api
from redpoll.control.dashboard.access import HOME, AccessControl, redirect
from redpoll.control.dashboard.accounts import Accounts
from redpoll.control.dashboard.apps import AppPages
from redpoll.control.dashboard.audit import AuditPages
from redpoll.control.dashboard.channels import ChannelPages
from redpoll.control.dashboard.connections import ConnectionPages
from redpoll.control.dashboard.console import ConsolePages
from redpoll.control.dashboard.deadletters import DeadLetterPages
from redpoll.control.dashboard.exports import Exports
from redpoll.control.dashboard.history import HistoryPages
from redpoll.control.dashboard.jobs import Jobs
from redpoll.control.dashboard.keys import KeyPages
from redpoll.control.dashboard.login import Login
from redpoll.control.dashboard.overview import Overview
from redpoll.control.dashboard.pages import Pages, StaticFiles
from redpoll.control.dashboard.series import Sampler, Workers
from redpoll.control.dashboard.setup import PublicAddress
from redpoll.control.dashboard.tokens import TokenPages
from redpoll.control.dashboard.trace import TracePages
from redpoll.control.dashboard.users import UserPages
from redpoll.control.dashboard.webhooks import WebhookPages
from redpoll.control.health import Health
from redpoll.control.history import ChannelHistory
from redpoll.control.occupancy import Occupancy
from redpoll.control.publisher import Publisher
from redpoll.control.records import Records
from redpoll.control.request import Request
from redpoll.control.response import Response
from redpoll.control.router import Access, Place, Route
from redpoll.control.tracing import Tracer
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.errors import ApiError
from redpoll.settings import Settings
from redpoll.store.eventlog import EventLog

__all__ = ["Dashboard", "Dependencies"]

_TITLES: Final = {
    400: "That didn't work",
    403: "Not allowed",
    404: "Nothing here",
    405: "Not this way",
    413: "Too large",
    429: "Too many tries",
    500: "Our mistake",
    503: "Not available just now",
}


class Dependencies(NamedTuple):
    """What the dashboard stands on: the rest of the control plane."""

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
    read_workers: Callable[[], Awaitable[Workers]]
    event_log: EventLog | None
    tracer: Tracer | None


class Dashboard:
    """`start` and `finish` for what goes on between the calls of its pages."""

    def __init__(self, rooms: Dependencies) -> None:
        settings, records, accounts = rooms.settings, rooms.records, rooms.accounts
        webhooks, publisher = rooms.webhooks, rooms.publisher
        self.accounts = accounts
        files = StaticFiles()
        self._files = files
        self._pages = Pages(files)
        self.door = door = AccessControl(accounts, records, self._pages)
        self.sampler = Sampler(
            rooms.read_workers, webhooks.counters, lambda: publisher.by_app, webhooks.attempts_by_app
        )
        self._jobs = Jobs(door)
        address = PublicAddress(settings.public_url, settings.port)
        exports = Exports(self._jobs)
        occupancy = Occupancy(rooms.link, rooms.keys)
        connections = ConnectionPages(door, Survey(rooms.link, rooms.keys), exports)
        self._parts = (
            Login(door, accounts, rooms.data_dir),
            Overview(door, records, self.sampler, webhooks, rooms.health),
            AppPages(door, records, address),
            KeyPages(door, records),
            TokenPages(door, records),
            ChannelPages(door, occupancy, connections, exports),
            connections,
            ConsolePages(door, records, rooms.api, rooms.tracer, address),
            TracePages(door, rooms.event_log),
            HistoryPages(door, records, rooms.history, occupancy, exports),
            WebhookPages(door, webhooks, exports),
            DeadLetterPages(door, webhooks, self._jobs, exports),
            AuditPages(door, accounts.store, exports),
            UserPages(door, accounts),
            self._jobs,
        )

    def start(self, timed: Iterable[Route], times_by_app: Mapping[str, Sequence[int]]) -> None:
        """`timed`: the routes whose answers' times are drawn as the publish latency; `times_by_app`: by app."""
        self.sampler.timed = tuple(timed)
        self.sampler.times_by_app = times_by_app
        self.sampler.start()

    async def finish(self) -> None:
        await self.sampler.finish()
        await self._jobs.finish()

    def routes(self) -> list[Route]:
        """All pages, on the control port."""
        static = Route(
            "GET",
            f"{HOME}/static/{{edition}}/{{name}}",
            "dashboard_static",
            self._files.show,
            Access.OPEN,
            Place.CONTROL,
        )
        return [static, *(route for part in self._parts for route in part.routes())]

    async def enter(self, call: Request) -> Response:
        """GET / on the control port."""
        return redirect(HOME)

    def fault(self, call: Request, error: ApiError, status: int = 0) -> Response | None:
        """The page in the place of the API's error shape; None where no person asked."""
        if call.path != HOME and not call.path.startswith(f"{HOME}/"):
            return None
        status = status or error.status
        text = error.message[:1].upper() + error.message[1:]
        context = {
            "title": _TITLES.get(status, _TITLES[400]),
            "text": text if text.endswith((".", "!", "?")) else f"{text}.",
            "status": status,
            "trace_id": call.trace_id,
        }
        return self._pages.answer("error.html", context, status=status, headers=call.more_headers)
