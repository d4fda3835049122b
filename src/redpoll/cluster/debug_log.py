"""Verbose logging of one app or one connection for a limited time (`redpoll debug`).

The app's record says until when, and of which connection (`App.debug_until`, `App.debug_socket`), so every process of
every node knows it, also one that starts meanwhile. Each process writes its lines to its own log and to a stream of the
app in Redis, from which the command line reads those of all processes. It ends by itself at the time in the record.
"""

import re
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.protocol.apps import App
from redpoll.protocol.limits import TokenBucket

__all__ = ["MAX_LINES", "DebugLog", "debug_text"]

log = structlog.get_logger()

# Lines that the stream keeps; Redis may keep some more.
MAX_LINES: Final = 2_000
# What a process writes at most, so that a busy app fills neither the disk nor Redis. The others are counted.
_LINES_PER_S: Final = 100.0
_MAX_BURST: Final = 500.0
_MAX_TEXT_CHARS: Final = 1_000
# The signature of a subscribe or sign-in, or a grant's whole JWT, also within a string of JSON.
_SIGNATURE: Final = re.compile(r'(\\*"auth\\*"\s*:\s*\\*"[^":\\]*:)[^"\\]+')


def debug_text(data: bytes | str) -> str:
    """Data of a client or a back end as a line may contain it: cut to 1,000 characters, without signatures."""
    text = data[: 4 * _MAX_TEXT_CHARS].decode(errors="replace") if isinstance(data, bytes) else data
    text = _SIGNATURE.sub(r"\1…", text[:_MAX_TEXT_CHARS])
    return text if len(data) <= _MAX_TEXT_CHARS else f"{text}… ({len(data)} in all)"


class DebugLog:
    """`any`: an app is being debugged; callers look at this first, because it is false nearly always.

    `node_name` ("": the host's name) and `process` name the process in the lines; `clock` gives Unix time, `steady`
    seconds that only increase.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        node_name: str,
        process: str,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.any = False
        self._link = link
        self._keys = keys
        self._origin = f"{node_name or socket.gethostname()} {process}"
        self._clock = clock
        self._steady = steady
        self._apps: dict[str, App] = {}
        self._rate = TokenBucket(_LINES_PER_S, _MAX_BURST)
        self._left_out = 0

    def app_changed(self, app_id: str, app: App | None) -> None:
        """Takes an app's present record; None: it was deleted."""
        if app is not None and app.debug_until > self._clock():
            self._apps[app_id] = app
        else:
            self._apps.pop(app_id, None)
        self.any = bool(self._apps)

    def socket_of(self, app_id: str) -> str | None:
        """The only connection of the app that is being debugged, "" for all; None: the app isn't being debugged."""
        app = self._apps.get(app_id)
        if app is None:
            return None
        if app.debug_until <= self._clock():
            self.app_changed(app_id, None)
            return None
        return app.debug_socket

    def covers(self, app_id: str, socket_id: str) -> bool:
        """Whether lines about this connection are wanted."""
        chosen = self.socket_of(app_id)
        return chosen is not None and chosen in ("", socket_id)

    def line(self, app_id: str, socket_id: str, what: str, **fields: Any) -> None:
        """Writes a line. `what` is a constant phrase; `fields` are values of JSON. The caller has asked `covers`."""
        if not self._rate.take(self._steady()):
            self._left_out += 1
            return
        if self._left_out:
            fields["lines_left_out"], self._left_out = self._left_out, 0
        log.info("debug", what=what, app=app_id, socket=socket_id, **fields)
        entry = {"time_ms": int(self._clock() * 1_000), "origin": self._origin, "socket": socket_id, "what": what}
        encoded = msgspec.json.encode({**entry, **fields})
        # Without the stream nobody reads, and nothing would delete it.
        key = self._keys.debug(app_id)
        self._link.call(b"XADD", key, b"NOMKSTREAM", b"MAXLEN", b"~", MAX_LINES, b"*", b"line", encoded)
