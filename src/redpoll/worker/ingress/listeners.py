"""The worker's listening sockets, and what happens to a connection before its first byte of HTTP.

The engine accepts the plain port's connections, unless `proxy_protocol` is set. This module accepts the others: it
reads the PROXY header, then does the TLS handshake, both within `head_timeout_s`. The result is an `Introduced`
connection, which knows the client's address from the header and whether the client used TLS.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any

import structlog

from redpoll._sockets import Listener, Poller
from redpoll.proxies import TrustedProxies, plain_address
from redpoll.worker.connection import Connection, Introduced
from redpoll.worker.ingress.proxy_protocol import MAX_HEADER_BYTES, ProxyFault, ProxyHeader, parse
from redpoll.worker.ingress.tls import SHUTDOWN_TIMEOUT_S, Certificate, give_memory_back

if TYPE_CHECKING:
    from redpoll.child_pipe import Start
    from redpoll.worker.ingress.gate import Gate

__all__ = ["Listeners"]

log = structlog.get_logger()

# Established clients wait for at most this many accepts of a burst.
_ACCEPTS_A_TURN = 64
# Out of descriptors or memory: stop accepting for this long. New clients wait in the kernel's queue.
_REST_S = 0.25
_TIDY_EVERY_S = 10.0


class Listeners:
    """The sockets of the public port and of the TLS port, if there is one. Call `open()`, `close()`, `finish()`.

    Owns the two descriptors of `start`. Raises CertificateError if the certificate can't be used.
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
        self._certificate: Certificate | None = None
        if start.tls_fd is not None:
            self._tls = _listening(start.tls_fd)
            self._certificate = Certificate(settings.tls_cert, settings.tls_key)
        # The ports as bound. `tls_port` is None without a TLS port.
        self.port = int(self._plain.getsockname()[1])
        self.tls_port = None if self._tls is None else int(self._tls.getsockname()[1])
        assert gate.flusher.poller is not None
        self._poller: Poller = gate.flusher.poller
        self._listener: Listener | None = None
        self._accepting: set[socket.socket] = set()
        self._entering: set[asyncio.Task[None]] = set()
        self._closed = False
        # (TLS connections accepted, connections) when memory was last given back.
        self._tidied = (0, 0)
        self._accepted_by_tls = 0
        self._tidying: asyncio.TimerHandle | None = None

    @property
    def entering(self) -> int:
        """The number of connections that are still in PROXY or TLS setup."""
        return len(self._entering)

    async def open(self) -> None:
        if self._proxy_protocol:
            self._accept_from(self._plain, None)
        else:
            gate = self._gate
            self._listener = Listener(self._poller, self._plain.detach(), lambda: Connection(gate), _cannot_accept)
        if self._tls is not None:
            self._accept_from(self._tls, self._certificate)
            self._tidy()

    def reload(self) -> bool:
        """Read the certificate again. False: it can't be used and the old one stays, or there is no TLS port."""
        return self._certificate is not None and self._certificate.reload()

    def close(self) -> bool:
        """Accept nothing more, and let HTTP requests under way end. Connections in PROXY or TLS setup finish that; the
        gate then refuses them. False: closed before.
        """
        if self._closed:
            return False
        self._closed = True
        for listening in list(self._accepting):
            self._loop.remove_reader(listening)
        self._accepting.clear()
        if self._listener is not None:
            self._listener.close()
        self._plain.close()
        if self._tls is not None:
            self._tls.close()
        self._gate.http.drain()
        return True

    def finish(self) -> None:
        """Cancel connections that are still in PROXY or TLS setup."""
        for task in self._entering:
            task.cancel()
        if self._tidying is not None:
            self._tidying.cancel()

    def _tidy(self) -> None:
        now = (self._accepted_by_tls, self._gate.connections)
        if now != self._tidied:
            self._tidied = now
            give_memory_back()
        self._tidying = self._loop.call_later(_TIDY_EVERY_S, self._tidy)

    # -- accepting -----------------------------------------------------------------------------------------

    def _accept_from(self, listening: socket.socket, certificate: Certificate | None) -> None:
        if not self._closed:
            self._accepting.add(listening)
            self._loop.add_reader(listening, self._accept, listening, certificate)

    def _accept(self, listening: socket.socket, certificate: Certificate | None) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _cannot_accept(error.errno)
                self._loop.remove_reader(listening)
                self._accepting.discard(listening)
                self._loop.call_later(_REST_S, self._accept_from, listening, certificate)
                return
            if self._gate.is_crowded(self.entering):
                sock.close()
                continue
            sock.setblocking(False)
            self._accepted_by_tls += certificate is not None
            task = self._loop.create_task(self._enter(sock, address, certificate))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    async def _enter(self, sock: socket.socket, address: Any, certificate: Certificate | None) -> None:
        """PROXY and TLS setup of one accepted socket. Closes the socket if the setup fails."""
        deadline = self._loop.time() + self._within_s
        peer: tuple[str, int] = (plain_address(address[0]), address[1])
        secure = certificate is not None
        try:
            if self._proxy_protocol and (not self._trusted or self._trusted.trusts(peer[0])):
                async with asyncio.timeout_at(deadline):
                    introduction = await self._read_proxy_header(sock)
                peer = introduction.address or peer
                secure = secure or introduction.secure
            connection = Introduced(self._gate, peer, secure)
            if certificate is None:
                self._poller.adopt(sock.detach(), connection)
                return
            await self._loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=certificate.context,
                ssl_handshake_timeout=max(deadline - self._loop.time(), 0.01),
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except (ProxyFault, OSError, ssl.SSLError) as fault:
            # Scanners, clients that leave early, clients that don't trust the certificate: an operator can do nothing.
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
