"""Controls the official JavaScript clients in a Node process, through clients/driver.mjs.

`await node.connect("anna")` connects a pusher-js with default options. `await node.seen(client="anna", event="x")`
waits for an event of that client. `auth_endpoint()` is a small HTTP server that signs subscriptions, as an
application's backend does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from helpers.server import Server
from helpers.wire import channel_auth

HERE = Path(__file__).parent
News = dict[str, Any]


class NodeError(RuntimeError):
    """A library threw an exception or rejected a promise. The text is the one from JavaScript."""


class Node:
    """`async with Node(server) as node:`. `news` has every event and state change of all clients, in order."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.news: list[News] = []
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()
        self._numbers = 0

    async def __aenter__(self) -> Self:
        assert (HERE / "node_modules").is_dir(), "run `npm ci` in tests/clients first"
        self._process = await asyncio.create_subprocess_exec(
            "node",
            str(HERE / "driver.mjs"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(60):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        await self._reader
        if error[0] is None:
            assert code == 0, f"the Node driver ended with {code}"

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            message = json.loads(line)
            if "id" in message:
                future = self._awaited.pop(message["id"])
                if future.done():
                    # The caller stopped waiting for it.
                    continue
                if "error" in message:
                    future.set_exception(NodeError(message["error"]))
                else:
                    future.set_result(message["ok"])
            else:
                self.news.append(message)
                self._changed.set()
        for future in self._awaited.values():
            future.set_exception(NodeError("the Node driver ended"))

    async def call(self, command: str, **parameters: object) -> Any:
        """Runs a command of driver.mjs and returns its result. Raises NodeError."""
        assert self._process.stdin is not None
        self._numbers += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[self._numbers] = future
        line = json.dumps({"id": self._numbers, "do": command, **parameters})
        self._process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(60):
            return await future

    # -- events and states of the clients

    def matching(self, **fields: object) -> list[News]:
        """All news with these fields."""
        return [item for item in self.news if all(item.get(name) == value for name, value in fields.items())]

    async def seen(self, count: int = 1, timeout_s: float = 60.0, **fields: object) -> News:
        """Waits for `count` pieces of news with these fields and returns the last of them."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.matching(**fields)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s} s: {count} × {fields}; last: {self.news[-5:]}") from None
        return self.matching(**fields)[count - 1]

    # -- the libraries, with the options that README.md recommends

    def options(self, auth_url: str | None = None, **more: object) -> dict[str, object]:
        options: dict[str, object] = {
            "cluster": "any",
            "wsHost": "127.0.0.1",
            "wsPort": self.server.port,
            "forceTLS": False,
            "enabledTransports": ["ws", "wss"],
            **more,
        }
        if auth_url is not None:
            options["channelAuthorization"] = {"endpoint": auth_url, "transport": "ajax"}
        return options

    async def connect(self, client: str, auth_url: str | None = None, *, key: str | None = None) -> str:
        """Connects a pusher-js and returns its socket id."""
        await self.call("connect", client=client, key=key or self.server.app_key, options=self.options(auth_url))
        await self.seen(client=client, state="connected")
        socket_id = await self.call("socket_id", client=client)
        assert isinstance(socket_id, str)
        return socket_id

    async def subscribe(self, client: str, channel: str, *events: str) -> News:
        """Subscribes a pusher-js and returns its success event."""
        name = "pusher:subscription_succeeded"
        before = len(self.matching(client=client, channel=channel, event=name))
        await self.call("subscribe", client=client, channel=channel, events=list(events))
        return await self.seen(before + 1, client=client, channel=channel, event=name)

    async def echo(self, client: str, auth_url: str | None = None) -> str:
        """Connects a laravel-echo with its `reverb` broadcaster and returns its socket id."""
        options = self.options(None, broadcaster="reverb", key=self.server.app_key)
        if auth_url is not None:
            options["authEndpoint"] = auth_url
        await self.call("echo", client=client, options=options)
        await self.seen(client=client, state="connected")
        socket_id = await self.call("echo_socket_id", client=client)
        assert isinstance(socket_id, str)
        return socket_id


Signer = Callable[[Mapping[str, str], Mapping[str, object] | None], Awaitable[Mapping[str, Any]]]


def local_signer(server: Server) -> Signer:
    """A signer that uses the app's secret itself, without a request to the server."""

    async def sign(form: Mapping[str, str], member: Mapping[str, object] | None) -> Mapping[str, Any]:
        if member is None:
            return {"auth": channel_auth(server, form["socket_id"], form["channel_name"])}
        channel_data = json.dumps(member)
        auth = channel_auth(server, form["socket_id"], form["channel_name"], channel_data)
        return {"auth": auth, "channel_data": channel_data}

    return sign


@contextlib.asynccontextmanager
async def auth_endpoint(sign: Signer) -> AsyncIterator[str]:
    """Runs an application's auth endpoint and yields its address. `?user=ID` in the address replaces a login session.

    Without a user it refuses presence channels with 403, as backends do.
    """

    async def authorize(request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        member: dict[str, object] | None = None
        if form["channel_name"].startswith("presence-"):
            if "user" not in request.query:
                return web.json_response({"error": "not signed in"}, status=403)
            user = request.query["user"]
            member = {"user_id": user, "user_info": {"name": f"name of {user}"}}
        return web.json_response(await sign(form, member))

    application = web.Application()
    application.router.add_post("/auth", authorize)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/auth"
    finally:
        await runner.cleanup()
