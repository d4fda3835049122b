"""The figures that workers write to Redis, by worker name; none while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final

import hiredis

from redpoll.cluster.nodes import NodesView
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.stats import Stats

__all__ = ["WorkerFigures"]

_WITHIN_S: Final = 2.0

Figures = Mapping[str, Mapping[str, float]]


class WorkerFigures:
    def __init__(self, stats: Stats, view: NodesView) -> None:
        self._stats = stats
        self._view = view

    async def all(self) -> Figures:
        return await _read(self._stats.read_all())

    async def own(self) -> Figures:
        """Those of this node's workers: each node's /metrics is scraped; sums must count a worker once. The others'
        aren't read, which would cost Redis the square of the workers for each scrape of all nodes."""
        return await _read(self._stats.read([f"{self._view.run}.{k}" for k in self._view.alive]))


async def _read(reading: Awaitable[Figures]) -> Figures:
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await reading
    except (LinkDown, hiredis.ReplyError, TimeoutError):
        return {}
