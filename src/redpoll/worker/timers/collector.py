"""When the garbage collector runs in a worker, so that it never stops the loop for long.

Connections, sessions and their mappings are not tracked by the collector at all (ext/README.md "Ownership"). Of the
rest, young objects are collected as usual, a thousand at a time. Collections of the other generations are not
automatic, because they walk again what was walked before. Instead, `Collector` runs a full one per minute while there
is little to walk; when there is more, it makes all present objects permanent (gc.freeze), and the next one walks only
later ones.
Objects without cycles are still freed at once, frozen or not. The price: a cycle that becomes garbage after it was
frozen is never freed.
"""

from __future__ import annotations

import asyncio
import gc

__all__ = ["Collector"]

_EVERY_S = 60.0
# Objects that are not in the processor's caches take up to 0.6 µs each: 100,000 of them took 59 ms. With a limit of
# 20,000 a collection held the loop for up to 20 ms (bench/load/stalls.py, subscription_count turned on).
MAX_WALKED_OBJECTS = 10_000
# About so many objects are walked at once; this takes up to 1 ms.
_YOUNG = 1_000
_NEVER = 2**30
# Collections of the young since the last full one. After more of them there may be that many objects, and counting them
# would take its time, too.
_MAX_COUNTED = 10


class Collector:
    """`start()` when the worker has loaded what it keeps, `stop()` when the process is about to end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        gc.collect()
        # Modules, settings and code stay until the end.
        gc.freeze()
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        self._timer = self._loop.call_later(_EVERY_S, self._collect)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            # The policy stays: the interpreter's last collections would walk what is frozen.

    def _collect(self) -> None:
        self.collect()
        self._timer = self._loop.call_later(_EVERY_S, self._collect)

    @staticmethod
    def collect() -> bool:
        """Collect all generations, or freeze them if that would take too long: then False."""
        _, middle, _ = gc.get_count()
        if middle > _MAX_COUNTED or _count_objects() > MAX_WALKED_OBJECTS:
            gc.freeze()
            return False
        gc.collect()
        return True


def _count_objects() -> int:
    # The older generations; the youngest is small.
    return sum(len(gc.get_objects(generation=generation)) for generation in (1, 2))
