"""Celery: publishes a task's state and progress, at a bounded rate.

@app.task(bind=True)
def export(self, user_id):
    with progress(self, f"private-exports-{user_id}", publisher) as report:
        for number, row in enumerate(rows):
            report(number, len(rows))
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Protocol, Self

from redpoll_client.calls import Call
from redpoll_client.errors import RateLimited, RedpollError
from redpoll_client.publisher import Publisher

__all__ = ["progress"]

_log = logging.getLogger("redpoll_client")
# The pause after a publish that failed, at least, and as a multiple of the time that it took: a server that is away
# slows the steps of a task down by at most 5 %.
_PAUSE_S = 5.0
_PAUSE_FACTOR = 20


class Task(Protocol):
    """What is used of a bound Celery task: `request.id` and `name`."""

    # Celery's `request` can't be set.
    @property
    def name(self) -> str: ...

    @property
    def request(self) -> Any: ...


class progress:
    """Publishes events named `task` on `channel`: `{"task", "name", "state"}`.

    The states are Celery's words: `STARTED`, `PROGRESS`, `RETRY`, `IGNORED`, `REJECTED`, `SUCCESS`, `FAILURE`.
    `PROGRESS` also has `done` and `total`, and what the caller adds. The reason of a failure isn't published.

    Enter it in a bound task, and call it with each step: at most `per_second` steps are published, the last one always.
    A publish that fails never fails the task: it is logged, and the next steps aren't published for 20 times as long as
    it took, at least 5 s, or for as long as the server asks.
    """

    def __init__(self, task: Task, channel: str, publisher: Publisher, *, per_second: float = 4) -> None:
        if not per_second > 0:
            raise ValueError("per_second must be positive")
        self._task = task
        self._channel = channel
        self._publisher = publisher
        self._interval_s = 1 / per_second
        self._next_at = 0.0
        self._unpublished: Call | None = None

    def __enter__(self) -> Self:
        self._publish(self._prepared({"state": "STARTED"}))
        return self

    def __call__(self, done: float, total: float | None = None, **more: Any) -> None:
        """Reports a step: `done` of `total`. Raises ValueError and TypeError for what can't be published."""
        # Also what isn't published must be publishable, so that an error doesn't depend on the rate.
        step = self._prepared({"state": "PROGRESS", "done": done, "total": total, **more})
        if time.monotonic() < self._next_at:
            self._unpublished = step
        else:
            self._publish(step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unpublished is not None:
            self._publish(self._unpublished)
        states = {"Retry": "RETRY", "Ignore": "IGNORED", "Reject": "REJECTED"}
        state = "SUCCESS" if kind is None else states.get(kind.__name__, "FAILURE")
        self._publish(self._prepared({"state": state}))

    def _prepared(self, fields: dict[str, Any]) -> Call:
        data = {"task": self._task.request.id, "name": self._task.name, **fields}
        return self._publisher.prepare(self._channel, "task", data)

    def _publish(self, event: Call) -> None:
        self._unpublished = None
        began_at = time.monotonic()
        self._next_at = began_at + self._interval_s
        try:
            self._publisher.send(event)
        except RedpollError as error:
            now = time.monotonic()
            wait_s = max(_PAUSE_S, _PAUSE_FACTOR * (now - began_at))
            if isinstance(error, RateLimited) and error.retry_after:
                wait_s = error.retry_after
            self._next_at = now + wait_s
            _log.warning("the progress of task %s isn't published: %s", self._task.request.id, error)
