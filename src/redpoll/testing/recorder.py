"""What was published to a server under test, and waiting for it.

Every wait has a deadline, and says at its end what did come.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ANYTHING", "WAIT_S", "Published", "Recorder"]

# The deadline of a wait, unless the test gives another.
WAIT_S: Final = 5.0
_MAX_RECORDED: Final = 100_000
_MAX_SHOWN: Final = 20


class _Anything:
    def __repr__(self) -> str:
        return "anything"


# In place of data: any will do.
ANYTHING: Final = _Anything()


@dataclass(frozen=True)
class Published:
    """One event on one channel. `data` is the string that subscribers get; `json` is what it stands for.

    `excluded` is the socket id that didn't get it. `correlation_id` is the publisher's. `sender` is the socket id of
    the client whose client event it is, and `user_id` that client's on a presence channel; both None over HTTP.
    """

    name: str
    channel: str
    data: str
    excluded: str | None = None
    correlation_id: str | None = None
    sender: str | None = None
    user_id: str | None = None

    @property
    def json(self) -> Any:
        """`data` decoded, or as it is if it isn't JSON."""
        try:
            return json.loads(self.data)
        except ValueError:
            return self.data

    def __str__(self) -> str:
        data = self.data if len(self.data) <= 80 else f"{self.data[:80]}…"
        return f"{self.name!r} on {self.channel!r} with {data}"


class Recorder:
    """Events in the order in which the server took them; the first 100,000 since the last `reset`. Any thread may call
    its methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._events: list[Published] = []
        self._lost = 0
        self._waits: list[tuple[Callable[[], bool], Future[None]]] = []

    def add(self, event: Published) -> None:
        with self._lock:
            if len(self._events) < _MAX_RECORDED:
                self._events.append(event)
            else:
                self._lost += 1
        self.changed()

    def changed(self) -> None:
        """Something that is waited for may have come."""
        with self._lock:
            for has_come, future in self._waits:
                if not future.done() and has_come() and future.set_running_or_notify_cancel():
                    future.set_result(None)

    def reset(self) -> None:
        with self._lock:
            self._events.clear()
            self._lost = 0

    def all(self) -> list[Published]:
        with self._lock:
            return list(self._events)

    def matching(self, name: str | None, channel: str | None, data: object = ANYTHING) -> list[Published]:
        return [
            event
            for event in self.all()
            if name in (None, event.name)
            and channel in (None, event.channel)
            and (data is ANYTHING or data == event.json or data == event.data)
        ]

    def shown(self) -> str:
        """What came, for a failure."""
        events = self.all()
        if not events:
            return "nothing was published"
        lines = [f"\n  {event}" for event in events[-_MAX_SHOWN:]]
        earlier = f"\n  … and {len(events) - _MAX_SHOWN} before these" if len(events) > _MAX_SHOWN else ""
        lost = f"\n  … and {self._lost} that were not recorded" if self._lost else ""
        return f"published {'was' if len(events) == 1 else 'were'}:{''.join(lines)}{earlier}{lost}"

    # -- waiting

    def wait(self, has_come: Callable[[], bool], timeout_s: float) -> bool:
        """Blocks until `has_come()`. False: not within `timeout_s`."""
        future = self._begin(has_come)
        try:
            future.result(timeout_s)
        except TimeoutError:
            return False
        finally:
            self._end(future)
        return True

    async def wait_for(self, has_come: Callable[[], bool], timeout_s: float) -> bool:
        """As `wait`, in an event loop."""
        future = self._begin(has_come)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(future)
        except TimeoutError:
            return False
        finally:
            self._end(future)
        return True

    def _begin(self, has_come: Callable[[], bool]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._waits.append((has_come, future))
        self.changed()
        return future

    def _end(self, future: Future[None]) -> None:
        with self._lock:
            self._waits = [wait for wait in self._waits if wait[1] is not future]
