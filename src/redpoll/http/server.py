"""What the HTTP connections of one port share: limits, deadlines, and whose turn it is.

A worker's public port (worker/ingress/http_requests.py) and the control port (control/http/control_port.py) are
servers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import structlog

from redpoll.http.head import FieldTable
from redpoll.http.reader import Fault, ParsedRequest

__all__ = ["HttpServer", "S", "Stream"]

log = structlog.get_logger()

# Of all bodies that are being read.
MAX_READING_BYTES: Final = 32 * 1024 * 1024
# For a whole body, however slowly it comes.
BODY_TIMEOUT_S: Final = 15.0
# Longer than the 60 s after which proxies commonly drop an idle connection, so that they close first.
IDLE_TIMEOUT_S: Final = 75.0
# How long connections go on in one pass of the loop, before all others have their turn.
SLICE_S: Final = 0.002
# A limit is logged again only after it wasn't reached for this long.
_EPISODE_S: Final = 10.0


class Stream(Protocol):
    """The bytes of a connection. `unsent_bytes` wait to be sent; `is_http`: it is open."""

    @property
    def unsent_bytes(self) -> int: ...
    @property
    def is_http(self) -> bool: ...

    def write_http(self, response: bytes) -> None: ...
    def end_http(self, response: bytes = b"") -> None:
        """Close after everything is written, with `response` last. Further bytes of the client are dropped."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class Served(Protocol):
    """A connection, as its server sees it (connection.py)."""

    def late(self) -> None: ...
    def gone(self) -> None: ...


S = TypeVar("S", bound=Stream)
C = TypeVar("C", bound=Served)


class HttpServer(Generic[S, C]):
    """The connections of a port, by their streams. `table`: the header fields that requests are to have.

    `idle`: connections between two requests, the longest idle first. `refused` counts refusals by the limit that was
    reached. `draining`: no connection takes another request.
    """

    def __init__(self, table: FieldTable, limits: tuple[str, ...]) -> None:
        self.table = table
        self.connections: dict[S, C] = {}
        self.idle: dict[S, None] = {}
        self.refused = dict.fromkeys(limits, 0)
        self.draining = False
        self.reading_bytes = 0
        self.max_reading_bytes = MAX_READING_BYTES
        self.body_timeout_s = BODY_TIMEOUT_S
        self.idle_timeout_s = IDLE_TIMEOUT_S
        self._loop = asyncio.get_running_loop()
        self._reached_at: dict[str, float] = {}
        self._postponed: deque[Callable[[], None]] = deque()

    # -- what a port does in its own way -------------------------------------------------------------------

    @property
    def head_timeout_s(self) -> float:
        """For a whole head, however slowly it comes."""
        raise NotImplementedError

    def submit(self, connection: C, request: ParsedRequest) -> None:
        """Have a request answered; `connection.answered` is called later."""
        raise NotImplementedError

    def error(self, fault: Fault) -> bytes:
        """The last response of a connection."""
        raise NotImplementedError

    def wait(self, stream: S, seconds: float) -> None:
        """Call `late` for this stream after that long, and not when it was to be called before."""
        raise NotImplementedError

    def silent_s(self, stream: S) -> float:
        """How long ago bytes last came from it."""
        raise NotImplementedError

    def when_read(self, stream: S, then: Callable[[], None]) -> None:
        """Call `then` once, later, when the client has read what waits for it."""
        raise NotImplementedError

    def forget_reader(self, stream: S) -> None:
        """Undo `when_read`."""
        raise NotImplementedError

    # -- what all do ---------------------------------------------------------------------------------------

    def late(self, stream: S) -> None:
        """A deadline of the stream has passed."""
        http = self.connections.get(stream)
        if http is not None:
            http.late()

    def gone(self, stream: S) -> None:
        """`stream` has ended or became a WebSocket. Idempotent."""
        http = self.connections.pop(stream, None)
        if http is not None:
            http.gone()

    def later(self, call: Callable[[], None]) -> None:
        """Call it in a later pass of the loop, in order. All connections share the time of a pass."""
        if not self._postponed:
            self._loop.call_soon(self._run_postponed)
        self._postponed.append(call)

    def _run_postponed(self) -> None:
        postponed, loop = self._postponed, self._loop
        until = time.monotonic() + SLICE_S
        for _ in range(len(postponed)):
            try:
                postponed[0]()
            except Exception as error:
                loop.call_exception_handler({"message": "an HTTP connection could not go on", "exception": error})
            # Only now, so that `later` doesn't schedule this once more.
            del postponed[0]
            if time.monotonic() > until:
                break
        if postponed:
            loop.call_soon(self._run_postponed)

    def limit_reached(self, limit: str) -> None:
        """Count a refusal. Log one line per period in which the limit is reached."""
        self.refused[limit] += 1
        now = self._loop.time()
        if now - self._reached_at.get(limit, -_EPISODE_S) >= _EPISODE_S:
            log.warning("limit reached", limit=f"HTTP {limit}")
        self._reached_at[limit] = now
