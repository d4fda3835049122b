"""Counts this worker's WebSockets by client address, so that one client can't take all places.

An IPv6 /64 counts as one address, because a client has a whole one. The counts are in a fixed table of 65,535 slots,
which an address chooses by a hash that differs in each process: a count is too high where two addresses share a slot,
never too low, and a connection needs two bytes. A connection isn't counted if the client's address isn't known, since
all clients behind a proxy would share its limit.
"""

from __future__ import annotations

import ipaddress
from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from redpoll.proxies import TrustedProxies, network_of, plain_address

__all__ = ["SLOTS", "Addresses"]

SLOTS: Final = 65_536


class Addresses:
    """`enter` counts a connection and `leave` takes it out. `limit` 0: there is no limit. `on`: connections get a slot,
    which other limits by address use too. `refused` counts those beyond the limit."""

    def __init__(self, limit: int, trusted: TrustedProxies) -> None:
        self.limit = limit
        self.on = bool(limit)
        self.refused = 0
        self._trusted = trusted
        self._counts = array("I", bytes(4 * SLOTS))

    def enter(self, peer: str, headers: Mapping[bytes, bytes], *, named: bool) -> int | None:
        """The slot in which a connection from `peer` is counted, 0 if it isn't; None if its address has `limit`
        connections. `named`: a trusted proxy named `peer` in a PROXY header. Names of `headers` are in lower case."""
        if not self.on:
            return 0
        address = self._client_of(peer, headers, named)
        if address is None:
            return 0
        slot = hash(network_of(address)) % (SLOTS - 1) + 1
        if self.limit and self._counts[slot] >= self.limit:
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
        # Without trusted_proxies the proxies aren't known. One on this machine or network is likely if the
        # peer's address is private, and certain if a header says so.
        if not self._trusted and (forwarded is not None or b"forwarded" in headers or _is_private(peer)):
            return None
        return peer


@lru_cache(maxsize=4096)
def _is_private(address: str) -> bool:
    try:
        return not ipaddress.ip_address(plain_address(address)).is_global
    except ValueError:
        # There is no address.
        return True
