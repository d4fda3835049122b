"""Snippets that connect to an app, to copy and paste: Laravel, pusher-js, Node, Python and curl.

redpoll/welcome.py has the snippets that are printed on a terminal.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

from redpoll.control.http.request import Request

__all__ = ["Address", "PublicAddress", "Snippet", "is_plain_host", "snippets"]


class Address(NamedTuple):
    """The address that clients connect to."""

    scheme: str
    host: str
    port: int

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def url(self) -> str:
        usual = 443 if self.secure else 80
        return f"{self.scheme}://{self.host}" + ("" if self.port == usual else f":{self.port}")

    @property
    def sockets(self) -> str:
        """The URL for WebSockets."""
        return self.url.replace("http", "ws", 1)


class PublicAddress:
    """The address of the public port: the setting `public_url`, or else the host of the dashboard's URL and `port`."""

    def __init__(self, public_url: str, port: int) -> None:
        self._public_url = public_url
        self._port = port

    def of(self, request: Request) -> Address:
        if self._public_url:
            parts = urlsplit(self._public_url)
            return Address(
                parts.scheme, _host(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)
            )
        try:
            host = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        return Address("http", _host(host if host and is_plain_host(host) else "127.0.0.1"), self._port)


def is_plain_host(host: str) -> bool:
    """Whether a host may go into a page's Content-Security-Policy: it has no characters with a meaning there."""
    return bool(host) and all(char.isalnum() or char in "-._:" for char in host) and host.isascii()


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Snippet(NamedTuple):
    """One way to connect. `parts` are pairs of title and text, in order."""

    id: str
    title: str
    parts: list[tuple[str, str]]


_ECHO: Final = """import Echo from "laravel-echo";
import Pusher from "pusher-js";
window.Pusher = Pusher;

window.Echo = new Echo({
  broadcaster: "pusher",
  key: import.meta.env.VITE_PUSHER_APP_KEY,
  cluster: import.meta.env.VITE_PUSHER_APP_CLUSTER,
  wsHost: import.meta.env.VITE_PUSHER_HOST,
  wsPort: import.meta.env.VITE_PUSHER_PORT,
  wssPort: import.meta.env.VITE_PUSHER_PORT,
  forceTLS: import.meta.env.VITE_PUSHER_SCHEME === "https",
  enabledTransports: ["ws", "wss"],
});
"""


def snippets(app_id: str, key: str, secret: str, at: Address) -> list[Snippet]:
    """All snippets for an app with this key."""
    return [
        Snippet("laravel", "Laravel", [(".env", _laravel(app_id, key, secret, at)), ("resources/js/echo.js", _ECHO)]),
        Snippet("browser", "pusher-js", [("npm install pusher-js", _browser(key, at))]),
        Snippet("node", "Node", [("npm install pusher", _node(app_id, key, secret, at))]),
        Snippet("python", "Python", [("pip install pusher", _python(app_id, key, secret, at))]),
        Snippet("curl", "curl", [("", _curl(app_id, key, secret, at))]),
    ]


def _laravel(app_id: str, key: str, secret: str, at: Address) -> str:
    return f"""BROADCAST_CONNECTION=pusher
PUSHER_APP_ID={app_id}
PUSHER_APP_KEY={key}
PUSHER_APP_SECRET={secret}
PUSHER_HOST={at.host}
PUSHER_PORT={at.port}
PUSHER_SCHEME={at.scheme}
PUSHER_APP_CLUSTER=mt1
VITE_PUSHER_APP_KEY="${{PUSHER_APP_KEY}}"
VITE_PUSHER_HOST="${{PUSHER_HOST}}"
VITE_PUSHER_PORT="${{PUSHER_PORT}}"
VITE_PUSHER_SCHEME="${{PUSHER_SCHEME}}"
VITE_PUSHER_APP_CLUSTER="${{PUSHER_APP_CLUSTER}}"
"""


def _browser(key: str, at: Address) -> str:
    return f"""import Pusher from "pusher-js";

const pusher = new Pusher("{key}", {{
  cluster: "mt1",
  wsHost: "{at.host}",
  wsPort: {at.port},
  wssPort: {at.port},
  forceTLS: {_tls(at)},
  enabledTransports: ["ws", "wss"],
}});
pusher.subscribe("news").bind("hello", (data) => console.log(data));
"""


def _node(app_id: str, key: str, secret: str, at: Address) -> str:
    return f"""import Pusher from "pusher";

const pusher = new Pusher({{
  appId: "{app_id}",
  key: "{key}",
  secret: "{secret}",
  host: "{at.host}",
  port: "{at.port}",
  useTLS: {_tls(at)},
}});
await pusher.trigger("news", "hello", {{ text: "Hello from Node" }});
"""


def _python(app_id: str, key: str, secret: str, at: Address) -> str:
    return f"""from pusher import Pusher

pusher = Pusher(
    app_id="{app_id}",
    key="{key}",
    secret="{secret}",
    host="{at.host}",
    port={at.port},
    ssl={at.secure},
)
pusher.trigger("news", "hello", {{"text": "Hello from Python"}})
"""


def _curl(app_id: str, key: str, secret: str, at: Address) -> str:
    return f"""curl {at.url}/api/v1/apps/{app_id}/events \\
  -H "X-Service-Key: {key}" \\
  -H "X-Service-Secret: {secret}" \\
  -H "Content-Type: application/json" \\
  -d '{{"name": "hello", "channels": ["news"], "data": "{{\\"text\\": \\"Hello from curl\\"}}"}}'
"""


def _tls(at: Address) -> str:
    """As JavaScript writes it."""
    return "true" if at.secure else "false"
