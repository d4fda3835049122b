"""What all HTTP connections of a worker share: the link to control, limits, deadlines, and the worker's own answers.

A connection becomes an HTTP connection when its first request doesn't ask for a WebSocket. Requests go to control
(control_link.py). At each limit a request is answered 503 with Retry-After, or a connection is closed to make room.
Half of each limit is for callers who have authenticated (strangers.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from redpoll.config.proxies import TrustedProxies
from redpoll.http.errors import TOO_MANY_OF_ADDRESS, error_response
from redpoll.http.messages import SECURE
from redpoll.worker.ingress.control_link import ControlLink
from redpoll.worker.ingress.http_connection import HttpConnection

if TYPE_CHECKING:
    from redpoll.config.config import Settings
    from redpoll.loop.writable import DrainSignal
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.ingress.credentials import Credentials
    from redpoll.worker.ingress.strangers import Strangers
    from redpoll.worker.timers.janitor import Janitor

__all__ = ["HttpRequests"]

log = structlog.get_logger()

# Per worker: requests that wait for control's answer, and bytes of bodies that are still being read.
MAX_REQUESTS: Final = 4096
MAX_READING_BYTES: Final = 32 * 1024 * 1024
# For a whole body, however slowly it comes.
BODY_TIMEOUT_S: Final = 15.0
# Longer than the 60 s after which proxies commonly drop an idle connection, so that they close first.
IDLE_TIMEOUT_S: Final = 75.0
# A connection whose caller has authenticated makes room only after it has been idle for this long, and last.
_SPARED_S: Final = 10.0
# How long connections go on in one pass of the loop, before all others have their turn.
SLICE_S: Final = 0.002
# A limit is logged again only after it wasn't reached for this long.
_EPISODE_S: Final = 10.0


class HttpRequests:
    """The HTTP side of a worker. `max_connections` bounds its HTTP connections.

    `idle`: authenticated callers' connections between two requests, the longest idle first; those of others are in
    `strangers`. `refused` counts refusals by the limit that was reached. `drain_signal` says when a client has read the
    answers that it left unread.
    """

    def __init__(
        self,
        settings: Settings,
        janitor: Janitor,
        drain_signal: DrainSignal,
        path: str,
        max_connections: int,
        strangers: Strangers,
        credentials: Credentials,
    ) -> None:
        self.strangers = strangers
        self.drain_signal = drain_signal
        self.link = ControlLink(path)
        self.draining = False
        self.max_requests = MAX_REQUESTS
        self.max_reading_bytes = MAX_READING_BYTES
        self.reading_bytes = 0
        self.idle: dict[Connection, None] = {}
        self.refused: dict[str, int] = {"connections": 0, "requests": 0, "bodies": 0, "address": 0}
        self.connections: dict[Connection, HttpConnection] = {}
        self._max_connections = max_connections
        self._credentials = credentials
        self._trusted = TrustedProxies(settings.trusted_proxies)
        self._janitor = janitor
        self._reached_at: dict[str, float] = {}
        self._postponed: deque[Callable[[], None]] = deque()

    @property
    def max_strange_requests(self) -> int:
        """Of `max_requests`, those that strangers may use."""
        return self.max_requests // 2

    @property
    def max_strange_reading_bytes(self) -> int:
        """Of `max_reading_bytes`, those that strangers may use."""
        return self.max_reading_bytes // 2

    # -- connections ---------------------------------------------------------------------------------------

    def adopt(self, connection: Connection, peer: str, secure: bool) -> None:
        """Serve a connection whose first request head has just come and doesn't ask for a WebSocket."""
        self.begin(connection, peer, secure, connection.serve_http())

    def begin(self, connection: Connection, peer: str, secure: bool, data: bytes) -> None:
        """Serve a connection that speaks HTTP. `data` is what came first."""
        full = len(self.connections) >= self._max_connections
        if full and not self.strangers.make_http_room(peer) and not self.close_idle():
            self.limit_reached("connections")
            text = "this server has as many HTTP connections as it takes; send the request again"
            connection.end_http(error_response(503, "unavailable", text, "Retry-After: 1\r\n"))
            return
        self.connections[connection] = made = HttpConnection(self, connection, peer, SECURE if secure else 0)
        made.received(data)

    def close_idle(self) -> bool:
        """Close the authenticated caller's connection that has been idle for the longest time. False: none has been
        idle for long."""
        oldest = next(iter(self.idle), None)
        if oldest is None or self._janitor.silent_s(oldest) < _SPARED_S:
            return False
        # Now, not when the connection is gone, which is later: the next connection of this loop pass needs another one.
        del self.idle[oldest]
        self.strangers.leaving.add(oldest)
        oldest.abort()
        return True

    def upgrade(self, http: HttpConnection, received: bytes) -> None:
        """A request asks for a WebSocket: `received` is its head and what follows."""
        self.gone(http.connection)
        http.connection.upgrade(received)

    def gone(self, connection: Connection) -> None:
        """`connection` has ended or became a WebSocket. Idempotent."""
        http = self.connections.pop(connection, None)
        if http is not None:
            http.gone()

    def drain(self) -> None:
        """Take no more: idle connections close now, others after the answer to what they have sent."""
        self.draining = True
        for connection in [*self.idle, *self.strangers.idle]:
            connection.end_http()

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
        self.link.close()

    def later(self, call: Callable[[], None]) -> None:
        """Call it in a later pass of the loop, in order. All connections share the time of a pass."""
        if not self._postponed:
            self._janitor.loop.call_soon(self._run_postponed)
        self._postponed.append(call)

    def _run_postponed(self) -> None:
        postponed, loop = self._postponed, self._janitor.loop
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

    # -- deadlines -----------------------------------------------------------------------------------------

    def wait_for_head(self, connection: Connection) -> None:
        self._janitor.http_waits(connection, self._janitor.head_timeout_s)

    def wait_for_body(self, connection: Connection) -> None:
        self._janitor.http_waits(connection, BODY_TIMEOUT_S)

    def late(self, connection: Connection) -> None:
        """A deadline of the connection has passed."""
        http = self.connections.get(connection)
        if http is None:
            return
        if http.reads_head:
            text = f"no complete request within {self._janitor.head_timeout_s:g} s"
            connection.end_http(error_response(408, "bad_request", text))
        elif http.reads_body:
            http.refuse_body(408)
        elif http.busy or self._janitor.silent_s(connection) < IDLE_TIMEOUT_S:
            self._janitor.http_waits(connection, IDLE_TIMEOUT_S)
        else:
            connection.end_http()

    def beat(self) -> None:
        """Four times a second."""
        self.link.beat()
        self.strangers.beat()

    # -- limits and answers --------------------------------------------------------------------------------

    def refusal(self, http: HttpConnection, request: tuple[Any, ...]) -> bytes | None:
        """The response to a request that can't be sent to control now; None: it can be sent. `request` are the
        arguments of ControlLink.send."""
        if not self.link.is_open():
            text = "the control plane isn't there; send the request again"
        elif (limit := self._limit_of(http, request)) is None:
            return None
        else:
            self.limit_reached(limit)
            text = TOO_MANY_OF_ADDRESS
            if limit == "requests":
                text = "this server has as many requests under way as it takes; send the request again"
        return error_response(503, "unavailable", text, "Retry-After: 1\r\n", keep_alive=True)

    def _limit_of(self, http: HttpConnection, request: tuple[Any, ...]) -> str | None:
        """The limit that this request would exceed."""
        under_way = len(self.link.awaited)
        if under_way >= self.max_requests:
            return "requests"
        if http.authenticated:
            return None
        _, method, client, target, fields, *_ = request
        limit = None
        if under_way >= self.max_strange_requests:
            limit = "requests"
        elif not self.strangers.take(http.connection, client.decode()):
            limit = "address"
        return None if limit is not None and self.is_signed(method, target, fields) else limit

    def is_signed(self, method: bytes, target: bytes, fields: bytes) -> bool:
        """Whether an app's caller sent this request, as far as a worker can tell."""
        return self._credentials.are_right(method, target, fields)

    def limit_reached(self, limit: str) -> None:
        """Count a refusal. Log one line per period in which the limit is reached."""
        self.refused[limit] += 1
        now = self._janitor.loop.time()
        if now - self._reached_at.get(limit, -_EPISODE_S) >= _EPISODE_S:
            log.warning("limit reached", limit=f"HTTP {limit}")
        self._reached_at[limit] = now

    def client_of(self, peer: str, forwarded_for: Sequence[str]) -> str:
        """The client's address: from X-Forwarded-For if a trusted proxy sent it, else `peer`."""
        return self._trusted.client_of(peer, forwarded_for) if self._trusted else peer
