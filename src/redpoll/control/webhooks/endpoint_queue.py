"""What the schedule has of one endpoint in memory: the deliveries that may go, and what it knows of the others."""

from __future__ import annotations

import asyncio

from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.store.deliveries import Waiting

__all__ = ["ChangesDuringRead", "EndpointQueue"]


class ChangesDuringRead:
    """What a reading of the store may not know of."""

    __slots__ = ("added", "removed")

    def __init__(self) -> None:
        self.added: list[Waiting] = []
        self.removed: set[int] = set()


class EndpointQueue:
    """One endpoint's deliveries in memory.

    `held` are the numbers of all that stand in `line`, are under way, or whose result isn't written: the store has them
    as waiting still. `withdrawn` are those of them that the operator gave up. `more_in_store`: more may be due there.
    `next_at`: when the next one becomes due that isn't yet. `reading`: what came and went while the store is being
    read, whose answer may be older than that.
    """

    __slots__ = (
        "during_read",
        "endpoint_id",
        "failures",
        "loaded",
        "more_in_store",
        "next_at",
        "pause",
        "read_after",
        "ready",
        "running",
        "unwritten",
        "withdrawn",
    )

    def __init__(self, endpoint_id: str) -> None:
        self.endpoint_id = endpoint_id
        self.ready = ReadyDeliveries()
        self.loaded: set[int] = set()
        self.withdrawn: set[int] = set()
        self.during_read: ChangesDuringRead | None = None
        self.running = 0
        self.unwritten = 0
        self.more_in_store = True
        self.next_at: float | None = None
        # By the loop's clock.
        self.read_after = 0.0
        self.failures = 0
        self.pause: asyncio.TimerHandle | None = None

    def load(self, item: Waiting) -> None:
        if item.number not in self.loaded:
            self.loaded.add(item.number)
            self.ready.add(item)

    def release(self, number: int) -> None:
        self.loaded.discard(number)
        self.withdrawn.discard(number)
        if self.during_read is not None:
            self.during_read.removed.add(number)
