"""The check of the connection: what `redpoll doctor URL` does, run by the browser that shows the page.

The page (check.js) opens a WebSocket as pusher-js does, subscribes, has this server publish an event, and waits in
silence for a proxy's idle timeout. Causes and remedies are those of the doctor (remedies.py).
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from redpoll.config.remedies import REFUSALS, remedy_for_idle, remedy_for_upgrade
from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.setup import Address, PublicAddress, is_plain_host
from redpoll.control.http.response import Response
from redpoll.control.http.router import Route

__all__ = ["CheckPages"]

# JSON for scripts, in attributes of the page.
_CAUSES = msgspec.json.encode(
    {
        "refusals": {str(code): said for code, said in REFUSALS.items()},
        "upgrade": remedy_for_upgrade(""),
        "idle": remedy_for_idle(""),
    }
).decode()


class CheckPages:
    """`address` is where clients connect."""

    def __init__(self, access: AccessControl, address: PublicAddress) -> None:
        self._access = access
        self._address = address

    def routes(self) -> list[Route]:
        return [self._access.route("GET", "/apps/{app_id}/check", "check", self.show)]

    async def show(self, visit: Visit) -> Response:
        """GET …/check: `at` is another address to check, as `https://ws.example.com`."""
        own = self._address.of(visit.request)
        text = visit.query.get("at", "").strip()
        chosen = _address_of(text) if text else own
        at = chosen or own
        key = visit.app.signing_key()
        return visit.page(
            "check.html",
            app=visit.app,
            key=key.key if key is not None else "",
            at=at,
            text=text or own.url,
            fault=""
            if chosen
            else "Expected http:// or https:// with a host name, and a port if it isn't the usual one.",
            causes=_CAUSES,
            sockets=(at.sockets, at.url),
        )


def _address_of(text: str) -> Address | None:
    """The address that a person has typed; None if it isn't one. It goes into the page's Content-Security-Policy."""
    try:
        parts = urlsplit(text.replace("ws", "http", 1) if text.startswith("ws") else text)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not is_plain_host(host):
        return None
    return Address(parts.scheme, f"[{host}]" if ":" in host else host, port)
