"""Each worker's counters, in Redis for 15 s, so that control can show its own workers and those of other machines."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any, Final

import msgspec

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.values import WorkerId
from redpoll.loop.slices import walk

__all__ = ["MAX_HANG_S", "Stats"]

_LIFETIME_S: Final = 15
# Apps in the counters that every node reads. There may be a hundred thousand apps.
_MAX_APPS: Final = 100
# Those of all apps are written in parts of this many apps, because a reader decodes them in slices.
_APPS_OF_PART: Final = 100
# A worker that hangs is killed after 30 s (cluster/membership/README.md "Dead workers").
MAX_HANG_S: Final = 35
_decode_parts: Final = msgspec.json.Decoder(tuple[str, list[msgspec.Raw]]).decode
_decode_part: Final = msgspec.json.Decoder(dict[str, list[int]]).decode


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
        items = iter(by_app.items())
        parts = list(iter(lambda: dict(islice(items, _APPS_OF_PART)), {}))
        for name, value in (
            (self._keys.stats_by_app(process), parts),
            (self._keys.stats(process), {**counters, "by_app": listed}),
        ):
            self._link.call(b"SET", name, msgspec.json.encode((w, value)), b"EX", _LIFETIME_S)

    async def silent_s(self, w: str) -> float:
        """For how long this worker, which doesn't answer or is dead, may have sent its clients nothing: since it last
        wrote. If that was too long ago, it is infinite: the worker may have hung, at most for MAX_HANG_S until it was
        killed. Raises LinkDown or hiredis.ReplyError."""
        left_ms = await self._link.ask(b"PTTL", self._keys.stats(WorkerId.parse(w).process_name))
        return _LIFETIME_S - left_ms / 1000 if left_ms >= 0 else math.inf

    async def read(
        self, own: Iterable[str], others: Iterable[str] = (), *, within_s: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """Counters by W, of those of these processes that wrote lately. `by_app` has all apps of the `own`, and of each
        of the others the 100 apps with the most connections. Raises LinkDown or hiredis.ReplyError, and TimeoutError if
        Redis doesn't answer within `within_s`."""
        own = list(own)
        names = [self._keys.stats(process) for process in (*own, *others)]
        names += [self._keys.stats_by_app(process) for process in own]
        async with asyncio.timeout(within_s):
            values = await self._link.ask(b"MGET", *names) if names else ()
        stats: dict[str, dict[str, Any]] = {}

        def add(value: bytes) -> None:
            w, counters = msgspec.json.decode(value)
            stats[w] = counters

        await walk(filter(None, values[: len(names) - len(own)]), add)
        for value in filter(None, values[len(names) - len(own) :]):
            w, parts = _decode_parts(value)
            if w in stats:
                stats[w]["by_app"] = by_app = dict[str, list[int]]()
                await walk(map(_decode_part, parts), by_app.update)
        return stats

    async def read_all(self, own: Iterable[str] = (), *, within_s: float | None = None) -> dict[str, dict[str, Any]]:
        """As `read`, of every worker in the beat table, and of the `own` that have left it. It costs Redis as much as
        there are workers in the cluster."""
        async with asyncio.timeout(within_s):
            names = await self._link.ask(b"HKEYS", self._keys.beat)
        own = set(own)
        others = {WorkerId.parse(name.decode()).process_name for name in names} - own
        return await self.read(sorted(own), sorted(others), within_s=within_s)
