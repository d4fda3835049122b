"""Evens out the connections of nodes and workers, for `redpoll balance`: decides how many each worker closes.

A node above the mean by more than 5 % closes what it has above the mean, from its fullest workers. With one node, the
same holds for its workers. The load balancer sends the clients to the nodes with the fewest connections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from redpoll.cluster.nodes import NodesView
from redpoll.cluster.questions import Count, Move
from redpoll.cluster.survey import Survey

__all__ = ["balance", "plan"]

_TOLERANCE: Final = 1.05


def plan(connections: Mapping[str, int], nodes: frozenset[str]) -> dict[str, int]:
    """How many connections each worker closes. `connections` is by worker name; `nodes` are the runs that take part,
    also those without workers."""
    workers = {run: {w: n for w, n in connections.items() if w.partition(".")[0] == run} for run in nodes}
    totals = {run: sum(counts.values()) for run, counts in workers.items()}
    if not totals:
        return {}
    mean = sum(totals.values()) / len(totals)
    targets: dict[str, int] = {}
    for run, counts in workers.items():
        if totals[run] > _TOLERANCE * mean:
            targets |= _from_fullest(counts, totals[run] - math.floor(mean))
        elif len(nodes) == 1 and counts:
            mean_of_workers = totals[run] / len(counts)
            targets |= {
                w: n - math.floor(mean_of_workers) for w, n in counts.items() if n > _TOLERANCE * mean_of_workers
            }
    return targets


def _from_fullest(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """Takes `total` from these workers, so that what the fullest have left is even."""
    names = sorted(counts, key=lambda w: counts[w], reverse=True)
    sizes = [counts[w] for w in names]
    # The first `fullest` workers are lowered to the same level.
    for fullest in range(1, len(names) + 1):
        level, rest = divmod(sum(sizes[:fullest]) - total, fullest)
        following = sizes[fullest] if fullest < len(names) else -1
        if level >= following or fullest == len(names):
            lowered = {w: counts[w] - level - (at < rest) for at, w in enumerate(names[:fullest])}
            return {w: n for w, n in lowered.items() if n > 0}
    return {}


async def balance(survey: Survey, nodes: NodesView, within_s: float) -> dict[str, Any]:
    """Asks the workers to close connections evenly over `within_s` seconds, or longer if the nodes that have room can't
    accept so many. Returns `{moved, within_s}`. Raises Unavailable; a part may be closing then."""
    taking_part = nodes.serving()
    connections = await survey.ask(Count())
    targets = plan(connections, frozenset(taking_part))
    moved = sum(targets.values())
    if moved:
        giving = {w.partition(".")[0] for w in targets}
        accepted_per_s = sum(n for run, n in taking_part.items() if run not in giving) or sum(taking_part.values())
        within_s = max(within_s, moved / max(1, accepted_per_s))
        await survey.ask(Move(targets, within_s))
    return {"moved": moved, "within_s": round(within_s, 1)}
