"""One redpoll server for the whole matrix, with an app for each combination of settings, and a website.

The server has two workers and both ports, `ws` and `wss`. The website is what an application would have: the page that
Chromium opens, and the endpoints that sign for its visitors. The endpoint's query names the visitor, where a real
application would use its session.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from click.testing import CliRunner

from clients.node import HERE as CLIENTS
from clients.node import Node
from helpers import browser
from helpers.certs import public_key_der, self_signed
from helpers.server import Server
from helpers.wire import channel_auth, digest
from redpoll.cli import main as redpoll_command

MASTER_KEY = bytes(range(32))

# How each app of the server is set; all others keep the defaults.
APPS = {
    "plain": {},
    "social": {"watchlist": "true", "subscription_count": "true"},
    "small rooms": {"max_presence_members": "2"},
    "authorised only": {},  # the cell sets the time, when its clients have subscribed
    "our page only": {},  # allowed_origins is the website, whose port is not known before
    "other pages only": {"allowed_origins": "shop.example"},
    "disabled": {"enabled": "false"},
    "one connection": {"max_connections": "1"},
    "tls only": {"tls_required": "true"},
    "idempotent": {"idempotency": "true"},
    "keeps": {"user_resume_s": "60"},
    "granting": {"grants": "true"},
    "pulling": {},
}


# History rules of the app "keeps": the prefixes of channels, what is replayed to subscribers, and how often they get
# events.
KEEPS: dict[str, dict[str, int | str | bool]] = {
    "replayed-": {"replay": 3},
    "presence-replayed-": {"replay_seconds": 600},
    "asked-": {},
    "read-": {},
    "text-": {"max_rate": 20, "join": "delta", "by": "stream"},
    "private-resumed-": {},
    "presence-resumed-": {},
    "growing-": {"keep": 300, "replay": 9, "max_rate": 2, "join": "delta", "by": "message_id"},
    "newest-": {"max_rate": 2, "latest": True},
}


@dataclass(frozen=True)
class App:
    """One app of the server, and one of its keys: what a client or a backend is configured with."""

    port: int
    tls_port: int
    app_id: str
    app_key: str
    app_secret: str

    def with_key(self, made: Mapping[str, Any]) -> App:
        return App(self.port, self.tls_port, self.app_id, made["key"], made["secret"])


@dataclass(frozen=True)
class Visitor:
    """A client as the application knows it that signs for it."""

    app: App
    user: str | int | None = None
    watchlist: tuple[str, ...] = ()
    by_signin: bool = False  # Presence channels are signed without channel_data, for the signed-in user.
    forged: bool = False  # The endpoint signs with a wrong secret.
    grant: str = ""  # `auth` of a signed channel grant: the client asks no endpoint.

    def member(self) -> dict[str, object]:
        return {"user_id": self.user, "user_info": {"name": f"name of {self.user}"}}

    def signing(self) -> App:
        app = self.app
        return App(app.port, app.tls_port, app.app_id, app.app_key, "f" * 20) if self.forged else app


@dataclass
class World:
    server: Server
    apps: dict[str, App]
    node: Node
    site_url: str
    certificate: Path
    page_token: str = ""
    visitors: dict[str, Visitor] = field(default_factory=dict)
    # The channels that the endpoint was asked to sign for, one for each request.
    asked: list[str] = field(default_factory=list)
    chromium_version: str = ""

    def endpoint(self, path: str, visitor: Visitor) -> str:
        """The address of the application's endpoint for this visitor."""
        number = str(len(self.visitors))
        self.visitors[number] = visitor
        return f"{self.site_url}{path}?{urlencode({'visitor': number})}"

    async def command(self, *words: str) -> Any:
        """Runs a command with --json, as an operator would; returns the answer."""
        return await asyncio.to_thread(_command, self.server, *words)


def _command(server: Server, *words: str) -> Any:
    result = CliRunner().invoke(redpoll_command, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, f"redpoll {' '.join(words)}: {result.output} {result.exception}"
    return json.loads(result.stdout)


def shared_secret(channel: str) -> str:
    """The key of an encrypted channel (protocol/README.md "Encrypted channels")."""
    return base64.b64encode(hashlib.sha256(channel.encode() + MASTER_KEY).digest()).decode()


@asynccontextmanager
async def running_world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="rpm") as folder:
        certificate, key = self_signed(Path(folder))
        settings = {
            "tls_port": 0,
            "tls_cert": certificate,
            "tls_key": key,
            "encryption_master_key": base64.b64encode(MASTER_KEY).decode(),
            # Receivers of webhooks are on loopback.
            "webhook_allow_http": 1,
            "webhook_allow_addresses": "127.0.0.0/8",
            # Every request of the matrix comes from one address.
            "trigger_rate_per_minute": 0,
        }
        with Server(workers=2, **settings) as server, _trusted(certificate):
            async with Node(server) as node:
                world = World(server, {}, node, "", certificate)
                async with website(world):
                    await _make_apps(world)
                    world.chromium_version = await _open_chromium(world)
                    yield world


