"""When the garbage collector runs in a worker, so that it never stops the loop for long.

Connections, sessions and their mappings are not tracked by the collector at all (ext/README.md "Ownership"). Of the
rest, young objects are collected as usual. Automatic full collections are off, because each walks everything that is
tracked. Instead, `Collector` runs one per minute while there is little to walk; when there is more, it makes
all present objects permanent (gc.freeze), and the next one walks only later ones. Objects without cycles are still
freed at once, frozen or not. The price: a cycle that becomes garbage after it was frozen is never freed.
"""

from __future__ import annotations

import asyncio
import gc

__all__ = ["Collector"]

_EVERY_S = 60.0
# A full collection takes some 10 ms per 100,000 objects.
MAX_WALKED_OBJECTS = 100_000
# A collection of the young walks about so many objects, one of the middle generation about four times that. An object
# is walked twice at most whatever these are; they say how many at once. 5,000 and ten times that took 18 ms.
_YOUNG, _MIDDLE = 1_000, 3
_NEVER = 2**30
# Collections of the middle generation since the last full one. With more, counting the objects takes too long, too.
_MAX_COUNTED = 50


class Collector:
    """`start()` when the worker has loaded what it keeps; `stop()` restores the interpreter's policy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        gc.collect()
        # Modules, settings and code stay until the end.
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        self._timer = self._loop.call_later(_EVERY_S, self._collect)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()

    def _collect(self) -> None:
        self.collect()
        self._timer = self._loop.call_later(_EVERY_S, self._collect)

    @staticmethod
    def collect() -> bool:
        """Collect all generations, or freeze them if that would take too long: then False."""
        if gc.get_count()[2] > _MAX_COUNTED or len(gc.get_objects(generation=2)) > MAX_WALKED_OBJECTS:
            gc.freeze()
            return False
        gc.collect()
        return True
