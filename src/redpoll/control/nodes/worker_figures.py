"""The figures that workers write to Redis, by worker name.

A worker that has lost Redis can't write that there: its figures expire. So its supervisor says that it is down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Final

import hiredis

from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.cluster.nodes import NodesView
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.values import WorkerId
from redpoll.cluster.stats import Stats

__all__ = ["WorkerFigures"]

_WITHIN_S: Final = 2.0
_DOWN: Final = {"redis_connection_state": ConnectionState.DOWN.value}

Figures = Mapping[str, Mapping[str, Any]]


class WorkerFigures:
    def __init__(self, stats: Stats, view: NodesView) -> None:
        self._stats = stats
        self._view = view
        # The last names of this node's living workers, by `k`.
        self._names: dict[int, str] = {}

    async def all(self, ended: Iterable[str] = ()) -> Figures:
        """Those of all nodes' workers. Of other nodes' they have the 100 apps with the most connections only. Of this
        node's processes that have `ended`, those that they wrote last are included."""
        return await _read(self._stats.read_all({*self._own(), *ended}, within_s=_WITHIN_S))

    async def own(self) -> Figures:
        """Those of this node's workers: each node's /metrics is scraped; sums must count a worker once. The others'
        aren't read, which would cost Redis the square of the workers for each scrape of all nodes.

        Workers without figures whose connection is down have that state, and nothing else."""
        run = self._view.run
        written = await _read(self._stats.read(self._own(), within_s=_WITHIN_S))
        alive = self._view.alive
        names = self._names | {WorkerId.parse(name).process: name for name in written}
        self._names = {k: names.get(k, str(WorkerId(run, k, 0))) for k in alive}
        down = {self._names[k] for k in self._view.down if k in self._names}
        return {**dict.fromkeys(down, _DOWN), **written}

    def _own(self) -> list[str]:
        return [f"{self._view.run}.{k}" for k in self._view.alive]


async def _read(reading: Awaitable[Figures]) -> Figures:
    try:
        return await reading
    except (LinkDown, hiredis.ReplyError, TimeoutError):
        return {}
