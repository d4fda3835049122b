"""Photographs pages of the documentation site, desktop and phone, light and dark, and checks them with axe-core.

python tests/deploy/site_check.py [FOLDER]

Builds the site in build/docs and writes the photographs to FOLDER, by default build/screenshots. Exit code 1 if a page
requests another host, is wider than its window, or has a serious or critical fault. It takes about a minute.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer
from playwright.async_api import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.browser import chromium  # noqa: E402

SITE = ROOT / "build" / "docs"
AXE = ROOT / "tests" / "clients" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
PAGES = (
    "",
    "quickstart/laravel",
    "webhooks",
    "migration",
    "operation",
    "metrics",
    "settings",
    "security",
    "kubernetes",
    "upgrade",
    "beyond",
)
EXAMINE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter((fault) => ["serious", "critical"].includes(fault.impact))
    .map((fault) => `${fault.id}: ${fault.nodes[0].html.slice(0, 120)}`)"""


async def answer(request: web.Request) -> web.FileResponse:
    path = SITE / request.match_info["path"]
    return web.FileResponse(path / "index.html" if path.is_dir() else path)


async def examine(page: Page, address: str) -> list[str]:
    await page.goto(address)
    wide = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    await page.evaluate(AXE.read_text())
    return [f"{wide} px wider than the window"] * (wide > 0) + await page.evaluate(EXAMINE)


async def check(folder: Path) -> list[str]:
    faults: list[str] = []
    asked: set[str] = set()
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as served, chromium() as browser:
        own = str(served.make_url("/"))
        for size, viewport in SIZES.items():
            for scheme in ("light", "dark"):
                page = await browser.new_page(viewport=viewport, color_scheme=scheme)
                page.on("request", lambda request: asked.add(request.url))
                for path in PAGES:
                    look = f"{path.replace('/', '-') or 'index'}-{size}-{scheme}"
                    faults += [f"{look}: {fault}" for fault in await examine(page, f"{own}{path}")]
                    await page.screenshot(path=folder / f"docs-{look}.png")
                await page.close()
    return faults + [f"request to {url}" for url in sorted(asked) if not url.startswith((own, "data:"))]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "deploy" / "mkdocs.yml"]
    subprocess.run([*command, "-d", SITE], check=True)
    faults = asyncio.run(check(folder))
    print(*faults, sep="\n")
    print(f"{len(faults)} faults; photographs in {folder}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
