"""The keys and the tokens of an app over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from redpoll.control.management.apps import app_path
from redpoll.control.management.bodies import (
    KeyChange,
    KeyList,
    NewKey,
    NewToken,
    TokenList,
    created_token_body,
    key_body,
    token_body,
)
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response
    from redpoll.control.management.managed import Managed
    from redpoll.protocol.apps import App, Key
    from redpoll.protocol.tokens import Token

__all__ = ["KeyManagement", "TokenManagement"]


class KeyManagement:
    def __init__(self, managed: Managed) -> None:
        self._managed = managed

    async def list(self, request: Request) -> Response:
        """GET …/keys."""
        app = self._managed.app(request)
        return self._managed.answer(request, KeyList([key_body(key) for key in app.keys]), app.id)

    async def add(self, request: Request) -> Response:
        """POST …/keys."""
        managed = self._managed
        app, new = managed.app(request), managed.body(request, NewKey)
        name, secret = (None if value is UNSET else value for value in (new.key, new.secret))
        if any(own.key == name for own in app.keys):
            raise ApiError("conflict", "the app has this key already; if it is disabled, PATCH enables it again")
        if name in managed.records.by_key:
            # Whose it is stays unsaid: a platform may pass this text to a customer.
            raise ApiError("conflict", f"the key {name} belongs to another app")
        key = await managed.records.add_key(app.id, name, secret, by=await managed.adding(request, app))
        return managed.answer(request, key_body(key, whole=True), app.id, 201, app_path(app.id, "keys", key.key))

    async def show(self, request: Request) -> Response:
        """GET …/keys/{key}."""
        app, key = self._resource(request)
        return self._managed.answer(request, key_body(key), app.id)

    async def change(self, request: Request) -> Response:
        """PATCH …/keys/{key}."""
        managed = self._managed
        app, key = self._resource(request)
        change = managed.body(request, KeyChange)
        by = await managed.changing(request, app)
        if change.enabled is UNSET:
            return await self.show(request)
        set_enabled = managed.records.enable_key if change.enabled else managed.records.disable_key
        key = await set_enabled(app.id, key.key, by=by)
        return managed.answer(request, key_body(key), app.id)

    async def delete(self, request: Request) -> Response:
        """DELETE …/keys/{key}."""
        managed = self._managed
        app, key = self._resource(request)
        await managed.records.delete_key(app.id, key.key, by=await managed.changing(request, app))
        return managed.answer(request, None, app.id, 204)

    def _resource(self, request: Request) -> tuple[App, Key]:
        app = self._managed.app(request)
        for key in app.keys:
            if key.key == request.parameters[1]:
                return app, key
        raise ApiError("not_found", "the app has no such key")


class TokenManagement:
    def __init__(self, managed: Managed) -> None:
        self._managed = managed

    async def list(self, request: Request) -> Response:
        """GET …/tokens."""
        managed = self._managed
        app = managed.app(request)
        body = TokenList([token_body(token) for token in managed.records.tokens_of(app.id)])
        return managed.answer(request, body, app.id)

    async def create(self, request: Request) -> Response:
        """POST …/tokens."""
        managed = self._managed
        app, new = managed.app(request), managed.body(request, NewToken)
        lasts_s = None if new.lasts_s is UNSET else float(new.lasts_s)
        token, plain = await managed.records.create_token(
            app.id, new.name, new.scopes, lasts_s, by=await managed.adding(request, app)
        )
        return managed.answer(
            request, created_token_body(token, plain), app.id, 201, app_path(app.id, "tokens", token.id)
        )

    async def show(self, request: Request) -> Response:
        """GET …/tokens/{token_id}."""
        app, token = self._resource(request)
        return self._managed.answer(request, token_body(token), app.id)

    async def revoke(self, request: Request) -> Response:
        """DELETE …/tokens/{token_id}."""
        managed = self._managed
        app, token = self._resource(request)
        await managed.records.revoke_tokens([token.id], by=await managed.changing(request, app))
        return managed.answer(request, None, app.id, 204)

    def _resource(self, request: Request) -> tuple[App, Token]:
        app = self._managed.app(request)
        for token in self._managed.records.tokens_of(app.id):
            if token.id == request.parameters[1]:
                return app, token
        raise ApiError("not_found", "the app has no such token")
