"""The worker's certificates and TLS settings: TLS 1.2 or newer, HTTP/1.1, certificates by SNI, OCSP staples.

OpenSSL is called by the engine (`_openssl.Context`), or by Python's ssl module where the engine can't call it
(config/tls_context.py). The supervisor says when to read the file again. New handshakes use the new certificates; open
connections don't change. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from redpoll import _openssl
from redpoll._engine import WebSocket
from redpoll._openssl import Context, ContextError
from redpoll._sockets import Poller
from redpoll._tls import OpenSslSocket, PythonTlsSocket, TlsSocket
from redpoll.config.certificate import PairError
from redpoll.config.certificate_files import ServerCertificate, select, unbundle

if TYPE_CHECKING:
    import ssl

__all__ = ["CertificateError", "Certificates", "give_memory_back", "use_ticket_keys"]

log = structlog.get_logger()

# Only glibc has it, and only glibc needs it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Return memory of ended TLS connections to the system.

    Each connection allocates and frees about 300 KiB in pieces, and glibc doesn't return them. After a few thousand
    handshakes the worker holds 1.5 times what it needs (bench/soak/tls_soak.py). Takes 0.2 ms for each MB that is
    returned, and little if there is none, so it is called often: for 256 connections that have ended about 1 ms.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def use_ticket_keys(keys: Sequence[str]) -> None:
    """Encrypt session tickets with the first of `keys`, in hex, and accept those of all. Python's ssl module has keys
    of its own."""
    if _openssl.load():
        _openssl.set_ticket_keys([bytes.fromhex(key) for key in keys])


class CertificateError(Exception):
    """The file cannot be used."""


class Certificates:
    """Certificates and their keys from the file that the supervisor has written (config/certificate_files.py).

    Raises CertificateError if it cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._direct = _openssl.load()
        if not self._direct:
            log.warning("TLS by Python's ssl module, slower and without OCSP staples", reason=_openssl.missing())
        self._context = self._read()

    def socket_for(
        self, poller: Poller, connection: WebSocket, settled: Callable[[TlsSocket, str | None], None]
    ) -> TlsSocket:
        """The transport of a new connection. Its handshake has the newest certificates when it begins."""
        kind: Any = OpenSslSocket if self._direct else PythonTlsSocket
        made: TlsSocket = kind(poller, self.newest, connection, settled)
        return made

    def reload(self) -> bool:
        """Read the file again. False if it cannot be used; the previous certificates stay."""
        try:
            self._context = self._read()
        except CertificateError as error:
            log.error("certificate not usable", reason=str(error))
            return False
        return True

    def newest(self) -> ssl.SSLContext | Context:
        """What new handshakes use."""
        return self._context

    def _read(self) -> ssl.SSLContext | Context:
        try:
            certificates = unbundle(Path(self._path).read_bytes(), self._path)
            return _direct(certificates) if self._direct else _by_python(certificates)
        except (OSError, ValueError, ContextError, PairError) as error:
            raise CertificateError(f"{self._path!r}: {error}") from error


def _direct(certificates: Sequence[ServerCertificate]) -> Context:
    """The context for clients that ask for no known name. It makes those of names when the first client asks for one:
    a context takes 0.8 ms and 20 kB, and there may be 256."""
    selection = select(certificates)

    def made(number: int) -> Context:
        group = selection.groups[number]
        context = Context(*(certificates[index].pem for index in group))
        for place, index in enumerate(group):
            if certificates[index].staple:
                context.set_staple(place, certificates[index].staple, certificates[index].staple_until_s)
        return context

    def made_later(number: int) -> Context | None:
        try:
            return made(number)
        except ContextError as error:
            # The supervisor has checked all. Clients get the first certificate.
            log.error("certificate not usable", reason=f"{certificates[selection.groups[number][0]].place}: {error}")
            return None

    default = made(0)
    default.serve_names({name: group for name, group in selection.names.items() if group}, made_later)
    return default


def _by_python(certificates: Sequence[ServerCertificate]) -> ssl.SSLContext:
    # Late: a Python may be built without ssl.
    from redpoll.config.tls_context import SslContexts

    return SslContexts(certificates).default
