"""The dashboard in a real Chromium, as its first user sees it: from the first login to a dead letter that is retried.

No request may leave the host, no page may break its Content-Security-Policy, and no script may fail.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from playwright.async_api import expect

from browser.lively import log_in_once
from browser.watch import Watch
from helpers.browser import PATIENCE_MS, chromium
from helpers.server import Server

PUSHER_JS = Path(__file__).parent.parent / "clients" / "node_modules" / "pusher-js" / "dist" / "web" / "pusher.min.js"
NEW_PASSWORD = "a finch on a birch twig"
SETTINGS = {
    "webhook_allow_http": 1,
    "webhook_allow_addresses": "127.0.0.0/8",
    "webhook_retry_after_s": "0.1,0.1,0.1",
    "webhook_debounce_s": 0,
}


@dataclass
class Receiver:
    """A webhook receiver that can be made to fail, and the application's page."""

    broken: bool = False
    delivered: list[dict] = field(default_factory=list)
    url: str = ""
    page: str = ""

    async def hook(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.broken:
            return web.Response(status=500, text="out of order")
        self.delivered.append(body)
        return web.Response()

    async def html(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page, content_type="text/html")

    async def script(self, request: web.Request) -> web.Response:
        return web.Response(text=PUSHER_JS.read_text(), content_type="text/javascript")


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    application = web.Application()
    application.router.add_post("/hook", receiver.hook)
    application.router.add_get("/page", receiver.html)
    application.router.add_get("/pusher.js", receiver.script)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def until(ask: Callable[[], Awaitable[object]], timeout_s: float = PATIENCE_MS / 1000) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ask():
            await asyncio.sleep(0.02)


async def test_first_login_to_retried_dead_letter() -> None:
    with Server(workers=2, **SETTINGS) as server:
        async with receiving() as receiver, chromium() as browser:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            watch = Watch(page)

            # The first login asks for a new password.
            once = (server.folder / "data" / "first-login").read_text().split()[-1]
            assert once not in server.output()
            await log_in_once(page, server, "admin", once, NEW_PASSWORD)
            await expect(page.get_by_text("one-time password")).to_have_count(0)
            assert not (server.folder / "data" / "first-login").exists()

            # An app, and its keys.
            await page.goto(f"{server.control_url}/dashboard/new-app")
            await page.fill("#name", "Shop")
            await page.get_by_role("button", name="Create app").click()
            app_id = await page.locator("#app-id").inner_text()
            key = await page.locator("#app-key").inner_text()
            here = f"{server.control_url}/dashboard/apps/{app_id}"

            # A token, shown once.
            await page.goto(f"{here}/tokens")
            await page.fill("#name", "back end")
            await page.locator("input[name=scope][value=publish]").check()
            await page.get_by_role("button", name="Create token").click()
            token = await page.locator("#plain-token").inner_text()
            await page.reload()
            assert token not in await page.content()

            # A page of the application subscribes, and the back end publishes, watched in the console.
            receiver.page = (
                "<!doctype html><script src=/pusher.js></script><script>"
                f"const options = {{cluster: 'any', wsHost: '127.0.0.1', wsPort: {server.port}, forceTLS: false,"
                " enabledTransports: ['ws']};"
                f"window.pusher = new Pusher('{key}', options); window.heard = [];"
                "window.channel = pusher.subscribe('orders');"
                "channel.bind('paid', (data) => heard.push(data.number));</script>"
            )
            shop = await browser.new_page()
            shop.set_default_timeout(PATIENCE_MS)
            await shop.goto(f"{receiver.url}/page")
            await shop.wait_for_function("window.channel.subscribed")
            console = await browser.new_page()
            console.set_default_timeout(PATIENCE_MS)
            console_watch = Watch(console)
            await console.context.add_cookies(await page.context.cookies())
            await console.goto(f"{here}/console")
            await expect(console.locator("#console-state")).to_have_text("Live", timeout=PATIENCE_MS)
            trace_id = await publish(server, app_id, token, "orders", "paid", {"number": 17})
            await shop.wait_for_function("window.heard.includes(17)")
            await expect(console.locator("#console-list")).to_contain_text("paid", timeout=PATIENCE_MS)
            await expect(console.locator("#console-list")).to_contain_text("orders")
            await console.fill("#publish-channel", "orders")
            await console.fill("#publish-name", "paid")
            await console.fill("#publish-data", '{"number": 18}')
            await console.get_by_role("button", name="Publish").click()
            await shop.wait_for_function("window.heard.includes(18)")

            # The event is found by its trace id, with the number of sockets it was written to.
            async def traced() -> bool:
                await page.goto(f"{here}/trace")
                await page.fill("#trace_id", trace_id)
                await page.get_by_role("button", name="Search").click()
                # Without a search, the page lists all requests.
                await page.wait_for_url(f"**trace_id={trace_id}**")
                row = page.locator("tbody tr")
                if await row.count() != 1:
                    return False
                await row.get_by_role("link").last.click()
                return "Written to 1 connection" in await page.locator("main").inner_text()

            await until(traced)
            assert "token back end" in await page.locator("main").inner_text()

            # A webhook, whose receiver breaks: the dead letter, the repair, the retry.
            await page.goto(f"{here}/webhooks/new")
            await page.fill("#url", f"{receiver.url}/hook")
            await page.get_by_role("button", name="Create webhook").click()
            await expect(page.locator("main")).to_contain_text(f"{receiver.url}/hook")
            receiver.broken = True
            # Every worker knows the endpoint within a second.
            numbers = iter(range(1_000))

            async def dead() -> bool:
                await shop.evaluate("name => pusher.subscribe(name)", f"room-{next(numbers)}")
                await page.goto(f"{here}/dead-letters")
                return await page.locator("input[name=id]").count() > 0

            await until(dead)
            await page.locator("tbody tr").first.get_by_role("link").first.click()
            await page.wait_for_url("**/deliveries/**")
            text = await page.locator("main").inner_text()
            assert "channel.occupied" in text
            assert text.count("500") >= 4, "four attempts with their status"
            assert "out of order" in await page.content()
            receiver.broken = False
            room = re.search(r'"channel": *"(room-\d+)"', await page.locator("pre.payload").first.inner_text())
            assert room is not None
            await page.get_by_role("button", name="Retry").click()
            await until(lambda: arrived(receiver, room[1]))
            delivery = page.url
            await page.goto(f"{here}/webhooks")
            assert not watch.faults
            assert not console_watch.faults
            assert delivery.startswith(server.control_url)


async def arrived(receiver: Receiver, channel: str) -> bool:
    return any(body["data"]["channel"] == channel for body in receiver.delivered)


async def publish(server: Server, app_id: str, token: str, channel: str, event: str, data: object) -> str:
    """Publishes over HTTP with the token; returns the trace id of the response."""
    body = {"name": event, "channels": [channel], "data": json.dumps(data)}
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{server.public_url}/api/v1/apps/{app_id}/events"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["X-Service-Trace-Id"]
