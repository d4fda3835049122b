"""A certificate pin: the SHA-256 of the one leaf certificate that an endpoint may show (spec 6.4).

It is compared at the end of each TLS handshake, where not a byte of a request has been sent yet, and comes on top of
what every connection is checked for, the chain to a CA and the name. aiohttp's `Fingerprint` would take the place of
those checks: an expired certificate would do, and so would the capture of a forged one.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from typing import Any, Final

__all__ = [
    "MATCHES_NONE",
    "CertificateChanged",
    "PinCheckingSSLObject",
    "PinnedContext",
    "trusted_context",
    "unchecked_context",
]

# Fits no certificate: a connection with it ends by telling which one was shown.
MATCHES_NONE: Final = "-"


class CertificateChanged(ssl.SSLError):
    """The certificate isn't the pinned one. `shown` is its SHA-256, 64 hex digits.

    An SSLError, because it comes out of the handshake, where event loops expect those.
    """

    def __init__(self, pinned: str, shown: str) -> None:
        super().__init__(ssl.SSL_ERROR_SSL, "the certificate changed")
        self.pinned = pinned
        self.shown = shown

    def __str__(self) -> str:
        return f"the certificate changed: pinned is {self.pinned}, shown was {self.shown}"


class PinCheckingSSLObject(ssl.SSLObject):
    """One connection's TLS, whose handshake fails unless the certificate fits the pin. Empty: any does."""

    pin = ""

    def do_handshake(self) -> None:
        super().do_handshake()
        if not self.pin:
            return
        leaf = self.getpeercert(binary_form=True) or b""
        shown = hashlib.sha256(leaf).hexdigest()
        if not hmac.compare_digest(shown.encode(), self.pin.encode()):
            raise CertificateChanged(self.pin, shown)


class PinnedContext(ssl.SSLContext):
    """`shared` with a pin. Holds no certificates of its own: reading the system's takes 20 ms and 1 MiB.

    Connections are pooled by the context they were made with, so keep one for each pin, and one made with another
    pin, or with none, is never used.
    """

    def __new__(cls, shared: ssl.SSLContext, pin: str) -> PinnedContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, shared: ssl.SSLContext, pin: str) -> None:
        self._shared = shared
        self.pin = pin

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Called by event loops for each connection."""
        connection = self._shared.wrap_bio(*arguments, **named)
        assert isinstance(connection, PinCheckingSSLObject)
        connection.pin = self.pin
        return connection


def trusted_context(ca_file: str = "") -> ssl.SSLContext:
    """Checks chain and name, by the system's CAs and those of `ca_file` (PEM). Raises OSError, ssl.SSLError."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    context.sslobject_class = PinCheckingSSLObject
    return context


def unchecked_context() -> ssl.SSLContext:
    """Checks nothing: for a look at a certificate that was not accepted, never for a delivery."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslobject_class = PinCheckingSSLObject
    return context
