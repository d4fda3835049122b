"""Settings that are hosts or URLs: what is wrong with them, and whether a database is reached safely."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redpoll.config.redis_url import RedisUrl

__all__ = ["ADDRESS_FAULTS", "checks_server", "database_files"]


def _http_url_fault(url: str) -> str | None:
    """Doesn't quote the URL, which may contain a password or a token."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises ValueError
    except ValueError:
        return "is not a URL with a host and a port from 1 to 65535"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "must begin with http:// or https:// and a host"
    return None


def _public_url_fault(url: str) -> str | None:
    text = _http_url_fault(url)
    if text:
        return text
    parts = urlsplit(url)
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        return "must have only a scheme, host and port: clients add the paths themselves"
    return None


def _redis_url_fault(url: str) -> str | None:
    """Doesn't quote the URL, which may contain a password."""
    try:
        RedisUrl.parse(url)
    except ValueError as error:
        return str(error)
    return None


def _database_url_fault(url: str) -> str | None:
    """Doesn't quote the URL, which contains a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # CPython 3.13, and with it asyncpg, refuses brackets after the first host.
        return "is not a URL; of several hosts, one in brackets must come first" if "[" in url else "is not a URL"
    if parts.scheme not in ("postgresql", "postgres"):
        return "must begin with postgresql://"
    # With such a character in a password, the host begins within the password, and messages would quote the rest.
    rest = parts.path if parts.path.strip("/") else f"{parts.query}{parts.fragment}"
    if parts.netloc.count("@") > 1 or "@" in rest or "@" in parts.fragment:
        return "has a special character that isn't escaped; write / as %2F, @ as %40, ? as %3F and # as %23"
    if not parts.path.strip("/"):
        return "names no database: postgresql://USER:PASSWORD@HOST/DATABASE"
    try:
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        return "has parameters that aren't NAME=VALUE with & in between"
    written = parts.netloc.rpartition("@")[2].split(",")
    places = [unquote(place) for place in written]
    # Others are addresses in brackets and the paths of Unix sockets.
    names = [place.partition(":")[0] for place in places if not place.startswith(("[", "/", "@"))]
    if any(map(_host_fault, names)) or (len(places) > 1 and "" in places):
        return "has a host with a part that is empty or has more than 63 characters"
    ports = [unquote(place.rpartition("]")[2].partition(":")[2]) for place in written]
    ports += query.get("port", "").split(",")
    if not all(not port or (port.isdecimal() and 0 < int(port) < 65536) for port in ports):
        return "has a port that isn't a number from 1 to 65535; escape special characters of a password"
    if find_spec("asyncpg") is None:
        # Found at the start only, it would fail a restart after the old server has stopped.
        return "names PostgreSQL, and its driver is missing: pip install 'redpoll[postgres]'"
    return None


def _host_fault(host: str) -> str | None:
    try:
        host.encode("idna")
    except UnicodeError:
        return f"is no host name: a part is empty or has more than 63 characters; got {host!r}"
    return None


def checks_server(database_url: str) -> bool:
    """Whether the connection stays on this machine, or the server's certificate is checked. asyncpg's default,
    `prefer`, checks none and takes a connection without TLS."""
    parts = urlsplit(database_url)
    query = dict(parse_qsl(parts.query))
    if query.get("sslmode") in ("verify-ca", "verify-full"):
        return True
    hosts = [host for host in (query.get("host") or parts.netloc.rpartition("@")[2]).split(",") if host]
    return all(_is_local(host) for host in hosts)


def database_files(database_url: str) -> dict[str, str]:
    """The TLS files that a connection reads, by the URL's parameter."""
    query = dict(parse_qsl(urlsplit(database_url).query))
    mode = query.get("sslmode", "prefer")
    checks = mode in ("require", "verify-ca", "verify-full")
    used = (("sslrootcert", checks), ("sslcrl", checks), ("sslcert", mode != "disable"), ("sslkey", mode != "disable"))
    return {name: query[name] for name, is_read in used if is_read and name in query}


def _is_local(host: str) -> bool:
    """`host` may have a port, an IPv6 address then in brackets; a path is that of a Unix socket."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host if host.count(":") > 1 else host.partition(":")[0]
    if unquote(name).startswith(("/", "@")) or name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


ADDRESS_FAULTS: Final[dict[str, Callable[[str], str | None]]] = {
    "host": _host_fault,
    "control_host": _host_fault,
    "redis_url": _redis_url_fault,
    "database_url": _database_url_fault,
    "otel_endpoint": _http_url_fault,
    "public_url": _public_url_fault,
}
"""What each setting with an address is checked by: says what is wrong with it, None if nothing is."""
