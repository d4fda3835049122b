"""The pages of apps: the list, creating one, how to connect to one, its settings, and deleting it.

The settings form is generated from the table protocol.apps.SETTINGS, which also checks the values.
"""

from __future__ import annotations

from typing import Final

from redpoll.control.commands.app_write import delete_app
from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.dashboard.pages import part_of
from redpoll.control.dashboard.setup import PublicAddress, snippets
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError, Records, setting_text
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.protocol.apps import SETTINGS, App, Setting, Value, parse_setting
from redpoll.protocol.errors import ApiError

__all__ = ["AppPages"]

_PAGE: Final = 100

# How the page groups the settings. Settings that are in no group appear under the last heading.
_GROUPS: Final = (
    ("What clients may do", ("client_events", "subscription_count", "watchlist", "grants", "idempotency")),
    (
        "Who may connect",
        (
            "allowed_origins",
            "tls_required",
            "user_authentication_timeout_s",
            "max_connections",
            "max_occupied_channels",
        ),
    ),
    ("Limits of an event", ("max_event_name_chars", "max_channels", "max_data_bytes", "max_batch")),
    ("Presence", ("max_presence_members", "max_user_info_bytes")),
    ("Storage", ("cache_ttl_s", "max_cached_channels", "max_history_channels", "user_resume_s")),
    ("Plan", ("plan",)),
)
_OTHERS: Final = "More"
_CAPITALS: Final = {"tls": "TLS", "ttl": "TTL"}


