"""`redpoll demo` in a real Chromium: four examples on three pages, a worker and Redis killed, and nothing left."""

from __future__ import annotations

import re
import signal
from typing import Any

from playwright.async_api import Page, expect

from browser.demo import running_demo
from browser.test_clean import AXE
from browser.watch import Watch
from helpers.browser import chromium, new_page
from helpers.server import processes
from redpoll.demo.backend import SPEECH

LOOKS: tuple[dict[str, Any], ...] = (
    {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True},
)
EXAMINE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .map((each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`)"""


async def faults_of(page: Page) -> list[str]:
    width = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    await page.evaluate(AXE.read_text())
    return [*([f"{width} px wider than the window"] if width > 0 else []), *await page.evaluate(EXAMINE)]


async def chat(pages: list[Page]) -> None:
    for page in pages:
        await expect(page.locator("#people")).to_contain_text(", ")
    await pages[0].fill("#message", "Is anybody <b>here</b>?")
    await pages[0].keyboard.press("Enter")
    for page in pages:
        await expect(page.locator("#log")).to_contain_text("Is anybody <b>here</b>?")
    await expect(pages[0].locator("#message")).to_have_value("")


async def cursors(pages: list[Page]) -> None:
    """One is moved by keys, one by a pointer."""
    await pages[0].focus("#board")
    await pages[0].keyboard.press("ArrowLeft")
    await expect(pages[2].locator(".cursor")).to_have_count(1)
    await pages[2].hover("#board")
    await expect(pages[0].locator(".cursor")).to_have_count(2)
    await expect(pages[1].locator(".cursor")).to_have_count(2)


async def kill(page: Page, what: str) -> None:
    await page.get_by_role("button", name=f"Kill {what}").click()
    last = page.locator("#noticed p.good").last
    await expect(last).to_contain_text("no price and no word is missing")
    await expect(page.locator("#state")).to_have_text("All 4 examples are connected.")
    assert "missing" not in (await page.inner_text("#noticed")).replace("no price and no word is missing", "")
    await page.locator("#noticed").evaluate("(log) => log.replaceChildren()")


async def test_four_examples_survive_a_killed_worker_and_redis() -> None:
    with running_demo() as demo:
        async with chromium() as browser:
            pages, watches = [], []
            for look in LOOKS:
                page = await new_page(browser, **look)
                watches.append(Watch(page))
                pages.append(page)
                await page.goto(demo.url)
                await expect(page.locator("#state")).to_have_text("All 4 examples are connected.")
            await chat(pages)
            await cursors(pages)
            await expect(pages[1].locator("#output")).to_contain_text("a small finch of the far north")
            for page in pages:
                assert await faults_of(page) == []
            await kill(pages[0], "a worker")
            await kill(pages[0], "Redis")
            # The history is that of before: the price, the messages and the text are there at once.
            before = await pages[2].evaluate("document.getElementById('line').points.numberOfItems")
            await pages[2].reload()
            await expect(pages[2].locator("#line")).to_have_attribute("points", re.compile(rf"^(\S+ ?){{{before},}}$"))
            await expect(pages[2].locator("#log")).to_contain_text("Is anybody <b>here</b>?")
            for page in pages:
                await expect(page.locator("#output")).to_have_text(SPEECH)
            await pages[1].get_by_role("button", name="Write it again").click()
            await expect(pages[0].locator("#again")).to_be_disabled()
            assert [watch.faults for watch in watches] == [[], [], []]
        family = demo.family()
        assert family
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 0
        assert {process.pid for process in processes()}.isdisjoint({process.pid for process in family})
        assert list(demo.folder.iterdir()) == []
