"""The page of an app's API tokens: create and revoke tokens. A token is shown only once."""

from __future__ import annotations

import time
from typing import Final

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError, Records
from redpoll.protocol.apps import App
from redpoll.protocol.tokens import Token

__all__ = ["TokenPages"]

_DAY_S: Final = 86_400.0
LASTS: Final = {"": None, "1": _DAY_S, "7": 7 * _DAY_S, "30": 30 * _DAY_S, "90": 90 * _DAY_S, "365": 365 * _DAY_S}


class TokenPages:
    def __init__(self, access: AccessControl, records: Records) -> None:
        self._access = access
        self._records = records

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/tokens", "tokens", self.show),
            access.route("POST", "/apps/{app_id}/tokens", "create_token", self.create, "admin"),
            access.route("POST", "/apps/{app_id}/tokens/revoke", "revoke_token", self.revoke, "admin"),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/apps/{app_id}/tokens."""
        return self._page(visit, visit.app, Form())

    def _page(self, visit: Visit, app: App, form: Form, *, status: int = 200, plain: str = "") -> Response:
        now_s = time.time()
        tokens = [(token, _state(token, now_s)) for token in reversed(self._records.tokens_of(app.id))]
        return visit.page("tokens.html", status=status, app=app, form=form, tokens=tokens, plain=plain)

    async def create(self, visit: Visit) -> Response:
        """POST …/tokens: name, scope (several), lasts in days. Shows the token, this one time."""
        app, form = visit.app, visit.form
        scopes = form.every("scope")
        lasts = form.choice("lasts", LASTS)
        if not scopes:
            form.fault("scope", "Choose at least one scope.")
        if not form.text("name"):
            form.fault("name", "Enter a name, so that you can recognise the token later.")
        plain = ""
        if form.good:
            try:
                _, plain = await self._records.create_token(
                    app.id, form.text("name"), scopes, LASTS[lasts], by=visit.actor
                )
            except RecordError as error:
                form.fault("scope" if "scope" in str(error) else "name", str(error))
        if not form.good:
            return self._page(visit, app, form, status=422)
        return self._page(visit, app, Form(), plain=plain)

    async def revoke(self, visit: Visit) -> Response:
        """POST …/tokens/revoke: id."""
        app, form = visit.app, visit.form
        owned = {token.id for token in self._records.tokens_of(app.id)}
        if form.text("id") not in owned:
            form.fault("", "This token doesn't exist.")
            return self._page(visit, app, form, status=422)
        (token,) = await self._records.revoke_tokens([form.text("id")], by=visit.actor)
        return visit.redirect(f"{HOME}/apps/{app.id}/tokens", f"Token {token.name} was revoked.")


def _state(token: Token, now_s: float) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is not None and now_s >= token.expires_at:
        return "expired"
    return "active"
