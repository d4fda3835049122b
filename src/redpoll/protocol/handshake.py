"""Whether a WebSocket may open: the checks of protocol.md 1.1 in their order, on what the head said.

RFC 6455's own conditions are the engine's, and capacity and draining the worker's.
"""

import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

import msgspec

from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code, close_reason

__all__ = ["Refusal", "check", "origin_allowed", "recovers"]

_OLDEST_PROTOCOL, _NEWEST_PROTOCOL = 5, 7
_DEFAULT_PROTOCOL = "7"
_MAX_QUOTED_CHARS = 40

# Any prefix before /app/: pusher-js' `wsPath`, where a proxy passes it on.
_PATH = re.compile(r"(?:/.*)?/app/([^/]+)/?", re.DOTALL).fullmatch
_INTEGER = re.compile(r"-?[0-9]{1,9}").fullmatch
_OWN_PORTS = {"http": 80, "https": 443}


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why not: sent in a `pusher:error` and as the close frame's code and reason, after the upgrade, because
    browsers can't read a refused one. `message` fits a close frame."""

    code: int
    message: str


def check(
    path: str,
    query: Mapping[str, str],
    origin: str | None,
    find_app: Callable[[str], App | None],
    secure: bool,
) -> App | Refusal:
    """The app that this socket belongs to, or the refusal.

    `path` is as requested, without the query; `query` is decoded; `origin` is the header, None where absent;
    `find_app` looks an app up by its key, and knows disabled apps too; `secure` says that the client came by
    TLS, to us or to a trusted proxy: told 4000 there, pusher-js would come back at once and for ever.
    """
    match = _PATH(path)
    if match is None:
        return _refusal(Code.PATH_NOT_FOUND, f"Path {path[:_MAX_QUOTED_CHARS]} not found: connect to /app/KEY")
    key = unquote(match[1])
    app = find_app(key)
    # A disabled key opens nothing new; its app's other keys go on.
    own = app is not None and app.console_key is not None and app.console_key.key == key
    if app is None or (app.secret_of(key) is None and not own):
        return _refusal(Code.UNKNOWN_KEY, f"App key {key[:_MAX_QUOTED_CHARS]} not known to this server")
    if app.tls_required and not secure:
        return _refusal(Code.TLS_REQUIRED, "This app takes TLS connections only: connect by wss://")
    if not app.enabled:
        return _refusal(Code.APP_DISABLED, "App disabled")
    version = query.get("protocol", _DEFAULT_PROTOCOL)
    if _INTEGER(version) is None:
        return _refusal(Code.BAD_VERSION, f"Invalid protocol version {version[:_MAX_QUOTED_CHARS]}")
    if not _OLDEST_PROTOCOL <= int(version) <= _NEWEST_PROTOCOL:
        return _refusal(
            Code.UNSUPPORTED_VERSION,
            f"Unsupported protocol version {version}: {_OLDEST_PROTOCOL} to {_NEWEST_PROTOCOL} are supported",
        )
    # The dashboard's page comes from an address of its own (decisions.md "Dashboard and trace").
    if not own and not origin_allowed(origin, app.allowed_origins):
        return _refusal(Code.UNAUTHORIZED, f"Origin {(origin or '')[:_MAX_QUOTED_CHARS]} not allowed")
    return app


def recovers(query: Mapping[str, str]) -> bool:
    """Whether this client wants to be told epochs and offsets, so that it can go on where it stopped (`recover=1`).
    Others pay no bytes for it."""
    return query.get("recover") == "1"


def origin_allowed(origin: str | None, allowed: tuple[str, ...]) -> bool:
    """Whether pages of `origin` may connect. Servers and mobile apps send none, and may.

    Entries are `host` or `*.host` (which is not `host` itself), with a port where it isn't the scheme's own.
    Compared letter by letter: browsers write origins in lower case, and what doesn't isn't one.
    """
    if not allowed or origin is None:
        return True
    host = _host_of(origin)
    if host is None:
        return False
    return any(
        host == entry or (entry.startswith("*.") and host.endswith(entry[1:]) and len(host) >= len(entry))
        for entry in allowed
    )


def _host_of(origin: str) -> str | None:
    """`host`, or `host:port` where the port isn't the scheme's own; None if it is no origin."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    plain = f"{parts.scheme}://{parts.netloc}"
    if not parts.scheme or not parts.netloc or plain != origin or "@" in parts.netloc or "," in origin:
        return None
    host = parts.netloc.removesuffix(f":{port}") if port is not None else parts.netloc
    return host if port is None or port == _OWN_PORTS.get(parts.scheme) else f"{host}:{port}"


def _refusal(code: Code, message: str) -> Refusal:
    return Refusal(int(code), close_reason(message))
