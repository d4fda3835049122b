"""The dashboard in use: dialogs and the keyboard, sessions that end while something is typed, a console with many
events.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, expect

from browser.lively import PASSWORD, Lively, command, lively, log_in_once, logged_in
from browser.watch import Watch
from helpers.broken_proxy import BrokenProxy
from helpers.browser import PATIENCE_MS, chromium, new_page
from helpers.ports import reserved_ports
from helpers.server import Server
from helpers.wire import NO_CONTROL, Api, tries

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life() -> AsyncIterator[Lively]:
    async with lively(sockets=6) as alive:
        yield alive


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def context(life: Lively, browser: Browser) -> AsyncIterator[BrowserContext]:
    """A context of this test's own, logged in."""
    async with logged_in(browser, life.server, timezone_id="Asia/Kathmandu", locale="en-GB") as made:
        yield made


async def test_selected_dead_letters_are_listed_before_discarding(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["dead-letters"])
    rows = page.locator("input[name=id]")
    many = await rows.count()
    ids = [str(await rows.nth(place).get_attribute("value")) for place in range(many)]
    await rows.first.check()
    named = await rows.first.get_attribute("aria-label")
    assert named is not None
    opener = page.get_by_role("button", name="Discard (1)")
    await opener.focus()
    await page.keyboard.press("Enter")
    dialog = page.locator("#discard-ticked")
    await expect(dialog).to_be_visible()
    await expect(dialog.get_by_role("listitem")).to_have_text([named])
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await expect(opener).to_be_focused()
    assert await rows.count() == many
    await opener.click()
    await dialog.get_by_role("button", name="Discard").click()
    # Others may have come meanwhile: the attempts of a delivery take longer on a slow machine.
    discarded = page.locator(f"input[name=id][value='{ids[0]}']")
    await expect(discarded).to_have_count(0)
    for letter in ids[1:]:
        await expect(page.locator(f"input[name=id][value='{letter}']")).to_have_count(1)
    await expect(discarded).to_have_count(0)


async def test_console_publish_links_to_the_trace(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["console"])
    await page.fill("#publish-channel", "news-sport")
    await page.fill("#publish-name", "goal")
    await page.get_by_role("button", name="Publish").click()
    await page.locator("#publish-state").get_by_role("link", name="Trace").click()
    await page.wait_for_url("**trace_id=**")
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not await page.locator("tbody tr").count():
            await page.reload()
    await page.locator("tbody tr").get_by_role("link").last.click()
    await expect(page.locator("main")).to_contain_text("dashboard user admin from 127.0.0.1")
    await expect(page.locator("main")).to_contain_text("Accepted by Redis")


async def check(life: Lively, context: BrowserContext, port: int | None, patience_s: int) -> tuple[str, list[str]]:
    """What the check of the connection says at its end, and its lines; `port` is another one than redpoll's own."""
    page = await context.new_page()
    watch = Watch(page)
    at = "" if port is None else f"?at=http://127.0.0.1:{port}"
    await page.goto(life.server.control_url + life.paths["check"] + at)
    await page.fill("#patience", str(patience_s))
    await page.get_by_role("button", name="Check").click()
    state = page.locator("#check-state")
    await expect(state).to_have_text(re.compile("wrong"), timeout=PATIENCE_MS)
    assert not watch.faults
    return await state.inner_text(), await page.locator("#check-rows tr").all_inner_texts()


async def test_the_browser_checks_the_connection(life: Lively, context: BrowserContext) -> None:
    state, lines = await check(life, context, None, 1)
    assert state == "Nothing is wrong."
    assert [line.split()[:2] for line in lines] == [
        [step, "ok"]
        for step in ("Address", "HTTP", "Clock", "Upgrade", "Connect", "Subscribe", "Publish", "Receive", "Idle")
    ]
    assert "still open after" in lines[-1]


