"""Writes what is queued for clients, once in each pass of the loop in which something was queued."""

import asyncio
from collections.abc import Callable

from redpoll._fanout import Flusher
from redpoll._sockets import Poller

__all__ = ["Flushing"]

# A traced event counts as sent after this many loop passes, though other events still wait.
_MAX_PASSES_TO_SEND = 100


class Flushing:
    """A worker's `flusher`, on its loop. `max_unsent_bytes` is as in the settings."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_unsent_bytes: int) -> None:
        self._loop = loop
        self._poller = Poller(loop)
        self.flusher = Flusher(self._schedule, max_unsent_bytes, poller=self._poller)

    def _schedule(self) -> None:
        self._loop.call_soon(self.flusher.flush)

    def when_sent(self, then: Callable[[], None], passes: int = _MAX_PASSES_TO_SEND) -> None:
        """Calls `then` after the flush that is scheduled, or if that doesn't write all, after a later one."""
        self._loop.call_soon(self._if_sent, then, passes)

    def _if_sent(self, then: Callable[[], None], passes: int) -> None:
        if self.flusher.waiting and passes:
            self.when_sent(then, passes - 1)
        else:
            then()

    def close(self) -> None:
        """Nothing is written from now on."""
        self._poller.close()
