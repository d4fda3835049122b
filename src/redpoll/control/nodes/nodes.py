"""The list of nodes, for `redpoll node list` and the dashboard: what the supervisor learned, with their connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from redpoll.cluster.nodes import Fitness, NodesView

__all__ = ["NodeList", "NodeRow"]


_FITNESS: Final = {
    Fitness.FIT: "fit",
    Fitness.WITHOUT_STORE: "no record store",
    Fitness.UNFIT: "unfit",
}


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `up_since` is a Unix time. `workers` counts living processes, `connections` open sockets, as of up to
    5 s ago. `fitness` is how much of the leader's work it can do: `fit`, `no record store` or `unfit`
    (cluster.nodes.Fitness)."""

    name: str
    version: str
    up_since: float
    workers: int
    connections: int
    leader: bool
    draining: bool
    alive: bool
    fitness: str


class NodeList:
    """`read_workers()` returns the workers' counters by worker name."""

    def __init__(
        self, view: NodesView, read_workers: Callable[[], Awaitable[Mapping[str, Mapping[str, float]]]]
    ) -> None:
        self.view = view
        self._read_workers = read_workers

    async def rows(self) -> list[NodeRow]:
        """All nodes, also dead ones whose workers are not removed yet, by name and start."""
        connections: dict[str, float] = {}
        for w, counters in (await self._read_workers()).items():
            run = w.partition(".")[0]
            connections[run] = connections.get(run, 0) + counters.get("connections", 0)
        rows = [
            NodeRow(
                name=node.name,
                version=node.version,
                up_since=node.started,
                workers=len(node.workers) if node.alive else 0,
                connections=int(connections.get(node.run, 0)) if node.alive else 0,
                leader=node.run == self.view.leader,
                draining=not node.serves,
                alive=node.alive,
                fitness=_FITNESS[node.fitness],
            )
            for node in self.view.nodes
        ]
        return sorted(rows, key=lambda row: (row.name, row.up_since))
