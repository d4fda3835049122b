"""The history rules and the webhooks of an app over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from redpoll.control.management.apps import app_path
from redpoll.control.management.bodies import (
    NewRule,
    NewWebhook,
    RuleChange,
    RuleList,
    WebhookChange,
    WebhookList,
    rule_body,
    webhook_body,
)
from redpoll.control.management.managed import endpoint_url
from redpoll.protocol.apps import HistoryRule
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response
    from redpoll.control.management.managed import Managed
    from redpoll.protocol.apps import App
    from redpoll.store.webhooks import Endpoint

__all__ = ["RuleManagement", "WebhookManagement"]


def _changed_fields(change: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}


class RuleManagement:
    def __init__(self, managed: Managed) -> None:
        self._managed = managed

    async def list(self, request: Request) -> Response:
        """GET …/history_rules."""
        app = self._managed.app(request)
        return self._managed.answer(request, RuleList([rule_body(rule) for rule in app.history]), app.id)

    async def add(self, request: Request) -> Response:
        """POST …/history_rules."""
        managed = self._managed
        app, new = managed.app(request), managed.body(request, NewRule)
        wanted = HistoryRule(id="", **msgspec.structs.asdict(new))
        rule = await managed.records.add_history_rule(app.id, wanted, by=await managed.adding(request, app))
        return managed.answer(request, rule_body(rule), app.id, 201, app_path(app.id, "history_rules", rule.id))

    async def show(self, request: Request) -> Response:
        """GET …/history_rules/{rule_id}."""
        app, rule = self._resource(request)
        return self._managed.answer(request, rule_body(rule), app.id)

    async def change(self, request: Request) -> Response:
        """PATCH …/history_rules/{rule_id}."""
        managed = self._managed
        app, rule = self._resource(request)
        values = _changed_fields(managed.body(request, RuleChange))
        changed = await managed.records.change_history_rule(
            app.id, rule.id, values, by=await managed.changing(request, app)
        )
        return managed.answer(request, rule_body(changed), app.id)

    async def delete(self, request: Request) -> Response:
        """DELETE …/history_rules/{rule_id}."""
        managed = self._managed
        app, rule = self._resource(request)
        await managed.records.remove_history_rule(app.id, rule.id, by=await managed.changing(request, app))
        return managed.answer(request, None, app.id, 204)

    def _resource(self, request: Request) -> tuple[App, HistoryRule]:
        app = self._managed.app(request)
        for rule in app.history:
            if rule.id == request.parameters[1]:
                return app, rule
        raise ApiError("not_found", "the app has no such history rule")


class WebhookManagement:
    def __init__(self, managed: Managed) -> None:
        self._managed = managed
        self._endpoints = managed.webhooks.endpoints

    async def list(self, request: Request) -> Response:
        """GET …/webhooks."""
        app = self._managed.app(request)
        body = WebhookList([webhook_body(endpoint) for endpoint in self._endpoints.of_app(app.id)])
        return self._managed.answer(request, body, app.id)

    async def create(self, request: Request) -> Response:
        """POST …/webhooks."""
        managed = self._managed
        app, new = managed.app(request), managed.body(request, NewWebhook)
        endpoint = await self._endpoints.create(
            app.id,
            endpoint_url(new),
            new.events,
            new.format,
            new.channels,
            client_events=new.client_events,
            batch=new.batch,
            by=await managed.adding(request, app),
        )
        location = app_path(app.id, "webhooks", endpoint.id)
        return managed.answer(request, webhook_body(endpoint, whole=True), app.id, 201, location)

    async def show(self, request: Request) -> Response:
        """GET …/webhooks/{webhook_id}."""
        app, endpoint = self._resource(request)
        return self._managed.answer(request, webhook_body(endpoint), app.id)

    async def change(self, request: Request) -> Response:
        """PATCH …/webhooks/{webhook_id}."""
        managed = self._managed
        app, endpoint = self._resource(request)
        values = _changed_fields(managed.body(request, WebhookChange))
        by = await managed.changing(request, app)
        if not values:
            return await self.show(request)
        endpoint = await self._endpoints.change(endpoint.id, **values, by=by)
        return managed.answer(request, webhook_body(endpoint), app.id)

    async def rotate(self, request: Request) -> Response:
        """POST …/webhooks/{webhook_id}/rotate. Needs If-Match: of two rotations, the first secret would be lost."""
        managed = self._managed
        app, endpoint = self._resource(request)
        rotated = await self._endpoints.rotate(endpoint.id, by=await managed.changing(request, app))
        return managed.answer(request, webhook_body(rotated, whole=True), app.id)

    async def delete(self, request: Request) -> Response:
        """DELETE …/webhooks/{webhook_id}."""
        managed = self._managed
        app, endpoint = self._resource(request)
        await self._endpoints.mark_deleted(endpoint.id, by=await managed.changing(request, app))
        # Before anything is waited for: another writer may delete the app meanwhile.
        answer = managed.answer(request, None, app.id, 204)
        await self._endpoints.discard_waiting(endpoint.id)
        return answer

    def _resource(self, request: Request) -> tuple[App, Endpoint]:
        app = self._managed.app(request)
        for endpoint in self._endpoints.of_app(app.id):
            if endpoint.id == request.parameters[1]:
                return app, endpoint
        raise ApiError("not_found", "the app has no such webhook")
