"""Chromium for tests, without a window."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, async_playwright

# Debian's. The one without a window takes half of the processor time.
_PROGRAM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# As root and without a network: nothing is looked up or fetched in the background.
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_PROGRAM, args=_FLAGS)
        yield browser
        await browser.close()


def node_options(*flags: str) -> dict[str, Any]:
    """What Playwright's `launch` takes in Node (`clients/driver.mjs`)."""
    return {"executablePath": _PROGRAM, "args": [*_FLAGS, *flags]}
