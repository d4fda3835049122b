"""What to change when clients can't connect: by close code, and lines for the configuration of the reverse proxies that
people put in front of redpoll.

`redpoll doctor` and the dashboard's check of the connection show the same. The lines for nginx, HAProxy, Caddy and
Apache are in the files of deploy/proxies too, which the tests run.
"""

from collections.abc import Mapping
from typing import Final

__all__ = ["REFUSALS", "recognise", "remedy_for_buffering", "remedy_for_idle", "remedy_for_upgrade"]

# By close code: the likely cause, and what to do.
REFUSALS: Final = {
    4000: ("the app requires TLS", "connect with wss://, or: redpoll app set APP_ID tls_required=false"),
    4001: ("no app has this key, or the key is disabled", "compare the key with `redpoll app show APP_ID`"),
    4003: ("the app is disabled", "redpoll app set APP_ID enabled=true"),
    4004: ("the app has as many connections as its max_connections allows", "raise max_connections of this app"),
    4009: (
        "the app doesn't allow this origin, or requires a sign-in",
        "look at allowed_origins of this app; if the origin is this server's own address, set public_url to it",
    ),
    4100: ("the server is over its capacity", "look at /readyz and the log of the server"),
}

_UPGRADE: Final = {
    "nginx": (
        "map $http_upgrade $redpoll_connection {",
        "    default upgrade;",
        "    ''      '';",
        "}",
        "upstream redpoll {",
        "    server 127.0.0.1:6001;",
        "}",
        "location / {",
        "    proxy_pass http://redpoll;",
        "    proxy_http_version 1.1;",
        "    proxy_set_header Upgrade $http_upgrade;",
        "    proxy_set_header Connection $redpoll_connection;",
        "    proxy_set_header Host $host;",
        "    proxy_read_timeout 180s;",
        "}",
    ),
    "HAProxy": ("# mode http forwards Upgrade by itself; check that no rule deletes it", "mode http"),
    "Caddy": ("# forwards Upgrade by itself", "reverse_proxy 127.0.0.1:6001"),
    "Apache": (
        "# a2enmod proxy proxy_http proxy_wstunnel",
        "ProxyPass / http://127.0.0.1:6001/ upgrade=websocket nocanon",
    ),
    "Traefik": ("# forwards Upgrade by itself; check that the router's rule matches PathPrefix(`/app`)",),
    "Cloudflare": (
        "# dashboard: Network > WebSockets must be on; only some ports are proxied (80, 443, 8080, 8443 …)",
    ),
}
_IDLE: Final = {
    "nginx": ("proxy_read_timeout 180s;", "proxy_send_timeout 180s;"),
    "HAProxy": ("timeout client  180s", "timeout server  180s", "timeout tunnel  180s"),
    "Caddy": ("# no idle timeout on WebSockets by default; look for one in front of Caddy",),
    "Apache": ("ProxyTimeout 180",),
    "Traefik": ("# --entryPoints.websecure.transport.respondingTimeouts.idleTimeout=180s",),
    "Cloudflare": ("# Cloudflare closes a WebSocket after 100 s without data: keep activity_timeout_s below 100",),
}
_BUFFERING: Final = {
    "nginx": ("proxy_buffering off;", "# and no proxy_ignore_headers X-Accel-Buffering"),
    "HAProxy": ("# mode http passes responses on as they come; look for option http-buffer-request, or compression",),
    "Caddy": ("# flushes by itself; look for encode, or a buffer in reverse_proxy",),
    "Apache": ("# ProxyPass … flushpackets=on, and no mod_deflate for application/javascript",),
    "Traefik": ("# look for the buffering middleware",),
    "Cloudflare": ("# passes streams on; look for the proxy behind it",),
}
_SERVERS: Final = {
    "nginx": "nginx",
    "openresty": "nginx",
    "haproxy": "HAProxy",
    "caddy": "Caddy",
    "apache": "Apache",
    "traefik": "Traefik",
    "cloudflare": "Cloudflare",
}


def recognise(headers: Mapping[str, str]) -> str:
    """The proxy's name by the `Server` and `Via` headers of a response, or an empty string."""
    text = f"{headers.get('Server', '')} {headers.get('Via', '')}".lower()
    return next((name for word, name in _SERVERS.items() if word in text), "")


def remedy_for_upgrade(proxy: str) -> tuple[str, ...]:
    """Lines that make a proxy forward the WebSocket Upgrade; of every known proxy if `proxy` is empty."""
    return _lines(_UPGRADE, proxy)


def remedy_for_buffering(proxy: str) -> tuple[str, ...]:
    """Lines that make a proxy pass a response on as it comes."""
    return _lines(_BUFFERING, proxy)


def remedy_for_idle(proxy: str) -> tuple[str, ...]:
    """Lines that make a proxy keep an idle WebSocket open, then the setting that avoids idle connections."""
    return (
        *_lines(_IDLE, proxy),
        "or let redpoll ping more often than that: activity_timeout_s (REDPOLL_ACTIVITY_TIMEOUT_S)",
    )


def _lines(table: Mapping[str, tuple[str, ...]], proxy: str) -> tuple[str, ...]:
    chosen = {proxy: table[proxy]} if proxy in table else table
    lines: list[str] = []
    for name, text in chosen.items():
        lines += [f"in {name}:", *(f"    {line}" for line in text)]
    return tuple(lines)
