"""Contexts of Python's ssl module for a server: TLS 1.2 or newer, HTTP/1.1, certificates by SNI, client certificates.

The control port uses it, and the TLS port where the engine can't call OpenSSL (`_openssl.missing`). Don't import it at
the top of a module: a Python may be built without ssl.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import structlog

from redpoll.config.certificate import load_pem
from redpoll.config.certificate_files import Selection, ServerCertificate, select

__all__ = ["SslContexts"]

log = structlog.get_logger()

# Of TLS 1.2: forward secrecy and authenticated encryption. OpenSSL's own list has RSA key exchange and SHA-1, and each
# build of Python changes it in another way. TLS 1.3 has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class SslContexts:
    """`default` is for new connections; its handshakes change to the context of the name that the client asks for, and
    to those of the last `use`, even if `default` is an earlier one. `client_ca` names a PEM file with authorities: who
    shows no certificate of theirs is refused. Python's module has no OCSP staples."""

    def __init__(self, certificates: Sequence[ServerCertificate], client_ca: str = "") -> None:
        self.default: ssl.SSLContext
        self._certificates: Sequence[ServerCertificate] = ()
        self._selection = Selection([], {})
        self._client_ca = ""
        # By group of the selection. A context takes 0.8 ms and 20 kB, so the others are made when a client asks.
        self._made: dict[int, ssl.SSLContext] = {}
        self.use(certificates, client_ca)

    def use(self, certificates: Sequence[ServerCertificate], client_ca: str = "") -> None:
        """From now on, shows these. Raises OSError (ssl.SSLError is one), and then changes nothing."""
        selection = select(certificates)
        self.default = self._context([certificates[n] for n in selection.groups[0]], client_ca)
        self._certificates, self._selection, self._client_ca = certificates, selection, client_ca
        self._made = {0: self.default}

    def _context(self, certificates: Sequence[ServerCertificate], client_ca: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Otherwise a client could make us repeat the expensive half of a handshake at will.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        for certificate in certificates:
            load_pem(context, certificate.pem)
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        # Also called without a name.
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        name, names = (name or "").lower(), self._selection.names
        group = names.get(name, names.get("*." + name.partition(".")[2], 0))
        if group not in self._made:
            certificates = [self._certificates[n] for n in self._selection.groups[group]]
            try:
                self._made[group] = self._context(certificates, self._client_ca)
            except OSError as error:
                # All were checked before. Clients get the first one.
                log.error("certificate not usable", reason=f"{certificates[0].place}: {error}")
                self._made[group] = self.default
        chosen = self._made[group]
        if chosen is not context:
            connection.context = chosen
