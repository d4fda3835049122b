"""The worker's certificate and TLS settings: TLS 1.2 or newer, HTTP/1.1.

OpenSSL is called by the engine (`_openssl.Context`), or by Python's ssl module where the engine can't call it.
The supervisor says when to read the files again. New handshakes use the new certificate; open connections don't change.
Files that cannot be used change nothing.
"""

from __future__ import annotations

import ctypes
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog

from redpoll import _openssl
from redpoll._engine import WebSocket
from redpoll._openssl import Context, ContextError
from redpoll._sockets import Poller
from redpoll._tls import OpenSslSocket, PythonTlsSocket, TlsSocket

__all__ = ["Certificate", "CertificateError", "give_memory_back", "use_ticket_keys"]

log = structlog.get_logger()

# Of TLS 1.2: forward secrecy and authenticated encryption. OpenSSL's own list has RSA key exchange and SHA-1, and each
# build of Python changes it in another way. TLS 1.3 has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

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
    """The files cannot be used as a certificate and its key."""


class Certificate:
    """A certificate and its key from PEM files, which may be the same file.

    Raises CertificateError if the files cannot be used.
    """

    def __init__(self, cert_path: str, key_path: str) -> None:
        self._cert_path = cert_path
        self._key_path = key_path
        self._direct = _openssl.load()
        if not self._direct:
            log.warning("TLS by Python's ssl module, which is slower", reason=_openssl.missing())
        self._context = self._read()

    def socket_for(
        self, poller: Poller, connection: WebSocket, settled: Callable[[TlsSocket, str | None], None]
    ) -> TlsSocket:
        """The transport of a new connection. Its handshake has the newest certificate when it begins."""
        kind: Any = OpenSslSocket if self._direct else PythonTlsSocket
        made: TlsSocket = kind(poller, self._newest, connection, settled)
        return made

    def reload(self) -> bool:
        """Read the files again. False if they cannot be used; the previous certificate stays."""
        try:
            self._context = self._read()
        except CertificateError as error:
            log.error("certificate not usable", reason=str(error))
            return False
        return True

    def _newest(self) -> ssl.SSLContext | Context:
        return self._context

    def _read(self) -> ssl.SSLContext | Context:
        try:
            return self._read_direct() if self._direct else self._read_by_python()
        except (OSError, ValueError, ContextError) as error:
            raise CertificateError(f"{self._cert_path!r} with {self._key_path!r}: {error}") from error

    def _read_direct(self) -> Context:
        cert = Path(self._cert_path).read_bytes()
        key = Path(self._key_path).read_bytes()
        return Context(cert if cert == key else key + b"\n" + cert)

    def _read_by_python(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Otherwise a client could make us repeat the expensive half of a handshake at will.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert_path, self._key_path, password=_no_passphrase)
        return context


def _no_passphrase() -> NoReturn:
    # OpenSSL would ask on the terminal and block the loop.
    raise ValueError("the key has a passphrase; use a key without one")
