"""When each delivery is tried: at once, then behind the setting's times; and how many at a time.

The store says what waits, so a kill loses nothing: what was under way is tried again. Every endpoint has a queue of its
own, with its own bound, so a slow or dead one delays no other (failures.md row 35). In memory are a few hundred
deliveries of each; the rest lies in the store until there is room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.webhooks.endpoint_queue import ChangesDuringRead, EndpointQueue
from redpoll.control.webhooks.outcomes import Attempt
from redpoll.control.webhooks.payloads import headers
from redpoll.control.webhooks.results import Results
from redpoll.control.webhooks.sender import Target
from redpoll.protocol.apps import Key
from redpoll.store import deliveries as delivery_rows
from redpoll.store.deliveries import AttemptRow, Result, Waiting
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["AttemptSender", "EndpointIndex", "Schedule"]

log = structlog.get_logger(__name__)

# Attempts at one endpoint at a time; and how many may have been begun whose results aren't in the store, which is what
# a kill has told twice.
_MAX_RUNNING: Final = 32
_MAX_UNWRITTEN: Final = 64
# Of one that has failed so often without a success between: attempts at a time, and the pause between their
# beginnings. It gets no more than 200 attempts a second then, about a tenth of a core; the first success lifts it.
_FAILING_AFTER: Final = 20
_MAX_RUNNING_FAILING: Final = 8
_FAILING_PAUSE_S: Final = 0.005
# Deliveries of one endpoint in memory; below the second number more are read.
_MAX_READY: Final = 512
_REFILL_BELOW: Final = 128
# Between two looks into the store for one endpoint, whose retries may become due one by one.
_READ_PAUSE_S: Final = 0.1
# The clock may be set, so no timer is longer. It was, when it is off by so much.
_MAX_WAIT_S: Final = 1.0
_CLOCK_JUMP_S: Final = 1.0


class AttemptSender(Protocol):
    """What is needed of sender.Sender."""

    async def attempt(self, target: Target, body: bytes, headers: dict[str, str]) -> Attempt: ...


class EndpointIndex(Protocol):
    """What is needed of endpoints.Endpoints."""

    def known(self, endpoint_id: str) -> Endpoint | None: ...

    def every(self) -> list[Endpoint]: ...

    def set_failing_since(self, endpoint_id: str, since: float | None) -> None: ...


class Schedule:
    """`run()` until it is cancelled, then `finish()`. `retry_after_s` are the pauses behind failed attempts; a delivery
    that fails once more than there are is a dead letter. `signing_key` gives an app's; `clock` tells Unix seconds, and
    `steady` seconds that nobody sets: a pause is as long as it is, whatever the clock does.

    `attempts` counts by outcome; `failed_total` deliveries that became dead letters.
    """

    def __init__(
        self,
        store: Store,
        endpoints: EndpointIndex,
        sender: AttemptSender,
        retry_after_s: Sequence[float],
        signing_key: Callable[[str], Key | None],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempts: Counter[str] = Counter()
        # By app id: attempts that delivered, and that failed.
        self.by_app: dict[str, tuple[int, int]] = {}
        self.failed_total = 0
        self._store = store
        self._endpoints = endpoints
        self._sender = sender
        self._retry_after_s = tuple(retry_after_s)
        self._signing_key = signing_key
        self._clock = clock
        self._steady = steady
        # The clock less the steady one, as of when they were compared; and whether the store has been told.
        self._clock_offset_s = clock() - steady()
        self._clock_known = False
        self._waiting_found = False
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, EndpointQueue] = {each.id: EndpointQueue(each.id) for each in endpoints.every()}
        self._results = Results(store, self._results_written)
        # The queues of results that are not written yet, by the delivery's number.
        self._unwritten: dict[int, EndpointQueue] = {}
        self._writing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._finishing = False

    @property
    def running(self) -> int:
        """Attempts that are under way."""
        return len(self._tasks)

    def add(self, written: Sequence[Waiting]) -> None:
        """Deliveries that the store has just taken: tried at once, or left there where their queue is full."""
        touched: dict[str, EndpointQueue] = {}
        for item in written:
            queue = touched.get(item.endpoint_id) or self._queue_of(item.endpoint_id)
            touched[item.endpoint_id] = queue
            if queue.more_in_store or len(queue.ready) >= _MAX_READY:
                queue.more_in_store = True
            elif queue.during_read is not None:
                # Behind what is being read, which is older.
                queue.during_read.added.append(item)
            else:
                queue.load(item)
        for queue in touched.values():
            self._start_attempts(queue)
        self._wake.set()

    def endpoint_changed(self, endpoint_id: str) -> None:
        """Something changed there: it was enabled or disabled, or its dead letters are tried anew."""
        queue = self._queue_of(endpoint_id)
        queue.more_in_store = True
        if not self._is_enabled(queue):
            for item in queue.ready.clear():
                queue.release(item.number)
        self._wake.set()

    def withdraw(self, endpoint_id: str, numbers: Collection[int]) -> None:
        """The operator gave these up: what isn't under way is not begun."""
        queue = self._queues.get(endpoint_id)
        if queue is not None:
            queue.withdrawn |= queue.loaded.intersection(numbers)
            if queue.during_read is not None:
                queue.during_read.removed.update(numbers)

    def forget(self, known: Callable[[str], object]) -> None:
        """Lets go of the queues of endpoints that are no longer known."""
        for endpoint_id in [each for each in self._queues if not known(each) and not self._queues[each].loaded]:
            del self._queues[endpoint_id]

    async def run(self) -> None:
        """Keeps the queues filled."""
        self._writing = self._loop.create_task(self._results.run(), name="webhook results")
        while True:
            try:
                wait_s = await self.step()
            except Exception:
                # A fault of ours, which must not stop what can go on.
                log.exception("schedule of webhooks failed")
                wait_s = _MAX_WAIT_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def step(self) -> float:
        """Reads what is due into the queues that have room; returns after how many seconds to look again."""
        self._wake.clear()
        await self._follow_clock()
        if not self._waiting_found:
            self._waiting_found = True
            await self._find_waiting()
        wait_s = _MAX_WAIT_S
        for queue in list(self._queues.values()):
            if not self._is_enabled(queue):
                continue
            if queue.next_at is not None and self._now() >= queue.next_at:
                queue.more_in_store, queue.next_at = True, None
            wanted = queue.more_in_store and len(queue.ready) < _REFILL_BELOW
            if wanted and self._loop.time() >= queue.read_after:
                try:
                    await self._refill(queue)
                except SQLAlchemyError as error:
                    log.error("webhooks can't be read from the store", reason=reason_of(error))
            elif wanted:
                wait_s = min(wait_s, queue.read_after - self._loop.time())
            self._start_attempts(queue)
            if queue.next_at is not None:
                wait_s = min(wait_s, queue.next_at - self._now())
        return max(wait_s, 0.0)

    async def _follow_clock(self) -> None:
        """When the clock was set, while this process runs or before: what is due by it in the store is set too."""
        steady_s, now_s = self._steady(), self._clock()
        before_s = steady_s + self._clock_offset_s
        if not self._clock_known or abs(now_s - before_s) >= _CLOCK_JUMP_S:
            try:
                async with self._store.change() as connection:
                    longest_s = max(self._retry_after_s, default=0.0)
                    await delivery_rows.keep_pauses(connection, before_s=before_s, now_s=now_s, longest_s=longest_s)
            except SQLAlchemyError as error:
                log.error("webhooks can't be told of the clock", reason=reason_of(error))
                return
            # Nothing is waited for from the commit on: whoever writes next goes by the new time.
            self._results.shift_retries(now_s - before_s)
            for queue in self._queues.values():
                queue.more_in_store, queue.next_at = True, None
            if self._clock_known:
                log.warning("the clock was set; retries of webhooks keep their pauses", by_s=round(now_s - before_s, 1))
            self._clock_known = True
        self._clock_offset_s = now_s - steady_s

    def _now(self) -> float:
        """The time by which deliveries are due: the clock's, as far as it has been followed."""
        return self._steady() + self._clock_offset_s

    async def finish(self, within_s: float) -> None:
        """Begins nothing more, gives what is under way so long, and writes what became of it."""
        self._finishing = True
        for queue in self._queues.values():
            if queue.pause is not None:
                queue.pause.cancel()
        under_way = set(self._tasks)
        if under_way:
            await asyncio.wait(under_way, timeout=within_s)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._results.stop()
        if self._writing is not None:
            await self._writing

    def _queue_of(self, endpoint_id: str) -> EndpointQueue:
        queue = self._queues.get(endpoint_id)
        if queue is None:
            queue = self._queues[endpoint_id] = EndpointQueue(endpoint_id)
        return queue

    def _is_enabled(self, queue: EndpointQueue) -> bool:
        endpoint = self._endpoints.known(queue.endpoint_id)
        return endpoint is not None and endpoint.enabled

    async def _find_waiting(self) -> None:
        """Spares a `_refill` to the queues for which nothing waits in the store: there may be ten thousand of them."""
        queues = list(self._queues.values())
        for queue in queues:
            queue.more_in_store, queue.during_read = False, ChangesDuringRead()
        endpoints_with_waiting = {queue.endpoint_id for queue in queues}
        try:
            async with self._store.reading() as connection:
                endpoints_with_waiting = await delivery_rows.endpoints_with_waiting(connection)
        except SQLAlchemyError as error:
            log.error("webhooks can't be read from the store", reason=reason_of(error))
        finally:
            for queue in queues:
                changes, queue.during_read = queue.during_read or ChangesDuringRead(), None
                if queue.endpoint_id in endpoints_with_waiting or not self._is_enabled(queue):
                    queue.more_in_store = True
                elif not queue.more_in_store:
                    for item in changes.added:
                        if item.number not in changes.removed:
                            queue.load(item)
                    self._start_attempts(queue)

    async def _refill(self, queue: EndpointQueue) -> None:
        now_s = self._now()
        limit = _MAX_READY + len(queue.loaded)
        # Before the question, not behind it: what is written meanwhile comes by `add`, or sets it again.
        queue.more_in_store, queue.next_at, queue.during_read = False, None, (changes := ChangesDuringRead())
        queue.read_after = self._loop.time() + _READ_PAUSE_S
        try:
            async with self._store.reading() as connection:
                found = await delivery_rows.due(connection, queue.endpoint_id, now_s, limit)
                next_at = await delivery_rows.next_due(connection, queue.endpoint_id, now_s)
        except BaseException:
            queue.more_in_store = True
            raise
        finally:
            queue.during_read = None
        queue.more_in_store = queue.more_in_store or len(found) == limit
        if next_at is not None and (queue.next_at is None or next_at < queue.next_at):
            queue.next_at = next_at
        if not self._is_enabled(queue):
            queue.more_in_store = True
            return
        # Where there is more in the store, what has come since is behind that.
        for item in found if queue.more_in_store else found + changes.added:
            if item.number not in changes.removed:
                queue.load(item)

    # -- attempts

    def _start_attempts(self, queue: EndpointQueue) -> None:
        """Begins what may begin."""
        if queue.pause is not None or self._finishing:
            return
        endpoint = self._endpoints.known(queue.endpoint_id)
        if endpoint is None or not endpoint.enabled:
            return
        failing = queue.failures >= _FAILING_AFTER
        at_once = _MAX_RUNNING_FAILING if failing else _MAX_RUNNING
        while queue.running < at_once and queue.running + queue.unwritten < _MAX_UNWRITTEN:
            item = queue.ready.take()
            if item is None:
                break
            if item.number in queue.withdrawn:
                queue.ready.done(item)
                queue.release(item.number)
                continue
            queue.running += 1
            task = self._loop.create_task(self._attempt(queue, endpoint, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if failing:
                queue.pause = self._loop.call_later(_FAILING_PAUSE_S, self._end_pause, queue)
                break

    def _end_pause(self, queue: EndpointQueue) -> None:
        queue.pause = None
        self._start_attempts(queue)

    async def _attempt(self, queue: EndpointQueue, endpoint: Endpoint, item: Waiting) -> None:
        begun_s = self._clock()
        told = headers(
            endpoint.format,
            item.event,
            item.body,
            delivery_id=item.id,
            attempt=item.attempts + 1,
            now_s=begun_s,
            secret=endpoint.secret,
            previous_secret=endpoint.previous_secret if begun_s < endpoint.previous_until else "",
            key=self._signing_key(endpoint.app_id),
        )
        try:
            # Cancelled, nobody knows what became of it: the next process tries it again.
            attempt = await self._sender.attempt(Target(endpoint.url, endpoint.pin), item.body, told)
        finally:
            queue.running -= 1
            queue.ready.done(item)
        self._record(queue, endpoint, item, begun_s, attempt)
        self._start_attempts(queue)
        if queue.more_in_store and len(queue.ready) < _REFILL_BELOW:
            self._wake.set()

    def _record(
        self, queue: EndpointQueue, endpoint: Endpoint, item: Waiting, begun_s: float, attempt: Attempt
    ) -> None:
        self.attempts[attempt.outcome] += 1
        delivered, failed = self.by_app.get(endpoint.app_id, (0, 0))
        self.by_app[endpoint.app_id] = (delivered + attempt.ok, failed + (not attempt.ok))
        now_s = self._clock()
        tried = item.attempts + 1 - item.cycle_from
        if attempt.ok:
            state, at = "delivered", now_s
        elif tried <= len(self._retry_after_s):
            state, at = "waiting", self._now() + self._retry_after_s[tried - 1]
        else:
            state, at = "failed", now_s
            self.failed_total += 1
        queue.failures = 0 if attempt.ok else queue.failures + 1
        self._note_failing(endpoint.id, begun_s, attempt.ok)
        row = AttemptRow(
            item.attempts + 1,
            begun_s,
            attempt.status,
            attempt.duration_ms,
            attempt.outcome,
            attempt.reason,
            attempt.response,
        )
        self._unwritten[item.number] = queue
        queue.unwritten += 1
        self._results.put(Result(item.number, state, at, row))

    def _note_failing(self, endpoint_id: str, begun_s: float, ok: bool) -> None:
        endpoint = self._endpoints.known(endpoint_id)
        if endpoint is None:
            return
        since = None if ok else endpoint.failing_since or begun_s
        if since != endpoint.failing_since:
            self._endpoints.set_failing_since(endpoint_id, since)
            self._results.put_failing(endpoint_id, since)

    def _results_written(self, results: Sequence[Result]) -> None:
        """The store has them: what is to be retried is there again, and more may be begun."""
        touched = set()
        for result in results:
            queue = self._unwritten.pop(result.number)
            queue.unwritten -= 1
            queue.release(result.number)
            touched.add(queue)
            if result.state == "waiting" and (queue.next_at is None or result.at < queue.next_at):
                queue.next_at = result.at
        for queue in touched:
            self._start_attempts(queue)
        self._wake.set()
