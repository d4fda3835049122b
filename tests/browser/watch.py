"""Records what a page of the dashboard must never do: request another host, break its own policy, fail in a script. Not
a test."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.async_api import Page


class Watch:
    """`faults` of one page, from now on."""

    def __init__(self, page: Page) -> None:
        self.faults: list[str] = []
        page.on("request", lambda request: self._requested(request.url))
        page.on("websocket", lambda socket: self._requested(socket.url))
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("console", lambda message: self._said(message.text))

    def _requested(self, url: str) -> None:
        if urlsplit(url).hostname not in ("127.0.0.1", None):
            self.faults.append(f"request to {url}")

    def _said(self, text: str) -> None:
        # Chromium's wording.
        if "Content Security Policy" in text:
            self.faults.append(f"policy: {text}")
