"""Lines for the configuration of the reverse proxies that people put in front of redpoll.

The doctor prints those of the proxy that it recognises by its `Server` header, and names the others.
"""

from collections.abc import Mapping

__all__ = ["recognise", "remedy_for_idle", "remedy_for_upgrade"]

_UPGRADE = {
    "nginx": (
        "location /app/ {",
        "    proxy_pass http://127.0.0.1:6001;",
        "    proxy_http_version 1.1;",
        "    proxy_set_header Upgrade $http_upgrade;",
        '    proxy_set_header Connection "upgrade";',
        "    proxy_set_header Host $host;",
        "    proxy_read_timeout 3600s;",
        "}",
    ),
    "HAProxy": ("# mode http forwards Upgrade by itself; keep the tunnel open:", "timeout tunnel 1h"),
    "Caddy": ("reverse_proxy 127.0.0.1:6001   # forwards Upgrade by itself",),
    "Apache": (
        "# a2enmod proxy proxy_http proxy_wstunnel",
        "ProxyPass        /app/ ws://127.0.0.1:6001/app/",
        "ProxyPassReverse /app/ ws://127.0.0.1:6001/app/",
    ),
    "Traefik": ("# forwards Upgrade by itself; check that the router's rule matches PathPrefix(`/app`)",),
    "Cloudflare": (
        "# dashboard: Network > WebSockets must be on; only some ports are proxied (80, 443, 8080, 8443 …)",
    ),
}
_IDLE = {
    "nginx": ("proxy_read_timeout 3600s;", "proxy_send_timeout 3600s;"),
    "HAProxy": ("timeout tunnel 1h", "timeout client 1h", "timeout server 1h"),
    "Caddy": ("# no idle timeout on WebSockets by default; look for one in front of Caddy",),
    "Apache": ("ProxyTimeout 3600",),
    "Traefik": ("--entryPoints.web.transport.respondingTimeouts.idleTimeout=3600s",),
    "Cloudflare": ("# Cloudflare closes a WebSocket after 100 s without data: keep activity_timeout_s below 100",),
}
_SERVERS = {
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
