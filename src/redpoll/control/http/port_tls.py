"""TLS on the control port, for clients with a certificate of `tls_client_ca` only.

By Python's ssl module, because the port has few connections. They count as the port's once their handshake is
complete, so what is before that has bounds of its own: asyncio's own TLS server has none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from redpoll.config.certificate import PairError
from redpoll.config.certificate_files import unbundle
from redpoll.config.proxies import network_of

if TYPE_CHECKING:
    import ssl

    from redpoll.config.tls_context import SslContexts

__all__ = ["PortTls"]

log = structlog.get_logger(__name__)

_MAX_HANDSHAKES: Final = 128
# How long a client may take to close after our close_notify.
_CLOSE_WITHIN_S: Final = 5.0
_READ_BYTES: Final = 65536


class PortTls:
    """`bundle` has the certificates (config/certificate_files.py), `client_ca` the authorities of clients. `make`
    returns the protocol of a connection, which gets it when the handshake is complete, within `within_s`. `refused` is
    called for each that is closed because too many are in their handshake.

    Raises PairError if the files can't be used.
    """

    def __init__(
        self,
        bundle: Path,
        client_ca: str,
        make: Callable[[], asyncio.Protocol],
        refused: Callable[[], None],
        *,
        within_s: float,
    ) -> None:
        self.make = make
        self.refused = refused
        self.within_s = within_s
        # The oldest first.
        self.handshakes: dict[_Connection, None] = {}
        self._bundle = bundle
        self._client_ca = client_ca
        self._contexts = self._first()

    def _first(self) -> SslContexts:
        # Late: a Python may be built without ssl.
        from redpoll.config.tls_context import SslContexts

        try:
            return SslContexts(unbundle(self._bundle.read_bytes(), str(self._bundle)), self._client_ca)
        except OSError as error:
            raise PairError({"client_ca": f"the TLS of the control port can't be set up: {error}"}) from error

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    @property
    def context(self) -> ssl.SSLContext:
        """Of handshakes that begin now."""
        return self._contexts.default

    def begins(self, connection: _Connection) -> None:
        """A handshake begins. If there are too many, the address with the most loses its oldest, so that silent
        strangers keep out each other."""
        if len(self.handshakes) >= _MAX_HANDSHAKES:
            ((network, _),) = Counter(one.network for one in self.handshakes).most_common(1)
            oldest = next(one for one in self.handshakes if one.network == network)
            del self.handshakes[oldest]
            oldest.abort()
            self.refused()
        self.handshakes[connection] = None

    def reload(self) -> None:
        """Reads the files again, for handshakes that begin from now on. Files that can't be used change nothing."""
        try:
            self._contexts.use(unbundle(self._bundle.read_bytes(), str(self._bundle)), self._client_ca)
        except (PairError, OSError) as error:
            log.error("certificate not usable", reason=str(error))

    def close(self) -> None:
        """Gives up handshakes under way."""
        for connection in list(self.handshakes):
            connection.abort()


class _Connection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a TCP connection, and the transport of what it carries."""

    def __init__(self, tls: PortTls) -> None:
        super().__init__()
        import ssl

        self._port = tls
        self._raw: asyncio.Transport
        self.network = ""
        self._protocol: asyncio.Protocol | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._wants_more = (ssl.SSLWantReadError,)
        self._fault = (ssl.SSLError,)
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._is_closing = False

    # -- called by the TCP transport -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.network = network_of(peer[0]) if peer else ""
        self._port.begins(self)
        self._timer = asyncio.get_running_loop().call_later(self._port.within_s, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._incoming.write(data)
        if self._protocol is None and not self._shake():
            return
        self._read()

    def eof_received(self) -> bool:
        # TLS ends with close_notify; an end without it is like a reset.
        self._raw.abort()
        return False

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, fault: Exception | None) -> None:
        self._port.handshakes.pop(self, None)
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._protocol is not None:
            self._protocol.connection_lost(fault)

    # -- TLS -----------------------------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Goes on with the handshake. True: it is complete."""
        try:
            self._ssl.do_handshake()
        except self._wants_more:
            self._send()
            return False
        except self._fault as fault:
            # Scanners, and clients without a certificate of these authorities.
            log.debug("control port: no TLS connection", reason=str(fault))
            # The alert that says why.
            self._end()
            return False
        self._send()
        self._port.handshakes.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._protocol = self._port.make()
        self._protocol.connection_made(self)
        return True

    def _read(self) -> None:
        protocol = self._protocol
        assert protocol is not None
        while not self._is_closing and not self._is_paused:
            try:
                data = self._ssl.read(_READ_BYTES)
            except self._wants_more:
                break
            except self._fault:
                self._send()
                self._raw.abort()
                return
            if not data:
                # close_notify
                protocol.eof_received()
                self.close()
                return
            protocol.data_received(data)
        self._send()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def _end(self) -> None:
        """Sends the last bytes, and waits for the client to close: it would lose them if bytes were left unread."""
        self._is_closing = True
        self._send()
        if self._raw.is_closing():
            return
        self._raw.write_eof()
        self._raw.resume_reading()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_CLOSE_WITHIN_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        if self._protocol is not None and self._raw.get_write_buffer_size():
            # A client that was let in still reads the answer, which may be long.
            self._timer = asyncio.get_running_loop().call_later(_CLOSE_WITHIN_S, self._stop_waiting)
        else:
            self._raw.abort()

    # -- called by the protocol ----------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        done = 0
        try:
            while done < len(data):
                done += self._ssl.write(data[done:])
        except self._fault:
            self._raw.abort()
            return
        self._send()

    def close(self) -> None:
        if self._is_closing:
            return
        # It wants the client's close_notify, too. Ours is made.
        with contextlib.suppress(*self._fault):
            self._ssl.unwrap()
        self._end()

    def abort(self) -> None:
        self._is_closing = True
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._is_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        if not self.is_closing():
            self._raw.resume_reading()
            # What was received before.
            asyncio.get_running_loop().call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)
