"""Each worker's counters, kept in Redis for a moment, so that /metrics can show workers of any machine."""

from typing import Any, Final

import msgspec

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link

__all__ = ["Stats"]

_LIVES_S: Final = 15


class Stats:
    """Workers write each 5 s; what isn't renewed is gone after 15."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def write(self, w: str, counters: dict[str, Any]) -> None:
        """Queued, not confirmed: the next one is on its way anyhow."""
        self._link.call(b"SET", self._keys.stats(w), msgspec.json.encode(counters), b"EX", _LIVES_S)

    async def read_all(self) -> dict[str, dict[str, Any]]:
        """Counters by W, of every worker that beats and wrote lately. Raises LinkDown or
        hiredis.ReplyError."""
        names = [name.decode() for name in await self._link.ask(b"HKEYS", self._keys.beat)]
        if not names:
            return {}
        found = await self._link.ask(b"MGET", *(self._keys.stats(w) for w in names))
        return {
            w: msgspec.json.decode(counters) for w, counters in zip(names, found, strict=True) if counters is not None
        }
