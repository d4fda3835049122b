"""FastAPI: `redpoll_client.starlette` with dependencies.

    realtime = Realtime(rules, get_user=current_user, user_id=lambda user: user.id)
    app = FastAPI(lifespan=realtime.lifespan)
    app.include_router(realtime.router(), prefix="/realtime")

    @app.post("/orders/{order_id}/pay")
    async def pay(order_id: int, publisher: Annotated[AsyncPublisher, Depends(realtime.get_publisher)]):
        await publisher.trigger(f"private-order-{order_id}", "paid", {})

`get_user` is an ordinary dependency, which returns the user or None. In a test, `app.dependency_overrides` replaces it,
and `realtime.get_publisher` too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from redpoll_client import starlette
from redpoll_client.async_publisher import AsyncPublisher
from redpoll_client.rules import Rules, authorize, grant, sign_in
from redpoll_client.webhooks import WebhookEvent

__all__ = ["Realtime"]


class Realtime(starlette.Realtime):
    """As in Starlette, but `get_user` is a dependency with whatever parameters it needs."""

    def __init__(
        self,
        rules: Rules,
        *,
        get_user: Callable[..., Any],
        user_id: Callable[[Any], str],
        publisher: AsyncPublisher | None = None,
        on_webhook: Callable[[WebhookEvent], Awaitable[None]] | None = None,
        endpoint_secret: str | Sequence[str] = (),
    ) -> None:
        super().__init__(
            rules,
            get_user=get_user,
            user_id=user_id,
            publisher=publisher,
            on_webhook=on_webhook,
            endpoint_secret=endpoint_secret,
        )
        self._dependency = get_user

    def get_publisher(self) -> AsyncPublisher:
        """A dependency: the app's publisher."""
        return self.publisher

    def router(self) -> APIRouter:
        """`/auth`, `/user-auth`, `/grant`, and with `on_webhook` `/webhook`; all POST, none in the OpenAPI document."""
        router = APIRouter(include_in_schema=False)

        current, signing = Depends(self._dependency), Depends(self.get_publisher)

        async def auth(request: Request, user: Any = current, signer: AsyncPublisher = signing) -> Response:
            return await self.answer(request, user, authorize, signer)

        async def user_auth(request: Request, user: Any = current, signer: AsyncPublisher = signing) -> Response:
            return await self.answer(request, user, sign_in, signer)

        async def one_grant(request: Request, user: Any = current, signer: AsyncPublisher = signing) -> Response:
            return await self.answer(request, user, grant, signer)

        router.add_api_route("/grant", one_grant, methods=["POST"], response_model=None)
        router.add_api_route("/auth", auth, methods=["POST"], response_model=None)
        router.add_api_route("/user-auth", user_auth, methods=["POST"], response_model=None)
        if self._on_webhook is not None:
            router.add_api_route("/webhook", self.webhook, methods=["POST"], response_model=None)
        return router
