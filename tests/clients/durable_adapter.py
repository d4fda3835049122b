"""Lets the conformance tests of Durable Streams seed channels: the writing half of their protocol, as publishes.

redpoll has the reading half. `PUT` and `POST` become publishes, one for each message; `DELETE` clears the history.
`GET` and `HEAD` go to redpoll and come back as they are, with two exceptions that the tests need: a stream that no test
has created is 404, because channels always exist, and of a stream that isn't JSON the array of strings becomes the text
or bytes. Bytes are published as a JSON string with a character for each, so that `0` comes back as a string, too.
An end without a message is an event without text, because redpoll ends a channel with an event.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from yarl import URL

from helpers.server import Server
from helpers.wire import Api

__all__ = ["adapter"]

_FORWARDED = ("Accept", "If-None-Match", "Origin", "Access-Control-Request-Headers", "Access-Control-Request-Method")
_BYTES = "application/octet-stream"
_HOP_BY_HOP = ("Transfer-Encoding", "Connection", "Content-Length", "Date", "Keep-Alive")


class _Adapter:
    def __init__(self, server: Server, token: str, prefix: str, api: Api, session: aiohttp.ClientSession) -> None:
        self._channels: dict[str, tuple[str, str]] = {}
        self._url = f"{server.public_url}/apps/{server.app_id}/channels"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._prefix = prefix
        self._api = api
        self._session = session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            return await self._create(request)
        if request.method == "OPTIONS":
            return await self._read(request, f"{self._prefix}any", "")
        if request.path not in self._channels:
            return web.Response(status=404, headers={"X-Content-Type-Options": "nosniff"})
        channel, kind = self._channels[request.path]
        if request.method == "POST":
            return await self._append(request, channel, kind)
        if request.method == "DELETE":
            del self._channels[request.path]
            await self._api.ask("DELETE", f"/channels/{channel}/history")
            return web.Response(status=204)
        return await self._read(request, channel, kind)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        known = self._channels.get(request.path)
        kind = request.headers.get("Content-Type", _BYTES).lower()
        if known is None:
            name = re.sub("[^a-z0-9-]", "-", request.path.lower())[-80:]
            self._channels[request.path] = known = (f"{self._prefix}{name}-{secrets.token_hex(4)}", kind)
            await self._publish(request, known[0], kind)
            status = 201
        else:
            status = 200 if known[1] == kind else 409
        return web.Response(status=status, headers={**await self._position(known[0]), "Content-Type": known[1]})

    async def _append(self, request: web.Request, channel: str, kind: str) -> web.StreamResponse:
        status = await self._publish(request, channel, kind)
        return web.Response(status=status, headers=await self._position(channel))

    async def _publish(self, request: web.Request, channel: str, kind: str) -> int:
        body = await request.read()
        messages: list[str] = []
        if body and kind == _BYTES:
            messages = [json.dumps(body.decode("latin-1"))]
        elif body and not kind.startswith("application/json"):
            messages = [body.decode()]
        elif body:
            content = json.loads(body)
            messages = [json.dumps(item) for item in (content if isinstance(content, list) else [content])]
        ends = request.headers.get("Stream-Closed", "").lower() == "true"
        if ends and not messages:
            messages = [""]
        for place, message in enumerate(messages):
            event = {"name": "m", "channels": [channel], "data": message}
            status, answer = await self._api.ask(
                "POST", "/events", {**event, "end": ends and place == len(messages) - 1}
            )
            if status != 200:
                assert answer["code"] == "channel_ended", answer
                return 409
        return 204

    async def _position(self, channel: str) -> dict[str, str]:
        async with self._session.head(f"{self._url}/{channel}/stream", headers=self._headers) as response:
            assert response.status == 200
            return {name: value for name, value in response.headers.items() if name.startswith("Stream-")}

    async def _read(self, request: web.Request, channel: str, kind: str) -> web.StreamResponse:
        query = f"{request.raw_path.partition('?')[2]}&only=data".lstrip("&")
        url = f"{self._url}/{channel}/stream?{query}"
        headers = {name: value for name, value in request.headers.items() if name in _FORWARDED}
        async with self._session.request(
            request.method, URL(url, encoded=True), headers={**headers, **self._headers}
        ) as found:
            kept = {name: value for name, value in found.headers.items() if name not in _HOP_BY_HOP}
            is_text = not kind.startswith("application/json") and kept.get("Content-Type") == "application/json"
            if is_text and found.status == 200:
                body = await found.read()
                text = "".join(json.loads(body)) if body else ""
                content = text.encode("latin-1" if kind == _BYTES else "utf-8")
                return web.Response(status=200, headers={**kept, "Content-Type": kind}, body=content)
            answer = web.StreamResponse(status=found.status, headers=kept)
            await answer.prepare(request)
            async for part in found.content.iter_any():
                await answer.write(part)
            return answer


@asynccontextmanager
async def adapter(server: Server, token: str, prefix: str) -> AsyncIterator[str]:
    """Serves on a free port; yields its URL. Channels get names with this prefix, which must be stored."""
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Api(server, connections=50) as api,
        aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session,
    ):
        app = web.Application(client_max_size=32 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", _Adapter(server, token, prefix, api, session).answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
