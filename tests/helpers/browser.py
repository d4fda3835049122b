"""Chromium for tests, without a window."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

# Debian's. The one without a window takes half of the processor time.
_PROGRAM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# As root and without a network: nothing is looked up or fetched in the background.
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


# How long a page may take for anything: the machine may be busy.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


async def new_page(browser: Browser, **how: Any) -> Page:
    """A page in a context of its own, which waits patiently. `how` goes to the context: viewport, color_scheme."""
    context = await browser.new_context(**how)
    context.set_default_timeout(PATIENCE_MS)
    return await context.new_page()


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_PROGRAM, args=_FLAGS)
        yield browser
        await browser.close()


def node_options(*flags: str) -> dict[str, Any]:
    """What Playwright's `launch` takes in Node (`clients/driver.mjs`)."""
    return {"executablePath": _PROGRAM, "args": [*_FLAGS, *flags]}
