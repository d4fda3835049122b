"""The client's address of an HTTP request: the peer's, or the one that a trusted proxy names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

from redpoll.config.proxies import TrustedProxies

__all__ = ["ClientAddresses"]

# An X-Forwarded-For header up to this size is remembered with the address in it.
_MAX_REMEMBERED_BYTES: Final = 128


class ClientAddresses:
    """By the setting `trusted_proxies`."""

    def __init__(self, trusted_proxies: Sequence[str]) -> None:
        self._trusted = TrustedProxies(trusted_proxies)
        # Bounded: clients choose what is in a header, and how long it is.
        self._remembered = lru_cache(maxsize=4096)(self._behind)

    def of(self, peer: str, forwarded_for: Sequence[str]) -> str:
        """The client's address: from the X-Forwarded-For headers if a trusted proxy sent them, else the peer's."""
        return self._trusted.client_of(peer, forwarded_for) if self._trusted else peer

    def reader(self, peer: str) -> Callable[[bytes], bytes] | None:
        """Takes the client's address from an X-Forwarded-For header of this peer. None: the peer isn't trusted."""
        return partial(self._forwarded, peer) if self._trusted.trusts(peer) else None

    def _forwarded(self, peer: str, forwarded_for: bytes) -> bytes:
        is_long = len(forwarded_for) > _MAX_REMEMBERED_BYTES
        return (self._behind if is_long else self._remembered)(peer, forwarded_for)

    def _behind(self, peer: str, forwarded_for: bytes) -> bytes:
        return self._trusted.client_of(peer, [forwarded_for.decode("latin-1")]).encode("ascii", "replace")
