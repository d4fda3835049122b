"""The certificate that this worker shows, and how TLS is spoken: 1.2 or newer, HTTP/1.1.

Read again when the operator says so: new handshakes get the new one, sockets that are open stay as they are. A
pair that can't be used changes nothing. Whether the files are the operator's last word is the supervisor's to know.
"""

from __future__ import annotations

import ctypes
import ssl
from typing import NoReturn

import structlog

__all__ = ["SHUTDOWN_TIMEOUT_S", "Certificate", "CertificateError", "give_memory_back"]

log = structlog.get_logger()

# For what is still owed and the peer's goodbye (close_notify) at the end of a connection; uvloop's own patience is
# 30 s (failures.md row 38). As long as a WebSocket's closing handshake may take.
SHUTDOWN_TIMEOUT_S = 5.0

# Only glibc has it, and only glibc needs it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Return to the system what ended TLS connections leave in the allocator.

    Each takes and frees some 300 KiB in pieces, which glibc keeps: half as much again as the worker needs, after a
    few thousand handshakes (bench/tls_soak.py). Takes 0.1 ms for each MB that goes back.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


class CertificateError(Exception):
    """The files don't make a certificate that can be served with."""


class Certificate:
    """A certificate with its key, from PEM files that may be one. `context` is for the handshakes of now.

    Raises CertificateError where the files can't be used.
    """

    def __init__(self, cert_path: str, key_path: str) -> None:
        self._cert_path = cert_path
        self._key_path = key_path
        self.context = self._read()

    def reload(self) -> bool:
        """Read the files again; False, and the one before stays, where they can't be used."""
        try:
            self.context = self._read()
        except CertificateError as error:
            log.error("certificate not taken", why=str(error))
            return False
        return True

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A client that renegotiates has us do the dear half of a handshake as often as it likes.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert_path, self._key_path, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise CertificateError(f"{self._cert_path!r} with {self._key_path!r}: {error}") from error
        return context


def _no_passphrase() -> NoReturn:
    # OpenSSL would ask the terminal, and the loop would stand still.
    raise ValueError("the key has a passphrase; nobody is there to type it")