@contextmanager
def _trusted(certificate: Path) -> Iterator[None]:
    """Node's libraries and pysher's WebSocket client, begun in here, trust the certificate."""
    names = ("NODE_EXTRA_CA_CERTS", "WEBSOCKET_CLIENT_CA_BUNDLE")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(dict.fromkeys(names, str(certificate)))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


async def _make_apps(world: World) -> None:
    server = world.server
    tls = re.search(r"^ready .* tls=\S+:(\d+)", server.output(), re.MULTILINE)
    assert tls is not None, server.output()
    for name, values in APPS.items():
        made = {"id": server.app_id, "key": server.app_key, "secret": server.app_secret}
        if name != "plain":
            made = await world.command("app", "create", name)
        world.apps[name] = App(server.port, int(tls[1]), str(made["id"]), made["key"], made["secret"])
        if name == "our page only":
            values = {"allowed_origins": world.site_url.partition("://")[2] + f",127.0.0.1:{server.port}"}
        if values:
            await world.command("app", "set", str(made["id"]), *(f"{key}={value}" for key, value in values.items()))
    for prefix, fields in KEEPS.items():
        rule = ["--prefix", prefix]
        for name, value in {"keep": 100, "seconds": 3600, **fields}.items():
            rule += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        await world.command("history", "rule", "add", world.apps["keeps"].app_id, *rule)
    token = await world.command("token", "create", server.app_id, "--name", "page", "--scope", "auth")
    world.page_token = token["token"]


async def _open_chromium(world: World) -> str:
    # Chromium's way to accept one self-signed certificate: by the hash of its key.
    public_key = public_key_der(world.certificate)
    pin = base64.b64encode(hashlib.sha256(public_key).digest()).decode()
    options = browser.node_options(f"--ignore-certificate-errors-spki-list={pin}")
    version = await world.node.call("browser", url=f"{world.site_url}/", options=options)
    assert isinstance(version, str)
    return version


@asynccontextmanager
async def website(world: World) -> AsyncIterator[None]:
    """The application: its page, and its endpoints `/auth` and `/user-auth`."""

    def who(request: web.Request) -> Visitor:
        return world.visitors[request.query["visitor"]]

    async def auth(request: web.Request) -> web.Response:
        form, visitor = await request.post(), who(request)
        socket_id, channel = str(form["socket_id"]), str(form["channel_name"])
        world.asked.append(channel)
        answer = {}
        data = None
        if channel.startswith("presence-") and not visitor.by_signin:
            answer["channel_data"] = data = json.dumps(visitor.member())
        if channel.startswith("private-encrypted-"):
            answer["shared_secret"] = shared_secret(channel)
        return web.json_response({"auth": channel_auth(visitor.signing(), socket_id, channel, data), **answer})

    async def user_auth(request: web.Request) -> web.Response:
        form, visitor = await request.post(), who(request)
        if visitor.user is None:
            return web.json_response({"error": "log in first"}, status=403)
        return web.json_response(signed_user(visitor, str(form["socket_id"])))

    def file(path: Path, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        text = path.read_text()

        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=text, content_type=f"text/{kind}")

        return answer

    async def text_hook(request: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(_bundled_hook), content_type="text/javascript")

    application = web.Application()
    application.router.add_get("/text_hook.mjs", text_hook)
    application.router.add_post("/auth", auth)
    application.router.add_post("/user-auth", user_auth)
    application.router.add_get("/", file(Path(__file__).parent / "page.html", "html"))
    application.router.add_get("/page.mjs", file(CLIENTS / "page.mjs", "javascript"))
    # The build that pages load, with the part that decrypts.
    pusher_js = CLIENTS / "node_modules/pusher-js/dist/web/pusher-with-encryption.min.js"
    application.router.add_get("/pusher.js", file(pusher_js, "javascript"))
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        world.site_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield
    finally:
        await runner.cleanup()


def _bundled_hook() -> str:
    """clients/text_hook.mjs with redpoll-js and React, as one module."""
    package = CLIENTS.parents[1] / "src" / "redpoll_js"
    words = ["text_hook.mjs", "--bundle", "--format=esm", '--define:process.env.NODE_ENV="development"']
    words += [f"--alias:redpoll-js/react={package}/react.mjs", f"--alias:redpoll-js={package}/index.mjs"]
    modules = CLIENTS / "node_modules"
    made = subprocess.run(
        [str(modules / ".bin" / "esbuild"), *words],
        cwd=CLIENTS,
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout


def signed_user(visitor: Visitor, socket_id: str) -> dict[str, str]:
    """The `auth` and `user_data` of a signin (protocol/README.md "Users and watchlists")."""
    user: dict[str, object] = {"id": str(visitor.user), "user_info": {"name": f"name of {visitor.user}"}}
    if visitor.watchlist:
        user["watchlist"] = list(visitor.watchlist)
    user_data = json.dumps(user)
    app = visitor.signing()
    return {
        "auth": f"{app.app_key}:{digest(app.app_secret, f'{socket_id}::user::{user_data}')}",
        "user_data": user_data,
    }
