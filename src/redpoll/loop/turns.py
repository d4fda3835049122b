"""Turns by app at something that all apps share, such as a lock.

In one common queue, an app that sends a thousand requests keeps all others waiting. With turns, the requests of an app
wait for each other first, and only one of them waits among those of other apps.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["TooManyWaiting", "Turns"]


class TooManyWaiting(Exception):
    """As many requests of the app wait as may. The HTTP API answers 429 `rate_limited`."""


class Turns:
    """Take the common lock inside `async with turns.of(app_id)`.

    At most `max_waiting` requests of an app wait for its turn, first in, first out. `len()` is the number of apps that
    have requests here.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._apps: dict[str, _Turn] = {}

    def __len__(self) -> int:
        return len(self._apps)

    @asynccontextmanager
    async def of(self, app_id: str) -> AsyncIterator[None]:
        """The app's turn; its next request has to wait until the block ends. Raises TooManyWaiting at once."""
        turn = self._apps.get(app_id)
        if turn is None:
            turn = self._apps[app_id] = _Turn()
        elif turn.requests > self._max_waiting:
            raise TooManyWaiting(f"{self._max_waiting} such requests of this app wait already, the most that may")
        turn.requests += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.requests -= 1
            if not turn.requests:
                del self._apps[app_id]


class _Turn:
    """Of one app: `requests` counts the one whose turn it is and those that wait."""

    __slots__ = ("lock", "requests")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.requests = 0
