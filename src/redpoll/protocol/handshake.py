"""Decides whether a WebSocket may open, from its path, query and Origin (protocol/README.md "Connecting").

The engine checks what RFC 6455 demands; the worker checks that it has room and isn't stopping.
"""

import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from redpoll.protocol.apps import App
from redpoll.protocol.auth import MAX_QUERY_PARAMS
from redpoll.protocol.errors import Code, close_reason

__all__ = [
    "Refusal",
    "admits_origin",
    "check",
    "decrypts_all",
    "host_of",
    "key_of",
    "origin_allowed",
    "read_query",
    "recovers",
    "split_target",
]

_OLDEST_PROTOCOL, _NEWEST_PROTOCOL = 5, 7
_DEFAULT_PROTOCOL = "7"
_USUAL_VERSIONS = frozenset(str(version) for version in range(_OLDEST_PROTOCOL, _NEWEST_PROTOCOL + 1))
_MAX_QUOTED_CHARS = 40

# Any prefix before /app/ is allowed: pusher-js' `wsPath`, which a proxy may pass on.
_PATH = re.compile(r"(?:/.*)?/app/([^/]+)/?", re.DOTALL).fullmatch
_INTEGER = re.compile(r"-?[0-9]{1,9}").fullmatch
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why a connection is refused. Sent after the upgrade as `pusher:error` and as the close's code and reason, because
    browsers can't read a refused upgrade. `message` fits into a close frame."""

    code: int
    message: str


def split_target(target: str) -> tuple[str, dict[str, str]]:
    """The path of a request's target, as requested, and its query decoded, with the last value of each name."""
    target = target.partition("#")[0]
    if not target.startswith("/"):
        # The absolute form, http://host/path (RFC 9112 section 3.2.2).
        target = f"/{target.partition('://')[2].partition('/')[2]}"
    path, _, query = target.partition("?")
    return path, read_query(query)


def read_query(query: str) -> dict[str, str]:
    """A query decoded, with the last value of each name. Parameters beyond `MAX_QUERY_PARAMS` are left out: nobody has
    checked who asks, and to decode thousands takes longer than a pass of the loop may."""
    read = "&".join(query.split("&", MAX_QUERY_PARAMS)[:MAX_QUERY_PARAMS])
    return {name: values[-1] for name, values in parse_qs(read, keep_blank_values=True).items()}


def key_of(path: str) -> str | None:
    """The app key in the path of a WebSocket, which is as requested; None if it isn't such a path."""
    match = _PATH(path)
    if match is None:
        return None
    return unquote(match[1]) if "%" in match[1] else match[1]


def check(
    path: str,
    query: Mapping[str, str],
    origin: str | None,
    find_app: Callable[[str], App | None],
    secure: bool,
    own_host: str | None = None,
) -> App | Refusal:
    """The app that the connection belongs to, or the refusal.

    `path` is as requested, without the query; `query` is decoded; `origin` is the header, None if absent; `find_app`
    finds apps by key, disabled apps too; `secure`: the client uses TLS, to this server or to a trusted proxy. A client
    with TLS never gets 4000, because pusher-js would reconnect by TLS at once and without end. `own_host` is as in
    `admits_origin`.
    """
    key = key_of(path)
    if key is None:
        return _refusal(Code.PATH_NOT_FOUND, f"Path {path[:_MAX_QUOTED_CHARS]} not found: connect to /app/KEY")
    app = find_app(key)
    # A disabled key admits no new connection; the app's other keys still do.
    if app is None or (app.secret_of(key) is None and not _is_console(app, key)):
        return _refusal(Code.UNKNOWN_KEY, f"App key {key[:_MAX_QUOTED_CHARS]} not known to this server")
    if app.tls_required and not secure:
        return _refusal(Code.TLS_REQUIRED, "This app requires TLS: connect by wss://")
    if not app.enabled:
        return _refusal(Code.APP_DISABLED, "App disabled")
    version = query.get("protocol", _DEFAULT_PROTOCOL)
    if version not in _USUAL_VERSIONS and (refusal := _version_refusal(version)) is not None:
        return refusal
    # All origins are allowed in most apps.
    if app.allowed_origins and not admits_origin(app, key, origin, own_host):
        return _refusal(Code.UNAUTHORIZED, f"Origin {(origin or '')[:_MAX_QUOTED_CHARS]} not allowed")
    return app


def _version_refusal(version: str) -> Refusal | None:
    if _INTEGER(version) is None:
        return _refusal(Code.BAD_VERSION, f"Invalid protocol version {version[:_MAX_QUOTED_CHARS]}")
    if not _OLDEST_PROTOCOL <= int(version) <= _NEWEST_PROTOCOL:
        return _refusal(
            Code.UNSUPPORTED_VERSION,
            f"Unsupported protocol version {version}: {_OLDEST_PROTOCOL} to {_NEWEST_PROTOCOL} are supported",
        )
    return None


def admits_origin(app: App, key: str, origin: str | None, own_host: str | None = None) -> bool:
    """Whether clients of `origin` may use the app with this key. The dashboard's console comes from the dashboard's own
    address.

    `own_host` is that of the setting `public_url`: React Native and other libraries without a page send the address
    that they connect to. The request's Host header wouldn't do: with DNS rebinding, a foreign page has it as its own.
    """
    if _is_console(app, key) or origin_allowed(origin, app.allowed_origins):
        return True
    return own_host is not None and origin is not None and host_of(origin) == own_host


def _is_console(app: App, key: str) -> bool:
    return app.console_key is not None and app.console_key.key == key


def recovers(query: Mapping[str, str]) -> bool:
    """Whether the client asked for epochs and offsets (`recover=1`), so that it can continue where it stopped. They
    cost bytes in every frame, so other clients don't get them."""
    return query.get("recover") == "1"


def decrypts_all(query: Mapping[str, str]) -> bool:
    """Whether this is Pusher's library for Java, as in Android apps. On an encrypted channel it decrypts each frame
    whose data isn't `{}`, whatever the event, and one that isn't ciphertext ends the app with a NullPointerException.
    """
    return query.get("client") == "java-client"


def origin_allowed(origin: str | None, allowed: tuple[str, ...]) -> bool:
    """Whether pages of `origin` may connect. Programs that send no Origin are always allowed.

    Entries are `host` or `*.host` (which doesn't include `host`), with a port unless it is the scheme's own. The
    comparison is case-sensitive: browsers write origins in lower case, and `parse_setting` writes entries so.
    """
    if not allowed or origin is None:
        return True
    host = host_of(origin)
    if host is None:
        return False
    return any(
        host == entry or (entry.startswith("*.") and host.endswith(entry[1:]) and len(host) >= len(entry))
        for entry in allowed
    )


def host_of(origin: str) -> str | None:
    """`host`, or `host:port` unless the port is the scheme's own; None if this is no origin.

    Browsers write no slash at the end. Libraries for Go send `http://localhost/`, which their users can't change.
    """
    origin = origin.removesuffix("/")
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    plain = f"{parts.scheme}://{parts.netloc}"
    if not parts.scheme or not parts.netloc or plain != origin or "@" in parts.netloc or "," in origin:
        return None
    host = parts.netloc.removesuffix(f":{port}") if port is not None else parts.netloc
    return host if port is None or port == _DEFAULT_PORTS.get(parts.scheme) else f"{host}:{port}"


def _refusal(code: Code, message: str) -> Refusal:
    return Refusal(int(code), close_reason(message))
