"""When each delivery is tried: at once, then behind the setting's times; and how many at a time.

The store says what waits, so a kill loses nothing: what was under way is tried again. Every endpoint has a lane of its
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

from redpoll.control.webhooks.endpoint_queue import EndpointQueue, Meanwhile
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

__all__ = ["AtEndpoints", "Schedule", "Sends"]

log = structlog.get_logger(__name__)

# Attempts at one endpoint at a time; and how many may have been begun whose results aren't in the store, which is what
# a kill has told twice.
_AT_ONCE: Final = 32
_MOST_UNWRITTEN: Final = 64
# Of one that has failed so often without a success between: attempts at a time, and the pause between their
# beginnings. It gets no more than 200 attempts a second then, about a tenth of a core; the first success lifts it.
_FAILURES: Final = 20
_AT_ONCE_FAILING: Final = 8
_APART_S: Final = 0.005
# Deliveries of one endpoint in memory; below the second number more are read.
_MOST_READY: Final = 512
_REFILL_BELOW: Final = 128
# Between two looks into the store for one endpoint, whose retries may become due one by one.
_LOOKS_APART_S: Final = 0.1
# The clock may be set, so no timer is longer. It was, when it is off by so much.
_LONGEST_WAIT_S: Final = 1.0
_CLOCK_SET_S: Final = 1.0


class Sends(Protocol):
    """What is needed of sender.Sender."""

    async def attempt(self, target: Target, body: bytes, headers: dict[str, str]) -> Attempt: ...


class AtEndpoints(Protocol):
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
        endpoints: AtEndpoints,
        sender: Sends,
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
        self._apart_s = clock() - steady()
        self._clock_known = False
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[str, EndpointQueue] = {each.id: EndpointQueue(each.id) for each in endpoints.every()}
        self._results = Results(store, self._written)
        # The lanes of results that are not written yet, by the delivery's number.
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
        """Deliveries that the store has just taken: tried at once, or left there where their lane is full."""
        touched: dict[str, EndpointQueue] = {}
        for item in written:
            lane = touched.get(item.endpoint_id) or self._lane(item.endpoint_id)
            touched[item.endpoint_id] = lane
            if lane.in_store or len(lane.line) >= _MOST_READY:
                lane.in_store = True
            elif lane.reading is not None:
                # Behind what is being read, which is older.
                lane.reading.come.append(item)
            else:
                lane.take_in(item)
        for lane in touched.values():
            self._start(lane)
        self._wake.set()

    def look_at(self, endpoint_id: str) -> None:
        """Something changed there: it was enabled or disabled, or its dead letters are tried anew."""
        lane = self._lane(endpoint_id)
        lane.in_store = True
        if not self._is_on(lane):
            for item in lane.line.clear():
                lane.release(item.number)
        self._wake.set()

    def withdraw(self, endpoint_id: str, numbers: Collection[int]) -> None:
        """The operator gave these up: what isn't under way is not begun."""
        lane = self._lanes.get(endpoint_id)
        if lane is not None:
            lane.withdrawn |= lane.held.intersection(numbers)
            if lane.reading is not None:
                lane.reading.gone.update(numbers)

    def forget(self, known: Callable[[str], object]) -> None:
        """Lets go of the lanes of endpoints that are no longer known."""
        for endpoint_id in [each for each in self._lanes if not known(each) and not self._lanes[each].held]:
            del self._lanes[endpoint_id]

    async def run(self) -> None:
        """Keeps the lanes filled."""
        self._writing = self._loop.create_task(self._results.run(), name="webhook results")
        while True:
            try:
                wait_s = await self.look()
            except Exception:
                # A fault of ours, which must not stop what can go on.
                log.exception("schedule of webhooks failed")
                wait_s = _LONGEST_WAIT_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> float:
        """Reads what is due into the lanes that have room; returns after how many seconds to look again."""
        self._wake.clear()
        await self._follow_clock()
        if not self._begun:
            self._begun = True
            await self._begin()
        wait_s = _LONGEST_WAIT_S
        for lane in list(self._lanes.values()):
            if not self._is_on(lane):
                continue
            if lane.next_at is not None and self._now() >= lane.next_at:
                lane.in_store, lane.next_at = True, None
            wanted = lane.in_store and len(lane.line) < _REFILL_BELOW
            if wanted and self._loop.time() >= lane.look_from:
                try:
                    await self._fill(lane)
                except SQLAlchemyError as error:
                    log.error("webhooks can't be read from the store", reason=reason_of(error))
            elif wanted:
                wait_s = min(wait_s, lane.look_from - self._loop.time())
            self._start(lane)
            if lane.next_at is not None:
                wait_s = min(wait_s, lane.next_at - self._now())
        return max(wait_s, 0.0)

    async def _follow_clock(self) -> None:
        """When the clock was set, while this process runs or before: what is due by it in the store is set too."""
        steady_s, now_s = self._steady(), self._clock()
        before_s = steady_s + self._apart_s
        if not self._clock_known or abs(now_s - before_s) >= _CLOCK_SET_S:
            try:
                async with self._store.change() as connection:
                    longest_s = max(self._retry_after_s, default=0.0)
                    await delivery_rows.keep_pauses(connection, before_s=before_s, now_s=now_s, longest_s=longest_s)
            except SQLAlchemyError as error:
                log.error("webhooks can't be told of the clock", reason=reason_of(error))
                return
            # Nothing is waited for from the commit on: whoever writes next goes by the new time.
            self._results.move(now_s - before_s)
            for lane in self._lanes.values():
                lane.in_store, lane.next_at = True, None
            if self._clock_known:
                log.warning("the clock was set; retries of webhooks keep their pauses", by_s=round(now_s - before_s, 1))
            self._clock_known = True
        self._apart_s = now_s - steady_s

    def _now(self) -> float:
        """The time by which deliveries are due: the clock's, as far as it has been followed."""
        return self._steady() + self._apart_s

    async def finish(self, within_s: float) -> None:
        """Begins nothing more, gives what is under way so long, and writes what became of it."""
        self._finishing = True
        for lane in self._lanes.values():
            if lane.pause is not None:
                lane.pause.cancel()
        under_way = set(self._tasks)
        if under_way:
            await asyncio.wait(under_way, timeout=within_s)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._results.stop()
        if self._writing is not None:
            await self._writing

    def _lane(self, endpoint_id: str) -> EndpointQueue:
        lane = self._lanes.get(endpoint_id)
        if lane is None:
            lane = self._lanes[endpoint_id] = EndpointQueue(endpoint_id)
        return lane

    def _is_on(self, lane: EndpointQueue) -> bool:
        endpoint = self._endpoints.known(lane.endpoint_id)
        return endpoint is not None and endpoint.enabled

    async def _begin(self) -> None:
        """Spares a `_fill` to the lanes for which nothing waits in the store: there may be ten thousand of them."""
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.in_store, lane.reading = False, Meanwhile()
        waited_for = {lane.endpoint_id for lane in lanes}
        try:
            async with self._store.reading() as connection:
                waited_for = await delivery_rows.waited_for(connection)
        except SQLAlchemyError as error:
            log.error("webhooks can't be read from the store", reason=reason_of(error))
        finally:
            for lane in lanes:
                meanwhile, lane.reading = lane.reading or Meanwhile(), None
                if lane.endpoint_id in waited_for or not self._is_on(lane):
                    lane.in_store = True
                elif not lane.in_store:
                    for item in meanwhile.come:
                        if item.number not in meanwhile.gone:
                            lane.take_in(item)
                    self._start(lane)

    async def _fill(self, lane: EndpointQueue) -> None:
        now_s = self._now()
        limit = _MOST_READY + len(lane.held)
        # Before the question, not behind it: what is written meanwhile comes by `add`, or sets it again.
        lane.in_store, lane.next_at, lane.reading = False, None, (meanwhile := Meanwhile())
        lane.look_from = self._loop.time() + _LOOKS_APART_S
        try:
            async with self._store.reading() as connection:
                found = await delivery_rows.due(connection, lane.endpoint_id, now_s, limit)
                next_at = await delivery_rows.next_due(connection, lane.endpoint_id, now_s)
        except BaseException:
            lane.in_store = True
            raise
        finally:
            lane.reading = None
        lane.in_store = lane.in_store or len(found) == limit
        if next_at is not None and (lane.next_at is None or next_at < lane.next_at):
            lane.next_at = next_at
        if not self._is_on(lane):
            lane.in_store = True
            return
        # Where there is more in the store, what has come since is behind that.
        for item in found if lane.in_store else found + meanwhile.come:
            if item.number not in meanwhile.gone:
                lane.take_in(item)

    # -- attempts

    def _start(self, lane: EndpointQueue) -> None:
        """Begins what may begin."""
        if lane.pause is not None or self._finishing:
            return
        endpoint = self._endpoints.known(lane.endpoint_id)
        if endpoint is None or not endpoint.enabled:
            return
        failing = lane.failures >= _FAILURES
        at_once = _AT_ONCE_FAILING if failing else _AT_ONCE
        while lane.running < at_once and lane.running + lane.unwritten < _MOST_UNWRITTEN:
            item = lane.line.take()
            if item is None:
                break
            if item.number in lane.withdrawn:
                lane.line.done(item)
                lane.release(item.number)
                continue
            lane.running += 1
            task = self._loop.create_task(self._try(lane, endpoint, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if failing:
                lane.pause = self._loop.call_later(_APART_S, self._go_on, lane)
                break

    def _go_on(self, lane: EndpointQueue) -> None:
        lane.pause = None
        self._start(lane)

    async def _try(self, lane: EndpointQueue, endpoint: Endpoint, item: Waiting) -> None:
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
            lane.running -= 1
            lane.line.done(item)
        self._ended(lane, endpoint, item, begun_s, attempt)
        self._start(lane)
        if lane.in_store and len(lane.line) < _REFILL_BELOW:
            self._wake.set()

    def _ended(self, lane: EndpointQueue, endpoint: Endpoint, item: Waiting, begun_s: float, attempt: Attempt) -> None:
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
        lane.failures = 0 if attempt.ok else lane.failures + 1
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
        self._unwritten[item.number] = lane
        lane.unwritten += 1
        self._results.put(Result(item.number, state, at, row))

    def _note_failing(self, endpoint_id: str, begun_s: float, ok: bool) -> None:
        endpoint = self._endpoints.known(endpoint_id)
        if endpoint is None:
            return
        since = None if ok else endpoint.failing_since or begun_s
        if since != endpoint.failing_since:
            self._endpoints.set_failing_since(endpoint_id, since)
            self._results.put_failing(endpoint_id, since)

    def _written(self, results: Sequence[Result]) -> None:
        """The store has them: what is to be retried is there again, and more may be begun."""
        touched = set()
        for result in results:
            lane = self._unwritten.pop(result.number)
            lane.unwritten -= 1
            lane.release(result.number)
            touched.add(lane)
            if result.state == "waiting" and (lane.next_at is None or result.at < lane.next_at):
                lane.next_at = result.at
        for lane in touched:
            self._start(lane)
        self._wake.set()
