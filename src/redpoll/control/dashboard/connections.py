"""The page of an app's connections: clients with address, library, channels and unsent data. Admins can close one.

Only workers know their connections, so the page asks all workers (cluster/survey.py). Lists are limited, newest first.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.questions import CloseSocket, ListConnections
from redpoll.cluster.survey import Survey
from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route

__all__ = ["ConnectionPages", "Found"]

_SHOWN: Final = 100
_EXPORTED: Final = 500


class Found(NamedTuple):
    """`rows` come from worker/connection_list.py, with the worker's name as `w`; `total` is the number of matches.
    `fault` says why not all workers answered."""

    rows: list[dict[str, Any]]
    total: int
    fault: str = ""
    # Clients that read over HTTP, which aren't in the list.
    readers: int = 0


class ConnectionPages:
    def __init__(self, access: AccessControl, survey: Survey, exports: Exports) -> None:
        self._access = access
        self._survey = survey
        self._exports = exports

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/connections", "connections", self.show),
            access.route("POST", "/apps/{app_id}/connections/close", "close_connection", self.close, "admin"),
            access.route("POST", "/apps/{app_id}/connections/export", "export_connections", self.export),
        ]

    async def find(self, app_id: str, *, find: str = "", channel: str = "", limit: int = _SHOWN) -> Found:
        """The newest connections of an app that match, over all workers."""
        try:
            pages = await self._survey.ask(ListConnections(app_id, find, channel, limit))
        except Unavailable as error:
            return Found([], 0, str(error))
        rows = [{**row, "w": w} for w, page in pages.items() for row in page["connections"]]
        rows.sort(key=lambda row: row["since"], reverse=True)
        # A worker of an earlier version doesn't say how many read over HTTP.
        readers = sum(page.get("readers", 0) for page in pages.values())
        return Found(rows[:limit], sum(page["total"] for page in pages.values()), readers=readers)

    async def show(self, visit: Visit) -> Response:
        """GET …/connections; `find`, `channel`."""
        app = visit.app
        find, channel = visit.query.get("find", "").strip()[:100], visit.query.get("channel", "").strip()[:200]
        listing = await self.find(app.id, find=find, channel=channel)
        here = f"{HOME}/apps/{app.id}/connections?{urlencode({'find': find, 'channel': channel})}"
        return visit.page("connections.html", app=app, listing=listing, find=find, channel=channel, here=here)

    async def close(self, visit: Visit) -> Response:
        """POST …/connections/close: socket."""
        app, socket = visit.app, visit.form.text("socket")
        answers = await self._survey.ask(CloseSocket(app.id, socket))
        closed = sum(answers.values())
        if closed:
            await visit.note("connections kick", app, socket)
        notice = f"Connection {socket} was closed." if closed else f"Connection {socket} had already ended."
        return visit.redirect(f"{HOME}/apps/{app.id}/connections", notice)

    async def export(self, visit: Visit) -> Response:
        """POST …/connections/export: find, channel, format. The newest 500 of each worker."""
        app, form = visit.app, visit.form
        find, channel = form.text("find"), form.text("channel")

        async def rows(progress: Progress) -> Chunks:
            pages = await self._survey.ask(ListConnections(app.id, find, channel, _EXPORTED))
            exported = [{**row, "w": w} for w, page in pages.items() for row in page["connections"]]
            progress.total = len(exported)
            # A worker may count a connection twice that it lists once, so a difference alone says nothing.
            progress.missing = sum(
                page["total"] - len(page["connections"]) for page in pages.values() if page["total"] > _EXPORTED
            )
            yield [{**row, "named": " ".join(row["named"])} for row in exported]

        title = f"Connections of {app.name}"
        rest = (
            f"These are the newest {_EXPORTED} of each worker. Search for a channel, a library or an address, and "
            "export what is found."
        )
        return self._exports.begin(visit, title, "connections", form.text("format"), rows, rest=rest, app=app)
