"""Nodes as a supervisor describes them to its control plane, and nodes that ask each other."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redpoll.cluster.nodes import KnownNode, NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import NodeSurvey

RUNS = {"one": "aaaaaaaaaaaa", "two": "bbbbbbbbbbbb"}


def known(run: str, name: str = "a", **changed: Any) -> KnownNode:
    said = {"version": "1", "store": "s", "started": 0.0, "workers": [], "greatest": 0, "control": True, "beat": 0}
    return KnownNode(run=run, name=name, **{"alive": True, **said, **changed})


class AskingNode:
    """One of RUNS: what its control plane has to ask the others."""

    def __init__(self, redis_url: str, name: str) -> None:
        self.link = Link(redis_url)
        self.view = NodesView(RUNS[name])
        self.survey = NodeSurvey(self.link, Keys(), self.view, answer_s=60)
        self.link.on_push, self.link.on_up = self.survey.received, self.survey.link_up

    async def finish(self) -> None:
        await self.survey.finish()
        await self.link.close()


async def introduce(nodes: Sequence[AskingNode]) -> None:
    """Returns when each can ask the others."""
    for node in nodes:
        node.view.update([known(run, name) for name, run in RUNS.items()], None)
        node.link.start()
    look = nodes[0].link
    await look.wait_up()
    while (await look.ask(b"PUBSUB", b"NUMSUB", Keys().controls))[1] < len(nodes):
        await asyncio.sleep(0.005)
