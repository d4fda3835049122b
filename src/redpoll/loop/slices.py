"""Work over many channels, paced: a slice of a few ms in each pass of the event loop, clients in between.

A worker may hold hundreds of thousands of channels. Anything that has to be done for all of them goes through a queue
or a cursor of this module, so that no pass of the loop takes longer than a slice and one step.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import monotonic
from typing import Final, Generic, TypeVar

__all__ = ["SLICE_S", "Cursor", "Queue", "Slices", "walk"]

# In a storm several kinds of work have a slice of the same pass: sockets 4 ms; the fan-out 4; accepting, lost sockets,
# calls, replies and each walk 2. Together they stay below 20 ms.
SLICE_S: Final = 0.002
_ITEMS_PER_LOOK: Final = 20

T = TypeVar("T")


class Queue(Generic[T]):
    """Each item once, first in first out. All operations take constant time; a dict's first key does not."""

    __slots__ = ("_items", "_order")

    def __init__(self) -> None:
        self._items: set[T] = set()
        # May also have items that were discarded since.
        self._order: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def add(self, item: T) -> None:
        if item not in self._items:
            self._items.add(item)
            self._order.append(item)

    def discard(self, item: T) -> None:
        self._items.discard(item)
        if not self._items:
            self._order.clear()

    def pop(self) -> T:
        """The first item. Raises IndexError when the queue is empty."""
        while True:
            item = self._order.popleft()
            if item in self._items:
                self.discard(item)
                return item

    def clear(self) -> None:
        self._items.clear()
        self._order.clear()


class Cursor(Generic[T]):
    """Goes through `items`, part by part. They must bear changes meanwhile."""

    __slots__ = ("_left", "done")

    def __init__(self, items: Iterable[T]) -> None:
        self._left: Iterator[T] = iter(items)
        self.done = False

    def next(self, count: int) -> list[T]:
        """The next items, at most `count`. Fewer than that: the cursor is done."""
        part = list(islice(self._left, count))
        self.done = len(part) < count
        return part


class Slices:
    """Calls `step()` again and again, for at most SLICE_S in each pass of the loop, until it returns False.

    `start()` begins or continues; calling it again has no effect while steps are due. A step that raises doesn't stop
    the ones after it. `after()` is called at the end of each slice.
    """

    def __init__(self, step: Callable[[], bool], after: Callable[[], None] | None = None) -> None:
        self.clock = monotonic
        self.step = step
        self._after = after
        self._scheduled = False

    def start(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.run)

    def run(self) -> None:
        """One slice of the steps; `start` has the loop call it."""
        self._scheduled = False
        step, clock = self.step, self.clock
        until = clock() + SLICE_S
        more = True
        try:
            while (more := step()) and clock() < until:
                pass
        finally:
            if self._after is not None:
                self._after()
            if more:
                self.start()


async def walk(items: Iterable[T], work: Callable[[T], None]) -> None:
    """Calls `work` with each item, a slice of them in each pass of the loop. `items` must bear changes meanwhile."""
    left = iter(items)
    while True:
        until = monotonic() + SLICE_S
        while True:
            part = list(islice(left, _ITEMS_PER_LOOK))
            for item in part:
                work(item)
            if len(part) < _ITEMS_PER_LOOK:
                return
            if monotonic() > until:
                break
        await asyncio.sleep(0)
