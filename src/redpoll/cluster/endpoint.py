"""Where Redis is, as its URL says it."""

from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Endpoint"]


class Endpoint(NamedTuple):
    """Where Redis is and how to get in; `path` for a Unix socket, else `host` and `port`."""

    path: str | None
    host: str
    port: int
    username: str | None
    password: str | None
    database: int

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """From `redis://[[user]:password@]host[:port][/db]` or `unix:///path[?db=n&password=p]`.

        Raises ValueError, with a sentence that names neither user nor password.
        """
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        username = unquote(parts.username) if parts.username else query.get("username")
        password = unquote(parts.password) if parts.password else query.get("password")
        if parts.scheme == "unix":
            if not parts.path:
                raise ValueError("a unix:// URL of Redis needs the path of its socket")
            path, database = unquote(parts.path), query.get("db", "0")
        elif parts.scheme == "redis":
            path, database = None, parts.path.strip("/") or query.get("db", "0")
        else:
            raise ValueError(f"a URL of Redis begins with redis:// or unix://, not {parts.scheme}://")
        if not database.isdecimal():
            raise ValueError("the database in a URL of Redis is a number")
        host, port = parts.hostname or "127.0.0.1", parts.port or 6379
        return cls(path, host, port, username, password, int(database))
