"""The pages of an app's message history: the rules, and the stored messages of a channel."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from redpoll.cluster.bus import Unavailable
from redpoll.control.api.history import ChannelHistory
from redpoll.control.api.occupancy import Occupancy
from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.channels import pretty
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.forms import Form, sentence
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.dashboard.pages import iso, path_to
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError, Records
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import MAX_STORED_MESSAGES
from redpoll.protocol.joining import MAX_RATE

__all__ = ["HistoryPages"]

_PAGE: Final = 50
_MAX_NAMES: Final = 200
UNITS: Final = {"seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400}
_MAX_S: Final = 2_592_000


class HistoryPages:
    def __init__(
        self, access: AccessControl, records: Records, history: ChannelHistory, occupancy: Occupancy, exports: Exports
    ) -> None:
        self._access = access
        self._records = records
        self._history = history
        self._occupancy = occupancy
        self._exports = exports

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/history", "history", self.show),
            access.route("POST", "/apps/{app_id}/history", "add_history_rule", self.add, "admin"),
            access.route("POST", "/apps/{app_id}/remove-history-rule", "remove_history_rule", self.remove, "admin"),
            access.route("GET", "/apps/{app_id}/history/{channel}", "channel_history", self.browse),
            access.route("POST", "/apps/{app_id}/history/{channel}/clear", "clear_channel", self.clear, "admin"),
            access.route("POST", "/apps/{app_id}/history/{channel}/export", "export_history", self.export),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET …/history: the rules. With `channel` it redirects to that channel's messages."""
        channel = visit.query.get("channel", "").strip()
        if channel:
            return visit.redirect(path_to(f"{HOME}/apps/{visit.app.id}/history", channel))
        return await self._page(visit, visit.app, Form())

    async def _page(self, visit: Visit, app: App, form: Form, status: int = 200) -> Response:
        try:
            names, fault = await self._occupancy.with_history(app.id, _MAX_NAMES), ""
        except Unavailable as error:
            names, fault = [], str(error)
        return visit.page("history.html", status=status, app=app, form=form, names=names, fault=fault, units=UNITS)

    async def add(self, visit: Visit) -> Response:
        """POST …/history: name, match (channel or prefix), keep, lasts and unit, replay (none, count or seconds) with
        replay_count, replay_lasts and replay_unit, client_events; rate (none, latest or join) with max_rate, and with
        join and by, which are paths."""
        app, form = visit.app, visit.form
        match = form.choice("match", ("channel", "prefix"), "channel")
        keep = form.number("keep", 0, MAX_STORED_MESSAGES)
        if not form.text("keep"):
            form.fault("keep", "Enter a number of messages. 0 makes an exception from a wider rule.")
        replay = form.choice("replay", ("none", "count", "seconds"), "none")
        seconds = _lasting(form, "lasts", "unit") if keep else 0
        replay_count = form.number("replay_count", 1, 1_000) if replay == "count" else 0
        if replay == "count" and not form.text("replay_count"):
            form.fault("replay_count", "Enter a number of messages.")
        replay_seconds = _lasting(form, "replay_lasts", "replay_unit") if replay == "seconds" else 0
        rate = form.choice("rate", ("none", "latest", "join"), "none")
        max_rate = form.number("max_rate", 1, MAX_RATE) if rate != "none" else None
        if rate != "none" and not form.text("max_rate"):
            form.fault("max_rate", "Enter a number of frames a second.")
        if rate == "join" and not form.text("join"):
            form.fault("join", "Enter a path, such as delta.")
        if form.good:
            rule = HistoryRule(
                id="000000",
                name=form.text("name"),
                prefix=match == "prefix",
                keep=keep,
                seconds=seconds,
                replay=replay_count if keep else 0,
                replay_seconds=replay_seconds if keep else 0,
                client_events=form.ticked("client_events") and keep > 0,
                max_rate=max_rate,
                latest=rate == "latest",
                join=form.text("join") if rate == "join" else "",
                by=form.text("by") if rate == "join" else "",
            )
            try:
                await self._records.add_history_rule(app.id, rule, by=visit.actor)
            except RecordError as error:
                form.fault(_field_of(str(error)), str(error))
        if not form.good:
            return await self._page(visit, app, form, 422)
        return visit.redirect(
            f"{HOME}/apps/{app.id}/history", "Rule added. It applies to messages published from now on."
        )

    async def remove(self, visit: Visit) -> Response:
        """POST …/remove-history-rule: rule."""
        app, form = visit.app, visit.form
        try:
            await self._records.remove_history_rule(app.id, form.text("rule"), by=visit.actor)
        except RecordError as error:
            form.fault("", str(error))
            return await self._page(visit, app, form, 422)
        return visit.redirect(f"{HOME}/apps/{app.id}/history", "Rule removed. Stored messages stay until they expire.")

    # -- messages

    async def browse(self, visit: Visit) -> Response:
        """GET …/history/{channel}: the messages, newest first, from `cursor` on."""
        app, channel = visit.app, visit.request.parameters[1]
        query = {"limit": str(_PAGE), "direction": "backwards"}
        if visit.query.get("cursor"):
            query["cursor"] = visit.query["cursor"]
        context: dict[str, Any] = {"messages": [], "epoch": "", "older": "", "fault": ""}
        status = 200
        try:
            page = await self._history.page(app.id, channel, query)
        except (ApiError, Unavailable) as error:
            context["fault"] = sentence(error.message if isinstance(error, ApiError) else str(error))
            status = error.status if isinstance(error, ApiError) else 503
        else:
            context["epoch"] = page.epoch
            context["messages"] = [(message, pretty(message.data)) for message in page.messages]
            if page.next is not None:
                context["older"] = f"{visit.request.path}?{urlencode({'cursor': page.next})}"
        return visit.page(
            "messages.html",
            status=status,
            app=app,
            channel=channel,
            rule=app.history_rule(channel),
            begun="cursor" not in query,
            **context,
        )

    async def clear(self, visit: Visit) -> Response:
        """POST …/history/{channel}/clear."""
        app, channel = visit.app, visit.request.parameters[1]
        await self._history.clear(app.id, channel)
        await visit.note("history clear", app, channel)
        notice = f"The stored messages of {channel} were deleted."
        return visit.redirect(path_to(f"{HOME}/apps/{app.id}/history", channel), notice)

    async def export(self, visit: Visit) -> Response:
        """POST …/history/{channel}/export: format. Oldest first."""
        app, channel = visit.app, visit.request.parameters[1]

        async def rows(progress: Progress) -> Chunks:
            cursor: str | None = None
            while True:
                query = {"limit": "1000", "direction": "backwards", **({"cursor": cursor} if cursor else {})}
                page = await self._history.page(app.id, channel, query)
                yield [
                    {
                        "offset": message.offset,
                        "time": iso(message.time_ms / 1000),
                        "event": message.event,
                        "data": message.data,
                    }
                    for message in page.messages
                ]
                cursor = page.next
                if cursor is None:
                    break

        back = path_to(f"{HOME}/apps/{app.id}/history", channel)
        return self._exports.begin(
            visit,
            f"Messages of {channel}",
            "history",
            visit.form.text("format"),
            rows,
            rest="Get the older ones with redpoll history show --backwards, or page by page over the HTTP API.",
            app=app,
            back=back,
            newest_first=True,
        )


def _lasting(form: Form, name: str, unit: str) -> int:
    size = UNITS[form.choice(unit, UNITS, "seconds") or "seconds"]
    if not form.text(name):
        form.fault(name, "Enter a duration.")
        return 0
    return form.number(name, 1, _MAX_S // size) * size


def _field_of(text: str) -> str:
    if "path" in text:
        return "join"
    if "replay" in text:
        return "replay"
    if text.startswith("keep"):
        return "keep"
    if text.startswith("seconds"):
        return "lasts"
    return "name"
