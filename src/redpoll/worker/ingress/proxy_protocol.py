"""Parses the header of the PROXY protocol, in which a TCP proxy sends the address of its client.

Reads version 1 (a line of text) and version 2 (binary), as haproxy's doc/proxy-protocol.txt describes them in
sections 2.1 and 2.2. The listeners decide which peers may send one.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import Final, NamedTuple

__all__ = ["MAX_HEADER_BYTES", "ProxyFault", "ProxyHeader", "parse"]

# Version 2 allows 64 KiB, but even a header with a client certificate takes only a few KiB.
MAX_HEADER_BYTES: Final = 16 * 1024

_V1: Final = b"PROXY "
# The longest line of version 1, including its CRLF (2.1).
_V1_BYTES: Final = 107
_V1_LINE = re.compile(
    rb"PROXY (TCP4|TCP6) ([0-9A-Fa-f:.]+) ([0-9A-Fa-f:.]+) (0|[1-9][0-9]{0,4}) (0|[1-9][0-9]{0,4})"
).fullmatch
_V1_UNKNOWN = re.compile(rb"PROXY UNKNOWN(?: [ -~]*)?").fullmatch

_V2: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_V2_FIXED_BYTES: Final = 16
_LOCAL, _PROXY = 0, 1
_UNSPECIFIED, _INET, _INET6, _UNIX = 0, 1, 2, 3
_ADDRESSES_BYTES: Final = {_UNSPECIFIED: 0, _INET: 12, _INET6: 36, _UNIX: 216}
_STREAM: Final = 1
_TLV_SSL: Final = 0x20
_CLIENT_SSL: Final = 0x01


class ProxyFault(ValueError):
    """The bytes are not a valid PROXY header. The connection must be closed: section 2 forbids guessing."""


class ProxyHeader(NamedTuple):
    """A parsed header of `size` bytes. The bytes after it come from the client.

    `address` is the client's, None if the proxy connects for itself (a health check) or doesn't know it. `secure`: the
    client uses TLS to the proxy; only version 2 can say so.
    """

    size: int
    address: tuple[str, int] | None
    secure: bool


def parse(data: bytes) -> ProxyHeader | None:
    """Parse the header at the start of `data`. None if `data` is only a part of one.

    Raises ProxyFault at the first wrong byte.
    """
    if data.startswith(_V2):
        return _parse_v2(data)
    if data.startswith(_V1):
        return _parse_v1(data)
    if _V1.startswith(data) or _V2.startswith(data):
        return None
    raise ProxyFault("no PROXY header")


def _parse_v1(data: bytes) -> ProxyHeader | None:
    end = data.find(b"\r\n", 0, _V1_BYTES)
    if end < 0:
        if len(data) >= _V1_BYTES or b"\n" in data or b"\r" in data[:-1]:
            raise ProxyFault("the line of version 1 doesn't end with CRLF")
        return None
    line = data[:end]
    size = end + 2
    if _V1_UNKNOWN(line):
        return ProxyHeader(size, None, False)
    match = _V1_LINE(line)
    if match is None:
        raise ProxyFault("the line of version 1 is not `PROXY TCP4|TCP6|UNKNOWN …`")
    address_type = ipaddress.IPv4Address if match[1] == b"TCP4" else ipaddress.IPv6Address
    try:
        source = address_type(match[2].decode())
        address_type(match[3].decode())
    except ValueError:
        raise ProxyFault("version 1 with an invalid address") from None
    ports = int(match[4]), int(match[5])
    if max(ports) > 0xFFFF:
        raise ProxyFault("version 1 with an invalid port")
    return ProxyHeader(size, (_text(source), ports[0]), False)


def _parse_v2(data: bytes) -> ProxyHeader | None:
    if len(data) > 12 and (data[12] >> 4 != 2 or data[12] & 0x0F > _PROXY):
        raise ProxyFault("version 2 with a command other than LOCAL and PROXY")
    if len(data) < _V2_FIXED_BYTES:
        return None
    command, family, transport = data[12] & 0x0F, data[13] >> 4, data[13] & 0x0F
    (length,) = struct.unpack_from(">H", data, 14)
    size = _V2_FIXED_BYTES + length
    if size > MAX_HEADER_BYTES:
        raise ProxyFault(f"the header has more than {MAX_HEADER_BYTES} bytes")
    if command == _PROXY:
        if family not in _ADDRESSES_BYTES or (transport != _STREAM and (family, transport) != (_UNSPECIFIED, 0)):
            raise ProxyFault("version 2 with an unknown address family, or not a stream")
        if length < _ADDRESSES_BYTES[family]:
            raise ProxyFault("version 2 with an incomplete address")
    if len(data) < size:
        return None
    if command == _LOCAL:
        return ProxyHeader(size, None, False)
    body = data[_V2_FIXED_BYTES:size]
    secure = _client_uses_tls(body[_ADDRESSES_BYTES[family] :])
    if family == _INET:
        (port,) = struct.unpack_from(">H", body, 8)
        return ProxyHeader(size, (str(ipaddress.IPv4Address(body[:4])), port), secure)
    if family == _INET6:
        (port,) = struct.unpack_from(">H", body, 32)
        return ProxyHeader(size, (_text(ipaddress.IPv6Address(body[:16])), port), secure)
    return ProxyHeader(size, None, secure)


def _client_uses_tls(tlvs: bytes) -> bool:
    """Whether an extension PP2_TYPE_SSL has the flag PP2_CLIENT_SSL (2.2.6). Other extensions are skipped."""
    secure = False
    at = 0
    while at < len(tlvs):
        if len(tlvs) - at < 3:
            raise ProxyFault("version 2 with an incomplete extension")
        kind, length = struct.unpack_from(">BH", tlvs, at)
        value = tlvs[at + 3 : at + 3 + length]
        if len(value) < length:
            raise ProxyFault("version 2 with an extension longer than the header")
        if kind == _TLV_SSL:
            if length < 5:
                raise ProxyFault("version 2 with an incomplete TLS extension")
            secure = bool(value[0] & _CLIENT_SSL)
        at += 3 + length
    return secure


def _text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
