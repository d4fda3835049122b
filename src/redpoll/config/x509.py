"""What a certificate (RFC 5280) and an OCSP response (RFC 6960) say, read from their DER.

It reads only what decides which certificate a client gets, and for how long. OpenSSL checks the rest, and clients check
the signatures. Python's ssl module decodes neither, and a server needs no package for more.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

__all__ = ["Certificate", "DerError", "OcspResponse", "blocks", "read_certificate", "read_ocsp"]

_INTEGER: Final = 0x02
_OCTET_STRING: Final = 0x04
_OID: Final = 0x06
_ENUMERATED: Final = 0x0A
_SEQUENCE: Final = 0x30
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
# Of GeneralName: dNSName and iPAddress.
_DNS_NAME: Final = 0x82
_IP_ADDRESS: Final = 0x87

_SUBJECT_ALT_NAME: Final = bytes.fromhex("551d11")
_BASIC_OCSP: Final = bytes.fromhex("2b0601050507300101")
# OpenSSL keeps one certificate of each of these for a context.
_KINDS: Final = {
    bytes.fromhex("2a864886f70d010101"): "RSA",
    bytes.fromhex("2a864886f70d01010a"): "RSA-PSS",
    bytes.fromhex("2a8648ce3d0201"): "ECDSA",
    bytes.fromhex("2b6570"): "Ed25519",
    bytes.fromhex("2b6571"): "Ed448",
}
_HASHES: Final = {
    bytes.fromhex("2b0e03021a"): "sha1",
    bytes.fromhex("608648016503040201"): "sha256",
    bytes.fromhex("608648016503040202"): "sha384",
    bytes.fromhex("608648016503040203"): "sha512",
}
_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)


class DerError(ValueError):
    """The bytes aren't the DER of what they should be."""


class Certificate(NamedTuple):
    """`names` are its DNS names in lower case, `addresses` its IP addresses; times are Unix seconds. `issuer` is the
    issuer's name in DER. `kind` is that of its key, such as RSA or ECDSA."""

    names: tuple[str, ...]
    addresses: tuple[bytes, ...]
    not_before_s: float
    not_after_s: float
    serial: int
    issuer: bytes
    kind: str

    def is_for(self, name: str) -> bool:
        """A wildcard stands for one label (RFC 6125 6.4.3)."""
        return name in self.names or "*." + name.partition(".")[2] in self.names


class OcspResponse(NamedTuple):
    """About one certificate, of which it has the serial number and a hash of the issuer's name. `fault`: why it must
    not be shown, or None. It counts until `next_update_s`, in Unix seconds."""

    serial: int
    hash_name: str
    issuer_hash: bytes
    fault: str | None
    next_update_s: float

    def is_about(self, certificate: Certificate) -> bool:
        wanted = hashlib.new(self.hash_name, certificate.issuer, usedforsecurity=False).digest()
        return self.serial == certificate.serial and self.issuer_hash == wanted


