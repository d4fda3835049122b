"""Which deliveries of an endpoint with `batch` go into the next POST, and when it may begin.

Each event stays a delivery of its own, with its own attempts. Only the POST is common, and so is its outcome: a
receiver that refuses one event refuses all that came with it. So that no event becomes a dead letter because of
another, the last attempt of a delivery is made alone; so that a refused event delays few others, a delivery that has
failed goes with at most nine others, which have failed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redpoll.control.webhooks.ordering import ReadyDeliveries
from redpoll.control.webhooks.payloads import has_events
from redpoll.store.deliveries import Waiting

__all__ = ["MAX_EVENTS", "Batches"]

# Deliveries in one POST: those that are attempted for the first time, and those that have failed.
MAX_EVENTS: Final = 100
_MAX_FAILED: Final = 10
# The sum of their bodies; a single delivery may be larger.
_MAX_BYTES: Final = 262_144
# Between the beginnings of two POSTs with new events.
_EVERY_S: Final = 1.0


class Batches:
    """The POSTs of one endpoint, of which at most one runs at a time.

    A POST with new events begins at once if the last one began a second ago or had no room for all of them, or if the
    next one is full, or all that memory has room for; otherwise when the second is over, at `due_at` (None if nothing
    waits for that). Deliveries that have failed are sent when they are due, in turn with new ones. Times are seconds of
    a steady clock.
    """

    __slots__ = ("_new_from", "_was_new", "due_at")

    def __init__(self) -> None:
        self.due_at: float | None = None
        self._new_from = 0.0
        # The last POST had new events.
        self._was_new = False

    def take(self, ready: ReadyDeliveries, retries: int, now: float, *, leaves: bool = False) -> list[Waiting]:
        """Removes the deliveries of the next POST from `ready`; none if it isn't time yet, or if there are none.

        They are in the order in which they were stored, which in each channel is that of the transitions. `retries`:
        the number of attempts after the first. `leaves`: more wait, for which `ready` has no room.
        """
        self.due_at = None
        in_order = ready.in_order()
        new = [item for item in in_order if not item.attempts]
        failed = [item for item in in_order if item.attempts]
        batch = _fitting(new, MAX_EVENTS, retries)
        leaves_some = leaves or len(batch) < len(new)
        if batch and now < self._new_from and not (leaves_some or _is_full(batch, retries)):
            self.due_at = self._new_from
            batch = []
        if failed and (self._was_new or not batch):
            self._was_new = False
            batch = _fitting(failed, _MAX_FAILED, retries)
        elif batch:
            self._was_new = True
            self._new_from = now if leaves_some else now + _EVERY_S
        if batch:
            ready.take_these(batch)
        return batch


def _fitting(ready: Sequence[Waiting], most: int, retries: int) -> list[Waiting]:
    """The first of them that one POST takes, at least one."""
    batch: list[Waiting] = []
    size = 0
    for item in ready:
        size += len(item.body)
        is_alone = _is_alone(item, retries)
        if batch and (len(batch) == most or size > _MAX_BYTES or is_alone):
            break
        batch.append(item)
        if is_alone:
            break
    return batch


def _is_full(batch: Sequence[Waiting], retries: int) -> bool:
    """There is room for no other new event."""
    size = sum(len(item.body) for item in batch)
    return len(batch) == MAX_EVENTS or size >= _MAX_BYTES or _is_alone(batch[0], retries)


def _is_alone(item: Waiting, retries: int) -> bool:
    """The delivery becomes a dead letter if this attempt fails, or is in the format of one event."""
    return item.attempts - item.cycle_from >= retries or not has_events(item.body)
