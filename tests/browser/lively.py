"""A server with activity to show on the dashboard: an app with channels, members, messages, webhooks that arrive and
one that fails, tokens, refused calls. Not a test; test_clean.py and screenshots.py use it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from aiohttp import web
from click.testing import CliRunner
from playwright.async_api import Browser, BrowserContext, Page, expect

from helpers.browser import new_page
from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.cli import main

PASSWORD = "a finch on a birch twig"
SETTINGS = {
    "webhook_allow_http": 1,
    "webhook_allow_addresses": "127.0.0.0/8",
    "webhook_retry_after_s": "0.1,0.1,0.1",
    "webhook_debounce_s": 0,
    "admin_password": PASSWORD,
}
PEOPLE = ("anna", "bruno", "clara", "dmitri", "elif", "fatou")


@dataclass
class App:
    """What a client needs (`wire.Target`)."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


@dataclass
class Lively:
    """`paths`: every page of the dashboard that a person can reach, with this app's data."""

    server: Server
    app: App
    paths: dict[str, str]


def command(server: Server, *words: str) -> Any:
    result = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@asynccontextmanager
async def receiver() -> AsyncIterator[str]:
    """A webhook receiver: `/hooks/rooms` takes everything, `/hooks/mail` nothing."""

    async def good(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    async def bad(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=503, text="The queue is full; come back later.")

    application = web.Application()
    application.router.add_post("/hooks/rooms", good)
    application.router.add_post("/hooks/mail", bad)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def headline(api: Api, number: int) -> None:
    data = json.dumps({"headline": f"Finch number {number} was seen", "at": number})
    await api.publish("news-sport", "headline", data, correlation_id=f"story-{number}")


async def days_work(app: App) -> None:
    """Sends news, weather and chat messages, a few per second, until it is cancelled."""
    typist = await Socket.connect(app)
    await typist.subscribe("presence-room", "anna", {"name": "anna"})
    async with Api(app) as api:
        for number in count(8):
            await headline(api, number)
            if number % 3 == 0:
                await api.publish("news-weather", "forecast", json.dumps({"celsius": number % 30}))
                typist.send({"event": "client-typing", "data": {"who": "anna"}, "channel": "presence-room"})
            await asyncio.sleep(0.2 + number % 7 / 10)


@asynccontextmanager
async def lively(sockets: int = 12) -> AsyncIterator[Lively]:
    with Server(workers=2, **SETTINGS) as server:
        made = await asyncio.to_thread(command, server, "app", "create", "Finch Weekly")
        app = App(server.port, made["id"], made["key"], made["secret"])
        async with receiver() as url, Api(app) as api:

            def typed(*words: str) -> Any:
                return asyncio.to_thread(command, server, *words)

            await typed(
                "history", "rule", "add", app.app_id, "--prefix", "news-", "--keep", "100", "--seconds", "86400"
            )
            await typed(
                "token", "create", app.app_id, "--name", "Deploy script", "--scope", "publish", "--expires", "30d"
            )
            await typed("token", "create", "--manage", "--name", "Platform")
            endpoint = await typed("webhook", "create", app.app_id, f"{url}/hooks/rooms")
            mail = f"{url}/hooks/mail"
            await typed("webhook", "create", app.app_id, mail, "--events", "member.added", "--format", "pusher")
            held = [await Socket.connect(app) for _ in range(sockets)]
            for number, socket in enumerate(held):
                await socket.subscribe("news-sport" if number % 3 else "news-weather")
                await socket.subscribe("presence-room", PEOPLE[number % len(PEOPLE)], {"name": PEOPLE[number % 6]})
            for number in range(8):
                await headline(api, number)
            await api.ask("POST", "/events", {"name": "pusher:no", "channels": ["news-sport"], "data": "{}"})

            async def logged() -> int:
                return len((await api.get("/events/log", name="headline"))["events"])

            await eventually(logged, 8)
            trace_id = (await api.get("/events/log", correlation_id="story-7"))["events"][0]["trace_id"]

            async def dead() -> bool:
                return bool(await typed("dead-letter", "list", app.app_id))

            await eventually(dead, True)
            letter = (await typed("dead-letter", "list", app.app_id))[0]["id"]
            here = f"/dashboard/apps/{app.app_id}"
            yield Lively(
                server,
                app,
                {
                    "overview": "/dashboard",
                    "overview-app": f"/dashboard?app={app.app_id}",
                    "apps": "/dashboard/apps",
                    "new-app": "/dashboard/new-app",
                    "connect": here,
                    "channels": f"{here}/channels",
                    "channel": f"{here}/channels/presence-room",
                    "connections": f"{here}/connections",
                    "console": f"{here}/console",
                    "check": f"{here}/check",
                    "trace-search": f"{here}/trace",
                    "trace": f"{here}/trace/{trace_id}",
                    "history": f"{here}/history",
                    "messages": f"{here}/history/news-sport",
                    "webhooks": f"{here}/webhooks",
                    "webhook": f"{here}/webhooks/{endpoint['id']}",
                    "new-webhook": f"{here}/webhooks/new",
                    "dead-letters": f"{here}/dead-letters",
                    "dead-letter": f"{here}/deliveries/{letter}",
                    "keys": f"{here}/keys",
                    "tokens": f"{here}/tokens",
                    "settings": f"{here}/settings",
                    "audit": "/dashboard/audit",
                    "users": "/dashboard/users",
                    "management-tokens": "/dashboard/tokens",
                    "account": "/dashboard/account",
                },
            )
            for socket in held:
                await socket.close()


async def log_in_once(page: Page, server: Server, name: str, once: str, password: str) -> None:
    """The first login with a one-time password, which asks for a new one."""
    await page.goto(server.control_url)
    await page.fill("#name", name)
    await page.fill("#password", once)
    await page.get_by_role("button", name="Log in").click()
    await page.fill("#old_password", once)
    await page.fill("#new_password", password)
    await page.fill("#new_password_again", password)
    await page.get_by_role("button", name="Save password").click()
    await expect(page.get_by_role("navigation", name="Main")).to_be_visible()


@asynccontextmanager
async def logged_in(browser: Browser, server: Server, **how: Any) -> AsyncIterator[BrowserContext]:
    """A context of the browser, without the cookies of others, in which the admin is logged in. `how` goes to it:
    viewport, color_scheme."""
    page = await new_page(browser, **how)
    await page.goto(server.control_url)
    await page.fill("#name", "admin")
    await page.fill("#password", PASSWORD)
    await page.get_by_role("button", name="Log in").click()
    await page.wait_for_url("**/dashboard")
    try:
        yield page.context
    finally:
        await page.context.close()