class AppPages:
    """The pages. `address` is where clients connect; `given_id` is the app of the settings (`app_id`), "" without
    one."""

    def __init__(
        self, access: AccessControl, records: Records, webhooks: Webhooks, address: PublicAddress, given_id: str
    ) -> None:
        self._access = access
        self._records = records
        self._webhooks = webhooks
        self._address = address
        self._given_id = given_id

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps", "apps", self.show_all),
            access.route("GET", "/new-app", "new_app", self.new, "admin"),
            access.route("POST", "/new-app", "create_app", self.create, "admin"),
            access.route("GET", "/apps/{app_id}", "app", self.show),
            access.route("GET", "/apps/{app_id}/settings", "settings", self.settings),
            access.route("POST", "/apps/{app_id}/settings", "set_app", self.change, "admin"),
            access.route("POST", "/apps/{app_id}/name", "rename_app", self.rename, "admin"),
            access.route("POST", "/apps/{app_id}/enabled", "switch_app", self.switch, "admin"),
            access.route("POST", "/apps/{app_id}/delete", "delete_app", self.delete, "admin"),
        ]

    async def show_all(self, visit: Visit) -> Response:
        """GET /dashboard/apps; `find` in names and ids, `page`."""
        find = visit.query.get("find", "").strip()
        word = find.casefold()
        found = [app for app in visit.apps if word in app.name.casefold() or word in app.id.casefold()]
        return visit.page("apps.html", part=part_of(found, visit.query.get("page", ""), _PAGE), find=find)

    async def new(self, visit: Visit) -> Response:
        return visit.page("app_new.html", form=Form())

    async def create(self, visit: Visit) -> Response:
        """POST /dashboard/new-app: name."""
        form = visit.form
        try:
            app = await self._records.create_app(form.text("name"), by=visit.actor)
        except RecordError as error:
            form.fault("name", str(error))
            return visit.page("app_new.html", status=422, form=form)
        return visit.redirect(f"{HOME}/apps/{app.id}", f"{app.name} was created. Here is how to connect to it.")

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/apps/{app_id}: how to connect."""
        app = visit.app
        address = self._address.of(visit.request)
        key = app.signing_key()
        # Viewers must not be able to publish.
        secret = key.secret if key is not None and visit.may_change else "YOUR_SECRET"
        shown = snippets(app.id, key.key, secret, address) if key is not None else []
        return visit.page("app.html", app=app, key=key, snippets=shown, address=address)

    # -- settings

    async def settings(self, visit: Visit) -> Response:
        return self._settings_page(visit, visit.app, Form())

    def _settings_page(
        self, visit: Visit, app: App, form: Form, status: int = 200, *, deletion: Form | None = None
    ) -> Response:
        grouped = {name for _, names in _GROUPS for name in names} | {"enabled"}
        others = tuple(name for name in SETTINGS if name not in grouped)
        groups = [
            (title, [_Shown(SETTINGS[name], app, form) for name in names])
            for title, names in (*_GROUPS, (_OTHERS, others))
            if names
        ]
        return visit.page(
            "settings.html",
            status=status,
            app=app,
            form=form,
            groups=groups,
            deletion=deletion or Form(),
            is_given=app.id == self._given_id,
        )

    async def change(self, visit: Visit) -> Response:
        """POST /dashboard/apps/{app_id}/settings: every setting by name. Browsers don't send unchecked switches."""
        app, form = visit.app, visit.form
        values: dict[str, Value] = {}
        for name, setting in SETTINGS.items():
            if name == "enabled" or form.untouched(name):
                continue
            if setting.type == "switch":
                values[name] = form.ticked(name)
            elif form.has(name):
                try:
                    values[name] = parse_setting(name, form.text(name).replace("\n", ","))
                except ValueError as error:
                    form.fault(name, _without_name(name, str(error)))
        if form.good:
            try:
                changed = await self._records.set_app(app.id, values, by=visit.actor)
            except RecordError as error:
                # Settings that don't fit together: a roster that is too large (record_checks.py), or a record that is.
                form.fault("max_presence_members" if " members of " in str(error) else "", str(error))
        if not form.good:
            return self._settings_page(visit, app, form, 422)
        notice = "Saved. All workers apply it within a second." if changed != app else "Nothing changed."
        return visit.redirect(f"{HOME}/apps/{app.id}/settings", notice)

    async def rename(self, visit: Visit) -> Response:
        """POST /dashboard/apps/{app_id}/name: name."""
        app, form = visit.app, visit.form
        try:
            renamed = await self._records.rename_app(app.id, form.text("name"), by=visit.actor)
        except RecordError as error:
            form.fault("name", str(error))
            return self._settings_page(visit, app, form, 422)
        return visit.redirect(f"{HOME}/apps/{app.id}/settings", f"The app was renamed to {renamed.name}.")

    async def switch(self, visit: Visit) -> Response:
        """POST /dashboard/apps/{app_id}/enabled: enabled is 1 or 0."""
        app = visit.app
        value = visit.form.text("enabled")
        if value not in ("1", "0"):
            raise ApiError("bad_request", "enabled must be 1 or 0; nothing was changed")
        enabled = value == "1"
        await self._records.set_app(app.id, {"enabled": enabled}, by=visit.actor)
        notice = f"{app.name} was switched {'on' if enabled else 'off'}."
        return visit.redirect(f"{HOME}/apps/{app.id}/settings", notice)

    async def delete(self, visit: Visit) -> Response:
        """POST /dashboard/apps/{app_id}/delete: confirm is the app's name, which the user types."""
        app, form = visit.app, visit.form
        if form.text("confirm") != app.name.strip():
            form.fault("confirm", "This isn't the app's name. Nothing was deleted.")
        if form.good:
            try:
                await delete_app(self._records, self._webhooks, app.id, visit.actor, self._given_id)
            except RecordError as error:
                form.fault("confirm", str(error))
        if not form.good:
            return self._settings_page(visit, app, Form(), 422, deletion=form)
        return visit.redirect(f"{HOME}/apps", f"{app.name} was deleted.")


class _Shown:
    """A setting on the page: the typed value if the form is shown again, else the current value."""

    def __init__(self, setting: Setting, app: App, form: Form) -> None:
        self.setting = setting
        self.name = setting.name
        self.label = _label(setting)
        value = getattr(app, setting.name)
        typed = bool(form.pairs) and not form.has("name")
        self.on = form.ticked(setting.name) if typed else bool(value)
        text = setting_text(value)
        self.value = form.raw(setting.name) if form.has(setting.name) else text
        # What a browser sends if nobody touches the field.
        self.now = ("1" if value else "") if setting.type == "switch" else text
        self.default = setting_text(setting.default)
        self.is_default = value == setting.default


def _label(setting: Setting) -> str:
    words = setting.name.removesuffix("_s").removesuffix("_bytes").removesuffix("_chars").replace("_", " ")
    label = " ".join(_CAPITALS.get(word, word) for word in words.split())
    return label[0].upper() + label[1:]


def _without_name(name: str, text: str) -> str:
    return text.removeprefix(f"{name} ").removeprefix(f"{name}: ")
