"""The part of one endpoint's deliveries that is in memory, and what the schedule knows about the rest.

The store has all waiting deliveries. Up to a few hundred of them are loaded here, so that attempts can start without a
read of the store.
"""

from __future__ import annotations

import asyncio

from redpoll.control.webhooks.batches import Batches
from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.store.deliveries import Waiting

__all__ = ["ChangesDuringRead", "EndpointQueue"]


class ChangesDuringRead:
    """Deliveries that were added or removed while the store was being read. Its answer may be older than they are."""

    __slots__ = ("added", "removed")

    def __init__(self) -> None:
        self.added: list[Waiting] = []
        self.removed: set[int] = set()


class EndpointQueue:
    """One endpoint's deliveries in memory.

    `loaded` are the numbers of all deliveries that are in `ready`, have a running attempt, or have a result that isn't
    written yet; the store still has them as waiting. `withdrawn` are those of them that the operator discarded.
    `more_in_store`: the store may have more due deliveries. `next_at`: when the next delivery that isn't due yet
    becomes due. `during_read` is set while the store is being read. `running` and `unwritten` count attempts, of
    several deliveries in one request one for each.
    """

    __slots__ = (
        "batches",
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
        self.batches = Batches()
        self.loaded: set[int] = set()
        self.withdrawn: set[int] = set()
        self.during_read: ChangesDuringRead | None = None
        self.running = 0
        self.unwritten = 0
        self.more_in_store = True
        self.next_at: float | None = None
        # On the loop's clock: the store isn't read for this endpoint before.
        self.read_after = 0.0
        # Failed attempts since the last success.
        self.failures = 0
        # Set while a failing endpoint waits between two attempts.
        self.pause: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing waits, here or in the store: until something is added, there is nothing to look at."""
        return not self.loaded and not self.more_in_store and self.next_at is None and self.during_read is None

    def load(self, item: Waiting) -> None:
        """Makes a delivery ready, unless it is loaded already."""
        if item.number not in self.loaded:
            self.loaded.add(item.number)
            self.ready.add(item)

    def release(self, number: int) -> None:
        """Removes a delivery from memory. The store knows its state, or it needs no attempt."""
        self.loaded.discard(number)
        self.withdrawn.discard(number)
        if self.during_read is not None:
            self.during_read.removed.add(number)
