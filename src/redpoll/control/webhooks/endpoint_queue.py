"""The part of one endpoint's deliveries that is in memory, and what the schedule knows about the rest.

The store has all waiting deliveries. Up to a few hundred of them are loaded here, fewer if their bodies are large, so
that attempts can start without a read of the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from redpoll.control.webhooks.batches import Batches
from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.store.deliveries import Waiting

__all__ = ["MAX_READY", "ChangesDuringRead", "EndpointQueue", "Memory"]

# Ready deliveries in memory per endpoint; below the second number more are read from the store.
MAX_READY: Final = 512
_REFILL_BELOW: Final = 128
# Their bodies, because clients choose their size: of one endpoint, of one that fails and so has few attempts, of all,
# and of one while all have as much.
_MAX_BYTES: Final = 1024 * 1024
_MAX_BYTES_FAILING: Final = 256 * 1024
_MAX_BYTES_OF_ALL: Final = 64 * 1024 * 1024
_FEW_BYTES: Final = 64 * 1024
# After this many failures without a success.
_FAILING_AFTER: Final = 20


class Memory:
    """The bytes of the bodies that all queues together have loaded."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class ChangesDuringRead:
    """Deliveries that were added or removed while the store was being read. Its answer may be older than they are."""

    __slots__ = ("added", "removed")

    def __init__(self) -> None:
        self.added: list[Waiting] = []
        self.removed: set[int] = set()


class EndpointQueue:
    """One endpoint's deliveries in memory.

    `loaded` has, by number, the body's size of each delivery that is in `ready`, has a running attempt, or has a result
    that isn't written yet; the store still has them as waiting. `size` is the sum, `memory` that of all queues.
    `withdrawn` are those of them that the operator discarded. `more_in_store`: the store may have more due deliveries.
    `next_at`: when the next delivery that isn't due yet becomes due. `during_read` is set while the store is being
    read. `running` and `unwritten` count attempts, of several deliveries in one request one for each.
    """

    __slots__ = (
        "batches",
        "during_read",
        "endpoint_id",
        "failures",
        "loaded",
        "memory",
        "more_in_store",
        "next_at",
        "pause",
        "read_after",
        "ready",
        "running",
        "size",
        "unwritten",
        "withdrawn",
    )

    def __init__(self, endpoint_id: str, memory: Memory) -> None:
        self.endpoint_id = endpoint_id
        self.memory = memory
        self.ready = ReadyDeliveries()
        self.batches = Batches()
        self.loaded: dict[int, int] = {}
        self.size = 0
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

    @property
    def room(self) -> int:
        """The bytes of bodies that may be loaded now. The last delivery that is loaded may be larger."""
        most = _MAX_BYTES_FAILING if self.is_failing else _MAX_BYTES
        return (most if self.memory.size < _MAX_BYTES_OF_ALL else _FEW_BYTES) - self.size

    @property
    def is_failing(self) -> bool:
        return self.failures >= _FAILING_AFTER

    @property
    def leaves_some(self) -> bool:
        """The store has more, for which there is no room here."""
        return self.more_in_store and self.is_full

    @property
    def is_full(self) -> bool:
        return len(self.ready) >= MAX_READY or self.room <= 0

    @property
    def wants_more(self) -> bool:
        """The store may have more, and it is time to read them. Not one by one: each read is a transaction."""
        return self.more_in_store and len(self.ready) < _REFILL_BELOW and self.room > self.size

    def load(self, item: Waiting) -> None:
        """Makes a delivery ready, unless it is loaded already."""
        if item.number not in self.loaded:
            self.loaded[item.number] = len(item.body)
            self.size += len(item.body)
            self.memory.size += len(item.body)
            self.ready.add(item)

    def load_read(self, read: Sequence[Waiting], changes: ChangesDuringRead) -> None:
        """Loads what was read, and if that is all that the store has, what was added meanwhile, which is newer."""
        for item in read if self.more_in_store else [*read, *changes.added]:
            if self.is_full:
                self.more_in_store = True
                break
            if item.number not in changes.removed:
                self.load(item)

    def release(self, number: int) -> None:
        """Removes a delivery from memory. The store knows its state, or it needs no attempt."""
        size = self.loaded.pop(number, 0)
        self.size -= size
        self.memory.size -= size
        self.withdrawn.discard(number)
        if self.during_read is not None:
            self.during_read.removed.add(number)
