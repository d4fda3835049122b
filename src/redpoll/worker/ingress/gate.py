"""The gate reads the first request head of each connection and decides what the connection becomes.

It accepts a WebSocket upgrade, or refuses it with a close code of the protocol. Any other request makes the connection
an HTTP connection (http_requests.py); a later request may still upgrade that to a WebSocket. The gate knows HTTP heads
and nothing of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

from redpoll import _frame
from redpoll._fanout import Flusher
from redpoll._http import Head, parse_head, upgrade_fault
from redpoll._memory import SmallMap, untrack
from redpoll.cluster.directory import Directory
from redpoll.cluster.lifecycle import Life
from redpoll.config.proxies import TrustedProxies
from redpoll.config.settings import Settings
from redpoll.http.errors import TOO_MANY_OF_ADDRESS, error_response
from redpoll.protocol import frames, handshake
from redpoll.protocol.apps import App
from redpoll.protocol.errors import Code
from redpoll.protocol.limits import Limits, Refusals
from redpoll.protocol.session import Session, Subscription
from redpoll.worker.hub.addresses import Addresses
from redpoll.worker.hub.client_libraries import ClientLibraries
from redpoll.worker.hub.connection import Connection
from redpoll.worker.hub.hub import Hub
from redpoll.worker.ingress.credentials import Credentials
from redpoll.worker.ingress.held_requests import LocalRequests
from redpoll.worker.ingress.http_requests import HttpRequests
from redpoll.worker.ingress.socket_ids import SocketIds
from redpoll.worker.ingress.strangers import Strangers
from redpoll.worker.ingress.tls import give_memory_back
from redpoll.worker.streams.streams import Streams
from redpoll.worker.timers.janitor import Janitor

__all__ = ["Gate"]

# Upgrades are refused at `max_connections`, connections are dropped at this many more. Between the two bounds a client
# still gets 503 instead of a reset (deploy/failures.md "Out of descriptors").
_HEADROOM = 48
# Connections whose memory is given back to the system in one go: 1 ms.
_TIDY_AFTER = 256

# Longer targets aren't remembered: clients choose them.
_MAX_REMEMBERED_BYTES = 256


class _Upgrade(NamedTuple):
    """A request for a WebSocket. `path` is as requested, `query` is decoded, with the last value of each name."""

    request: Head
    path: str
    query: Mapping[str, str]


class Gate:
    """Decides about every connection of a worker. `life` is the worker's; `ready()`: the directory is loaded and Redis
    is connected.

    `max_connections` counts all sockets of this worker; at most half of them may be HTTP connections. HTTP requests go
    to the control plane at the Unix socket `requests_path`.
    """

    def __init__(
        self,
        settings: Settings,
        flusher: Flusher,
        hub: Hub,
        janitor: Janitor,
        directory: Directory,
        life: Life,
        requests_path: str,
        ready: Callable[[], bool],
        max_connections: int,
        local: LocalRequests,
    ) -> None:
        self.settings = settings
        # `handshake.admits_origin` says what for.
        self.own_host = handshake.host_of(settings.public_url.lower())
        self.flusher = flusher
        self.max_message_bytes = settings.max_message_bytes
        self.hub = hub
        self.janitor = janitor
        self._directory = directory
        self._life = life
        self._ready = ready
        self.max_connections = max_connections
        self._trusted = TrustedProxies(settings.trusted_proxies)
        self.addresses = Addresses(settings.max_connections_per_address, self._trusted)
        self._limit_addresses(settings)
        self.strangers = Strangers(settings.max_pending_per_address, self._trusted, hub.admission.withdraw)
        proxied = settings.proxy_protocol
        self.streams = Streams(hub, directory.by_id, self.addresses, life, ready, named_by_proxy=proxied)
        self.http = HttpRequests(
            settings,
            janitor,
            hub.writable_signal,
            requests_path,
            max(1, max_connections // 2),
            self.strangers,
            Credentials(directory.by_id),
            local,
            self.streams,
        )
        self.debugging = hub.debugging
        self.refusals = Refusals()
        self._limits = self._limits_of(settings, self.refusals)
        self._client_libraries = ClientLibraries()
        self._socket_ids = SocketIds()
        # Connections in PROXY or TLS setup.
        self.entering = 0
        self.connections = 0
        self.connections_total = 0
        # Connections that ended since memory was given back. None: their memory is small without TLS.
        self._untidied: int | None = None
        self.upgrades_refused_total = 0

    def settings_changed(self, settings: Settings) -> None:
        """Limits of a connection count for those that come from now on."""
        self.settings = settings
        self.max_message_bytes = settings.max_message_bytes
        self.strangers.limit = settings.max_pending_per_address
        self._limit_addresses(settings)
        self._limits = self._limits_of(settings, self.refusals)

    def _limit_addresses(self, settings: Settings) -> None:
        per_s = settings.subscribes_per_second_per_address
        self.addresses.limit = settings.max_connections_per_address
        self.addresses.on = bool(self.addresses.limit or per_s)
        self.hub.subscribe_rates.per_s = per_s

    @staticmethod
    def _limits_of(settings: Settings, refusals: Refusals) -> Limits:
        return Limits(
            settings.max_channels_per_connection,
            settings.client_events_per_second,
            settings.subscribes_per_second,
            refusals,
        )

    # -- what connections report ---------------------------------------------------------------------------

    def pong_received(self, connection: Connection) -> None:
        self.janitor.pong_received(connection)

    def connected(self, connection: Connection) -> None:
        self.connections += 1
        self.connections_total += 1
        strangers = self.strangers
        if self.is_crowded():
            # After a handshake it is among them, and must not make room for itself.
            strangers.newcomers.pop(connection, None)
            if not self.make_room(connection.address):
                strangers.leaving.add(connection)
                connection.abort()
                return
        strangers.newcomers[connection] = None
        self.janitor.arrived(connection)

    def setups_changed(self, count: int) -> None:
        """This many connections are in PROXY or TLS setup (listeners.py)."""
        self.entering = count

    def give_back_memory(self) -> None:
        """From now on, memory is given back to the system after each _TIDY_AFTER connections that end."""
        self._untidied = 0

    def is_crowded(self) -> bool:
        """Whether there are more connections than descriptors for them, those in PROXY or TLS setup included."""
        return self._held() + self.entering > self.max_connections + _HEADROOM

    def make_room(self, address: str) -> bool:
        """Close a connection for a new one of this address: of strangers, else one that has long been idle. False:
        there is none."""
        return self.strangers.make_room(address) or self.http.close_idle()

    def _held(self) -> int:
        """Descriptors of connections."""
        return self.connections - len(self.strangers.leaving)

    def gone(self, connection: Connection) -> None:
        """A connection that never became a WebSocket has ended."""
        self.http.gone(connection)
        self.hub.admission.withdraw(connection)

    def closing(self, connection: Connection) -> None:
        """The close frame is queued: leave the channels now, and give the socket a few seconds to close."""
        if connection.session is None:
            self.strangers.closing[connection] = None
            self.janitor.http_closing(connection)
        else:
            self.janitor.closing(connection)
            self.hub.closed(connection)

    def closed(self, connection: Connection) -> None:
        """A WebSocket has ended, whatever the cause: FIN, RST, timeout, protocol error, or a close by this server."""
        if connection.session is not None:
            self.hub.closed(connection)

    def released(self, connection: Connection) -> None:
        """The descriptor is closed. Until then it counts: clients choose how long they keep a closed connection."""
        self.connections -= 1
        self.janitor.departed(connection)
        if self._untidied is not None:
            self._untidied += 1
            if self._untidied == _TIDY_AFTER:
                self._untidied = 0
                give_memory_back()
        self.addresses.leave(connection.address_slot)
        if connection.session is None:
            self.strangers.forget(connection)
            self.strangers.leaving.discard(connection)

    def http_began(self, connection: Connection, data: bytes) -> None:
        """The first request is a POST."""
        self.strangers.newcomers.pop(connection, None)
        peer, secure = self._peer_of(connection)
        self.http.begin(connection, peer[0], secure, data)

    def head_begun(self, connection: Connection) -> None:
        """A part of its first head came: from now on it costs memory."""
        if not self.strangers.reserve(connection, connection.address):
            self.http.limit_reached("address")
            connection.abort()

    def head_received(self, connection: Connection, head: bytes) -> None:
        self.strangers.newcomers.pop(connection, None)
        self.strangers.release(connection)
        # A server may ignore an Upgrade to another protocol, such as curl's h2c, and answer in HTTP/1.1.
        if b"websocket" not in (lower := head.lower()) or b"\nupgrade" not in lower:
            peer, secure = self._peer_of(connection)
            self.http.adopt(connection, peer[0], secure)
            return
        try:
            request = parse_head(head)
        except ValueError as fault:
            self._answer(connection, 400, "bad_request", f"not an HTTP request: {fault}")
            return
        if b"websocket" in request.headers.get(b"upgrade", b"").lower():
            self._upgrade(connection, request)
        else:
            peer, secure = self._peer_of(connection)
            self.http.adopt(connection, peer[0], secure)

    def head_too_large(self, connection: Connection) -> None:
        self._answer(connection, 431, "bad_request", "the request head is larger than 16 KiB")

    def head_late(self, connection: Connection) -> None:
        """The head wasn't complete within `head_timeout_s`. The connection may have ended in this pass of the loop."""
        if not connection.buffered:
            # Connection pools and browsers open connections before they need them. An answer now would be read as that
            # of their first request.
            connection.end_http()
            return
        text = f"no complete request within {self.settings.head_timeout_s:g} s"
        connection.end_http(error_response(408, "bad_request", text))

    # -- WebSockets ----------------------------------------------------------------------------------------

    def _upgrade(self, connection: Connection, request: Head) -> None:
        fault = upgrade_fault(request)
        if fault is not None:
            status, text = fault
            extra = "Sec-WebSocket-Version: 13\r\n" if status == 426 else ""
            self._answer(connection, status, "bad_request", text, extra)
            return
        unready = self.unready(connection)
        if unready is not None:
            # 503 and no close code from 4200 to 4299: with those, pusher-js would reconnect at once
            # (protocol/README.md "Close codes").
            self.upgrades_refused_total += 1
            self._answer(connection, 503, "unavailable", unready, "Retry-After: 1\r\n")
            return
        upgrade = _read(request)
        if not connection.address_slot and self.addresses.on:
            slot = self.addresses.enter(
                self._peer_of(connection)[0][0],
                request.headers,
                named=self.settings.proxy_protocol,
            )
            if slot is None:
                # 4100 and not 4004: others may share the address, and pusher-js never reconnects after 4004.
                text = "your address has as many connections as this server allows"
                self._settle(connection, upgrade, handshake.Refusal(Code.OVER_CAPACITY, text))
                return
            connection.address_slot = slot
        outcome = self._check(connection, upgrade)
        if isinstance(outcome, handshake.Refusal):
            self._settle(connection, upgrade, outcome)
            return
        # The head's deadline is met. Redis may take a while; in apps without a limit the answer comes at once.
        self.janitor.departed(connection)
        admission = self.hub.admission
        if admission.admits_at_once(outcome):
            self._settle(connection, upgrade, outcome)
        elif self.strangers.reserve(connection, connection.address):
            self.strangers.newcomers[connection] = None
            admission.ask(connection, outcome, partial(self._place_found, connection, upgrade, outcome))
        else:
            self.http.limit_reached("address")
            self.upgrades_refused_total += 1
            self._answer(connection, 503, "unavailable", TOO_MANY_OF_ADDRESS, "Retry-After: 1\r\n")

    def unready(self, client: Connection | str) -> str | None:
        """Why this connection, or any of this address, isn't admitted now, for any client; None: it may be."""
        if not self._life.admits or not self._ready():
            return "this server isn't ready"
        if self._held() <= self.max_connections:
            return None
        made = self.strangers.make_room(client if isinstance(client, str) else client.address)
        return None if made else "this server is full"

    def _check(self, connection: Connection, upgrade: _Upgrade) -> App | handshake.Refusal:
        return handshake.check(
            upgrade.path,
            upgrade.query,
            _text(upgrade.request.headers.get(b"origin")),
            self._directory.find,
            self._is_secure(connection, upgrade.request),
            self.own_host,
        )

    def _place_found(
        self, connection: Connection, upgrade: _Upgrade, app: App, refusal: handshake.Refusal | None
    ) -> None:
        self.strangers.newcomers.pop(connection, None)
        self.strangers.release(connection)
        outcome: App | handshake.Refusal = refusal or app
        if refusal is None and self._directory.by_id.get(app.id) is not app:
            # The app's record changed while the connection waited.
            outcome = self.hub.admission.confirmed(app, self._check(connection, upgrade))
        self._settle(connection, upgrade, outcome)

    def _settle(self, connection: Connection, upgrade: _Upgrade, outcome: App | handshake.Refusal) -> None:
        connection.accept(upgrade.request.headers[b"sec-websocket-key"])
        if isinstance(outcome, handshake.Refusal):
            self.upgrades_refused_total += 1
            connection.shut(outcome.code, outcome.message)
            if self.debugging.any:
                self.debugging.refused(self._app_named(upgrade.path), outcome, **self._described(connection, upgrade))
            return
        client = self._forwarded_client(connection, upgrade.request)
        described = partial(self._described, connection, upgrade) if self.debugging.any else None
        self.greet(connection, outcome, upgrade.query, client, described)

    def greet(
        self,
        connection: Connection,
        app: App,
        query: Mapping[str, str],
        client: str,
        described: Callable[[], dict[str, Any]] | None,
    ) -> None:
        """Give an open connection its session, and greet its client. `client`: its address, if it isn't the peer's."""
        connection.set_sid(*self._socket_ids.next())
        connection.client_seen = self._client_libraries.note(query)
        if client:
            connection.client_seen = connection.client_seen._replace(address=client)
            untrack(connection.client_seen)
        recovers = handshake.recovers(query)
        channels: SmallMap[Subscription] = SmallMap()
        current = self.hub.open_connections.current(app)
        sid, decrypts_all = (connection.sid_hi, connection.sid_lo), handshake.decrypts_all(query)
        session = Session(sid, current, self._limits, recovers, channels, decrypts_all)
        untrack(session)
        connection.session = session
        self.hub.open_connections.add(connection)
        self.janitor.opened(connection)
        if described is not None and self.debugging.any:
            self.debugging.opened(connection, **described())
        timeout_s = self.settings.activity_timeout_s
        connection.send_first(_frame.text(frames.connection_established(session.socket_id, timeout_s, recovers)))

    # -- helpers -------------------------------------------------------------------------------------------

    def _app_named(self, path: str) -> App | None:
        """The app of a path that ends in /app/KEY."""
        return self._directory.find(unquote(path.rstrip("/").rpartition("/")[2]))

    def _described(self, connection: Connection, upgrade: _Upgrade) -> dict[str, Any]:
        """A client and its request, for debugging."""
        (peer, _), _ = self._peer_of(connection)
        names = ("origin", "user-agent", "host", "x-forwarded-for", "x-forwarded-proto")
        headers = {name: _text(upgrade.request.headers.get(name.encode())) for name in names}
        return {
            "address": self._forwarded_client(connection, upgrade.request) or peer,
            "path": upgrade.path,
            "query": dict(upgrade.query),
            "secure": self._is_secure(connection, upgrade.request),
            "headers": {name: value for name, value in headers.items() if value is not None},
        }

    def _peer_of(self, connection: Connection) -> tuple[tuple[str, int], bool]:
        """The peer's address and whether it used TLS, from the PROXY header or TLS port if there was one."""
        return connection.proxied_peer or (connection.peer or ("", 0), False)

    def _is_secure(self, connection: Connection, request: Head) -> bool:
        forwarded = request.headers.get(b"x-forwarded-proto")
        if forwarded is None:
            # Then the peer's address doesn't matter, and reading it is a system call.
            proxied = connection.proxied_peer
            return proxied is not None and proxied[1]
        peer, secure = self._peer_of(connection)
        return self._trusted.is_secure(peer[0], _text(forwarded), secure)

    def _forwarded_client(self, connection: Connection, request: Head) -> str:
        """The client's address if a trusted proxy named it in a header, else ""."""
        forwarded = request.headers.get(b"x-forwarded-for") if self._trusted else None
        if forwarded is None:
            return ""
        (peer, _), _ = self._peer_of(connection)
        client = self._trusted.client_of(peer, [forwarded.decode("latin-1")])
        return client if client != peer else ""

    def _answer(self, connection: Connection, status: int, code: str, text: str, extra_headers: str = "") -> None:
        """Send a last HTTP response and close the connection."""
        connection.answer(error_response(status, code, text, extra_headers))


def _read(request: Head) -> _Upgrade:
    target = request.target
    path, query = (_location if len(target) > _MAX_REMEMBERED_BYTES else _remembered_location)(target)
    return _Upgrade(request, path, query)


def _location(target: bytes) -> tuple[str, Mapping[str, str]]:
    path, query = handshake.split_target(target.decode("latin-1"))
    return path, MappingProxyType(query)


# All clients of an app and library ask for the same target, and parsing it takes 10 µs.
_remembered_location = lru_cache(maxsize=1024)(_location)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
