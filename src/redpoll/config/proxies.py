"""The proxies that the operator trusts, and the client address and scheme that their headers give.

Anybody can send an X-Forwarded-For header, so it counts only when it comes from a trusted address. Workers and the
control plane both use this module, so they see the same client. It has no sockets and no I/O.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

__all__ = ["NO_PROXIES", "TrustedProxies", "is_private", "network_of", "plain_address"]

# With or without a port, as `192.0.2.1:4711` and `[2001:db8::1]:4711`.
_ADDRESS = re.compile(r"(?:(?P<v4>[0-9.]+)|\[(?P<v6>[0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?|(?P<bare>[0-9A-Fa-f:.]+)")
# Only this many addresses, the rightmost ones, are read from a header.
_MAX_HOPS: Final = 32
_SECURE_SCHEMES: Final = frozenset({"https", "wss"})


class TrustedProxies:
    """The trusted proxies, by address or network (`10.0.0.0/8`). Raises ValueError for anything else.

    False when there are none, which is the usual case and must cost one comparison per request.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(network, strict=False) for network in networks)
        # Bounded: clients choose the addresses in a header.
        self._trusts = lru_cache(maxsize=1024)(self._look)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        """Whether `address`, as the kernel or a header gives it, is a trusted proxy."""
        return bool(self._networks) and self._trusts(address)

    def client_of(self, peer: str, forwarded_for: Sequence[str]) -> str:
        """The client address of a request from `peer` with these X-Forwarded-For headers, in their order.

        It is the rightmost address that is not a trusted proxy, because an untrusted sender may have written everything
        to the left of it. If all are trusted, it is the leftmost. If one is not an address, it is the proxy that wrote
        it.
        """
        if not forwarded_for or not self.trusts(peer):
            return peer
        client = peer
        for text in reversed(",".join(forwarded_for).rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]):
            address = _address_in(text.strip())
            if address is None:
                return client
            client = address
            if not self._trusts(address):
                return client
        return client

    def is_secure(self, peer: str, forwarded_proto: str | None, secure: bool) -> bool:
        """Whether the client of a request from `peer` used TLS. `secure` says whether this connection uses TLS.

        The X-Forwarded-Proto of a trusted proxy decides. Of several schemes the leftmost counts, which is the client's:
        a client that used TLS must not be refused because of a later hop, and a client that lies only harms itself.
        """
        if not forwarded_proto or not self.trusts(peer):
            return secure
        return forwarded_proto.partition(",")[0].strip().lower() in _SECURE_SCHEMES

    def _look(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(plain_address(address))
        except ValueError:
            return False
        return any(parsed.version == network.version and parsed in network for network in self._networks)


NO_PROXIES: Final = TrustedProxies(())


def plain_address(address: str) -> str:
    """The address, with an IPv4 address from an IPv6 socket (`::ffff:192.0.2.1`) in its IPv4 form."""
    if address[:7].lower() == "::ffff:" and "." in address:
        return address[7:]
    return address


@lru_cache(maxsize=4096)
def is_private(address: str) -> bool:
    """Whether the address is one of this machine or of a private network, or isn't known."""
    try:
        return not ipaddress.ip_address(plain_address(address)).is_global
    except ValueError:
        return True


def network_of(address: str) -> str:
    """What limits by address count: an IPv4 address, and of an IPv6 address the /64, which one client has as a rule."""
    if ":" not in address:
        return address
    plain = plain_address(address)
    try:
        parsed = ipaddress.IPv6Address(plain)
    except ValueError:
        return plain
    return f"{ipaddress.IPv6Address(int(parsed) >> 64 << 64)}/64"


def _address_in(text: str) -> str | None:
    """The address in one entry of X-Forwarded-For, in its shortest form; None for `unknown` and the like."""
    match = _ADDRESS.fullmatch(text)
    try:
        parsed = ipaddress.ip_address((match["v4"] or match["v6"] or match["bare"]) if match else "")
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)
