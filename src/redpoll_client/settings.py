"""Where the server is and with what it is spoken to: from a URL, the environment, or arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from redpoll_client.names import check_app_id

__all__ = ["ENVIRONMENT", "Endpoint", "endpoint_of"]

# Read in this order when nothing else is given.
ENVIRONMENT = ("REDPOLL_URL", "PUSHER_URL")
_PUSHER_HOST = "api.pusherapp.com"
_HOST = re.compile(r"[A-Za-z0-9._:-]+").fullmatch
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*").fullmatch


@dataclass(frozen=True)
class Endpoint:
    """A server and an app on it. `prefix` is a path before `/apps`, such as that of a proxy."""

    app_id: str
    key: str
    secret: str = field(repr=False)
    ssl: bool
    host: str
    port: int
    prefix: str = ""

    @property
    def origin(self) -> str:
        """`http://host:port`, without the prefix."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl else 'http'}://{host}:{self.port}"


def endpoint_of(
    app_id: str | None = None,
    key: str | None = None,
    secret: str | None = None,
    ssl: bool = True,
    host: str | None = None,
    port: int | None = None,
    cluster: str | None = None,
    *,
    url: str | None = None,
    prefix: str = "",
) -> Endpoint:
    """The endpoint that these arguments name; without app_id, key, secret and url that of REDPOLL_URL or PUSHER_URL.

    Raises ValueError that says which argument is missing or wrong. No text has the secret.
    """
    apart = {"host": host, "port": port, "cluster": cluster, "prefix": prefix or None, "ssl": None if ssl else False}
    if url is None and app_id is None and key is None and secret is None:
        name = next((name for name in ENVIRONMENT if os.environ.get(name)), None)
        if name is None:
            raise ValueError(f"give app_id, key and secret, or url, or set {' or '.join(ENVIRONMENT)}")
        _nothing_beside(name, apart)
        return _from_url(os.environ[name], name)
    if url is not None:
        _nothing_beside("url", {"app_id": app_id, "key": key, "secret": secret, **apart})
        return _from_url(url, "url")
    for name, value in (("app_id", app_id), ("key", key), ("secret", secret)):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a string that isn't empty, not {type(value).__name__}")
    host = host or (f"api-{cluster}.pusher.com" if cluster else _PUSHER_HOST)
    if host.startswith("[") and host.endswith("]"):
        # An IPv6 address as in a URL.
        host = host[1:-1]
    assert isinstance(app_id, str)
    assert isinstance(key, str)
    assert isinstance(secret, str)
    return _checked(Endpoint(check_app_id(app_id), key, secret, ssl, host, port or (443 if ssl else 80), prefix))


def _nothing_beside(name: str, others: Mapping[str, object]) -> None:
    """Raises ValueError for arguments that would be ignored."""
    given = [other for other, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} can't be given together with {name}")


def _from_url(url: str, name: str) -> Endpoint:
    shape = "http[s]://KEY:SECRET@HOST[:PORT][/PREFIX]/apps/APP_ID"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{name} is not like {shape}") from None
    prefix, apps, app_id = parts.path.rstrip("/").rpartition("/apps/")
    if parts.scheme not in ("http", "https") or not (parts.hostname and parts.username and parts.password and apps):
        raise ValueError(f"{name} is not like {shape}")
    ssl = parts.scheme == "https"
    key, secret = unquote(parts.username), unquote(parts.password)
    return _checked(
        Endpoint(check_app_id(app_id), key, secret, ssl, parts.hostname, port or (443 if ssl else 80), prefix)
    )


def _checked(endpoint: Endpoint) -> Endpoint:
    if _HOST(endpoint.host) is None:
        raise ValueError(f"host {endpoint.host!r:.80} is not a name or an address, without scheme, port and path")
    if not 0 < endpoint.port < 65536:
        raise ValueError(f"port {endpoint.port} is not between 1 and 65535")
    if _PREFIX(endpoint.prefix) is None:
        raise ValueError(f"the path prefix {endpoint.prefix!r:.80} is not like /realtime")
    return endpoint
