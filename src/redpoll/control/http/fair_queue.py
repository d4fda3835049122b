"""A queue that takes turns: what one client address adds doesn't wait for all that another one has added before."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from redpoll.config.proxies import network_of

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client address (IPv6: /64). `pop` returns one item of each address in turn; those of one address come in
    the order in which they were added. Both operations take constant time."""

    __slots__ = ("_items", "_size", "_turns")

    def __init__(self) -> None:
        # An address is in `_turns` exactly once while it has items.
        self._items: dict[str, deque[T]] = {}
        self._turns: deque[str] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, address: str, item: T) -> None:
        network = network_of(address)
        self._size += 1
        items = self._items.get(network)
        if items is None:
            self._items[network] = deque((item,))
            self._turns.append(network)
        else:
            items.append(item)

    def pop(self) -> T:
        """The next item. Raises IndexError when the queue is empty."""
        network = self._turns.popleft()
        items = self._items[network]
        self._size -= 1
        item = items.popleft()
        if items:
            self._turns.append(network)
        else:
            del self._items[network]
        return item
