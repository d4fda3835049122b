"""Each worker's counters, in Redis for 15 s, so that control's /metrics can show all workers of all machines."""

from typing import Any, Final

import msgspec

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Stats"]

_LIFETIME_S: Final = 15


class Stats:
    """Workers write every 5 s. Counters that are not renewed expire after 15 s."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def write(self, w: str, counters: dict[str, Any]) -> None:
        """Queues the counters. The outcome doesn't matter, because the next ones follow in 5 s."""
        self._link.call(b"SET", self._keys.stats(w), msgspec.json.encode(counters), b"EX", _LIFETIME_S)

    async def read_all(self) -> dict[str, dict[str, Any]]:
        """Counters by W, of every worker in the beat table that wrote lately. Raises LinkDown or hiredis.ReplyError."""
        names = [name.decode() for name in await self._link.ask(b"HKEYS", self._keys.beat)]
        if not names:
            return {}
        values = await self._link.ask(b"MGET", *(self._keys.stats(w) for w in names))
        return {
            w: msgspec.json.decode(counters) for w, counters in zip(names, values, strict=True) if counters is not None
        }
