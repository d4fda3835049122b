"""The routes for Starlette and FastAPI over HTTP: what is refused, webhooks, and the publisher's life."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import Annotated

import aiohttp
import fastapi as fastapi_library
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.authentication import UnauthenticatedUser
from starlette.routing import Mount

from redpoll_client import AsyncPublisher, fastapi, starlette
from redpoll_client.rules import Rules
from redpoll_client.signatures import hex_hmac


@asynccontextmanager
async def serving(app):
    """The URL of an ASGI app."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        # A connection for each request: uvicorn closes those of failed ones.
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(force_close=True)) as session:
            yield session
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def received():
    return []


@pytest.fixture(params=["starlette", "fastapi"])
def app(request, received):
    rules = Rules(grant_s=60)
    rules.channel("private-{name}")(lambda user, name: name == user)

    async def on_webhook(event):
        if event.channel == "fails":
            event = None
        received.append(event.channel)

    options = {
        "user_id": str,
        "publisher": AsyncPublisher("1", "k", "s", host="127.0.0.1", port=1),
        "on_webhook": on_webhook,
        "endpoint_secret": "e",
    }
    if request.param == "starlette":
        realtime = starlette.Realtime(rules, get_user=lambda request: request.headers.get("X-User"), **options)
        app = Starlette(routes=[Mount("/realtime", routes=realtime.routes())], lifespan=realtime.lifespan)
    else:

        async def current_user(request: fastapi_library.Request):
            return request.headers.get("X-User")

        realtime = fastapi.Realtime(rules, get_user=current_user, **options)
        app = fastapi_library.FastAPI(lifespan=realtime.lifespan)
        app.include_router(realtime.router(), prefix="/realtime")
    app.state.realtime = realtime
    return app


async def test_auth_routes(app):
    signer = app.state.realtime.publisher
    async with serving(app) as session:

        async def post(path, user=None, **fields):
            headers = {"X-User": user} if user else {}
            async with session.post(f"/realtime/{path}", data=fields, headers=headers) as response:
                return response.status, await response.json()

        form = {"socket_id": "1.2", "channel_name": "private-anna"}
        assert await post("auth", "anna", **form) == (200, signer.authenticate("private-anna", "1.2"))
        assert (await post("auth", "bert", **form))[0] == 403
        assert (await post("auth", **form))[0] == 403
        assert (await post("auth", "anna", socket_id="1.2"))[0] == 400
        assert (await post("auth", "anna", socket_id="x" * 70_000))[0] == 413
        assert await post("user-auth", "anna", **form) == (200, signer.authenticate_user("1.2", {"id": "anna"}))
        assert (await post("user-auth", **form))[0] == 403
        granted = (await post("grant", "anna", **{"channel_name[]": "private-anna"}))[1]
        assert (granted["channels"], granted["auth"][:2]) == (["private-anna"], "k:")
        assert (await post("grant", **{"channel_name[]": "private-anna"}))[0] == 403
    with pytest.raises(RuntimeError, match="closed"):
        await signer.trigger("a", "e", "")


async def test_webhooks_are_verified_and_repeats_ignored(app, received):
    async with serving(app) as session:

        async def post(channel, delivery, secret="e"):
            body = json.dumps({"event": "channel.occupied", "data": {"channel": channel}, "timestamp": 1}).encode()
            headers = {"X-Service-Signature": hex_hmac(secret, body), "X-Service-Delivery": delivery}
            async with session.post("/realtime/webhook", data=body, headers=headers) as response:
                return response.status

        assert await post("a", "1") == 200
        assert await post("a", "1") == 200
        assert await post("a", "2", "wrong") == 401
        assert await post("x" * (1024 * 1024), "3") == 413
        # A handler that fails is called again.
        assert [await post("fails", "4"), await post("fails", "4")] == [500, 500]
        assert received == ["a"]


async def test_overrides_replace_the_publisher():
    realtime = fastapi.Realtime(
        Rules(), get_user=lambda: None, user_id=str, publisher=AsyncPublisher("1", "k", "s", host="127.0.0.1", port=1)
    )
    app = fastapi_library.FastAPI(lifespan=realtime.lifespan)

    @app.get("/key")
    async def key(publisher: Annotated[AsyncPublisher, fastapi_library.Depends(realtime.get_publisher)]) -> str:
        return publisher.endpoint.key

    app.dependency_overrides[realtime.get_publisher] = lambda: AsyncPublisher("1", "other", "s", host="h")
    async with serving(app) as session, session.get("/key") as response:
        assert await response.json() == "other"


async def test_starlettes_object_for_nobody_is_nobody():
    rules = Rules()
    rules.channel("private-{name}")(lambda user, name: True)
    realtime = starlette.Realtime(
        rules,
        get_user=lambda request: UnauthenticatedUser(),
        user_id=lambda user: user.display_name,
        publisher=AsyncPublisher("1", "k", "s", host="127.0.0.1", port=1),
    )
    form = {"socket_id": "1.2", "channel_name": "private-a"}
    async with serving(Starlette(routes=realtime.routes())) as session:
        for path in ("/auth", "/user-auth"):
            async with session.post(path, data=form) as response:
                assert (response.status, await response.json()) == (403, {"error": "forbidden"})
