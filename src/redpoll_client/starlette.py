"""Starlette: the routes of auth, sign-in and webhooks, and a publisher that lives as long as the app.

    realtime = Realtime(rules, get_user=lambda request: request.user, user_id=lambda user: user.username)
    app = Starlette(routes=[Mount("/realtime", routes=realtime.routes())], lifespan=realtime.lifespan)

Channels are signed at `/realtime/auth`, sign-ins at `/realtime/user-auth`; `/realtime/grant` answers with one grant for
many channels, if the rules have `grant_s`; webhooks arrive at `/realtime/webhook`. For
pages of other origins add Starlette's CORSMiddleware. A page of the same origin needs a session cookie with
`SameSite=Lax` or a token in a header, so that no other site can ask in the user's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from redpoll_client.async_publisher import AsyncPublisher
from redpoll_client.errors import InvalidWebhook
from redpoll_client.rules import MAX_AUTH_BYTES, BadAuthRequest, Rules, authorize, grant, parse_auth, sign_in
from redpoll_client.webhooks import MAX_WEBHOOK_BYTES, SeenDeliveries, WebhookEvent, verify_webhook

__all__ = ["BodyTooLarge", "Realtime", "read_body"]


class BodyTooLarge(Exception):
    """A request's body is longer than allowed."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises BodyTooLarge if it has more than `limit` bytes: the rest is read and dropped, up to four times
    the limit, because a client that still sends can't read the answer."""
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            body += piece
        elif size > 4 * limit:
            break
    if size > limit:
        raise BodyTooLarge
    return bytes(body)


class Realtime:
    """An app's publisher, rules and webhooks.

    - `get_user(request)` returns the user who is logged in, or None; it may be a coroutine.
    - `user_id(user)` returns the id under which others see the user, a string.
    - `publisher` is an AsyncPublisher; by default one from REDPOLL_URL or PUSHER_URL, made when the app starts or at
      its first use.
    - `on_webhook(event)`, a coroutine, gets each WebhookEvent. If it raises, the server repeats the delivery.
    - `endpoint_secret`: those of `redpoll webhook create`; without them, only Pusher's format is accepted, and
      only signed with the publisher's key.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        get_user: Callable[[Request], Any],
        user_id: Callable[[Any], str],
        publisher: AsyncPublisher | None = None,
        on_webhook: Callable[[WebhookEvent], Awaitable[None]] | None = None,
        endpoint_secret: str | Sequence[str] = (),
    ) -> None:
        self.rules = rules
        self._publisher = publisher
        self._is_given = publisher is not None
        self._get_user = get_user
        self._user_id = user_id
        self._on_webhook = on_webhook
        self._endpoint_secret = endpoint_secret
        self._seen = SeenDeliveries()

    @property
    def publisher(self) -> AsyncPublisher:
        """The app's publisher. Raises ValueError if none was given and neither REDPOLL_URL nor PUSHER_URL is set."""
        if self._publisher is None:
            self._publisher = AsyncPublisher()
        return self._publisher

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For `lifespan=`: closes the publisher's connections at the app's end. An app that is started again, as in
        tests, reads REDPOLL_URL again."""
        async with self.publisher:
            yield
        if not self._is_given:
            self._publisher = None

    def routes(self) -> list[Route]:
        """`/auth`, `/user-auth`, `/grant`, and with `on_webhook` `/webhook`; all POST."""
        routes = [
            Route("/auth", self.auth, methods=["POST"]),
            Route("/user-auth", self.user_auth, methods=["POST"]),
            Route("/grant", self.grant, methods=["POST"]),
        ]
        if self._on_webhook is not None:
            routes.append(Route("/webhook", self.webhook, methods=["POST"]))
        return routes

    async def auth(self, request: Request) -> Response:
        """Signs the channels that the rules let the user join."""
        return await self.answer(request, await self._user(request), authorize, self.publisher)

    async def user_auth(self, request: Request) -> Response:
        """Signs the user's connection in."""
        return await self.answer(request, await self._user(request), sign_in, self.publisher)

    async def grant(self, request: Request) -> Response:
        """Makes one grant for the channels that the rules let the user join."""
        return await self.answer(request, await self._user(request), grant, self.publisher)

    async def answer(
        self,
        request: Request,
        user: Any,
        decide: Callable[..., Awaitable[tuple[int, Any]]],
        signer: AsyncPublisher,
    ) -> Response:
        """The response to a request of this user; `decide` is `authorize`, `sign_in` or `grant`."""
        try:
            body = await read_body(request, MAX_AUTH_BYTES)
            asked = parse_auth(request.headers.get("Content-Type", ""), body)
        except BodyTooLarge:
            return JSONResponse({"error": f"at most {MAX_AUTH_BYTES} bytes are allowed"}, 413)
        except BadAuthRequest as error:
            return JSONResponse({"error": str(error)}, error.status)
        # Starlette's AuthenticationMiddleware has an object for nobody.
        if user is not None and not getattr(user, "is_authenticated", True):
            user = None
        user_id = None if user is None else self._user_id(user)
        status, content = await decide((self.rules, signer, asked, user, user_id), asyncio.to_thread)
        return JSONResponse(content, status)

    async def webhook(self, request: Request) -> Response:
        """Verifies a webhook, ignores a repeat of one that was handled, and hands its events over."""
        end = self.publisher.endpoint
        try:
            body = await read_body(request, MAX_WEBHOOK_BYTES)
            delivery = verify_webhook(
                body, request.headers, key=end.key, secret=end.secret, endpoint_secret=self._endpoint_secret
            )
        except BodyTooLarge:
            return JSONResponse({"error": f"at most {MAX_WEBHOOK_BYTES} bytes are allowed"}, 413)
        except InvalidWebhook as error:
            return JSONResponse({"error": "not accepted"}, error.status)
        assert self._on_webhook is not None
        if not self._seen.has(delivery.id):
            for event in delivery.events:
                await self._on_webhook(event)
            self._seen.add(delivery.id)
        return Response(status_code=200)

    async def _user(self, request: Request) -> Any:
        user = self._get_user(request)
        return await user if inspect.isawaitable(user) else user
