"""Each worker's counters, in Redis for 15 s, so that control can show its own workers and those of other machines."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any, Final

import msgspec

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.values import WorkerId

__all__ = ["Stats"]

_LIFETIME_S: Final = 15
# Apps in the counters that every node reads. There may be a hundred thousand apps.
_MAX_APPS: Final = 100
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

    def write(self, w: str, counters: Mapping[str, Any], by_app: Mapping[str, Sequence[int]]) -> None:
        """Queues the counters, and those of each app, of which the first is the number of its connections. The outcome
        doesn't matter, because the next ones follow in 5 s."""
        process = WorkerId.parse(w).process_name
        listed = by_app
        if len(by_app) > _MAX_APPS:
            listed = dict(nlargest(_MAX_APPS, by_app.items(), key=lambda app: app[1][0]))
        for name, value in (
            (self._keys.stats_by_app(process), by_app),
            (self._keys.stats(process), {**counters, "by_app": listed}),
        ):
            self._link.call(b"SET", name, msgspec.json.encode((w, value)), b"EX", _LIFETIME_S)

    async def silent_s(self, w: str, dead_s: float) -> float:
        """For how long this worker, which doesn't answer or died within the last `dead_s`, may have sent its clients
        nothing: since it last wrote. If that was too long ago, it may have hung until it was killed. Raises LinkDown or
        hiredis.ReplyError."""
        left_ms = await self._link.ask(b"PTTL", self._keys.stats(WorkerId.parse(w).process_name))
        return _LIFETIME_S - left_ms / 1000 if left_ms >= 0 else dead_s + _MAX_HANG_S

    async def read(self, own: Iterable[str], others: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
        """Counters by W, of those of these processes that wrote lately. `by_app` has all apps of the `own`, and of each
        of the others the 100 apps with the most connections. Raises LinkDown or hiredis.ReplyError."""
        own = list(own)
        names = [self._keys.stats(process) for process in (*own, *others)]
        names += [self._keys.stats_by_app(process) for process in own]
        values = await self._link.ask(b"MGET", *names) if names else ()
        decoded = [None if value is None else msgspec.json.decode(value) for value in values]
        stats: dict[str, dict[str, Any]] = dict(filter(None, decoded[: len(names) - len(own)]))
        for w, by_app in filter(None, decoded[len(names) - len(own) :]):
            if w in stats:
                stats[w]["by_app"] = by_app
        return stats

    async def read_all(self, own: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
        """As `read`, of every worker in the beat table, and of the `own` that have left it. It costs Redis as much as
        there are workers in the cluster."""
        names = await self._link.ask(b"HKEYS", self._keys.beat)
        own = set(own)
        others = {WorkerId.parse(name.decode()).process_name for name in names} - own
        return await self.read(sorted(own), sorted(others))
