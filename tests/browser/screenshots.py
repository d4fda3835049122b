"""Photographs of every page of the dashboard, desktop and phone, light and dark, into build/screenshots.

python tests/browser/screenshots.py [--only overview,trace] [FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from browser.lively import days_work, lively, logged_in  # noqa: E402
from helpers.browser import chromium  # noqa: E402

SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


async def photograph(folder: Path, only: set[str]) -> None:
    async with lively() as life, chromium() as browser:
        work = asyncio.create_task(days_work(life.app))
        # So that the charts have something to draw.
        await asyncio.sleep(60)
        for size, viewport in SIZES.items():
            for scheme in ("light", "dark"):
                look = {"viewport": viewport, "color_scheme": scheme}
                async with logged_in(browser, life.server, **look) as context:
                    page = await context.new_page()
                    for name, path in life.paths.items():
                        if not only or name in only:
                            await page.goto(f"{life.server.control_url}{path}")
                            # The console and the charts fill while they are shown.
                            await page.wait_for_timeout(4000 if name == "console" else 400)
                            await page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TESTS.parent / "build" / "screenshots")
    parser.add_argument("--only", default="", help="names of pages, separated by commas")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(photograph(given.folder, {name for name in given.only.split(",") if name}))
    print(given.folder)


if __name__ == "__main__":
    main()
