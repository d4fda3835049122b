"""Parses the URL of Redis."""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Endpoint"]


class Endpoint(NamedTuple):
    """The address and credentials of Redis: `path` for a Unix socket, else `host` and `port`."""

    path: str | None
    host: str
    port: int
    username: str | None
    password: str | None
    database: int

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """From `redis://[[user]:password@]host[:port][/db]` or `unix:///path[?db=n&password=p]`.

        Raises ValueError. Its text contains neither user nor password.
        """
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        username = unquote(parts.username) if parts.username else query.get("username")
        password = unquote(parts.password) if parts.password else query.get("password")
        if parts.scheme == "unix":
            if not parts.path:
                raise ValueError("the Redis URL has no path: write unix:///path/to/socket")
            path, database = unquote(parts.path), query.get("db", "0")
        elif parts.scheme == "redis":
            path, database = None, parts.path.strip("/") or query.get("db", "0")
        else:
            raise ValueError(f"the Redis URL must begin with redis:// or unix://, not {parts.scheme}://")
        if not database.isdecimal():
            raise ValueError("the database in the Redis URL must be a number")
        host, port = parts.hostname or "127.0.0.1", parts.port or 6379
        return cls(path, host, port, username, password, int(database))