@pytest.mark.parametrize(
    ("broken", "step", "cause"),
    [
        ({"drops_upgrade": True}, "Upgrade", "doesn't forward the Upgrade header"),
        # Long enough for the steps before, in which the browser waits for the server.
        ({"idle_s": 12.0}, "Idle", "closes connections that are idle for"),
    ],
)
async def test_the_browser_names_what_a_proxy_breaks(
    life: Lively, context: BrowserContext, broken: dict, step: str, cause: str
) -> None:
    async with BrokenProxy(life.server.port, **broken) as proxy:
        state, lines = await check(life, context, proxy.port, 30)
    assert state == "The last line says what is wrong."
    assert lines[-1].startswith(step)
    assert cause in lines[-1]
    assert "in nginx:" in lines[-1]


async def test_the_browser_names_a_closed_port(life: Lively, context: BrowserContext) -> None:
    with reserved_ports(1) as (port,):
        state, lines = await check(life, context, port, 0)
    assert state == "The last line says what is wrong."
    assert "nothing listens on the port" in lines[-1]


async def test_session_that_ends_in_the_console_loses_nothing_typed(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["console"])
    await page.fill("#publish-channel", "news-sport")
    await page.fill("#publish-name", "long thought of")
    await page.fill("#publish-data", json.dumps({"words": "many"}))
    await context.clear_cookies()
    await page.get_by_role("button", name="Publish").click()
    await expect(page.locator("#publish-state")).to_contain_text("your session has ended")
    await page.locator("#publish-state").get_by_role("link", name="Log in again").click()
    await page.fill("#name", "admin")
    await page.fill("#password", PASSWORD)
    await page.get_by_role("button", name="Log in").click()
    await expect(page.locator("#publish-name")).to_have_value("long thought of")
    await expect(page.locator("#publish-data")).to_have_value('{"words": "many"}')
    await page.get_by_role("button", name="Publish").click()
    await expect(page.locator("#publish-state")).to_contain_text("Published.")


async def test_console_goes_on_when_only_the_publish_is_refused(
    life: Lively, context: BrowserContext, browser: Browser
) -> None:
    """An admin who was made a viewer read that the session had ended."""
    once = command(life.server, "user", "create", "wanda", "--role", "admin")["password"]
    page = await new_page(browser)
    await log_in_once(page, life.server, "wanda", once, PASSWORD)
    await page.goto(life.server.control_url + life.paths["console"])
    await expect(page.locator("#console-state")).to_have_text("Live")
    users = await context.new_page()
    await users.goto(f"{life.server.control_url}/dashboard/users")
    await users.locator("tr", has_text="wanda").get_by_role("button", name="Make viewer").click()
    await expect(users.locator("tr", has_text="wanda").get_by_role("button", name="Make admin")).to_be_visible()
    await page.fill("#publish-channel", "news-sport")
    await page.fill("#publish-name", "goal")
    await page.get_by_role("button", name="Publish").click()
    said = "Not published: Viewers can't make changes. Ask an admin."
    await expect(page.locator("#publish-state")).to_have_text(said)
    await expect(page.locator("#console-state")).to_have_text("Live")
    await page.context.close()


async def test_form_survives_the_end_of_the_session(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["new-webhook"])
    await page.fill("#url", "http://127.0.0.1:9/typed/with/care")
    await page.fill("#channels", "orders-\nnews-")
    await context.clear_cookies()
    await page.get_by_role("button", name="Create webhook").click()
    await page.fill("#name", "admin")
    await page.fill("#password", "wrong at first")
    await page.get_by_role("button", name="Log in").click()
    await expect(page.locator("#fault-login")).to_be_visible()
    await page.fill("#password", PASSWORD)
    await page.get_by_role("button", name="Log in").click()
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("main")).to_contain_text("http://127.0.0.1:9/typed/with/care")
    await expect(page.locator("main")).to_contain_text("orders-")


