"""Apps over HTTP: list, create, read, change and delete them."""

from __future__ import annotations

import heapq
import secrets
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec import UNSET

from redpoll.control.api.answers import cursor_of, page_limit, parse_cursor
from redpoll.control.commands.app_plan import Wanted, WantedKey, WantedToken, WantedWebhook
from redpoll.control.commands.app_write import create_app, delete_app
from redpoll.control.http.router import API_PREFIX
from redpoll.control.management.bodies import (
    AppChange,
    AppList,
    AppSummary,
    NewApp,
    NewKey,
    app_body,
    created_app_body,
    created_token_body,
    parsed_settings,
    setting_texts,
)
from redpoll.control.management.managed import endpoint_url
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response
    from redpoll.control.management.managed import Managed
    from redpoll.protocol.apps import App, Value

__all__ = ["AppManagement", "app_path"]


def app_path(app_id: str, *more: str) -> str:
    """The path of an app, or of something below it."""
    return "/".join((f"{API_PREFIX}/apps", *(quote(part, safe="") for part in (app_id, *more))))


class AppManagement:
    """`given_id` is the app of the settings (`app_id`), "" without one."""

    def __init__(self, managed: Managed, given_id: str) -> None:
        self._managed = managed
        self._given_id = given_id

    async def list(self, request: Request) -> Response:
        """GET /apps, by id."""
        limit = page_limit(request.param("limit"))
        after = parse_cursor(request.param("cursor"), 1)
        apps = self._managed.records.apps
        ids = heapq.nsmallest(limit + 1, (app_id for app_id in apps if after is None or app_id > after[1]))
        shown = [AppSummary(id=app_id, name=apps[app_id].name, enabled=apps[app_id].enabled) for app_id in ids[:limit]]
        following = cursor_of(0, ids[limit - 1]) if len(ids) > limit else None
        return self._managed.answer(request, AppList(apps=shown, next=following))

    async def create(self, request: Request) -> Response:
        """POST /apps."""
        managed = self._managed
        plan = await create_app(
            managed.records, managed.webhooks, _wanted(managed.body(request, NewApp)), managed.by(request)
        )
        plain = {one["name"]: one["secret"] for one in plan.made if one["what"] == "token"}
        tokens = [created_token_body(token, plain[token.name]) for token in plan.added_tokens]
        body = created_app_body(plan.app, plan.added_endpoints, tokens)
        return managed.answer(request, body, plan.app.id, 201, app_path(plan.app.id))

    async def show(self, request: Request) -> Response:
        """GET /apps/{app_id}."""
        return self._shown(request, self._managed.app(request))

    async def change(self, request: Request) -> Response:
        """PATCH /apps/{app_id}."""
        managed = self._managed
        app = managed.app(request)
        change = managed.body(request, AppChange)
        values: dict[str, Value] = {}
        if change.settings is not UNSET:
            try:
                values = parsed_settings(change.settings)
            except ValueError as error:
                raise ApiError("bad_request", str(error)) from None
        name = None if change.name is UNSET else change.name
        changed = await managed.records.set_app(app.id, values, name, by=await managed.changing(request, app))
        return self._shown(request, changed)

    async def delete(self, request: Request) -> Response:
        """DELETE /apps/{app_id}."""
        managed = self._managed
        app = managed.app(request)
        await delete_app(
            managed.records, managed.webhooks, app.id, await managed.changing(request, app), self._given_id
        )
        return managed.answer(request, None, status=204)

    def _shown(self, request: Request, app: App) -> Response:
        managed = self._managed
        endpoints = managed.webhooks.endpoints.of_app(app.id)
        return managed.answer(request, app_body(app, endpoints, managed.records.tokens_of(app.id)), app.id)


def _wanted(new: NewApp) -> Wanted:
    now_s = time.time()
    return Wanted(
        id="" if new.id is UNSET else new.id,
        name=new.name,
        one_key=False,
        keys=_wanted_keys(new.keys),
        settings={} if new.settings is UNSET else setting_texts(new.settings),
        history=[{name: getattr(rule, name) for name in rule.__struct_fields__} for rule in new.history_rules],
        webhooks=[
            WantedWebhook(
                endpoint_url(one),
                tuple(one.events),
                one.format,
                tuple(one.channels),
                tuple(one.client_events),
                one.batch,
            )
            for one in new.webhooks
        ],
        tokens=[
            WantedToken(one.name, list(one.scopes), None if one.lasts_s is UNSET else now_s + one.lasts_s)
            for one in new.tokens
        ],
    )


def _wanted_keys(new: list[NewKey]) -> list[WantedKey]:
    wanted = [
        WantedKey(
            secrets.token_hex(10) if one.key is UNSET else one.key,
            secrets.token_hex(20) if one.secret is UNSET else one.secret,
        )
        for one in new
    ]
    names = [one.key for one in wanted]
    if len(set(names)) < len(names):
        raise ApiError("bad_request", "keys: a key is here twice")
    return wanted
