"""The worker's listening sockets, and what happens to a connection before its first byte of HTTP.

The engine accepts connections; with `proxy_protocol` this module does, and reads the PROXY header. A `TlsSocket` then
does the handshake. Both have `head_timeout_s`. The result is a `ProxiedPeer` connection, which knows the client's
address from the header and whether the client used TLS; on the plain port without PROXY headers it is a
`ClientConnection`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from redpoll._sockets import Listener, Poller, accepted_peer
from redpoll._tls import TlsSocket
from redpoll.config.proxies import TrustedProxies, plain_address
from redpoll.worker.ingress.client_connection import ClientConnection, ProxiedPeer
from redpoll.worker.ingress.proxy_protocol import MAX_HEADER_BYTES, ProxyFault, ProxyHeader, parse
from redpoll.worker.ingress.tls import Certificates, give_memory_back

if TYPE_CHECKING:
    from redpoll.ipc.messages import Start
    from redpoll.worker.ingress.gate import Gate

__all__ = ["Listeners"]

log = structlog.get_logger()

# Established clients wait for at most this many accepts of a burst, and this long.
_ACCEPTS_A_TURN = 64
_ACCEPT_SLICE_S = 0.002
# Handshakes that are given up in one go because they took too long.
_EXPIRED_AT_ONCE = 64
# Out of descriptors or memory: stop accepting for this long. New clients wait in the kernel's queue.
_REST_S = 0.25
_TIDY_EVERY_S = 10.0


class Listeners:
    """The sockets of the public port and of the TLS port, if there is one. Call `open()`, `close()`, `finish()`.

    Owns the two descriptors of `start`. `certificates` are those of the TLS port. Raises CertificateError if the
    certificate can't be used.
    """

    def __init__(self, start: Start, gate: Gate) -> None:
        settings = start.settings
        self.handshakes_failed_total = 0
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._trusted = TrustedProxies(settings.trusted_proxies)
        self._proxy_protocol = settings.proxy_protocol
        self._within_s = settings.head_timeout_s
        self._plain = _listening(start.listen_fd)
        self._tls: socket.socket | None = None
        self.certificates: Certificates | None = None
        if start.tls_fd is not None:
            self._tls = _listening(start.tls_fd)
            self.certificates = Certificates(settings.tls_cert[0])
        # The ports as bound. `tls_port` is None without a TLS port.
        self.port = int(self._plain.getsockname()[1])
        self.tls_port = None if self._tls is None else int(self._tls.getsockname()[1])
        assert gate.flusher.poller is not None
        self.poller: Poller = gate.flusher.poller
        self._listeners: list[Listener] = []
        self._accepting: set[socket.socket] = set()
        self._entering: set[asyncio.Task[None]] = set()
        # Handshakes and their deadlines, nearly in order: PROXY headers come first.
        self._handshakes: dict[TlsSocket, tuple[float, ProxiedPeer]] = {}
        self._expiring: asyncio.Handle | None = None
        # (TLS connections accepted, connections) when memory was last given back.
        self._tidied = (0, 0)
        self._accepted_by_tls = 0
        self._tidying: asyncio.TimerHandle | None = None

    @property
    def entering(self) -> int:
        """The number of connections that are still in PROXY or TLS setup."""
        return len(self._entering) + len(self._handshakes)

    async def open(self) -> None:
        if self._proxy_protocol:
            self._accept_from(self._plain, None)
        else:
            gate = self._gate
            self._listeners.append(
                Listener(self.poller, self._plain.detach(), lambda: ClientConnection(gate), _cannot_accept)
            )
        if self._tls is not None:
            assert self.certificates is not None
            if self._proxy_protocol:
                self._accept_from(self._tls, self.certificates)
            else:
                make = partial(self._handshake_for, self.certificates)
                # A handshake takes too long for the time in which others wait to be accepted.
                self._listeners.append(Listener(self.poller, self._tls.detach(), make, _cannot_accept, reads=False))
            self._gate.give_back_memory()
            self._tidy()

    def reload(self) -> bool:
        """Read the certificate again. False: it can't be used and the old one stays, or there is no TLS port."""
        return self.certificates is not None and self.certificates.reload()

    def close(self) -> None:
        """Accept nothing more, and let HTTP requests under way end. Connections in PROXY or TLS setup finish that; the
        gate then refuses them.
        """
        for listening in list(self._accepting):
            self._loop.remove_reader(listening)
        self._accepting.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._plain.close()
        if self._tls is not None:
            self._tls.close()
        self._gate.http.drain()

    def finish(self) -> None:
        """Cancel connections that are still in PROXY or TLS setup."""
        for task in self._entering:
            task.cancel()
        for tls in list(self._handshakes):
            tls.abort()
        if self._expiring is not None:
            self._expiring.cancel()
        if self._tidying is not None:
            self._tidying.cancel()

    def _tidy(self) -> None:
        """Give back what handshakes and fewer connections than the gate counts have left."""
        now = (self._accepted_by_tls, self._gate.connections)
        if now != self._tidied:
            self._tidied = now
            give_memory_back()
        self._tidying = self._loop.call_later(_TIDY_EVERY_S, self._tidy)

    # -- accepting -----------------------------------------------------------------------------------------

    def _accept_from(self, listening: socket.socket, certificates: Certificates | None) -> None:
        if listening.fileno() >= 0:
            self._accepting.add(listening)
            self._loop.add_reader(listening, self._accept, listening, certificates)

    def _accept(self, listening: socket.socket, certificates: Certificates | None) -> None:
        until = time.monotonic() + _ACCEPT_SLICE_S
        for _ in range(_ACCEPTS_A_TURN):
            if time.monotonic() > until:
                return
            try:
                if not self._accept_one(listening, certificates):
                    return
            except OSError as error:
                _cannot_accept(error.errno)
                self._loop.remove_reader(listening)
                self._accepting.discard(listening)
                self._loop.call_later(_REST_S, self._accept_from, listening, certificates)
                return
            finally:
                self._count()

    def _accept_one(self, listening: socket.socket, certificates: Certificates | None) -> bool:
        """False: none waits. Raises OSError if there are no descriptors or no memory for it."""
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        peer = (plain_address(address[0]), address[1])
        if not self._has_room(peer[0]):
            sock.close()
            return True
        sock.setblocking(False)
        deadline = self._loop.time() + self._within_s
        if self._proxy_protocol and (not self._trusted or self._trusted.trusts(peer[0])):
            task = self._loop.create_task(self._enter(sock, peer, certificates, deadline))
            self._entering.add(task)
            task.add_done_callback(self._header_over)
        else:
            self._let_in(sock, ProxiedPeer(self._gate, peer, certificates is not None), certificates, deadline)
        return True

    def _has_room(self, address: str) -> bool:
        """Whether there is a descriptor for one more in setup, of this address."""
        self._gate.setups_changed(self.entering + 1)
        return not self._gate.is_crowded() or self._gate.make_room(address)

    def _let_in(
        self, sock: socket.socket, connection: ProxiedPeer, certificates: Certificates | None, deadline: float
    ) -> None:
        """Give the socket to the poller, at first for its TLS handshake if there is a certificate. Raises OSError if it
        can't be watched; then it is closed."""
        if certificates is None:
            self.poller.adopt(sock.detach(), connection)
            return
        tls = self._begin_handshake(connection, certificates, deadline)
        if tls is None:
            sock.close()
            return
        try:
            self.poller.adopt(sock.detach(), tls)
        except BaseException:
            self._give_up(tls)
            raise

    def _handshake_for(self, certificates: Certificates) -> TlsSocket | None:
        """For a connection that the engine accepts. None: it is to be closed."""
        host, port = accepted_peer() or ("", 0)
        peer = (plain_address(host), port)
        tls = None
        if self._has_room(peer[0]):
            connection = ProxiedPeer(self._gate, peer, secure=True)
            tls = self._begin_handshake(connection, certificates, self._loop.time() + self._within_s)
        if tls is None:
            self._count()
        return tls

    def _begin_handshake(
        self, connection: ProxiedPeer, certificates: Certificates, deadline: float
    ) -> TlsSocket | None:
        """The transport of a connection whose socket the poller gets next. None: its address has too many."""
        strangers = self._gate.strangers
        if not strangers.reserve(connection, connection.address):
            self._gate.http.limit_reached("address")
            return None
        tls = certificates.socket_for(self.poller, connection, self._handshake_over)
        self._accepted_by_tls += 1
        self._handshakes[tls] = deadline, connection
        strangers.newcomers[connection] = None
        strangers.handshakes[connection] = partial(self._give_up, tls)
        if self._expiring is None:
            self._expiring = self._loop.call_at(deadline, self._expire)
        return tls

    def _handshake_over(self, tls: TlsSocket, fault: str | None) -> None:
        if tls in self._handshakes:
            _, connection = self._handshakes.pop(tls)
            self._count()
            if fault is None:
                # It keeps its place until its first head is complete.
                del self._gate.strangers.handshakes[connection]
            else:
                self._gate.strangers.forget(connection)
        if fault is not None:
            # Scanners, clients that leave early, clients that don't trust the certificate: an operator can do nothing.
            self.handshakes_failed_total += 1
            log.debug("connection setup failed", reason=fault)

    def _expire(self) -> None:
        """Give up handshakes that took too long, some at a time."""
        now = self._loop.time()
        for tls, (deadline, _) in list(islice(self._handshakes.items(), _EXPIRED_AT_ONCE)):
            if deadline > now:
                break
            self._give_up(tls)
        nearest = next(iter(self._handshakes.values()), None)
        self._expiring = None if nearest is None else self._loop.call_at(nearest[0], self._expire)

    def _give_up(self, tls: TlsSocket) -> None:
        """End a handshake."""
        _, connection = self._handshakes.pop(tls)
        self._gate.strangers.forget(connection)
        self._count()
        tls.abort()

    def _header_over(self, task: asyncio.Task[None]) -> None:
        self._entering.discard(task)
        self._count()

    def _count(self) -> None:
        self._gate.setups_changed(self.entering)

    async def _enter(
        self, sock: socket.socket, peer: tuple[str, int], certificates: Certificates | None, deadline: float
    ) -> None:
        """Read the PROXY header of an accepted socket. Closes the socket if there is none."""
        try:
            async with asyncio.timeout_at(deadline):
                introduction = await self._read_proxy_header(sock)
            secure = certificates is not None or introduction.secure
            connection = ProxiedPeer(self._gate, introduction.address or peer, secure)
            self._let_in(sock, connection, certificates, deadline)
        except (ProxyFault, OSError) as fault:
            self.handshakes_failed_total += 1
            log.debug("connection setup failed", peer=peer[0], reason=str(fault) or type(fault).__name__)
            sock.close()
        except BaseException:
            sock.close()
            raise

    async def _read_proxy_header(self, sock: socket.socket) -> ProxyHeader:
        """Read the PROXY header and not a byte after it: TLS or the engine reads on from there."""
        header = b""
        while True:
            await self._readable(sock)
            seen = sock.recv(MAX_HEADER_BYTES, socket.MSG_PEEK)
            if not seen:
                raise ConnectionResetError("closed before its PROXY header was complete")
            introduction = parse(header + seen)
            wanted = len(seen) if introduction is None else introduction.size - len(header)
            header += sock.recv(wanted)
            if introduction is not None:
                return introduction

    async def _readable(self, sock: socket.socket) -> None:
        readable = self._loop.create_future()
        self._loop.add_reader(sock, _settle, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(sock)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _cannot_accept(error: int | None) -> None:
    log.error("can't accept", reason=os.strerror(error or 0))


def _listening(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return sock
