"""What all handlers of the management API share: the app, the token's user, conditions, answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from redpoll.control.http.response import TRACE_HEAD, Response, header_line
from redpoll.control.management.tags import Tags
from redpoll.control.records.records import RecordConflict, RecordError, Records
from redpoll.protocol.errors import ApiError, fault_of
from redpoll.store.audit import Actor

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.management.bodies import NewWebhook
    from redpoll.control.records.spreading import Spreading
    from redpoll.control.webhooks.webhooks import Webhooks
    from redpoll.protocol.apps import App

__all__ = ["Managed", "endpoint_url", "refusals"]

_JSON_TYPES: Final = ("application/json", "application/merge-patch+json")
_Body = TypeVar("_Body")
_encode: Final = msgspec.json.Encoder().encode


def endpoint_url(new: NewWebhook) -> str | None:
    """The URL of a new webhook, None if its deliveries are pulled. Raises ApiError unless it has one of both."""
    if new.pull is not (new.url is UNSET):
        raise ApiError("bad_request", "a webhook needs either a url, or pull: true")
    return None if new.url is UNSET else new.url


class Managed:
    """The records of all apps, and how a request of the management API reads and changes them."""

    def __init__(self, records: Records, webhooks: Webhooks, tag_secret: bytes) -> None:
        self.records = records
        self.webhooks = webhooks
        self.tags = Tags(records, webhooks.endpoints, tag_secret)

    def app(self, request: Request) -> App:
        """The app of the path. Raises ApiError."""
        app = self.records.apps.get(request.parameters[0])
        if app is None:
            raise ApiError("unknown_app", "there is no app with this id")
        return app

    def body(self, request: Request, kind: type[_Body]) -> _Body:
        """The checked body. Raises ApiError."""
        content_type = request.headers.get("Content-Type")
        if content_type is not None and content_type.partition(";")[0].strip().lower() not in _JSON_TYPES:
            raise ApiError("unsupported_media_type", f"the body must be {' or '.join(_JSON_TYPES)}")
        try:
            return msgspec.json.decode(request.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError("bad_request", f"the body is not as described: {fault_of(error)}") from None

    def by(self, request: Request, condition: Callable[[], None] | None = None) -> Actor:
        """Who asks, as the audit log names them."""
        assert request.token is not None
        return Actor(f"token {request.token.id} {request.token.name}", request.remote, condition)

    async def adding(self, request: Request, app: App) -> Actor:
        """Who adds something to the app, if it still exists and matches If-Match, which the request may have."""
        if_match = request.headers.get("If-Match", "*")
        if not self.tags.matches(app.id, if_match):
            # Another node may have answered with this tag a moment ago.
            await self.records.sync()
        self.tags.check(app.id, if_match)
        return self.by(request, lambda: self.tags.check(app.id, if_match))

    async def changing(self, request: Request, app: App) -> Actor:
        """Who changes the app or something of it, which needs If-Match. It is checked here, and in the transaction
        again, which begins with what others have committed. Raises ApiError."""
        if "If-Match" not in request.headers:
            raise ApiError(
                "precondition_required",
                "send If-Match with the ETag of the answer that you read, so that no other writer's change is "
                "overwritten",
            )
        return await self.adding(request, app)

    def answer(self, request: Request, body: Any, app_id: str = "", status: int = 200, location: str = "") -> Response:
        """An answer with the app's tag, if there is an `app_id`. Call it right after the change, before anything is
        waited for. `body` None: there is none."""
        headers = b"X-Service-Trace-Id: " if body is None else TRACE_HEAD
        headers += request.trace_id.encode() + b"\r\n" + request.more_headers
        # What is read here may be out of date at once, and has parts of secrets.
        headers += header_line("Cache-Control", "no-store")
        if app_id:
            headers += header_line("ETag", self.tags.of(app_id))
        if location:
            headers += header_line("Location", location)
        return Response(status, b"" if body is None else _encode(body), headers)


_Handler = Callable[["Request"], Coroutine[Any, Any, Response]]


def refusals(handler: _Handler, spreading: Spreading | None) -> _Handler:
    """The handler, with refusals by the rules of records as errors of the API. With `spreading`, it answers when all
    workers know the change."""

    async def handled(request: Request) -> Response:
        try:
            response = await handler(request)
            if spreading is not None:
                await spreading.wait()
            return response
        except RecordConflict as error:
            raise ApiError("conflict", str(error)) from None
        except RecordError as error:
            raise ApiError("bad_request", str(error)) from None

    return handled
