"""The HTTP side of a worker: its connections, what they share, and what it answers itself.

A connection becomes an HTTP connection when its first request doesn't ask for a WebSocket. Requests go to control
(control_link.py). At each limit a request is answered 503 with Retry-After, or a connection is closed to make room.
Half of each limit is for callers who have authenticated (strangers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from redpoll._http import pack_rest, pack_simple
from redpoll.http.connection import CONTINUE_LINE, State
from redpoll.http.errors import ALIVE, TOO_MANY_OF_ADDRESS, alive_response, closing, error_response, upgrade_wanted
from redpoll.http.head import FieldTable
from redpoll.http.messages import CLOSES, FIELDS, HEAD_ONLY, HTTP_1_0, SECURE, STREAM, pack_fields
from redpoll.http.reader import Fault, ParsedRequest, Phase
from redpoll.http.server import HttpServer
from redpoll.worker.hub.connection import Connection
from redpoll.worker.ingress.client_addresses import ClientAddresses
from redpoll.worker.ingress.control_link import ControlLink, Requester
from redpoll.worker.ingress.held_requests import LATER, LocalRequests
from redpoll.worker.ingress.stream_requests import ReadingConnection
from redpoll.worker.streams.asked import READ_FIELDS, asked_of
from redpoll.worker.streams.pulls import is_pull

if TYPE_CHECKING:
    from redpoll.config.settings import Settings
    from redpoll.loop.writable import WritableSignal
    from redpoll.worker.ingress.credentials import Credentials
    from redpoll.worker.ingress.strangers import Strangers
    from redpoll.worker.streams.pulls import Pull
    from redpoll.worker.streams.streams import Streams
    from redpoll.worker.timers.janitor import Janitor

__all__ = ["FORWARDED_PROTO", "TABLE", "HttpRequests", "PublicConnection"]

# X-Forwarded-Proto, and what readers of streams send, is for the worker; control doesn't get it.
TABLE: Final = FieldTable(READ_FIELDS)
FORWARDED_PROTO: Final = READ_FIELDS.index("X-Forwarded-Proto")
_KINDS: Final = FieldTable(FIELDS).kinds
# A body announced as no larger than this is read without asking control.
_MAX_UNASKED_BODY_BYTES: Final = 16 * 1024
# Control decides about the body of any other request: it answers those that have none at once.
_WITH_BODY: Final = (b"POST", b"PUT", b"PATCH", b"DELETE")
_BODY, _ANSWER = State.BODY, State.ANSWER
_IDLE = State.IDLE
# Per worker: requests that wait for control's answer.
MAX_REQUESTS: Final = 4096
# A connection whose caller has authenticated makes room only after it has been idle for this long, and last.
_SPARED_S: Final = 10.0
# Flags, method, message, client's address, bytes that are missing (pack_simple).
_Packed = tuple[int, bytes, bytes, bytes, int]
_NO_ROOM: Final = "this server has as many HTTP connections as it takes; send the request again"


class PublicConnection(ReadingConnection):
    """A connection of the public port. It is a stranger's (strangers.py) while it isn't `authenticated`.

    A whole request of the usual shape becomes its message in one step, in C, also if its body comes after its head;
    http/connection.py reads all others. A request for a WebSocket goes back to the engine.
    """

    websockets = True
    _server: HttpRequests

    # The number of the request that control has, or had last. A later request may have been read meanwhile.
    _number = 0

    # The beginning of a request of the usual shape, and what pack_simple made of it.
    _kept: tuple[bytes, _Packed] | None = None

    def __init__(self, http: HttpRequests, connection: Connection, peer: str, secure: int) -> None:
        super().__init__(http, connection, peer, secure)
        self._secure = secure
        self._client = peer.encode("ascii", "replace")
        self._client_of = http.client_addresses.reader(peer)
        self._idle = http.strangers.idle
        http.strangers.callers[connection] = None

    # -- requests and answers ------------------------------------------------------------------------------

    def _begin_whole(self, data: bytes) -> bool:
        link = self._server.link
        packed = pack_simple(data, link.next_number, self._secure, self._client, _KINDS, self._client_of)
        if packed is None:
            return False
        flags, method, message, client, missing = packed
        return self._keep(data, packed) if missing else self._pass_on(flags, method, message, client)

    def _pass_on(self, flags: int, method: bytes, message: bytes, client: bytes) -> bool:
        """Send a whole request of the usual shape to control, as nearly all are. False: the reader decides about it."""
        http = self._server
        link = http.link
        if not (link.ready or link.is_open()) or len(link.awaited) >= (
            http.max_requests if self.authenticated else http.max_strange_requests
        ):
            return False
        if not self.authenticated and not self._reserve(client):
            return False
        self._sent_flags, self._sent_method = flags, method
        self.state = _ANSWER
        self._number = link.send_packed(self, message)
        link.usual_total += 1
        if flags & CLOSES:
            self.stream.end_reading()
        return True

    def _keep(self, data: bytes, packed: _Packed) -> bool:
        """Wait for the rest of a request of the usual shape, as libraries in Python and .NET send it; 100 Continue is
        sent if the client waits for it. False: the reader decides whether there is room."""
        http = self._server
        client, missing = packed[3:]
        limit = http.max_reading_bytes if self.authenticated else http.max_strange_reading_bytes
        size = len(data) + len(packed[2])  # what was received, and the message of it
        if http.reading_bytes + size > limit or not (self.authenticated or self._reserve(client)):
            return False
        if missing < 0:
            self.stream.write_http(CONTINUE_LINE)
        self._kept = data, packed
        self._counted_bytes = size
        http.reading_bytes += size
        self.state = _BODY
        http.wait(self.stream, http.body_timeout_s)
        return True

    def _reserve(self, client: bytes) -> bool:
        address = self.peer if client is self._client else client.decode()
        return self._server.strangers.reserve(self.stream, address)

    def _read(self, data: bytes) -> None:
        if self._kept is not None:
            beginning, (flags, method, message, client, missing) = self._kept
            http, more, missing = self._server, len(data), abs(missing)
            if more < missing and http.reading_bytes + 2 * more <= http.max_strange_reading_bytes:
                self._kept = beginning + data, (flags, method, message + data, client, missing - more)
                self._counted_bytes += 2 * more
                http.reading_bytes += 2 * more
                return
            self._kept = None
            if more == missing:
                self._uncount_body()
                if self._pass_on(flags, method, pack_rest(message, data, http.link.next_number), client):
                    return
            data = beginning + data
        super()._read(data)

    def late(self) -> None:
        if self._kept is not None:
            # What is left to do is the reader's: it has the head for control.
            (beginning, _), self._kept = self._kept, None
            self._uncount_body()
            self._reader.read(beginning)
        super().late()

    def _forget(self) -> None:
        self._kept = None
        super()._forget()

    def _answer_here(self, request: ParsedRequest) -> bytes | None:
        return self._server.local.answer(self, request) if b"/app/" in request.target else None

    def _send(self, request: ParsedRequest) -> None:
        """Send a request to control, or answer it here if it doesn't need control or can't reach it."""
        http = self._server
        local = self._answer_here(request)
        if local is not None:
            if local is LATER:
                return
            answer = local
        elif request.target.startswith(b"/app/"):
            answer = upgrade_wanted()
        elif request.target in ALIVE and request.method in (b"GET", b"HEAD"):
            answer = alive_response(request.target)
        else:
            asked = asked_of(request)
            if asked is not None:
                request = asked.request
            refusal = http.refusal(self, request)
            if refusal is None:
                self._sent_flags, self._sent_method, self.state = request.flags, request.method, _ANSWER
                requester: Requester | None = None
                if asked is not None:
                    requester = self.read_channel(asked, request, http.streams)
                elif is_pull(request):
                    requester = pull = self.pull_webhooks(request, http.streams.pulls)
                    request = pull.request
                self._number = http.send(self, request, requester, STREAM if requester else 0)
                return
            answer = refusal if asked is None else asked.refused(refusal)
        if request.method == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        goes_on = self.authenticated or http.strangers.may_leave_unread(self.stream, http.client_of(self, request))
        if not goes_on or request.flags & (CLOSES | HEAD_ONLY | HTTP_1_0):
            answer = closing(answer)
        self._write(answer)

    def ask(self, pull: Pull) -> None:
        http = self._server
        if http.refusal(self, pull.request) is None:
            self._number = http.send(self, pull.request, pull, STREAM)
        else:
            pull.unanswered(False)

    def admitted(self) -> None:
        """What waits counts as a WebSocket does, and no longer as a stranger's request."""
        self._server.strangers.forget(self.stream)

    def reply(self, response: bytes) -> None:
        if not self.authenticated:
            # Again, if it was `admitted`.
            self._server.strangers.callers[self.stream] = None
        super().reply(response)

    def _write(self, answer: bytes) -> None:
        """Write an answer of our own; it says whether the connection closes after it."""
        if b"\r\nConnection: close\r\n" in answer:
            self.end(answer)
        else:
            self.stream.write_http(answer)

    def unanswered(self, sent: bool) -> None:
        """Control went away before it answered. `sent` False: it never saw the request."""
        text = (
            "not confirmed: the control plane went away before it answered"
            if sent
            else "the control plane isn't there; send the request again"
        )
        closes = self._sent_flags & (CLOSES | HTTP_1_0 | HEAD_ONLY) != 0
        answer = error_response(503, "unavailable", text, "Retry-After: 1\r\n", keep_alive=not closes)
        if self._sent_method == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        self._write(answer)
        if not closes:
            self._go_on()

    def _upgrade(self, received: bytes) -> None:
        self._server.upgrade(self.stream, received)

    def gone(self) -> None:
        if self.state is _ANSWER:
            self._server.link.forget(self._number)
        super().gone()
        self._server.strangers.forget(self.stream)

    # -- strangers -----------------------------------------------------------------------------------------

    def _judge(self, authenticated: int) -> None:
        self.authenticated = authenticated
        strangers = self._server.strangers
        if authenticated:
            self._idle = self._server.idle
            strangers.authenticated(self.stream, self.peer)
        else:
            self._idle = strangers.idle
            strangers.callers[self.stream] = None

    def _rest(self) -> None:
        if not self.authenticated:
            self._server.strangers.rest(self.stream)
        self.state = _IDLE
        self._idle[self.stream] = None

    def _must_ask(self) -> bool:
        head, http = self._reader.head, self._server
        return (
            head.announced is None
            or head.announced > _MAX_UNASKED_BODY_BYTES
            or self._reader.method not in _WITH_BODY
            or (not self.authenticated and http.reading_bytes > http.max_strange_reading_bytes)
        )

    def _max_reading_bytes(self) -> int:
        http = self._server
        return http.max_strange_reading_bytes if self._asked and not self.authenticated else http.max_reading_bytes

    def _has_place(self) -> bool:
        http, reader = self._server, self._reader
        is_known = reader.phase is Phase.BODY and self._client_of is not None
        client = http.client_of(self, reader.head_request(0, 0)) if is_known else self.peer
        if self.authenticated or http.strangers.reserve(self.stream, client):
            return True
        if reader.phase is Phase.BODY and http.is_signed(reader.head_request(0, 0)):
            return True
        http.limit_reached("address")
        self.refuse(Fault(503, "unavailable", TOO_MANY_OF_ADDRESS))
        return False


