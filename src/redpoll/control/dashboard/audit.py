"""The page of the audit log: which user did what, newest first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlencode

import msgspec

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.dashboard.pages import iso
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.store import audit
from redpoll.store.store import Store

__all__ = ["AuditPages"]

_PAGE: Final = 50
_CHUNK: Final = 1_000


class AuditPages:
    def __init__(self, access: AccessControl, store: Store, exports: Exports) -> None:
        self._access = access
        self._store = store
        self._exports = exports

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/audit", "audit", self.show),
            access.route("POST", "/audit/export", "export_audit", self.export),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/audit; `find`, `who`, `app`, `before`."""
        wanted = _wanted(lambda name: visit.query.get(name, ""))
        text = visit.query.get("before", "")
        before = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
        entries = await self._find(wanted, before, _PAGE + 1)
        older = ""
        if len(entries) > _PAGE:
            entries.pop()
            older = f"{HOME}/audit?{urlencode({**wanted, 'before': entries[-1].number})}"
        apps = self._access.records.apps
        return visit.page("audit.html", entries=entries, wanted=wanted, older=older, begun=before is None, apps=apps)

    async def _find(self, wanted: dict[str, str], before: int | None, limit: int) -> list[audit.Entry]:
        async with self._store.reading() as connection:
            return await audit.find(
                connection,
                app_id=wanted["app"] or None,
                who=wanted["who"] or None,
                text=wanted["find"],
                before=before,
                limit=limit,
            )

    async def export(self, visit: Visit) -> Response:
        """POST /dashboard/audit/export: find, who, app, format."""
        form = visit.form
        wanted = _wanted(form.text)

        async def rows(progress: Progress) -> Chunks:
            before: int | None = None
            while chunk := await self._find(wanted, before, _CHUNK):
                yield [{**msgspec.structs.asdict(entry), "at": iso(entry.at)} for entry in chunk]
                before = chunk[-1].number

        rest = "These are the newest. Search for a user, an app or a text, and export what is found."
        return self._exports.begin(visit, "Audit log", "audit", form.text("format"), rows, rest=rest)


def _wanted(text_of: Callable[[str], str]) -> dict[str, str]:
    """What is searched for. SQLite refuses patterns of more than 50,000 bytes."""
    return {name: text_of(name).strip()[:100] for name in ("find", "who", "app")}
