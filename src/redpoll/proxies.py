"""The operator's own proxies: whose word on a client's address and scheme is taken.

Anybody can write an X-Forwarded-For header; only what a trusted address wrote counts. Worker and control ask the
same questions here, so that both see the same client. Pure: knows no sockets.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

__all__ = ["NOBODY", "TrustedProxies", "plain_address"]

# With or without a port, as `192.0.2.1:4711` and `[2001:db8::1]:4711`.
_ADDRESS = re.compile(r"(?:(?P<v4>[0-9.]+)|\[(?P<v6>[0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?|(?P<bare>[0-9A-Fa-f:.]+)")
# Proxies in front of one another, at most. What is further left in a header costs nothing.
_MOST_HOPS: Final = 32
_SECURE_SCHEMES: Final = frozenset({"https", "wss"})


class TrustedProxies:
    """The proxies in front, by address or network (`10.0.0.0/8`); ValueError for what is neither.

    True where there are any. Looked at once a request, so the usual case, none, is one comparison.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(each, strict=False) for each in networks)
        # The few proxies of a server ask again and again; a flood of other addresses must find it small.
        self._trusts = lru_cache(maxsize=1024)(self._look)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        """Whether `address`, as the kernel or a header gives it, is one of them."""
        return bool(self._networks) and self._trusts(address)

    def client_of(self, peer: str, forwarded_for: Sequence[str]) -> str:
        """The client of a request that came from `peer` with these X-Forwarded-For headers, in their order.

        The rightmost address that isn't a trusted proxy's: what stands left of it was written by somebody who isn't
        trusted. Where all are, the leftmost; where one is no address, the proxy that wrote it.
        """
        if not forwarded_for or not self.trusts(peer):
            return peer
        client = peer
        for text in reversed(",".join(forwarded_for).rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]):
            address = _address_in(text.strip())
            if address is None:
                return client
            client = address
            if not self._trusts(address):
                return client
        return client

    def is_secure(self, peer: str, forwarded_proto: str | None, secure: bool) -> bool:
        """Whether the client of a request from `peer` came by TLS. `secure`: whether this connection is so.

        A trusted proxy's X-Forwarded-Proto decides. Of several schemes the leftmost, which is the client's: a client
        that lies there deceives itself alone, and one that came by TLS must not be sent away for a later hop.
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


# What is trusted where the operator named no proxy.
NOBODY: Final = TrustedProxies(())


def plain_address(address: str) -> str:
    """An IPv4 address in its own form where it came over an IPv6 socket (`::ffff:192.0.2.1`), others as they are."""
    if address[:7].lower() == "::ffff:" and "." in address:
        return address[7:]
    return address


def _address_in(text: str) -> str | None:
    """The address that one place of X-Forwarded-For names, in its shortest form; None for `unknown` and the like."""
    match = _ADDRESS.fullmatch(text)
    try:
        parsed = ipaddress.ip_address((match["v4"] or match["v6"] or match["bare"]) if match else "")
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)
