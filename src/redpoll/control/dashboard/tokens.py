"""The pages of API tokens, of an app and of the management of apps: create and revoke them. A token is shown once."""

from __future__ import annotations

import time
from typing import Final

from redpoll.control.dashboard.access import HOME, AccessControl, Visit
from redpoll.control.dashboard.forms import Form
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError, Records
from redpoll.protocol.apps import App
from redpoll.protocol.tokens import MANAGE, Token

__all__ = ["TokenPages"]

_DAY_S: Final = 86_400.0
LASTS: Final = {"": None, "1": _DAY_S, "7": 7 * _DAY_S, "30": 30 * _DAY_S, "90": 90 * _DAY_S, "365": 365 * _DAY_S}


class TokenPages:
    """Two pages: the tokens of an app, and those that manage apps, which belong to no app and have one scope."""

    def __init__(self, access: AccessControl, records: Records) -> None:
        self._access = access
        self._records = records

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/apps/{app_id}/tokens", "tokens", self.show),
            access.route("POST", "/apps/{app_id}/tokens", "create_token", self.create, "admin"),
            access.route("POST", "/apps/{app_id}/tokens/revoke", "revoke_token", self.revoke, "admin"),
            access.route("GET", "/tokens", "management_tokens", self.show_management),
            access.route("POST", "/tokens", "create_management_token", self.create_management, "admin"),
            access.route("POST", "/tokens/revoke", "revoke_management_token", self.revoke_management, "admin"),
        ]

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/apps/{app_id}/tokens."""
        return self._page(visit, visit.app, Form())

    async def create(self, visit: Visit) -> Response:
        """POST …/tokens: name, scope (several), lasts in days. Shows the token, this one time."""
        return await self._create(visit, visit.app)

    async def revoke(self, visit: Visit) -> Response:
        """POST …/tokens/revoke: id."""
        return await self._revoke(visit, visit.app)

    async def show_management(self, visit: Visit) -> Response:
        """GET /dashboard/tokens."""
        return self._page(visit, None, Form())

    async def create_management(self, visit: Visit) -> Response:
        """POST /dashboard/tokens: name, lasts in days. Shows the token, this one time."""
        return await self._create(visit, None)

    async def revoke_management(self, visit: Visit) -> Response:
        """POST /dashboard/tokens/revoke: id."""
        return await self._revoke(visit, None)

    # -- both pages: `app` None is the one of tokens that manage apps

    def _page(self, visit: Visit, app: App | None, form: Form, *, status: int = 200, plain: str = "") -> Response:
        now_s = time.time()
        tokens = [(token, _state(token, now_s)) for token in reversed(self._records.tokens_of(_id_of(app)))]
        return visit.page(
            "tokens.html", status=status, app=app, form=form, tokens=tokens, plain=plain, address=_address(app)
        )

    async def _create(self, visit: Visit, app: App | None) -> Response:
        form = visit.form
        scopes = [MANAGE] if app is None else form.every("scope")
        lasts = form.choice("lasts", LASTS)
        if not scopes:
            form.fault("scope", "Choose at least one scope.")
        if not form.text("name"):
            form.fault("name", "Enter a name, so that you can recognise the token later.")
        plain = ""
        if form.good:
            try:
                _, plain = await self._records.create_token(
                    _id_of(app), form.text("name"), scopes, LASTS[lasts], by=visit.actor
                )
            except RecordError as error:
                form.fault("scope" if app is not None and "scope" in str(error) else "name", str(error))
        if not form.good:
            return self._page(visit, app, form, status=422)
        return self._page(visit, app, Form(), plain=plain)

    async def _revoke(self, visit: Visit, app: App | None) -> Response:
        form = visit.form
        owned = {token.id for token in self._records.tokens_of(_id_of(app))}
        if form.text("id") not in owned:
            form.fault("", "This token doesn't exist.")
            return self._page(visit, app, form, status=422)
        (token,) = await self._records.revoke_tokens([form.text("id")], by=visit.actor)
        return visit.redirect(_address(app), f"Token {token.name} was revoked.")


def _id_of(app: App | None) -> str | None:
    return None if app is None else app.id


def _address(app: App | None) -> str:
    return f"{HOME}/tokens" if app is None else f"{HOME}/apps/{app.id}/tokens"


def _state(token: Token, now_s: float) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is not None and now_s >= token.expires_at:
        return "expired"
    return "active"
