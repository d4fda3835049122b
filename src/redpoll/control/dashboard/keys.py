"""The page of an app's keys: add, disable and enable keys, to rotate them."""

from __future__ import annotations

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError, Records

__all__ = ["KeyPages"]


class KeyPages:
    def __init__(self, access: AccessControl, records: Records) -> None:
        self._access = access
        self._records = records

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/keys", "keys", self.show),
            access.route("POST", "/apps/{app_id}/keys", "add_key", self.add, "admin"),
            access.route("POST", "/apps/{app_id}/keys/disable", "disable_key", self.disable, "admin"),
            access.route("POST", "/apps/{app_id}/keys/enable", "enable_key", self.enable, "admin"),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/apps/{app_id}/keys. Secrets are shown to admins."""
        return visit.page("keys.html", app=visit.app, form=Form())

    async def add(self, visit: Visit) -> Response:
        """POST …/keys."""
        app = visit.app
        try:
            await self._records.add_key(app.id, by=visit.actor)
        except RecordError as error:
            form = visit.form
            form.fault("", str(error))
            return visit.page("keys.html", status=422, app=app, form=form)
        notice = "The new key works now. Give it to every client and back end, then disable the old one."
        return visit.redirect(f"{HOME}/apps/{app.id}/keys", notice)

    async def disable(self, visit: Visit) -> Response:
        """POST …/keys/disable: key."""
        return await self._switch(visit, enable=False)

    async def enable(self, visit: Visit) -> Response:
        """POST …/keys/enable: key. It keeps its secret."""
        return await self._switch(visit, enable=True)

    async def _switch(self, visit: Visit, *, enable: bool) -> Response:
        app, form = visit.app, visit.form
        key = form.text("key")
        try:
            if enable and not any(known.key == key for known in app.keys):
                raise RecordError(f"app {app.id} has no key {key}")
            if enable:
                await self._records.add_key(app.id, key, by=visit.actor)
            else:
                await self._records.disable_key(app.id, key, by=visit.actor)
        except RecordError as error:
            form.fault("", str(error))
            return visit.page("keys.html", status=422, app=app, form=form)
        notice = f"Key {key} was {'enabled' if enable else 'disabled'}."
        return visit.redirect(f"{HOME}/apps/{app.id}/keys", notice)
