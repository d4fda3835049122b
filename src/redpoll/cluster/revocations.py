"""The hashes of tokens that were revoked lately, in Redis, for control planes that can't reach the record store.

Keys are part of the app records, so the directory has them (directory.py). Tokens are in the record store only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["Revocations"]

_KEEP: Final = 10_000
_KEEP_S: Final = 86_400


class Revocations:
    """Methods raise LinkDown or hiredis.ReplyError."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._key = keys.revoked

    async def add(self, revoked: Mapping[str, int]) -> None:
        """Adds hashes with the record store's version at which they were revoked, or a later one. The newest 10,000
        stay, for a day after the last one."""
        pairs = [part for token_hash, version in revoked.items() for part in (version, token_hash)]
        await self._link.ask_all(
            [
                (b"ZADD", self._key, *pairs),
                (b"ZREMRANGEBYRANK", self._key, 0, -_KEEP - 1),
                (b"EXPIRE", self._key, _KEEP_S),
            ]
        )

    async def since(self, version: int) -> list[str]:
        """The hashes that were revoked after this version of the record store."""
        hashes = await self._link.ask(b"ZRANGEBYSCORE", self._key, f"({version}", b"+inf")
        return [token_hash.decode() for token_hash in hashes]
