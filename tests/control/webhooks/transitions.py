"""Helpers for the tests of webhooks: a clock, transitions, an outbox in memory, a kill. Not a test."""

import asyncio
import itertools
import json
import time

from helpers.receiver import Request
from redpoll.cluster.outbox import Taken
from redpoll.cluster.transition import Transition

APP, OTHER = "1", "2"
# Long ago, so that a test notices a use of the real time.
NOW_S = 1_000_000_000.0


class Clock:
    """Unix seconds that the test sets."""

    def __init__(self):
        self.now_s = NOW_S
        self.set_by_s = 0.0

    def __call__(self):
        return self.now_s + self.set_by_s

    def steady(self):
        """Seconds that `set` doesn't change."""
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds

    def set(self, by_s):
        """Moves the wall clock by `by_s` seconds, as an administrator may."""
        self.set_by_s += by_s


_stamps = itertools.count(5_000_000)


def transition(event="channel.occupied", channel="room", app_id=APP, user=None, detail=None, **more):
    """A row as the outbox gives it, with the next stamp."""
    details = {"channel.occupied": b"1", "subscription.count": b"2"}
    details["client_event"] = b'{"event":"client-x","data":"hello","socket_id":"1.2"}'
    if event.startswith("member.") and user is None:
        user = "u"
    fields = {"shard": 7, "stamp": next(_stamps), "time_ms": int(NOW_S * 1000), "trace": None, **more}
    found = details.get(event, b"") if detail is None else detail
    return Transition(event=event, app_id=app_id, channel=channel, user=user, detail=found, **fields)


class Box:
    """Rows that stay until the first drain after they were committed, as in Redis. `fault` is raised by `drain`."""

    def __init__(self, *rows):
        self.rows = list(rows)
        self.errors = 0
        self.fault = None
        self.page = 1_000
        self.drains = 0
        self.waiting = self.leaves = 0
        self.connects = 1
        self.debounce_s = 0.0
        # What is occupied or a member, by Subject, what was to be restated, and whose leaves are held back.
        self.is_present = {}
        self.restated = []
        self.held_back = set()
        self._committed = set()

    def put(self, *rows):
        self.rows += rows

    async def take(self):
        self.drains += 1
        if self.fault is not None:
            raise self.fault
        self.rows = [row for row in self.rows if (row.shard, row.stamp) not in self._committed]
        self._committed.clear()
        self.waiting = len(self.rows)
        return Taken(self.rows[: self.page], 0, len(self.rows) > self.page)

    async def present(self, subjects):
        return [self.is_present.get(subject, False) for subject in subjects]

    async def restate(self, subjects):
        self.restated += subjects
        return sum(subject not in self.held_back for subject in subjects)

    def committed(self, rows):
        self._committed |= {(row.shard, row.stamp) for row in rows}


async def kill(webhooks):
    """Ends it as kill -9 does: nothing more is written to the store."""
    schedule = webhooks.schedule
    tasks = [*webhooks._tasks, *schedule._tasks, schedule._writing]
    # Otherwise the end of one attempt would start the next.
    schedule._finishing = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    webhooks._tasks, webhooks.schedule = [], None


async def seen(webhooks, state, count, app_id=APP):
    """Waits until `count` deliveries have this state, and returns them."""
    deadline = time.monotonic() + 60
    while True:
        found = await webhooks.deliveries(app_id, states=(state,), limit=10_000)
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, (state, len(found), await webhooks.deliveries(app_id))
        await asyncio.sleep(0.01)


async def later(webhooks, clock, wait_until, seconds):
    """Moves the clock, and waits until Redis has answered: what is removed depends on its last answer."""
    clock.advance(seconds)
    await wait_until(lambda: webhooks.intake.forgotten_before() == clock())


async def tidy(webhooks):
    """One round of the leader's tidying."""
    await webhooks.tidying.tidy(webhooks._store, webhooks.schedule, webhooks.intake)


def content_of(request: Request):
    """`(event, channel, user)` of a delivery in the service's format."""
    body = json.loads(request.body)
    return body["event"], body["data"]["channel"], body["data"].get("user_id")
