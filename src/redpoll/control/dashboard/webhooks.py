"""The pages of an app's webhooks: endpoints with their secrets and certificates, and deliveries."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.channels import pretty
from redpoll.control.dashboard.exports import Chunks, Exports
from redpoll.control.dashboard.forms import Form, sentence
from redpoll.control.dashboard.jobs import Progress
from redpoll.control.dashboard.pages import iso
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.payloads import EVENTS, FORMATS, STANDARD
from redpoll.control.webhooks.wanted import ALL, target_of
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.store.deliveries import STATES, Delivery
from redpoll.store.webhooks import Endpoint

__all__ = ["WebhookPages", "before_of", "delivery_row", "older_than"]

_PAGE: Final = 50
_CHUNK: Final = 1_000
_HELP: Final = {
    "channel.occupied": "The first subscriber joins a channel.",
    "channel.vacated": "The last subscriber has left.",
    "member.added": "A user joins a presence channel.",
    "member.removed": "A user has left a presence channel.",
    "client_event": "A client triggers an event.",
    "cache.miss": "A client joins a cache channel that has no cached event.",
    "subscription.count": "The number of subscribers changes, if the app announces it (subscription_count); not on "
    "presence channels.",
}


class WebhookPages:
    def __init__(self, access: AccessControl, webhooks: Webhooks, exports: Exports) -> None:
        self._access = access
        self._webhooks = webhooks
        self._exports = exports

    def routes(self) -> list[Route]:
        access, one = self._access, "/apps/{app_id}/webhooks/{endpoint_id}"
        acts = [
            access.route("POST", f"{one}/{verb}", f"webhook_{verb}", self._act(verb), "admin")
            for verb in ("enable", "disable", "rotate", "pin", "unpin", "delete")
        ]
        return [
            access.route("GET", "/apps/{app_id}/webhooks", "webhooks", self.show_all),
            access.route("GET", "/apps/{app_id}/webhooks/new", "new_webhook", self.new, "admin"),
            access.route("POST", "/apps/{app_id}/webhooks/new", "create_webhook", self.create, "admin"),
            access.route("GET", one, "webhook", self.show),
            access.route("GET", f"{one}/edit", "edit_webhook", self.edit, "admin"),
            access.route("POST", f"{one}/edit", "change_webhook", self.change, "admin"),
            access.route("POST", f"{one}/test", "test_webhook", self.test, "admin"),
            access.route("POST", f"{one}/export", "export_deliveries", self.export),
            *acts,
            access.route("GET", "/apps/{app_id}/deliveries/{delivery_id}", "delivery", self.delivery),
        ]

    async def show_all(self, visit: Visit) -> Response:
        """GET …/webhooks."""
        app = visit.app
        depths = await self._webhooks.depths(app.id)
        rows = [
            (endpoint, depths.get(endpoint.id), self._webhooks.failing_since(endpoint))
            for endpoint in self._webhooks.endpoints.of_existing_app(app.id)
        ]
        return visit.page("webhooks.html", app=app, rows=rows)

    # -- creating and editing an endpoint

    async def new(self, visit: Visit) -> Response:
        return self._form_page(visit, visit.app, Form(), None)

    def _form_page(self, visit: Visit, app: App, form: Form, endpoint: Endpoint | None, status: int = 200) -> Response:
        events = [(name, _HELP.get(name, ""), name in STANDARD) for name in EVENTS]
        values: dict[str, Any] = {
            "url": "",
            "pull": False,
            "events": ["all"],
            "format": FORMATS[0],
            "channels": "",
            "client_events": "",
            "batch": False,
            "pin": False,
        }
        if form.pairs:
            values = {
                "url": form.text("url"),
                "events": form.every("event"),
                "format": form.text("format"),
                "channels": form.raw("channels"),
                "pull": form.ticked("pull"),
                "client_events": form.raw("client_events"),
                "batch": form.ticked("batch"),
                "pin": form.ticked("pin"),
            }
        elif endpoint is not None:
            values = {
                "url": endpoint.url,
                "events": endpoint.events,
                "format": endpoint.format,
                "channels": "\n".join(endpoint.channels),
                "pull": endpoint.pulled,
                "client_events": "\n".join(endpoint.client_events),
                "batch": endpoint.batch,
                "pin": bool(endpoint.pin),
            }
        return visit.page(
            "webhook_form.html",
            status=status,
            app=app,
            form=form,
            endpoint=endpoint,
            events=events,
            values=values,
            shown={} if endpoint is None else _shown(endpoint),
        )

    async def create(self, visit: Visit) -> Response:
        """POST …/webhooks/new: url or pull, event (several), format, channels (prefixes, one a line), client_events
        (names, one a line), batch, pin."""
        app, form = visit.app, visit.form
        fields = _fields_of(form, pulled=form.ticked("pull"))
        created: Endpoint | None = None
        if form.good:
            try:
                created = await self._webhooks.endpoints.create(
                    app.id, **fields, pin=form.ticked("pin"), by=visit.actor
                )
            except RecordError as error:
                form.fault(_field_of(str(error)), str(error))
        if created is None:
            return self._form_page(visit, app, form, None, 422)
        notice = "The webhook is on. Give its secret to the receiver, then send a test."
        if created.pulled:
            notice = "The webhook is on. Run redpoll webhook listen where your back end is."
        return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{created.id}", notice)

    async def edit(self, visit: Visit) -> Response:
        app, endpoint = visit.app, self._endpoint(visit)
        return self._form_page(visit, app, Form(), endpoint)

    async def change(self, visit: Visit) -> Response:
        """POST …/webhooks/{endpoint_id}/edit: the fields of a new one, without pull and pin."""
        app, form, endpoint = visit.app, visit.form, self._endpoint(visit)
        fields = _fields_of(form, pulled=endpoint.pulled)
        # None: as it is.
        fields |= {name: None for name in fields if form.untouched(_INPUTS.get(name, name))}
        if form.good:
            try:
                await self._webhooks.endpoints.change(endpoint.id, **fields, by=visit.actor)
            except RecordError as error:
                form.fault(_field_of(str(error)), str(error))
        if not form.good:
            return self._form_page(visit, app, form, endpoint, 422)
        return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}", "Saved.")

    # -- one endpoint

    def _endpoint(self, visit: Visit) -> Endpoint:
        app, endpoint_id = visit.app, visit.request.parameters[1]
        for endpoint in self._webhooks.endpoints.of_existing_app(app.id):
            if endpoint.id == endpoint_id:
                return endpoint
        raise ApiError("not_found", "This app has no webhook with this id. It may have been deleted.")

    async def show(self, visit: Visit) -> Response:
        """GET …/webhooks/{endpoint_id}; `state`, `before`."""
        app, endpoint = visit.app, self._endpoint(visit)
        state = visit.query.get("state", "")
        chosen = (state,) if state in STATES else STATES
        deliveries = await self._webhooks.deliveries(
            app.id, endpoint_id=endpoint.id, states=chosen, limit=_PAGE + 1, before=before_of(visit)
        )
        older = older_than(deliveries, _PAGE, visit.request.path, {"state": state})
        return visit.page(
            "webhook.html",
            app=app,
            endpoint=endpoint,
            failing_since=self._webhooks.failing_since(endpoint),
            overlaps=endpoint.previous_until > self._access.accounts.now_s(),
            depth=(await self._webhooks.depths(app.id)).get(endpoint.id),
            deliveries=deliveries,
            older=older,
            state=state if state in STATES else "",
            states=STATES,
            here=f"{visit.request.path}?{urlencode({'state': state})}",
            begun=before_of(visit) is None,
            tested=None,
        )

    async def test(self, visit: Visit) -> Response:
        """POST …/test: sends one test delivery and shows the result."""
        app, endpoint = visit.app, self._endpoint(visit)
        try:
            attempt = await self._webhooks.test(endpoint.id, by=visit.actor)
        except RecordError as error:
            return visit.redirect(f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}", sentence(error))
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
            endpoints, by = self._webhooks.endpoints, visit.actor
            here = f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}"
            try:
                if verb in ("enable", "disable"):
                    await endpoints.set_enabled(endpoint.id, verb == "enable", by=by)
                elif verb == "rotate":
                    await endpoints.rotate(endpoint.id, by=by)
                elif verb == "pin":
                    await endpoints.pin(endpoint.id, by=by)
                elif verb == "unpin":
                    await endpoints.unpin(endpoint.id, by=by)
                else:
                    await endpoints.delete(endpoint.id, by=by)
                    here = f"{HOME}/apps/{app.id}/webhooks"
            except RecordError as error:
                return visit.redirect(here, sentence(error))
            return visit.redirect(here, _NOTICES[verb])

        return act

    async def export(self, visit: Visit) -> Response:
        """POST …/export: state, format."""
        app, endpoint, form = visit.app, self._endpoint(visit), visit.form
        chosen = (form.text("state"),) if form.text("state") in STATES else STATES

        async def rows(progress: Progress) -> Chunks:
            before: int | None = None
            while chunk := await self._webhooks.added(endpoint.id, states=chosen, limit=_CHUNK, before=before):
                yield [delivery_row(delivery) for delivery in chunk]
                before = chunk[-1].number

        back = f"{HOME}/apps/{app.id}/webhooks/{endpoint.id}"
        return self._exports.begin(
            visit,
            f"Deliveries to {target_of(endpoint)}",
            "deliveries",
            form.text("format"),
            rows,
            rest="These are the newest. Export the deliveries of one state to get more of them.",
            app=app,
            back=back,
        )

    # -- one delivery

    async def delivery(self, visit: Visit) -> Response:
        """GET …/deliveries/{delivery_id}: the payload and every attempt."""
        app = visit.app
        try:
            delivery, endpoint, attempts = await self._webhooks.delivery(visit.request.parameters[1])
        except RecordError:
            raise ApiError("not_found", "This delivery doesn't exist. It may have been deleted.") from None
        if endpoint.app_id != app.id:
            raise ApiError("not_found", "This delivery doesn't exist. It may have been deleted.")
        return visit.page(
            "delivery.html",
            app=app,
            delivery=delivery,
            endpoint=endpoint,
            attempts=[(attempt, attempt.response.decode(errors="replace")) for attempt in attempts],
            payload=pretty(delivery.body.decode(errors="replace")),
        )


_NOTICES: Final = {
    "enable": "The webhook is on. Waiting deliveries are sent now.",
    "disable": "The webhook is off. Its deliveries wait until you switch it on.",
    "rotate": "The webhook has a new secret. For a day deliveries are signed with the old one too.",
    "pin": "The certificate is pinned. Deliveries fail if the receiver presents another one.",
    "unpin": "Any valid certificate is accepted again.",
    "delete": "The webhook was deleted. Its dead letters stay until you discard them.",
}


def _shown(endpoint: Endpoint) -> dict[str, str]:
    """What a browser sends if nobody touches the fields (Form.untouched)."""
    return {
        "url": endpoint.url,
        "event": ",".join(name for name in (ALL, *EVENTS) if name in endpoint.events),
        "format": endpoint.format,
        "channels": "\n".join(endpoint.channels),
        "client_events": "\n".join(endpoint.client_events),
        "batch": "1" if endpoint.batch else "",
    }


# Of fields with another name in the form.
_INPUTS: Final = {"events": "event"}


def _fields_of(form: Form, *, pulled: bool) -> dict[str, Any]:
    events = form.every("event")
    if not events:
        form.fault("event", "Choose at least one event.")
    if not pulled and not form.text("url"):
        form.fault("url", "Enter a URL.")
    if pulled and form.text("url"):
        form.fault("url", "Leave the URL empty if your back end pulls.")
    return {
        "url": None if pulled else form.text("url"),
        "events": events,
        "format": form.choice("format", FORMATS, FORMATS[0]),
        "channels": form.text("channels").replace(",", "\n").split(),
        "client_events": [name for line in form.text("client_events").splitlines() if (name := line.strip())],
        "batch": form.ticked("batch"),
    }


# Of a refusal, by words in its sentence (webhooks/endpoints.py); the rest is about the URL.
_FIELDS: Final = {
    "can't be pinned": "pin",
    "batch events": "batch",
    "client event": "client_events",
    "channel prefixes": "channels",
    "name begins": "channels",
    "webhook's events": "event",
    "webhook's format": "format",
}


def _field_of(text: str) -> str:
    return next((field for word, field in _FIELDS.items() if word in text), "url")


def before_of(visit: Visit) -> tuple[float, int] | None:
    """The position where the requested page begins, from the query that `older_than` wrote; None for the newest."""
    return position_of(visit.query.get("before", ""))


def position_of(text: str) -> tuple[float, int] | None:
    """The position that `written_position` wrote; None for another text."""
    at, _, number = text.partition("_")
    try:
        position = (float(at), int(number))
    except ValueError:
        return None
    return position if abs(position[1]) < 1 << 62 else None


def written_position(delivery: Delivery) -> str:
    """Where a delivery is among others, as a field of a form or query."""
    return f"{delivery.at!r}_{delivery.number}"


def older_than(deliveries: list[Delivery], limit: int, path: str, query: dict[str, str]) -> str:
    """The URL of the next page, "" if there is none. Shortens `deliveries` to `limit`."""
    if len(deliveries) <= limit:
        return ""
    del deliveries[limit:]
    return f"{path}?{urlencode({**query, 'before': written_position(deliveries[-1])})}"


def delivery_row(delivery: Delivery) -> dict[str, Any]:
    """A delivery as a row of an export."""
    return {
        "id": delivery.id,
        "endpoint": delivery.endpoint_id,
        "event": delivery.event,
        "channel": delivery.channel,
        "user": delivery.user,
        "time": iso(delivery.time_ms / 1000),
        "state": delivery.state,
        "at": iso(delivery.at),
        "attempts": delivery.attempts,
        "payload": delivery.body.decode(errors="replace"),
    }
