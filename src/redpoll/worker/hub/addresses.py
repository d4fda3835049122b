"""Counts this worker's WebSockets by client address, so that one client can't take all places.

An IPv6 /64 counts as one address, because a client has a whole one. The counts are in a fixed table of 65,535 slots,
which an address chooses by a hash that differs in each process: a count is too high where two addresses share a slot,
never too low, and a connection needs two bytes.

Without `trusted_proxies` it isn't known which peers are proxies. A connection from a private address isn't counted,
since all clients behind a proxy would share its limit. From a public address with a proxy's header it counts in a slot
of its own with a larger limit: the peer may be a proxy, or a client that only says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final

import structlog

from redpoll.config.proxies import TrustedProxies, is_private, network_of

__all__ = ["SHARED_FACTOR", "SLOTS", "Addresses", "factor_of"]

log = structlog.get_logger()

SLOTS: Final = 65_536
# Slots from here on are those of addresses that clients may share; 0 is that of connections that aren't counted.
_FIRST_SHARED: Final = SLOTS - SLOTS // 8
# How many times the limit an address has that several clients may share.
SHARED_FACTOR: Final = 10


def factor_of(slot: int) -> int:
    """How many times the limit of an address the addresses of this slot have."""
    return SHARED_FACTOR if slot >= _FIRST_SHARED else 1


class Addresses:
    """`enter` counts a connection and `leave` takes it out. `limit` 0: there is no limit. `on`: connections get a slot,
    which other limits by address use too. `refused` counts those beyond the limit."""

    def __init__(self, limit: int, trusted: TrustedProxies) -> None:
        self.limit = limit
        self.on = bool(limit)
        self.refused = 0
        self._trusted = trusted
        self._warned = False
        self._counts = array("I", bytes(4 * SLOTS))

    def enter(self, peer: str, headers: Mapping[bytes, bytes], *, named: bool) -> int | None:
        """The slot in which a connection from `peer` is counted, 0 if it isn't; None if its address has as many
        connections as it may. `named`: a trusted proxy named `peer` in a PROXY header. Names of `headers` are in lower
        case."""
        if not self.on:
            return 0
        address = self._client_of(peer, headers, named)
        if address is None:
            return 0
        hashed = hash(network_of(address))
        if self._may_be_proxy(peer, headers, named):
            self._warn(peer)
            slot = hashed % (SLOTS - _FIRST_SHARED) + _FIRST_SHARED
        else:
            slot = hashed % (_FIRST_SHARED - 1) + 1
        if self.limit and self._counts[slot] >= self.limit * factor_of(slot):
            self.refused += 1
            return None
        self._counts[slot] += 1
        return slot

    def leave(self, slot: int) -> None:
        if slot:
            self._counts[slot] -= 1

    def _client_of(self, peer: str, headers: Mapping[bytes, bytes], named: bool) -> str | None:
        forwarded = headers.get(b"x-forwarded-for")
        if self._trusted.trusts(peer):
            if forwarded is None:
                return None
            client = self._trusted.client_of(peer, [forwarded.decode("latin-1")])
            # All addresses are those of proxies.
            return None if self._trusted.trusts(client) else client
        if named:
            return peer
        return None if not self._trusted and is_private(peer) else peer

    def _may_be_proxy(self, peer: str, headers: Mapping[bytes, bytes], named: bool) -> bool:
        return not self._trusted and not named and (b"x-forwarded-for" in headers or b"forwarded" in headers)

    def _warn(self, peer: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("a peer sends headers of a proxy, set trusted_proxies", peer=peer)
