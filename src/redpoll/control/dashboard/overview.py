"""The overview page: whether the server is ready, with figures and charts of its load."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.averages import SPANS
from redpoll.control.dashboard.pages import SECURITY
from redpoll.control.dashboard.series import Sampler
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.observe.health import Health
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["Overview"]

_JSON: Final = b"Content-Type: application/json\r\nCache-Control: no-store\r\n" + SECURITY
_encode: Final = msgspec.json.Encoder().encode


class Overview:
    def __init__(
        self, access: AccessControl, records: Records, sampler: Sampler, webhooks: Webhooks, health: Health
    ) -> None:
        self._access = access
        self._records = records
        self._sampler = sampler
        self._webhooks = webhooks
        self._health = health

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "", "overview", self.show),
            access.route("GET", "/figures", "figures", self.figures),
            access.route("GET", "/series", "series", self.series),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard. With `app` the charts are those of one app; `span` is the time that they show."""
        app = self._records.apps.get(visit.query.get("app", ""))
        apps = sorted(self._records.apps.values(), key=lambda app: app.name.casefold())
        return visit.page("overview.html", apps=apps, chosen=app, spans=SPANS, span=_span(visit), **self._figures())

    async def figures(self, visit: Visit) -> Response:
        """GET /dashboard/figures: the part of the page that is refreshed."""
        return visit.page("figures.html", **self._figures())

    def _figures(self) -> dict[str, Any]:
        workers = self._sampler.workers

        def total(name: str) -> float:
            return float(sum(worker.get(name, 0) for worker in workers.values()))

        return {
            "obstacle": self._health.obstacle(),
            "workers": len(workers),
            # A worker of an earlier version doesn't report the state.
            "redis_states": {
                name: worker.get("redis_connection_state", "") for name, worker in sorted(workers.items())
            },
            "connections": total("connections"),
            "readers": total("stream_readers"),
            # Workers' channels can't be added up: many workers hold the same one.
            "subscriptions": total("subscriptions"),
            "lag_ms": max((worker.get("loop_lag_seconds", 0) for worker in workers.values()), default=0) * 1000,
            "webhooks": self._webhooks.counters(),
            "last": self._sampler.whole.last(),
            "app_count": len(self._records.apps),
        }

    async def series(self, visit: Visit) -> Response:
        """GET /dashboard/series: the charts' data over a `span`, of one app with `app`."""
        columns = await self._sampler.columns(visit.query.get("app", ""), _span(visit))
        return Response(200, _encode(columns), _JSON)


def _span(visit: Visit) -> str:
    span: str = visit.query.get("span", "")
    return span if span in SPANS else "hour"