class _Reader:
    """Reads the elements of one constructed value in order."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def tag(self) -> int:
        """That of the next element; -1 at the end."""
        return self._data[self._at] if self.more else -1

    def element(self, tag: int | None = None) -> tuple[int, bytes, bytes]:
        """The next element: its tag, its content, and all of it. Raises DerError if it is another one than `tag`."""
        data, begin = self._data, self._at
        if len(data) - begin < 2:
            raise DerError("it is not DER, or not whole")
        own_tag, size, at = data[begin], data[begin + 1], begin + 2
        if size > 0x80:
            count = size & 0x7F
            if count > 4:
                raise DerError("an element is longer than 4 GiB")
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        elif size == 0x80:
            raise DerError("an element has no length, which DER doesn't allow")
        if len(data) - at < size:
            raise DerError("it is not DER, or not whole")
        if tag is not None and own_tag != tag:
            raise DerError(f"there is an element of type {own_tag:#x} where {tag:#x} belongs")
        self._at = at + size
        return own_tag, data[at : at + size], data[begin : at + size]

    def content(self, tag: int) -> bytes:
        return self.element(tag)[1]

    def inner(self, tag: int = _SEQUENCE) -> _Reader:
        return _Reader(self.content(tag))

    def skip(self, *tags: int) -> None:
        """The next element, if it is one of these."""
        if self.tag() in tags:
            self.element()

    def integer(self) -> int:
        return int.from_bytes(self.content(_INTEGER), "big", signed=True)

    def time_s(self) -> float:
        tag, content, _ = self.element()
        try:
            text = content.decode("ascii")
            if tag == _UTC_TIME:
                # Two digits of the year: 1950 to 2049 (RFC 5280 4.1.2.5.1).
                text = ("20" if text < "5" else "19") + text
            elif tag != _GENERALIZED_TIME:
                raise DerError("there is something else where a time belongs")
            return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
        except (UnicodeDecodeError, ValueError) as error:
            raise DerError(f"{content!r} is not a time") from error


def blocks(pem: bytes) -> list[tuple[str, bytes, bytes]]:
    """The PEM blocks of a text (RFC 7468): label, DER, and the block's own text. Raises DerError."""
    parsed = []
    for block in _BLOCK.finditer(pem):
        label, body = block[1].decode("ascii"), block[2]
        if b":" in body:
            # The header of an encrypted key (RFC 1421).
            body = body.partition(b"\n\n")[2]
        try:
            parsed.append((label, binascii.a2b_base64(body), block[0] + b"\n"))
        except binascii.Error as error:
            raise DerError(f"a PEM block {label!r} is not base64") from error
    return parsed


def read_certificate(der: bytes) -> Certificate:
    """Raises DerError."""
    body = _Reader(der).inner().inner()
    body.skip(0xA0)
    serial = body.integer()
    body.element(_SEQUENCE)
    issuer = body.element(_SEQUENCE)[2]
    validity = body.inner()
    not_before_s, not_after_s = validity.time_s(), validity.time_s()
    body.element(_SEQUENCE)
    algorithm = body.inner().inner().content(_OID)
    body.skip(0x81)
    body.skip(0x82)
    names: list[str] = []
    addresses: list[bytes] = []
    if body.tag() == 0xA3:
        extensions = body.inner(0xA3).inner()
        while extensions.more:
            extension = extensions.inner()
            if extension.content(_OID) == _SUBJECT_ALT_NAME:
                extension.skip(0x01)
                general = _Reader(extension.content(_OCTET_STRING)).inner()
                while general.more:
                    tag, content, _ = general.element()
                    # Others than ASCII (RFC 5280 4.2.1.6) can't be asked for.
                    if tag == _DNS_NAME and content.isascii():
                        names.append(content.decode("ascii").lower())
                    elif tag == _IP_ADDRESS:
                        addresses.append(content)
    return Certificate(
        tuple(names),
        tuple(addresses),
        not_before_s,
        not_after_s,
        serial,
        issuer,
        _KINDS.get(algorithm, algorithm.hex()),
    )


def read_ocsp(der: bytes) -> OcspResponse:
    """The first answer of an OCSP response. Raises DerError."""
    response = _Reader(der).inner()
    status = response.content(_ENUMERATED)
    if status != b"\0":
        raise DerError(f"it is an error of the responder, with the status {status.hex()} (RFC 6960 4.2.1)")
    content = response.inner(0xA0).inner()
    if content.content(_OID) != _BASIC_OCSP:
        raise DerError("it is not a basic OCSP response")
    data = _Reader(content.content(_OCTET_STRING)).inner().inner()
    data.skip(0xA0)
    data.skip(0xA1, 0xA2)
    data.time_s()
    single = data.inner().inner()
    identity = single.inner()
    algorithm = identity.inner().content(_OID)
    if algorithm not in _HASHES:
        raise DerError("it names its certificate by an unknown hash")
    issuer_hash = identity.content(_OCTET_STRING)
    identity.element(_OCTET_STRING)
    serial = identity.integer()
    state, _, _ = single.element()
    single.time_s()
    fault, next_update_s = None, 0.0
    if state != 0x80:
        fault = "it says that the certificate is revoked" if state == 0xA1 else "it doesn't know the certificate"
    if single.tag() == 0xA0:
        next_update_s = single.inner(0xA0).time_s()
    else:
        fault = fault or "it doesn't say until when it counts (nextUpdate)"
    return OcspResponse(serial, _HASHES[algorithm], issuer_hash, fault, next_update_s)
