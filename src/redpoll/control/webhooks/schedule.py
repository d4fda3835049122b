"""Decides when each delivery is attempted, and how many attempts run at a time.

A new delivery is attempted at once. After a failure it is retried after the pauses of the setting
`webhook_retry_after_s`; after the last one it is a dead letter. The store has all waiting deliveries, so a kill loses
none: the next process repeats attempts that were running. Each endpoint has its own queue and bounds, so a slow or dead
receiver doesn't delay the others. A part of each endpoint's deliveries is in memory (endpoint_queue.py), the rest in
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.tracing.spans import Spans
from redpoll.control.webhooks.batches import MAX_EVENTS
from redpoll.control.webhooks.endpoint_queue import MAX_READY, ChangesDuringRead, EndpointQueue, Memory
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.control.webhooks.outcomes import INTERNAL_REASON, Attempt, Outcome
from redpoll.control.webhooks.posts import Posts
from redpoll.control.webhooks.results import Results, result_of
from redpoll.control.webhooks.sender import Sender
from redpoll.loop.ending import finish_tasks
from redpoll.protocol.apps import Key
from redpoll.store import due_deliveries
from redpoll.store.deliveries import Result, Waiting
from redpoll.store.leadership import Changes
from redpoll.store.sqlite import reason_of
from redpoll.store.webhooks import Endpoint

__all__ = ["Schedule"]

log = structlog.get_logger(__name__)

# Running attempts per endpoint.
_MAX_RUNNING: Final = 32
# Attempts per endpoint that are running or whose results are not in the store: the upper bound on repeats after a kill.
# With `batch`, a POST begins if fewer than MAX_EVENTS results are not in the store: fewer than twice as many repeats.
_MAX_UNWRITTEN: Final = 64
# An endpoint that is failing gets fewer attempts at a time and a pause between them: at most 200 attempts per second,
# about a tenth of a core. The first success ends this.
_MAX_RUNNING_FAILING: Final = 8
_FAILING_PAUSE_S: Final = 0.005
# The pause between two reads of the store for one endpoint, because its retries may become due one by one.
_READ_PAUSE_S: Final = 0.1
# No timer is longer, so that a change of the system clock is noticed in time.
_MAX_WAIT_S: Final = 1.0
# A difference this large between the system clock and the steady one means that the clock was set.
_CLOCK_JUMP_S: Final = 1.0


def _ignore(endpoint_id: str, size: int) -> None:
    pass


class Schedule:
    """Call `run()`, cancel it, then call `finish()`.

    `retry_after_s` are the pauses after failed attempts, in seconds. `signing_key(app_id)` returns the app's key.
    `spans`: None unless OpenTelemetry is on. `on_left(endpoint_id, size)`: a delivery with a body of this size
    no longer waits. `lease_s`: that of pulled deliveries, whose due times follow the clock too. `clock()` returns Unix
    seconds, `steady()` seconds of a clock that is never set, by which pauses are measured. `attempts` counts attempts
    by outcome, `by_app` the successful and the failed ones by app id, `failed_total` deliveries that became dead
    letters. `results` writes what came of them.
    """

    def __init__(
        self,
        store: Changes,
        endpoints: Endpoints,
        sender: Sender,
        retry_after_s: Sequence[float],
        signing_key: Callable[[str], Key | None],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
        on_left: Callable[[str, int], None] = _ignore,
        lease_s: float = 0.0,
        by_app: MutableMapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.attempts: Counter[str] = Counter()
        self._by_app = {} if by_app is None else by_app
        self.failed_total = 0
        self._store = store
        self._endpoints = endpoints
        self._posts = Posts(sender, signing_key, clock, spans)
        self._retry_after_s = tuple(retry_after_s)
        self._on_left = on_left
        self._lease_s = lease_s
        self._clock = clock
        self._steady = steady
        # The clock minus the steady one at their last comparison, and whether the store's times agree with it.
        self._clock_offset_s = clock() - steady()
        self._clock_known = False
        self._waiting_found = False
        self._loop = asyncio.get_running_loop()
        self._memory = Memory()
        self._queues: dict[str, EndpointQueue] = {
            endpoint.id: EndpointQueue(endpoint.id, self._memory) for endpoint in endpoints.every()
        }
        # Those that aren't idle, and those of them that changed since the last step: an endpoint costs nothing while
        # nothing is sent to it.
        self._busy: dict[EndpointQueue, None] = dict.fromkeys(self._queues.values())
        self._touched: dict[EndpointQueue, None] = {}
        self.results = Results(store, self._results_written)
        # The deliveries whose results are not written yet, by number: their queues, and the sizes of their bodies.
        self._unwritten: dict[str, tuple[EndpointQueue, int]] = {}
        self._writing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._finishing = False

    @property
    def running(self) -> int:
        """The number of running attempts."""
        return len(self._tasks)

    def add(self, written: Sequence[Waiting]) -> None:
        """New deliveries that were just written to the store. They start at once, or stay there if their queue is
        full."""
        touched: dict[str, EndpointQueue] = {}
        for item in written:
            queue = touched.get(item.endpoint_id) or self._queue_of(item.endpoint_id)
            touched[item.endpoint_id] = queue
            if queue.more_in_store or queue.is_full:
                queue.more_in_store = True
            elif queue.during_read is not None:
                # They come after the ones that are being read, which are older.
                queue.during_read.added.append(item)
            else:
                queue.load(item)
        for queue in touched.values():
            self._start_attempts(queue)
        self._touch(*touched.values())

    def endpoint_changed(self, endpoint_id: str) -> None:
        """The endpoint was enabled, disabled or changed, or deliveries of it were retried or discarded, perhaps by
        another node. What waits is read again."""
        queue = self._queue_of(endpoint_id)
        queue.more_in_store = True
        for item in queue.ready.clear():
            queue.release(item.number)
        self._touch(queue)

    def look_again(self, endpoint_id: str) -> None:
        """Another node may have made deliveries of this endpoint due."""
        queue = self._queue_of(endpoint_id)
        if not queue.loaded:
            queue.more_in_store = True
            self._touch(queue)

    def withdraw(self, endpoint_id: str, numbers: Collection[int]) -> None:
        """The operator discarded these deliveries: attempts that are not running don't start."""
        queue = self._queues.get(endpoint_id)
        if queue is not None:
            queue.withdrawn |= queue.loaded.keys() & set(numbers)
            if queue.during_read is not None:
                queue.during_read.removed.update(numbers)

    def forget(self, known: Callable[[str], object]) -> None:
        """Removes the queues of endpoints for which `known` is false."""
        for endpoint_id, queue in list(self._queues.items()):
            if not known(endpoint_id) and not queue.loaded:
                del self._queues[endpoint_id]
                self._busy.pop(queue, None)

    async def run(self) -> None:
        """Keeps the queues filled."""
        self._writing = self._loop.create_task(self.results.run(), name="webhook results")
        look_at_all = 0.0
        while True:
            only_touched = self._loop.time() < look_at_all
            try:
                wait_s = await self.step(only_touched)
            except Exception:
                # Our own bug must not end the schedule.
                log.exception("webhook schedule failed")
                wait_s = _MAX_WAIT_S
            due = self._loop.time() + wait_s
            look_at_all = min(look_at_all, due) if only_touched else due
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(look_at_all):
                    await self._wake.wait()

    def _touch(self, *queues: EndpointQueue) -> None:
        """The next step looks at these."""
        changed = dict.fromkeys(queues)
        self._busy |= changed
        self._touched |= changed
        self._wake.set()

    async def step(self, only_touched: bool = False) -> float:
        """Reads due deliveries into the queues that have room: of all, or of those that changed since the last step.
        Returns the seconds until the next step of all is due."""
        self._wake.clear()
        await self._follow_clock()
        if not self._waiting_found:
            self._waiting_found = True
            await self._find_waiting()
        wait_s = _MAX_WAIT_S
        queues = list(self._touched if only_touched else self._busy)
        self._touched.clear()
        for queue in queues:
            if queue.is_idle:
                self._busy.pop(queue, None)
            if not self._sends_to(queue):
                continue
            if queue.next_at is not None and self._now() >= queue.next_at:
                queue.more_in_store, queue.next_at = True, None
            wanted = queue.wants_more
            if wanted and self._loop.time() >= queue.read_after:
                try:
                    await self._refill(queue)
                except SQLAlchemyError as error:
                    log.error("webhook deliveries not read", reason=reason_of(error))
            elif wanted:
                wait_s = min(wait_s, queue.read_after - self._loop.time())
            queue.batches.due_at = None
            self._start_attempts(queue)
            if queue.batches.due_at is not None:
                wait_s = min(wait_s, queue.batches.due_at - self._steady())
            if queue.next_at is not None:
                wait_s = min(wait_s, queue.next_at - self._now())
        return max(wait_s, 0.0)

    async def _follow_clock(self) -> None:
        """If the system clock was set, now or while no process ran, moves the due times in the store accordingly."""
        steady_s, now_s = self._steady(), self._clock()
        before_s = steady_s + self._clock_offset_s
        if not self._clock_known or abs(now_s - before_s) >= _CLOCK_JUMP_S:
            try:
                async with self._store.change() as connection:
                    await due_deliveries.move_due_times(
                        connection,
                        before_s=before_s,
                        now_s=now_s,
                        pauses_s=self._retry_after_s,
                        lease_s=self._lease_s,
                    )
            except SQLAlchemyError as error:
                log.error("webhook due times not moved after a clock change", reason=reason_of(error))
                return
            # No await between the commit and here: the next result to be written must already use the new time.
            self.results.shift_retries(now_s - before_s)
            for queue in self._queues.values():
                queue.more_in_store, queue.next_at = True, None
            self._touch(*self._queues.values())
            if self._clock_known:
                log.warning("clock was set, webhook retries keep their pauses", by_s=round(now_s - before_s, 1))
            self._clock_known = True
        self._clock_offset_s = now_s - steady_s

    def _now(self) -> float:
        """Unix seconds by which deliveries are due: the system clock without changes that were not followed yet."""
        return self._steady() + self._clock_offset_s

    async def finish(self, within_s: float) -> None:
        """Starts no more attempts, gives running ones `within_s` seconds, and writes their results."""
        self._finishing = True
        for queue in self._queues.values():
            if queue.pause is not None:
                queue.pause.cancel()
        await finish_tasks(self._tasks, within_s)
        self.results.stop()
        if self._writing is not None:
            # Not cancelled with the task that waits: its results would be lost, and the next `finish` would raise.
            await asyncio.wait([self._writing])

    def _queue_of(self, endpoint_id: str) -> EndpointQueue:
        queue = self._queues.get(endpoint_id)
        if queue is None:
            queue = self._queues[endpoint_id] = EndpointQueue(endpoint_id, self._memory)
        return queue

    def _sends_to(self, queue: EndpointQueue) -> bool:
        """Not to an endpoint that is disabled, or whose deliveries are pulled (pulls.py)."""
        endpoint = self._endpoints.known(queue.endpoint_id)
        return endpoint is not None and endpoint.enabled and not endpoint.pulled

    async def _find_waiting(self) -> None:
        """At the start, one query finds the endpoints with waiting deliveries.

        The others need no `_refill`: there may be ten thousand endpoints.
        """
        queues = list(self._queues.values())
        for queue in queues:
            queue.more_in_store, queue.during_read = False, ChangesDuringRead()
        with_waiting = {queue.endpoint_id for queue in queues}
        try:
            async with self._store.reading() as connection:
                with_waiting = await due_deliveries.endpoints_with_waiting(connection)
        except SQLAlchemyError as error:
            log.error("webhook deliveries not read", reason=reason_of(error))
        finally:
            for queue in queues:
                changes, queue.during_read = queue.during_read or ChangesDuringRead(), None
                if queue.endpoint_id in with_waiting or not self._sends_to(queue):
                    queue.more_in_store = True
                elif not queue.more_in_store:
                    queue.load_read((), changes)
                    self._start_attempts(queue)

    async def _refill(self, queue: EndpointQueue) -> None:
        now_s = self._now()
        # Those that are loaded still wait in the store.
        limit, loaded = MAX_READY + len(queue.loaded), set(queue.loaded)
        # Reset before the read: what is written during it comes through `add`, or sets these again.
        queue.more_in_store, queue.next_at, queue.during_read = False, None, (changes := ChangesDuringRead())
        queue.read_after = self._loop.time() + _READ_PAUSE_S
        try:
            async with self._store.reading() as connection:
                due = await due_deliveries.due(connection, queue.endpoint_id, now_s, limit, queue.room, loaded)
                next_at = await due_deliveries.next_due(connection, queue.endpoint_id, now_s)
        except BaseException:
            queue.more_in_store = True
            raise
        finally:
            queue.during_read = None
        queue.more_in_store = queue.more_in_store or due.more
        if next_at is not None and (queue.next_at is None or next_at < queue.next_at):
            queue.next_at = next_at
        if not self._sends_to(queue):
            queue.more_in_store = True
            return
        queue.load_read(due.waiting, changes)

    # -- attempts

    def _start_attempts(self, queue: EndpointQueue) -> None:
        """Starts as many attempts as the bounds allow."""
        if queue.pause is not None or self._finishing:
            return
        if (endpoint := self._endpoints.known(queue.endpoint_id)) is None or not self._sends_to(queue):
            return
        if endpoint.batch:
            self._start_batch(queue, endpoint)
            return
        max_running = _MAX_RUNNING_FAILING if queue.is_failing else _MAX_RUNNING
        while queue.running < max_running and queue.running + queue.unwritten < _MAX_UNWRITTEN:
            item = queue.ready.take()
            if item is None:
                break
            if item.number in queue.withdrawn:
                queue.ready.done(item)
                queue.release(item.number)
                continue
            self._start(queue, endpoint, (item,))
            if queue.pause is not None:
                break

    def _start_batch(self, queue: EndpointQueue, endpoint: Endpoint) -> None:
        """Starts the next POST with several events, if it is time and the one before has ended."""
        if queue.running or queue.unwritten >= MAX_EVENTS:
            return
        if queue.withdrawn:
            for item in queue.ready.remove(queue.withdrawn):
                queue.release(item.number)
        items = queue.batches.take(queue.ready, len(self._retry_after_s), self._steady(), leaves=queue.leaves_some)
        if items:
            self._start(queue, endpoint, items)

    def _start(self, queue: EndpointQueue, endpoint: Endpoint, items: Sequence[Waiting]) -> None:
        queue.running += len(items)
        task = self._loop.create_task(self._attempt(queue, endpoint, items))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if queue.is_failing:
            queue.pause = self._loop.call_later(_FAILING_PAUSE_S, self._end_pause, queue)

    def _end_pause(self, queue: EndpointQueue) -> None:
        queue.pause = None
        self._start_attempts(queue)

    async def _attempt(self, queue: EndpointQueue, endpoint: Endpoint, items: Sequence[Waiting]) -> None:
        try:
            # If this is cancelled, its outcome is unknown, and the next process repeats it.
            begun_s, attempt = await self._posts.post(endpoint, items)
        except Exception:
            # Our own bug. Without a result, the delivery would wait until another process begins.
            log.exception("webhook attempt failed")
            begun_s, attempt = self._clock(), Attempt(False, None, INTERNAL_REASON, 0, b"", Outcome.INTERNAL)
        finally:
            queue.running -= len(items)
            queue.ready.done(*items)
        self._record(queue, endpoint, items, begun_s, attempt)
        self._start_attempts(queue)
        if queue.wants_more:
            self._touch(queue)

    def _record(
        self, queue: EndpointQueue, endpoint: Endpoint, items: Sequence[Waiting], begun_s: float, attempt: Attempt
    ) -> None:
        self.attempts[attempt.outcome] += len(items)
        delivered, failed = self._by_app.get(endpoint.app_id, (0, 0))
        number_ok = len(items) if attempt.ok else 0
        self._by_app[endpoint.app_id] = (delivered + number_ok, failed + len(items) - number_ok)
        queue.failures = 0 if attempt.ok else queue.failures + 1
        self._note_failing(endpoint.id, begun_s, attempt.ok)
        # One time for all: what failed together is due together.
        now_s, due_from_s = self._clock(), self._now()
        reason = attempt.reason if len(items) == 1 else f"{attempt.reason}; one of {len(items)} events in the request"
        for item in items:
            result = result_of(item, attempt, reason, begun_s, now_s, due_from_s, self._retry_after_s)
            self.failed_total += result.state == "failed"
            self._unwritten[item.id] = queue, len(item.body)
            queue.unwritten += 1
            self.results.put(result)

    def _note_failing(self, endpoint_id: str, begun_s: float, ok: bool) -> None:
        endpoint = self._endpoints.known(endpoint_id)
        if endpoint is None:
            return
        since = None if ok else endpoint.failing_since or begun_s
        if since != endpoint.failing_since:
            self._endpoints.set_failing_since(endpoint_id, since)
            self.results.put_failing(endpoint_id, since)

    def _results_written(self, results: Sequence[Result]) -> None:
        """These results are in the store now: retries can be read from there again, and more attempts may start."""
        touched: dict[EndpointQueue, None] = {}
        for result in results:
            queue, size = self._unwritten.pop(result.id)
            queue.unwritten -= 1
            queue.release(result.number)
            touched[queue] = None
            if result.state != "waiting":
                self._on_left(queue.endpoint_id, size)
            elif queue.next_at is None or result.at < queue.next_at:
                queue.next_at = result.at
        for queue in touched:
            self._start_attempts(queue)
        self._touch(*touched)