async def test_times_are_shown_and_entered_in_the_readers_time_zone(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    url = life.server.control_url + life.paths["trace-search"]
    async with Api(life.app) as api:
        (call,) = (await api.get("/events/log", correlation_id="story-3"))["events"]
    await page.goto(f"{url}?correlation_id=story-3&since={call['time_ms']}")
    shown = await page.locator("tbody tr time").first.inner_text()
    # Kathmandu is 5 h 45 min before Greenwich.
    local = await page.evaluate("at => new Date(at + 20700000).toISOString()", call["time_ms"])
    assert local[11:19] in shown
    # A browser leaves out seconds that are 0.
    await expect(page.locator("#since-at")).to_have_value(local[:19].removesuffix(":00"))
    await page.fill("#since-at", f"{local[:10]}T{local[11:16]}:00")
    await page.fill("#until-at", "2040-01-01T00:00:00")
    await page.get_by_role("button", name="Search").click()
    # Until it is loaded, its script may still write into the fields.
    await page.wait_for_url(re.compile("until=2"))
    await expect(page.locator("tbody tr")).to_have_count(1)
    await page.fill("#until-at", "2001-01-01T00:00:07")
    await page.get_by_role("button", name="Search").click()
    await expect(page.locator("#fault-until")).to_be_visible()
    await expect(page.locator("#until-at")).to_have_value("2001-01-01T00:00:07")
    await expect(page.locator("#correlation_id")).to_have_value("story-3")


async def test_console_comes_back_by_itself_when_the_control_process_was_killed(browser: Browser) -> None:
    """The new process knows nothing of the page's connection, and ends its subscription. The page connects again."""
    socket_id = "() => Pusher.instances[0].connection.socket_id"
    with Server(workers=1, admin_password=PASSWORD) as server:
        async with logged_in(browser, server) as context, Api(server) as api:
            page = await context.new_page()
            await page.goto(f"{server.control_url}/dashboard/apps/{server.app_id}/console")
            await expect(page.locator("#console-state")).to_have_text("Live", timeout=PATIENCE_MS)
            before = await page.evaluate(socket_id)
            os.kill(server.control_pid, signal.SIGKILL)
            await page.wait_for_function(f"(before) => ![before, undefined].includes(({socket_id})())", arg=before)
            await expect(page.locator("#console-state")).to_have_text("Live", timeout=PATIENCE_MS)
            await api.publish("news", "goal", "{}")
            await expect(page.locator("#console-list")).to_contain_text("goal", timeout=PATIENCE_MS)
            # The second time within ten minutes, the page doesn't connect again. The session is as valid.
            await page.fill("#publish-name", "typed")
            os.kill(server.control_pid, signal.SIGKILL)
            state = page.locator("#console-state")
            await expect(state).to_have_text("The server has ended this view. Reload", timeout=PATIENCE_MS)
            await state.get_by_role("link", name="Reload").click()
            await expect(state).to_have_text("Live", timeout=PATIENCE_MS)
            await expect(page.locator("#publish-name")).to_have_value("typed")
            await context.clear_cookies()
            os.kill(server.control_pid, signal.SIGKILL)
            await expect(state).to_have_text("Your session has ended. Log in again", timeout=PATIENCE_MS)


async def test_console_says_that_the_server_refuses_it_and_comes_back_on_request(
    life: Lively, context: BrowserContext
) -> None:
    made = await asyncio.to_thread(command, life.server, "app", "create", "short")
    page = await context.new_page()
    await page.goto(f"{life.server.control_url}/dashboard/apps/{made['id']}/console")
    state = page.locator("#console-state")
    await expect(state).to_have_text("Live", timeout=PATIENCE_MS)
    await page.fill("#publish-name", "typed")
    await asyncio.to_thread(command, life.server, "app", "set", made["id"], "enabled=false")
    await expect(state).to_have_text("The server refuses this view: the app is disabled. Reload", timeout=PATIENCE_MS)
    # One that is opened now gets the refusal instead of a greeting.
    await state.get_by_role("link", name="Reload").click()
    await expect(state).to_have_text("The server refuses this view: App disabled. Reload", timeout=PATIENCE_MS)
    await asyncio.to_thread(command, life.server, "app", "set", made["id"], "enabled=true")
    await state.get_by_role("link", name="Reload").click()
    await expect(state).to_have_text("Live", timeout=PATIENCE_MS)
    await expect(page.locator("#publish-name")).to_have_value("typed")


async def test_console_stays_responsive_under_thousands_of_events(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["console"])
    await expect(page.locator("#console-state")).to_have_text("Live", timeout=PATIENCE_MS)
    await page.fill("#only-event", "mark")
    await page.evaluate(
        "() => { window.worst = 0; let last = performance.now();"
        " setInterval(() => { const now = performance.now(); window.worst = Math.max(window.worst, now - last);"
        " last = now; }, 10); }"
    )
    async with Api(life.app) as api:

        async def some(count: int) -> None:
            for _ in range(count):
                batch = [{"name": "tick", "channel": "flood", "data": "{}"} for _ in range(10)]
                async for _ in tries():
                    status, answer = await api.ask("POST", "/batch_events", {"batch": batch})
                    if status == 200:
                        break
                    assert (status, answer["error"]) == (503, NO_CONTROL)

        await api.publish("flood", "mark", "{}")
        await asyncio.gather(*(some(125) for _ in range(8)))
    await expect(page.locator("#console-count")).to_contain_text("10,001 received", timeout=PATIENCE_MS)
    await expect(page.locator("#console-list details:visible")).to_have_count(1)
    assert await page.locator("#console-list details").count() <= 1_000
    assert await page.evaluate("window.worst") < PATIENCE_MS


async def test_everything_can_be_reached_by_keyboard(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url + life.paths["connect"])
    await page.keyboard.press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()
    await page.locator("#tab-laravel").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#panel-browser")).to_be_visible()
    await expect(page.locator("#tab-browser")).to_be_focused()
    await page.goto(life.server.control_url + life.paths["connections"])
    summary = page.locator(".dropdown > summary")
    await summary.focus()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="CSV")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("button", name="CSV")).to_be_hidden()
    await expect(summary).to_be_focused()


