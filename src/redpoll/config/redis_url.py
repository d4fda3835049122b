"""Parses the URL of Redis: where it is, how to log in, and which TLS files to use.

The schemes are `redis`, `unix`, `redis+sentinel` and `redis+cluster`, with `rediss` in place of `redis` for TLS. The
names of TLS files are parameters of the URL, as in redis-py, so that one string says everything that a process needs
for its connection. Error messages contain neither user nor password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    import ssl

__all__ = ["RedisUrl", "with_tls_files"]

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
# Parameters of the URL, and the fields of RedisUrl that they set.
_TLS_FILES = {"ssl_ca_certs": "ca_file", "ssl_certfile": "cert_file", "ssl_keyfile": "key_file"}


@dataclass(frozen=True, kw_only=True)
class RedisUrl:
    """One parsed URL. `hosts` are those of Redis, of some nodes of a `cluster`, or, if `service` is set, of the
    Sentinels that know its master.

    `path` is a Unix socket, and `hosts` is empty then. Credentials aren't part of its repr.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    database: int = 0
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    service: str = ""
    cluster: bool = False
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """From `redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DB]`, `unix:///PATH`,
        `redis[s]+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST…]/SERVICE`, or
        `redis[s]+cluster://[[USER]:PASSWORD@]HOST[:PORT][,HOST…]`. Line feeds are left out, as by urlsplit.

        Raises ValueError.
        """
        # urlsplit refuses brackets in a list of hosts (CPython 3.13), so it gets the URL without them.
        scheme, slashes, rest = re.sub("[\t\r\n]", "", url).partition("://")
        authority = re.split("[/?#]", rest, maxsplit=1)[0]
        parts = urlsplit(f"{scheme}{slashes}{rest.removeprefix(authority)}")
        parameters = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        credentials, _, places = authority.rpartition("@")
        name, _, secret = credentials.partition(":")
        username = unquote(name) or parameters.get("username")
        password = unquote(secret) or parameters.get("password")
        scheme, _, kind = parts.scheme.partition("+")
        if scheme == "unix" and not kind:
            path = unquote(parts.path)
            if not path.startswith("/") or places:
                raise ValueError("needs an absolute path, such as unix:///run/redis.sock")
            database = _database(parameters.get("db", "0"))
            return cls(path=path, username=username, password=password, database=database)
        if scheme not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
            raise ValueError(
                "must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (with TLS "
                "rediss+sentinel:// or rediss+cluster://)"
            )
        hosts = tuple(
            _host(place, _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT) for place in places.split(",")
        )
        if len(hosts) > 1 and not kind:
            raise ValueError("has several hosts: only redis+sentinel:// and redis+cluster:// can have them")
        tail = unquote(parts.path.strip("/"))
        if kind == "sentinel" and not tail:
            raise ValueError("names no service: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
        database = _database(parameters.get("db", "0") if kind == "sentinel" else tail or parameters.get("db", "0"))
        if kind == "cluster" and database:
            raise ValueError("names a database: a Redis Cluster has only database 0")
        return cls(
            hosts=hosts,
            username=username,
            password=password,
            database=database,
            tls=scheme == "rediss",
            **{name: parameters.get(parameter, "") for parameter, name in _TLS_FILES.items()},
            service=tail if kind == "sentinel" else "",
            cluster=kind == "cluster",
            sentinel_username=parameters.get("sentinel_user"),
            sentinel_password=parameters.get("sentinel_password"),
        )

    @property
    def place(self) -> str:
        """The path or the hosts, for messages."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.service:
            return f"the master of {self.service}, says Sentinel at {hosts}"
        return self.path or hosts

    def tls_context(self) -> ssl.SSLContext | None:
        """The context of a connection, from the files as they are now; None without TLS. Raises OSError."""
        if not self.tls:
            return None
        # Late: a Python may be built without ssl.
        import ssl

        context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file or None)
        return context


def with_tls_files(url: str, ca_file: str, cert_file: str, key_file: str) -> str:
    """The URL with these files as parameters. Empty names are left out."""
    files = zip(_TLS_FILES, (ca_file, cert_file, key_file), strict=True)
    query = "&".join(f"{parameter}={quote(path, safe='/')}" for parameter, path in files if path)
    return url + ("&" if "?" in url else "?") + query if query else url


def _host(place: str, default_port: int) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = place, str(default_port)
    if host.startswith("["):
        if not host.endswith("]"):
            raise ValueError("has an IPv6 address without its closing bracket")
        host = host[1:-1]
    if not host:
        raise ValueError("has no host")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("has a host with a part that is empty or has more than 63 characters") from None
    # What is wrong isn't quoted: it may be a part of a password in which `/` or `@` isn't escaped.
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("has a port that isn't a number from 1 to 65535; escape special characters of a password")
    return host, int(port)


def _database(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("has a database that isn't a number")
    return int(text)
