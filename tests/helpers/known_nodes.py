"""Nodes as a supervisor describes them to its control plane."""

from typing import Any

from redpoll.cluster.nodes import KnownNode


def known(run: str, name: str = "a", **changed: Any) -> KnownNode:
    said = {"version": "1", "store": "s", "started": 0.0, "workers": [], "greatest": 0, "control": True, "beat": 0}
    return KnownNode(run=run, name=name, **{"alive": True, **said, **changed})