class HttpRequests(HttpServer[Connection, PublicConnection]):
    """The HTTP side of a worker. `max_connections` bounds its HTTP connections.

    `idle` has authenticated callers' connections; those of others are in `strangers`.
    """

    def __init__(
        self,
        settings: Settings,
        janitor: Janitor,
        writable_signal: WritableSignal,
        path: str,
        max_connections: int,
        strangers: Strangers,
        credentials: Credentials,
        local: LocalRequests,
        streams: Streams,
    ) -> None:
        super().__init__(TABLE, ("connections", "requests", "bodies", "address"))
        self.strangers = strangers
        self.local = local
        self.streams = streams
        self.link = ControlLink(path)
        self.max_requests = MAX_REQUESTS
        self._writable_signal = writable_signal
        self.max_connections = max_connections
        self._credentials = credentials
        self.client_addresses = ClientAddresses(settings.trusted_proxies)
        self._janitor = janitor
        streams.serve_by(self.when_read, self.wait)

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
        full = len(self.connections) >= self.max_connections
        full = full and not self.strangers.make_http_room(peer) and not self.close_idle()
        made = PublicConnection(self, connection, peer, SECURE if secure else 0)
        if full:
            self.limit_reached("connections")
            self.strangers.forget(connection)  # Before the answer: from then on it is in `closing`.
            made.refuse_first(data, Fault(503, "unavailable", _NO_ROOM))
            return
        self.connections[connection] = made
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

    def upgrade(self, connection: Connection, received: bytes) -> None:
        """A request asks for a WebSocket: `received` is its head and what follows."""
        self.gone(connection)
        connection.upgrade(received)

    def drain(self) -> None:
        """Take no more: idle connections close now, others after the answer to what they have sent."""
        self.draining = True
        for connection in [*self.idle, *self.strangers.idle]:
            connection.end_http()

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
        self.link.close()

    # -- deadlines -----------------------------------------------------------------------------------------

    @property
    def head_timeout_s(self) -> float:
        return self._janitor.head_timeout_s

    def wait(self, stream: Connection, seconds: float) -> None:
        self._janitor.http_waits(stream, seconds)

    def silent_s(self, stream: Connection) -> float:
        return self._janitor.silent_s(stream)

    def when_read(self, stream: Connection, then: Callable[[], None]) -> None:
        self._writable_signal.wait(stream, then)

    def forget_reader(self, stream: Connection) -> None:
        self._writable_signal.closed(stream)

    def beat(self) -> None:
        """Four times a second."""
        self.link.beat()
        self.strangers.beat()

    # -- limits and answers --------------------------------------------------------------------------------

    def error(self, fault: Fault) -> bytes:
        return error_response(*fault, "Retry-After: 1\r\n" if fault.status == 503 else "")

    def send(
        self, http: PublicConnection, request: ParsedRequest, requester: Requester | None = None, more_flags: int = 0
    ) -> int:
        """Send a request to control, with more flags. The connection gets the answer, or `requester`. Returns its
        number."""
        flags, method, target, fields, _, body, announced, refusal = request
        client = self.client_of(http, request).encode("ascii", "replace")
        packed = pack_fields(fields) if fields else b""
        flags |= more_flags
        return self.link.send(requester or http, flags, method, client, target, packed, body, announced, refusal)

    def refusal(self, http: PublicConnection, request: ParsedRequest) -> bytes | None:
        """The response to a request that can't be sent to control now; None: it can be sent."""
        if not self.link.is_open():
            text = "the control plane isn't there; send the request again"
        elif (limit := self._limit_of(http, request)) is None:
            return None
        else:
            self.limit_reached(limit)
            full = "this server has as many requests under way as it takes; send the request again"
            text = full if limit == "requests" else TOO_MANY_OF_ADDRESS
        return error_response(503, "unavailable", text, "Retry-After: 1\r\n", keep_alive=True)

    def _limit_of(self, http: PublicConnection, request: ParsedRequest) -> str | None:
        """The limit that this request would exceed."""
        under_way = len(self.link.awaited)
        if under_way >= self.max_requests:
            return "requests"
        if http.authenticated:
            return None
        limit = None
        if under_way >= self.max_strange_requests:
            limit = "requests"
        elif not self.strangers.reserve(http.stream, self.client_of(http, request)):
            limit = "address"
        return None if limit is not None and self.is_signed(request) else limit

    def is_signed(self, request: ParsedRequest) -> bool:
        """Whether an app's caller sent this request, as far as a worker can tell."""
        return self._credentials.are_right(request.method, request.target, pack_fields(request.fields))

    def client_of(self, http: PublicConnection, request: ParsedRequest) -> str:
        """The client's address: from X-Forwarded-For if a trusted proxy sent it, else the peer's."""
        return self.client_addresses.of(http.peer, request.forwarded)
