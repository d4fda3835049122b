"""The pages of an app's channels: the occupied channels, and one channel with members, cache and connections."""

from __future__ import annotations

import math
from time import monotonic
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from redpoll.cluster.bus import Unavailable
from redpoll.control.api.occupancy import Occupancy
from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.connections import ConnectionPages
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.dashboard.pages import part_of
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.protocol.apps import App
from redpoll.protocol.channels import Kind, is_cache, is_encrypted, kind_of, valid_name
from redpoll.protocol.errors import ApiError

__all__ = ["ChannelPages", "words_of"]

_PAGE: Final = 100
_MAX_MEMBERS: Final = 500
# An open page asks for the list again after this time, or after twenty times the time that it took, if that is longer:
# a list of a million channels takes a second of the control plane.
_REFRESH_S: Final = 5
_PAUSES: Final = 20


class ChannelPages:
    def __init__(
        self, access: AccessControl, occupancy: Occupancy, connections: ConnectionPages, exports: Exports
    ) -> None:
        self._access = access
        self._occupancy = occupancy
        self._connections = connections
        self._exports = exports

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/channels", "channels", self.show_all),
            access.route("POST", "/apps/{app_id}/export-channels", "export_channels", self.export),
            access.route("GET", "/apps/{app_id}/channels/{channel}", "channel", self.show),
        ]

    async def show_all(self, visit: Visit) -> Response:
        """GET …/channels; `prefix`, `page`."""
        app = visit.app
        prefix = visit.query.get("prefix", "").strip()
        rows: list[dict[str, Any]] = []
        part, fault = part_of((), "", _PAGE), ""
        began_s = monotonic()
        try:
            part = part_of(await self._names(app, prefix), visit.query.get("page", ""), _PAGE)
            rows = await self._rows(app, list(part.items))
        except Unavailable as error:
            fault = str(error)
        here = f"/dashboard/apps/{app.id}/channels?{urlencode({'prefix': prefix, 'page': part.at})}"
        took_s = monotonic() - began_s
        refresh_s = _REFRESH_S if fault else max(_REFRESH_S, math.ceil(_PAUSES * took_s))
        return visit.page(
            "channels.html", app=app, rows=rows, part=part, prefix=prefix, fault=fault, here=here, refresh_s=refresh_s
        )

    async def _names(self, app: App, prefix: str) -> list[str]:
        return [name async for names in self._occupancy.channels(app.id, prefix) for name in names]

    async def _rows(self, app: App, names: list[str]) -> list[dict[str, Any]]:
        presence = [name for name in names if kind_of(name) is Kind.PRESENCE]
        counts = await self._occupancy.subscription_counts(app.id, names)
        users = dict(zip(presence, await self._occupancy.user_counts(app.id, presence), strict=True))
        return [
            {"name": name, "kinds": words_of(name), "subscriptions": count, "users": users.get(name)}
            for name, count in zip(names, counts, strict=True)
        ]

    async def show(self, visit: Visit) -> Response:
        """GET …/channels/{channel}."""
        app, channel = visit.app, visit.request.parameters[1]
        if not valid_name(channel):
            raise ApiError("not_found", "This is not a valid channel name.")
        context: dict[str, Any] = {"subscriptions": 0, "users": None, "members": [], "cached": None, "fault": ""}
        try:
            (context["subscriptions"],) = await self._occupancy.subscription_counts(app.id, [channel])
            if kind_of(channel) is Kind.PRESENCE:
                (context["users"],) = await self._occupancy.user_counts(app.id, [channel])
                members = await self._occupancy.members(app.id, channel, _MAX_MEMBERS)
                context["members"] = [(user, info.decode(errors="replace")) for user, info in members]
            if is_cache(channel):
                context["cached"] = await self._occupancy.cached(app.id, channel)
        except Unavailable as error:
            context["fault"] = str(error)
        listing = await self._connections.find(app.id, channel=channel)
        return visit.page(
            "channel.html",
            app=app,
            channel=channel,
            kinds=words_of(channel),
            caches=is_cache(channel),
            rule=app.history_rule(channel),
            listing=listing,
            **context,
        )

    async def export(self, visit: Visit) -> Response:
        """POST …/export-channels: prefix, format."""
        app, form = visit.app, visit.form
        prefix = form.text("prefix")

        async def rows(progress: Progress) -> Chunks:
            names = await self._names(app, prefix)
            progress.total = len(names)
            for at in range(0, len(names), _PAGE):
                page = await self._rows(app, names[at : at + _PAGE])
                yield [{**row, "kinds": " ".join(row["kinds"])} for row in page]

        title = f"Channels of {app.name}"
        rest = "Export the channels of one prefix after another, or list them page by page over the HTTP API."
        return self._exports.begin(visit, title, "channels", form.text("format"), rows, rest=rest, app=app)


def words_of(channel: str) -> list[str]:
    """The kinds of a channel, for people."""
    words = [{Kind.PUBLIC: "public", Kind.PRIVATE: "private", Kind.PRESENCE: "presence"}.get(kind_of(channel), "user")]
    if is_cache(channel):
        words.append("cache")
    if is_encrypted(channel):
        words.append("encrypted")
    return words


def pretty(text: str) -> str:
    """JSON on several lines; other text unchanged."""
    try:
        return msgspec.json.format(text.encode(), indent=2).decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
