"""What the schedule has of one endpoint in memory: the deliveries that may go, and what it knows of the others."""

from __future__ import annotations

import asyncio

from redpoll.control.webhooks.ordering import Line
from redpoll.store.deliveries import Waiting

__all__ = ["EndpointQueue", "Meanwhile"]


class Meanwhile:
    """What a reading of the store may not know of."""

    __slots__ = ("come", "gone")

    def __init__(self) -> None:
        self.come: list[Waiting] = []
        self.gone: set[int] = set()


class EndpointQueue:
    """One endpoint's deliveries in memory.

    `held` are the numbers of all that stand in `line`, are under way, or whose result isn't written: the store has them
    as waiting still. `withdrawn` are those of them that the operator gave up. `in_store`: more may be due there.
    `next_at`: when the next one becomes due that isn't yet. `reading`: what came and went while the store is being
    read, whose answer may be older than that.
    """

    __slots__ = (
        "endpoint_id",
        "failures",
        "held",
        "in_store",
        "line",
        "look_from",
        "next_at",
        "pause",
        "reading",
        "running",
        "unwritten",
        "withdrawn",
    )

    def __init__(self, endpoint_id: str) -> None:
        self.endpoint_id = endpoint_id
        self.line = Line()
        self.held: set[int] = set()
        self.withdrawn: set[int] = set()
        self.reading: Meanwhile | None = None
        self.running = 0
        self.unwritten = 0
        self.in_store = True
        self.next_at: float | None = None
        # By the loop's clock.
        self.look_from = 0.0
        self.failures = 0
        self.pause: asyncio.TimerHandle | None = None

    def take_in(self, item: Waiting) -> None:
        if item.number not in self.held:
            self.held.add(item.number)
            self.line.add(item)

    def release(self, number: int) -> None:
        self.held.discard(number)
        self.withdrawn.discard(number)
        if self.reading is not None:
            self.reading.gone.add(number)
