"""The page of an app's dead letters: webhook deliveries that failed for good, to inspect, retry or discard."""

from __future__ import annotations

from typing import Final

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.forms import Form
from redpoll.control.dashboard.jobs import Jobs, Progress
from redpoll.control.dashboard.webhooks import (
    before_of,
    delivery_row,
    older_than,
    position_of,
    written_position,
)
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.apps import App

__all__ = ["DeadLetterPages"]

_PAGE: Final = 50
# How many a job reads or changes at a time; others can write in between.
_CHUNK: Final = 500


class DeadLetterPages:
    def __init__(self, access: AccessControl, webhooks: Webhooks, jobs: Jobs, exports: Exports) -> None:
        self._access = access
        self._webhooks = webhooks
        self._jobs = jobs
        self._exports = exports

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/dead-letters", "dead_letters", self.show),
            access.route("POST", "/apps/{app_id}/dead-letters", "act_on_dead_letters", self.act, "admin"),
            access.route(
                "POST", "/apps/{app_id}/dead-letters/all", "act_on_all_dead_letters", self.act_on_all, "admin"
            ),
            access.route("POST", "/apps/{app_id}/dead-letters/export", "export_dead_letters", self.export),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET …/dead-letters; `endpoint`, `before`."""
        return await self._page(visit, visit.app, Form())

    async def _page(self, visit: Visit, app: App, form: Form, status: int = 200) -> Response:
        endpoints = {endpoint.id: endpoint for endpoint in self._webhooks.endpoints.of_existing_app(app.id)}
        chosen = visit.query.get("endpoint", "")
        endpoint_id = chosen if chosen in endpoints else None
        before = before_of(visit)
        deliveries = await self._webhooks.deliveries(
            app.id, endpoint_id=endpoint_id, states=("failed",), limit=_PAGE + 1, before=before
        )
        newest = deliveries[:1]
        if before is not None:
            newest = await self._webhooks.deliveries(app.id, endpoint_id=endpoint_id, states=("failed",), limit=1)
        path = f"{HOME}/apps/{app.id}/dead-letters"
        older = older_than(deliveries, _PAGE, path, {"endpoint": endpoint_id or ""})
        depths = await self._webhooks.depths(app.id)
        counted = [depth for counted_id, depth in depths.items() if endpoint_id in (None, counted_id)]
        return visit.page(
            "dead_letters.html",
            status=status,
            app=app,
            form=form,
            deliveries=deliveries,
            endpoints=endpoints,
            chosen=endpoint_id or "",
            total=sum(depth.failed for depth in counted),
            newest=written_position(newest[0]) if newest else "",
            older=older,
            begun=before is None,
        )

    async def act(self, visit: Visit) -> Response:
        """POST …/dead-letters: do (retry or discard), id (several). All of them or none."""
        app, form = visit.app, visit.form
        ids, do = form.every("id"), form.choice("do", ("retry", "discard"))
        if not ids:
            form.fault("", "Select at least one dead letter.")
        if form.good:
            try:
                for delivery_id in ids:
                    await self._check_of(app, delivery_id)
                letters = self._webhooks.dead_letters
                await (letters.retry if do == "retry" else letters.discard)(ids, by=visit.actor)
            except RecordError as error:
                form.fault("", f"{error}. Nothing was done.")
        if not form.good:
            return await self._page(visit, app, form, 422)
        count = "1 dead letter" if len(ids) == 1 else f"{len(ids)} dead letters"
        notice = f"Retrying {count}." if do == "retry" else f"Discarded {count}."
        if form.text("back") == "delivery" and len(ids) == 1:
            return visit.redirect(f"{HOME}/apps/{app.id}/deliveries/{ids[0]}", notice)
        return visit.redirect(f"{HOME}/apps/{app.id}/dead-letters", notice)

    async def _check_of(self, app: App, delivery_id: str) -> None:
        _, endpoint, _ = await self._webhooks.delivery(delivery_id)
        if endpoint.app_id != app.id:
            raise RecordError(f"there is no delivery with the id {delivery_id}")

    async def act_on_all(self, visit: Visit) -> Response:
        """POST …/dead-letters/all: do, endpoint ("" for all), newest. A job: there may be very many.

        `newest` is the newest dead letter when the page was made. Who confirmed hasn't seen those that came later.
        """
        app, form = visit.app, visit.form
        retry = form.choice("do", ("retry", "discard")) == "retry"
        if not form.good:
            return await self._page(visit, app, form, 422)
        endpoint_id, newest = form.text("endpoint") or None, position_of(form.text("newest"))
        if newest is None:
            form.fault("", "This page doesn't say what it showed. Try again.")
            return await self._page(visit, app, form, 422)
        depths = await self._webhooks.depths(app.id)
        total = sum(depth.failed for counted_id, depth in depths.items() if endpoint_id in (None, counted_id))

        letters, actor = self._webhooks.dead_letters, visit.actor
        change = letters.retry if retry else letters.discard

        async def work(progress: Progress) -> str:
            # In chunks, to show the progress.
            before = (newest[0], newest[1] + 1)
            while chunk := await self._webhooks.deliveries(
                app.id, endpoint_id=endpoint_id, states=("failed",), limit=_CHUNK, before=before
            ):
                before = (chunk[-1].at, chunk[-1].number)
                # Somebody else may have handled some, and those of a deleted webhook can't be retried.
                progress.done += len(await change([delivery.id for delivery in chunk], skip=True, by=actor))
            return f"{progress.done:,} dead letters {'are being retried' if retry else 'were discarded'}."

        what = "Retry" if retry else "Discard"
        back = f"{HOME}/apps/{app.id}/dead-letters"
        return self._jobs.begin(visit, f"{what} dead letters of {app.name}", back, work, total)

    async def export(self, visit: Visit) -> Response:
        """POST …/dead-letters/export: format, endpoint ("" for all)."""
        app, endpoint_id = visit.app, visit.form.text("endpoint") or None

        async def rows(progress: Progress) -> Chunks:
            before: tuple[float, int] | None = None
            while chunk := await self._webhooks.deliveries(
                app.id, endpoint_id=endpoint_id, states=("failed",), limit=_CHUNK, before=before
            ):
                yield [delivery_row(delivery) for delivery in chunk]
                before = (chunk[-1].at, chunk[-1].number)

        rest = "These are the newest. Retry or discard them, and export the others then."
        title = f"Dead letters of {app.name}"
        return self._exports.begin(visit, title, "dead-letters", visit.form.text("format"), rows, rest=rest, app=app)
