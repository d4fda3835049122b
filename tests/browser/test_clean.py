"""Every page of the dashboard: no request leaves the host, no policy is breached, axe-core finds nothing serious."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from browser.lively import command, lively, logged_in
from browser.watch import Watch
from helpers.browser import chromium, new_page
from helpers.lengths import amount

AXE = Path(__file__).parent.parent / "clients" / "node_modules" / "axe-core" / "axe.min.js"
# Each look with the rules of axe-core that are checked in it. All rules are checked once; the second look repeats those
# whose result depends on colours and sizes, in the short form for every third page.
LOOKS = {
    "desktop, light": ({"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}, {}),
    "phone, dark": (
        {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
        {"runOnly": ["color-contrast", "scrollable-region-focusable", "target-size"]},
    ),
}
# The page's policy forbids other scripts, so axe is evaluated through the browser's debugger.
EXAMINE = """async (options) => (await axe.run(document, {resultTypes: ["violations"], ...options})).violations
    .filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`)"""


async def faults_of(page: Page, watch: Watch, address: str, rules: dict[str, Any] | None) -> list[str]:
    """Opens a page, and returns what is wrong with it. `rules` are the options of axe-core; None leaves it out."""
    answer = await page.goto(address)
    assert answer is not None
    assert answer.status == 200, address
    width = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    found = [f"{width} px wider than the window"] if width > 0 else []
    if rules is not None:
        await page.evaluate(AXE.read_text())
        found += await page.evaluate(EXAMINE, rules)
    found += watch.faults
    watch.faults.clear()
    return found


async def test_pages_load_nothing_external_and_are_accessible() -> None:
    faults: dict[str, list[str]] = {}
    async with lively() as life, chromium() as browser:
        for look, (how, rules) in LOOKS.items():
            async with logged_in(browser, life.server, **how) as context:
                page = await context.new_page()
                watch = Watch(page)
                for number, (name, path) in enumerate(life.paths.items()):
                    examined = not rules or number % amount(3, 1) == 0
                    found = await faults_of(
                        page, watch, f"{life.server.control_url}{path}", rules if examined else None
                    )
                    faults |= {f"{name}, {look}": found} if found else {}
                # Debugging shows a notice on each page of the app.
                debug = "debug", "--app", life.app.app_id
                await asyncio.to_thread(command, life.server, *debug, "--for", "10m", "--no-follow")
                found = await faults_of(page, watch, f"{life.server.control_url}{life.paths['connect']}", rules)
                faults |= {f"notice of debug, {look}": found} if found else {}
                assert await page.get_by_text("is being debugged until").is_visible()
                await asyncio.to_thread(command, life.server, *debug, "--off")
    assert not faults


async def test_watch_reports_violations() -> None:
    """The checks can fail: a page that requests other hosts, breaks a policy and throws is reported."""
    async with chromium() as browser:
        page = await new_page(browser)
        watch = Watch(page)
        await page.route("**/*", lambda route: route.abort() if "elsewhere" in route.request.url else route.continue_())
        policy = "<meta http-equiv=Content-Security-Policy content=\"img-src 'none'\">"
        await page.set_content(f"{policy}<img src=data:x><link rel=stylesheet href=https://elsewhere.example/x.css>")
        with pytest.raises(Exception, match="oops"):
            await page.evaluate("() => { throw new Error('oops') }")
        async with page.expect_event("pageerror"):
            await page.evaluate("() => { setTimeout(() => { throw new Error('later') }) }")
    assert any("elsewhere.example" in fault for fault in watch.faults)
    assert any(fault.startswith("policy:") for fault in watch.faults)
    assert any("later" in fault for fault in watch.faults)
