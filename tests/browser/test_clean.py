"""Every page of the dashboard: no request leaves the host, no policy is breached, axe-core finds nothing serious."""

import shutil
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from browser.lively import FLAGS, lively, logged_in
from browser.watch import Watch

AXE = Path(__file__).parent.parent / "clients" / "node_modules" / "axe-core" / "axe.min.js"
# Each look with the rules of axe-core that are checked in it. All rules are checked once; the second look repeats those
# whose result depends on colours and sizes.
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


async def test_pages_load_nothing_external_and_are_accessible() -> None:
    faults: dict[str, list[str]] = {}
    async with lively() as life, async_playwright() as playwright:
        for look, (how, rules) in LOOKS.items():
            async with logged_in(playwright, life.server, **how) as context:
                for name, path in life.paths.items():
                    page = await context.new_page()
                    watch = Watch(page)
                    answer = await page.goto(f"{life.server.control_url}{path}")
                    assert answer is not None
                    assert answer.status == 200, path
                    width = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    found = [f"{width} px wider than the window"] if width > 0 else []
                    await page.evaluate(AXE.read_text())
                    found += await page.evaluate(EXAMINE, rules)
                    if found or watch.faults:
                        faults[f"{name}, {look}"] = found + watch.faults
                    await page.close()
    assert not faults


async def test_watch_reports_violations() -> None:
    """The checks can fail: a page that requests other hosts, breaks a policy and throws is reported."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = await browser.new_page()
        watch = Watch(page)
        await page.route("**/*", lambda route: route.abort() if "elsewhere" in route.request.url else route.continue_())
        policy = "<meta http-equiv=Content-Security-Policy content=\"img-src 'none'\">"
        await page.set_content(f"{policy}<img src=data:x><link rel=stylesheet href=https://elsewhere.example/x.css>")
        with pytest.raises(Exception, match="oops"):
            await page.evaluate("() => { throw new Error('oops') }")
        async with page.expect_event("pageerror"):
            await page.evaluate("() => { setTimeout(() => { throw new Error('later') }) }")
        await browser.close()
    assert any("elsewhere.example" in fault for fault in watch.faults)
    assert any(fault.startswith("policy:") for fault in watch.faults)
    assert any("later" in fault for fault in watch.faults)
