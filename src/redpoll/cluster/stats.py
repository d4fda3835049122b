"""Each worker's counters, in Redis for 15 s, so that control can show its own workers and those of other machines."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.values import WorkerId

__all__ = ["Stats"]

_LIFETIME_S: Final = 15
# A worker that hangs is killed after 30 s (cluster/membership/README.md "Dead workers").
_MAX_HANG_S: Final = 35


class Stats:
    """Workers write every 5 s. Counters that are not renewed expire after 15 s.

    The counters belong to the worker's process, `RUN.K`, which keeps them when it takes another W. So control can name
    those of its own node without reading the names of all workers.
    """

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def write(self, w: str, counters: dict[str, Any]) -> None:
        """Queues the counters. The outcome doesn't matter, because the next ones follow in 5 s."""
        value = msgspec.json.encode((w, counters))
        self._link.call(b"SET", self._keys.stats(WorkerId.parse(w).process_name), value, b"EX", _LIFETIME_S)

    async def silent_s(self, w: str, dead_s: float) -> float:
        """For how long this worker, which doesn't answer or died within the last `dead_s`, may have sent its clients
        nothing: since it last wrote. If that was too long ago, it may have hung until it was killed. Raises LinkDown or
        hiredis.ReplyError."""
        left_ms = await self._link.ask(b"PTTL", self._keys.stats(WorkerId.parse(w).process_name))
        return _LIFETIME_S - left_ms / 1000 if left_ms >= 0 else dead_s + _MAX_HANG_S

    async def read(self, processes: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Counters by W, of those of these processes that wrote lately. Raises LinkDown or hiredis.ReplyError."""
        names = [self._keys.stats(process) for process in processes]
        values = await self._link.ask(b"MGET", *names) if names else ()
        stats: dict[str, dict[str, Any]] = dict(msgspec.json.decode(value) for value in values if value is not None)
        return stats

    async def read_all(self) -> dict[str, dict[str, Any]]:
        """Those of every worker in the beat table. It costs Redis as much as there are workers in the cluster."""
        names = await self._link.ask(b"HKEYS", self._keys.beat)
        return await self.read(sorted({WorkerId.parse(name.decode()).process_name for name in names}))
