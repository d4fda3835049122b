"""The pages of an app's webhooks: its endpoints, their secrets and certificates, and what was sent to them."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.channels import pretty
from redpoll.control.dashboard.exports import MOST_ROWS, Exports
from redpoll.control.dashboard.forms import Form, sentence
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.dashboard.pages import iso
from redpoll.control.records import RecordError
from redpoll.control.response import Response
from redpoll.control.router import Route
from redpoll.control.webhooks.payloads import EVENTS, FORMATS, STANDARD
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.store.deliveries import STATES, Delivery
from redpoll.store.webhooks import Endpoint

__all__ = ["WebhookPages", "before_of", "delivery_row", "older_than"]

_PAGE: Final = 50
_SHARE: Final = 1_000
_HELP: Final = {
    "channel.occupied": "The first subscriber joins a channel.",
    "channel.vacated": "The last subscriber has left.",
    "member.added": "A user joins a presence channel.",
    "member.removed": "A user has left one.",
    "client_event": "A client triggers an event.",
    "cache.miss": "Somebody joins a cache channel that has nothing cached.",
    "subscription.count": "The number of subscribers changes.",
}


class WebhookPages:
    def __init__(self, door: AccessControl, webhooks: Webhooks, exports: Exports) -> None:
        self._door = door
        self._webhooks = webhooks
        self._exports = exports

    def routes(self) -> list[Route]:
        door, one = self._door, "/apps/{app_id}/webhooks/{endpoint_id}"
        acts = [
            door.route("POST", f"{one}/{verb}", f"webhook_{verb}", self._act(verb), "admin")
            for verb in ("enable", "disable", "rotate", "pin", "unpin", "delete")
        ]
        return [
            door.route("GET", "/apps/{app_id}/webhooks", "webhooks", self.show_all),
            door.route("GET", "/apps/{app_id}/webhooks/new", "new_webhook", self.new, "admin"),
            door.route("POST", "/apps/{app_id}/webhooks/new", "create_webhook", self.create, "admin"),
            door.route("GET", one, "webhook", self.show),
            door.route("GET", f"{one}/edit", "edit_webhook", self.edit, "admin"),
            door.route("POST", f"{one}/edit", "change_webhook", self.change, "admin"),
            door.route("POST", f"{one}/test", "test_webhook", self.test, "admin"),
            door.route("POST", f"{one}/export", "export_deliveries", self.export),
            *acts,
            door.route("GET", "/apps/{app_id}/deliveries/{delivery_id}", "delivery", self.delivery),
        ]

    async def show_all(self, visit: Visit) -> Response:
        """GET …/webhooks."""
        app = visit.app
        depths = await self._webhooks.depths(app.id)
        rows = [
            (each, depths.get(each.id), self._webhooks.failing_since(each))
            for each in self._webhooks.endpoints.of_existing_app(app.id)
        ]
        return visit.page("webhooks.html", app=app, rows=rows)

    # -- an endpoint made and changed

    async def new(self, visit: Visit) -> Response:
        return self._form_page(visit, visit.app, Form(), None)

    def _form_page(self, visit: Visit, app: App, form: Form, endpoint: Endpoint | None, status: int = 200) -> Response:
        events = [(name, _HELP.get(name, ""), name in STANDARD) for name in EVENTS]
        values: dict[str, Any] = {"url": "", "events": ["all"], "format": FORMATS[0], "channels": "", "pin": False}
        if form.pairs:
            values = {
                "url": form.text("url"),
                "events": form.every("event"),
                "format": form.text("format"),
                "channels": form.raw("channels"),
                "pin": form.ticked("pin"),
            }
        elif endpoint is not None:
            values = {
                "url": endpoint.url,
                "events": endpoint.events,
                "format": endpoint.format,
                "channels": "\n".join(endpoint.channels),
                "pin": bool(endpoint.pin),
            }
        return visit.page(
            "webhook_form.html", status=status, app=app, form=form, endpoint=endpoint, events=events, values=values
        )

    async def create(self, visit: Visit) -> Response:
        """POST …/webhooks/new: url, event (several), format, channels (prefixes, one a line), pin."""
        app, form = visit.app, visit.form
        asked = _asked(form)
        made: Endpoint | None = None
        if form.good:
            try:
                made = await self._webhooks.endpoints.create(app.id, **asked, pin=form.ticked("pin"))
            except RecordError as error:
                form.fault(_field_of(str(error)), str(error))
        if made is None:
            return self._form_page(visit, app, form, None, 422)
        await visit.note("webhook created", app=app, target=made.url, detail=", ".join(made.events))
        told = "It is on. Give its secret to the receiver, then send a test."
        return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{made.id}", told)

    async def edit(self, visit: Visit) -> Response:
        app, endpoint = visit.app, self._endpoint(visit)
        return self._form_page(visit, app, Form(), endpoint)

    async def change(self, visit: Visit) -> Response:
        """POST …/webhooks/{endpoint_id}/edit: as for a new one, without pin."""
        app, form, endpoint = visit.app, visit.form, self._endpoint(visit)
        asked = _asked(form)
        if form.good:
            try:
                await self._webhooks.endpoints.change(endpoint.id, **asked)
            except RecordError as error:
                form.fault(_field_of(str(error)), str(error))
        if not form.good:
            return self._form_page(visit, app, form, endpoint, 422)
        await visit.note("webhook changed", app=app, target=asked["url"])
        return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}", "Saved.")

    # -- one endpoint

    def _endpoint(self, visit: Visit) -> Endpoint:
        app, endpoint_id = visit.app, visit.call.parameters[1]
        found = next(
            (each for each in self._webhooks.endpoints.of_existing_app(app.id) if each.id == endpoint_id), None
        )
        if found is None:
            raise ApiError("not_found", "This app has no such webhook. It may have been deleted.")
        return found

    async def show(self, visit: Visit) -> Response:
        """GET …/webhooks/{endpoint_id}; `state`, `before`."""
        app, endpoint = visit.app, self._endpoint(visit)
        state = visit.query.get("state", "")
        chosen = (state,) if state in STATES else STATES
        found = await self._webhooks.deliveries(
            app.id, endpoint_id=endpoint.id, states=chosen, limit=_PAGE + 1, before=before_of(visit)
        )
        older = older_than(found, _PAGE, visit.call.path, {"state": state})
        return visit.page(
            "webhook.html",
            app=app,
            endpoint=endpoint,
            failing_since=self._webhooks.failing_since(endpoint),
            overlaps=endpoint.previous_until > self._door.accounts.now_s(),
            depth=(await self._webhooks.depths(app.id)).get(endpoint.id),
            deliveries=found,
            older=older,
            state=state if state in STATES else "",
            states=STATES,
            here=f"{visit.call.path}?{urlencode({'state': state})}",
            begun=before_of(visit) is None,
            tested=None,
        )

    async def test(self, visit: Visit) -> Response:
        """POST …/test: one delivery now; answers with how it went."""
        app, endpoint = visit.app, self._endpoint(visit)
        try:
            attempt = await self._webhooks.test(endpoint.id)
        except RecordError as error:
            return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}", sentence(error))
        await visit.note("webhook tested", app=app, target=endpoint.url, detail=attempt.reason)
        return visit.page(
            "webhook_test.html",
            app=app,
            endpoint=endpoint,
            attempt=attempt,
            response=attempt.response.decode(errors="replace"),
        )

    def _act(self, verb: str) -> Any:
        """A handler of POST …/{verb}."""

        async def act(visit: Visit) -> Response:
            app, endpoint = visit.app, self._endpoint(visit)
            webhooks = self._webhooks
            here = f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}"
            try:
                if verb in ("enable", "disable"):
                    await webhooks.endpoints.set_enabled(endpoint.id, verb == "enable")
                elif verb == "rotate":
                    await webhooks.endpoints.rotate(endpoint.id)
                elif verb == "pin":
                    await webhooks.endpoints.pin(endpoint.id)
                elif verb == "unpin":
                    await webhooks.endpoints.unpin(endpoint.id)
                else:
                    await webhooks.endpoints.delete(endpoint.id)
                    here = f"{HOME}/apps/{app.id}/webhooks"
            except RecordError as error:
                return visit.redirect(here, sentence(error))
            done, told = _DONE[verb]
            await visit.note(f"webhook {done}", app=app, target=endpoint.url)
            return visit.redirect(here, told)

        return act

    async def export(self, visit: Visit) -> Response:
        """POST …/export: state, format."""
        app, endpoint, form = visit.app, self._endpoint(visit), visit.form
        chosen = (form.text("state"),) if form.text("state") in STATES else STATES

        async def rows(progress: Progress) -> list[dict[str, Any]]:
            found: list[Delivery] = []
            while len(found) < MOST_ROWS:
                before = (found[-1].at, found[-1].number) if found else None
                share = await self._webhooks.deliveries(
                    app.id, endpoint_id=endpoint.id, states=chosen, limit=_SHARE, before=before
                )
                found += share
                progress.done = len(found)
                if len(share) < _SHARE:
                    break
            return [delivery_row(each) for each in found]

        back = f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}"
        return self._exports.begin(
            visit, f"Deliveries to {endpoint.url}", "deliveries", form.text("format"), rows, app, back
        )

    # -- one delivery

    async def delivery(self, visit: Visit) -> Response:
        """GET …/deliveries/{delivery_id}: its payload, and every attempt."""
        app = visit.app
        try:
            delivery, endpoint, attempts = await self._webhooks.delivery(visit.call.parameters[1])
        except RecordError:
            raise ApiError("not_found", "There is no such delivery, or none any more.") from None
        if endpoint.app_id != app.id:
            raise ApiError("not_found", "There is no such delivery, or none any more.")
        return visit.page(
            "delivery.html",
            app=app,
            delivery=delivery,
            endpoint=endpoint,
            attempts=[(each, each.response.decode(errors="replace")) for each in attempts],
            payload=pretty(delivery.body.decode(errors="replace")),
        )


_DONE: Final = {
    "enable": ("enabled", "It is on. What waited for it is tried now."),
    "disable": ("disabled", "It is off. What waits for it waits."),
    "rotate": ("secret rotated", "It has a new secret. Deliveries are signed with the old one as well, for a day."),
    "pin": ("pinned", "Its certificate is pinned: nothing is sent where another one is shown."),
    "unpin": ("unpinned", "Any valid certificate is taken again."),
    "delete": ("deleted", "The webhook is deleted. Its dead letters stay until you discard them."),
}


def _asked(form: Form) -> dict[str, Any]:
    events = form.every("event")
    if not events:
        form.fault("event", "Choose at least one kind of event.")
    if not form.text("url"):
        form.fault("url", "Say where to send it.")
    return {
        "url": form.text("url"),
        "events": events,
        "format": form.choice("format", FORMATS, FORMATS[0]),
        "channels": form.text("channels").replace(",", "\n").split(),
    }


# Of a refusal, by words in its sentence (webhooks/endpoints.py); the rest is about the URL.
_FIELDS: Final = {
    "can't be pinned": "pin",
    "channel prefixes": "channels",
    "name begins": "channels",
    "webhook's events": "event",
    "webhook's format": "format",
}


def _field_of(text: str) -> str:
    return next((field for word, field in _FIELDS.items() if word in text), "url")


def before_of(visit: Visit) -> tuple[float, int] | None:
    """The place in the list where the page that is asked for begins, as `older_than` wrote it; None: at the newest."""
    at, _, number = visit.query.get("before", "").partition("_")
    try:
        place = (float(at), int(number))
    except ValueError:
        return None
    return place if abs(place[1]) < 1 << 62 else None


def older_than(found: list[Delivery], most: int, path: str, query: dict[str, str]) -> str:
    """The address of the page of older ones, "" where there are none; `found` keeps at most `most`."""
    if len(found) <= most:
        return ""
    del found[most:]
    return f"{path}?{urlencode({**query, 'before': f'{found[-1].at!r}_{found[-1].number}'})}"


def delivery_row(each: Delivery) -> dict[str, Any]:
    """A delivery as exports have it."""
    return {
        "id": each.id,
        "endpoint": each.endpoint_id,
        "event": each.event,
        "channel": each.channel,
        "user": each.user,
        "time": iso(each.time_ms / 1000),
        "state": each.state,
        "at": iso(each.at),
        "attempts": each.attempts,
        "payload": each.body.decode(errors="replace"),
    }
