"""Certificate pins: an endpoint can be limited to one leaf certificate, given by its SHA-256.

The pin is compared at the end of each TLS handshake, before any byte of a request is sent. It is an addition to the
usual checks of chain and name. aiohttp's `Fingerprint` would replace those checks: it accepts expired certificates, and
a forged one could be captured as a pin.
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

# A pin that no certificate matches. The connection fails with CertificateChanged, which has the shown certificate.
MATCHES_NONE: Final = "-"


class CertificateChanged(ssl.SSLError):
    """The certificate isn't the pinned one. `shown` is its SHA-256, 64 hex digits.

    It is an SSLError because event loops expect those from a handshake.
    """

    def __init__(self, pinned: str, shown: str) -> None:
        super().__init__(ssl.SSL_ERROR_SSL, "the certificate changed")
        self.pinned = pinned
        self.shown = shown

    def __str__(self) -> str:
        return f"the certificate changed: {self.pinned} is pinned, {self.shown} was shown"


class PinCheckingSSLObject(ssl.SSLObject):
    """One TLS connection. Its handshake fails if there is a pin and the certificate doesn't match it."""

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
    """The context `shared` with a pin. It has no CA certificates of its own: loading them takes 20 ms and 1 MiB.

    aiohttp pools connections per context. Keep one PinnedContext per pin, so that a connection is never used with
    another pin than the one it was checked with.
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
        # Late: the ssl module creates the object.
        connection.pin = self.pin
        return connection


def trusted_context(ca_file: str = "") -> ssl.SSLContext:
    """A context that checks chain and name, with the system's CAs and those of `ca_file` (PEM).

    Raises OSError or ssl.SSLError for a bad `ca_file`.
    """
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    context.sslobject_class = PinCheckingSSLObject
    return context


def unchecked_context() -> ssl.SSLContext:
    """A context that checks nothing. Only for reading a certificate that was not accepted, never for a delivery."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslobject_class = PinCheckingSSLObject
    return context