async def test_first_fault_is_visible_and_has_the_focus(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    # The field begins above the bar at the bottom, and its error text is below.
    await page.set_viewport_size({"width": 1280, "height": 900})
    await page.goto(life.server.control_url + life.paths["settings"])
    await page.fill("#allowed_origins", "http://shop.example.com")
    await page.get_by_role("button", name="Save settings").click()
    field = page.locator("#allowed_origins")
    await expect(page.locator("#fault-allowed_origins")).to_be_visible()
    await expect(field).to_be_focused()
    await expect(field).to_have_value("http://shop.example.com")
    fault = page.locator("#fault-allowed_origins")
    over = "e => { const at = e.getBoundingClientRect(); return document.elementFromPoint(at.x + 5, at.y + 5) === e; }"
    assert await fault.evaluate(over), "nothing lies over what is said"


async def test_an_app_is_deleted_by_typing_its_name(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    home = life.server.control_url
    await page.goto(f"{home}/dashboard/new-app")
    await page.fill("#name", "Finch Monthly")
    await page.get_by_role("button", name="Create app").click()
    app_id = await page.locator("#app-id").inner_text()
    await page.goto(f"{home}/dashboard/apps/{app_id}/settings")
    await page.fill("#confirm", "Finch Weekly")
    await page.get_by_role("button", name="Delete app").click()
    await expect(page.locator("#fault-confirm")).to_be_visible()
    await expect(page.locator("#confirm")).to_be_focused()
    await page.fill("#confirm", "Finch Monthly")
    await page.get_by_role("button", name="Delete app").click()
    await page.wait_for_url("**/dashboard/apps")
    await expect(page.get_by_role("status").first).to_have_text("Finch Monthly was deleted.")
    await expect(page.get_by_role("link", name="Finch Monthly")).to_have_count(0)
    await expect(page.get_by_role("link", name="Finch Weekly")).to_have_count(1)


async def test_a_management_token_is_made_and_revoked(life: Lively, context: BrowserContext) -> None:
    page = await context.new_page()
    await page.goto(life.server.control_url)
    await page.get_by_role("link", name="Management tokens").click()
    await page.fill("#name", "Customers")
    await page.get_by_role("button", name="Create token").click()
    plain = await page.locator("#plain-token").inner_text()
    headers = {"Authorization": f"Bearer {plain}"}
    url = f"{life.server.control_url}/api/v1/apps"
    async with aiohttp.ClientSession() as session:
        async with session.get(url, headers=headers) as answer:
            assert life.app.app_id in {app["id"] for app in (await answer.json())["apps"]}
        await page.get_by_role("row", name="Customers").get_by_role("button", name="Revoke").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke token").click()
        await expect(page.get_by_role("row", name="Customers")).to_contain_text("revoked")
        async with session.get(url, headers=headers) as answer:
            assert answer.status == 401
