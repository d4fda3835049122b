"""Random histories of webhook rows: joins, leaves, breaks, fences, killed and reaped workers, a control plane that dies
before or after its commit, a Redis that is killed.

A witness records what happened in Redis, from MONITOR and from the deltas that members get. The rows that a reader has
committed are compared with it. For each channel and user they must alternate, end at the present state, report every
absence longer than the debounce, and no shorter one. The seed of a failing history is in the test's name.

`pytest --long` runs more of them.
"""

import asyncio
import random
import re
import time
from contextlib import suppress

import hiredis
import pytest

from cluster.random_history import NEWS, ROOMS, RandomHistory
from helpers.lengths import seeds
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.envelopes import parse_added, parse_removed
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.transition import Transition

SEEDS = seeds(3)

DRAIN_S = 0.02
# A row has the time at which its script began, MONITOR the time of a command in it. On a busy machine Redis may lose
# the processor between the two.
NEAR_US = 1_000_000

_OCCUPANCY = re.compile(rb'^\+(\d+)\.(\d{6}) \[.*\] "(SADD|SREM)" "rp:\{\d+\}:a:7" "([^"]*)"')


class Witness:
    """Records what happened in Redis. `seen[channel, user]` is a list of (came, time in µs) in order; user is None
    for the channel itself."""

    def __init__(self, path: str, keys) -> None:
        self.seen: dict[tuple[str, str | None], list[tuple[bool, int]]] = {}
        self._path = path
        self._rooms = {keys.topic("7", room): room for room in ROOMS}
        self._link = Link(f"unix://{path}")
        self._link.on_push = self._pushed
        self._task: asyncio.Task | None = None
        self._synced = asyncio.Event()

    async def start(self) -> None:
        self._link.start()
        await self._link.wait_up()
        self._link.subscribe(list(self._rooms))
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
        self._writer.write(b"MONITOR\r\n")
        assert await reader.readline() == b"+OK\r\n"
        self._task = asyncio.ensure_future(self._watch(reader))

    async def finish(self) -> None:
        """Waits until all that happened so far is in `seen`."""
        await self._link.ask(b"ECHO", b"the witness has seen enough")
        await self._synced.wait()
        await self.close()

    async def close(self) -> None:
        await self._link.close()
        self._writer.close()
        self._task.cancel()

    async def _watch(self, reader) -> None:
        while line := await reader.readline():
            if found := _OCCUPANCY.match(line):
                seconds, micros, command, channel = found.groups()
                came = command == b"SADD"
                self._note(channel.decode(), None, came, int(seconds) * 1_000_000 + int(micros))
            elif b"the witness has seen enough" in line:
                self._synced.set()

    def _pushed(self, topic: bytes, payload: bytes) -> None:
        room = self._rooms[topic]
        if payload[:1] == b"m":
            delta = parse_added(payload)
            # Of a user who is a member already, only the info changed.
            if not self.seen.get((room, delta.user), [(False, 0)])[-1][0]:
                self._note(room, delta.user, True, delta.stamp)
        else:
            removed = parse_removed(payload)
            self._note(room, removed.user, False, removed.stamp)

    def _note(self, channel: str, user: str | None, came: bool, at_us: int) -> None:
        self.seen.setdefault((channel, user), []).append((came, at_us))


class Control:
    """Drains rows into a dict, and dies now and then, before or after its commit."""

    def __init__(self, seed: int, link, keys, debounce_s: float, *, dies: float = 0.3) -> None:
        self.random = random.Random(seed)
        self.store: dict[tuple[int, int], Transition] = {}
        self.failed = 0
        self._make = lambda: Outbox(link, keys, debounce_s)
        self._dies = dies
        self.outbox = self._make()
        self._stopped = False
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while not self._stopped:
            # Now and then nobody drains for longer than the debounce.
            await asyncio.sleep(DRAIN_S if self.random.random() > 0.02 else 15 * DRAIN_S)
            try:
                await self.take()
            except (LinkDown, hiredis.ReplyError):
                self.failed += 1

    async def take(self) -> bool:
        """Returns whether nothing is left to drain."""
        taken = await self.outbox.take()
        chance = self.random.random()
        if chance > self._dies / 2:
            for row in taken.rows:
                assert self.store.setdefault((row.shard, row.stamp), row) == row
            self.outbox.committed(taken.rows)
        nothing = not taken.rows and not self.outbox.leaves
        if chance < self._dies:
            self.outbox = self._make()
        return nothing

    async def finish(self) -> None:
        self._stopped = True
        await self._task
        while not await self.take():
            await asyncio.sleep(0.005)

    def reported(self) -> dict[tuple[str, str | None], list[tuple[bool, int]]]:
        """The committed rows, in the form of `Witness.seen`."""
        reported: dict[tuple[str, str | None], list[tuple[bool, int]]] = {}
        for key in sorted(self.store):
            row = self.store[key]
            came = row.event in ("channel.occupied", "member.added")
            reported.setdefault((row.channel, row.user), []).append((came, row.stamp if came else row.time_ms * 1000))
        return reported


def faults_of(what, happened, reported, debounce_us: int, slack_us: int) -> list[str]:
    """What is wrong with the rows of one channel or member, as sentences."""
    if [came for came, _ in reported] != [n % 2 == 0 for n in range(len(reported))]:
        return [f"{what}: rows don't alternate: {reported}"]
    if not happened:
        return [f"{what}: rows, but nothing happened: {reported}"] if reported else []
    wrong = []
    # Members come and go at the stamps of the scripts themselves, channels at MONITOR's times.
    late_us = 0 if what[1] else NEAR_US
    arrivals = [at for at, (came, _) in enumerate(happened) if came]
    announced: dict[int, int] = {}
    for number, (came, at_us) in enumerate(reported):
        if came:
            # The next arrival, not the nearest one: a script takes the row's time, and adds the channel after it.
            arrival = next((at for at in arrivals if happened[at][1] >= at_us), None)
            if arrival is None or happened[arrival][1] - at_us > NEAR_US or arrival in announced:
                wrong.append(f"{what}: a row says that it came at {at_us}, which didn't happen")
            else:
                announced[arrival] = number
    for at in arrivals:
        if at == 0:
            if announced.get(0) != 0:
                wrong.append(f"{what}: its first row isn't the first time that it came")
            continue
        absent_us = happened[at][1] - happened[at - 1][1]
        if at not in announced:
            if not debounce_us or absent_us > debounce_us + slack_us + late_us:
                wrong.append(f"{what}: absent for {absent_us} µs, without a row")
        elif absent_us < debounce_us - 2_000 - late_us:
            wrong.append(f"{what}: absent for only {absent_us} µs, with a row")
        elif abs(reported[announced[at] - 1][1] - happened[at - 1][1]) > NEAR_US:
            wrong.append(f"{what}: left at {happened[at - 1][1]}, the row says {reported[announced[at] - 1][1]}")
    if not reported or reported[-1][0] != happened[-1][0]:
        wrong.append(f"{what}: ends as {happened[-1]}, the last row is {reported[-1:]}")
    elif not reported[-1][0] and abs(reported[-1][1] - happened[-1][1]) > NEAR_US:
        wrong.append(f"{what}: left for good at {happened[-1][1]}, the row says {reported[-1][1]}")
    return wrong


class History(RandomHistory):
    users = tuple(f"u{n}" for n in range(4))

    def __init__(self, seed: int, start_worker, server, link, keys, app, debounce_s: float) -> None:
        super().__init__(seed, link, keys)
        self.start_worker = start_worker
        self.server = server
        self.app = app
        self.debounce_s = debounce_s
        self.reaper = Reaper(link, keys, "ffffffffffff", hooks_of=lambda app_id: app.hooks, debounce_s=debounce_s)
        self.control = Control(seed, link, keys, debounce_s)
        self.workers = []
        self.k = 0

    async def add_worker(self) -> None:
        self.k += 1
        worker = await self.start_worker(self.k, server=self.server, second_look_s=0.3, debounce_s=self.debounce_s)
        worker.app = self.app
        self.workers.append(worker)

    async def mishap(self) -> None:
        worker = self.random.choice(self.workers)
        chance = self.random.random()
        if chance < 0.3:
            worker.link.drop("cut")
        elif chance < 0.6:
            self.lose_replies(worker)
        elif chance < 0.85:
            await self.reaper.reap(worker.registry.worker_id)
        else:
            await self.kill(worker)

    async def kill(self, worker) -> None:
        await self.remove(worker)
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.random() * 0.1)
        await self.reap_the_dead(self.reaper)
        await self.add_worker()

    async def run(self, steps: int, mishap) -> None:
        for _ in range(steps):
            # Few at a time, so that channels and users come and go.
            if self.random.random() < 0.62 - 0.03 * len(self.sockets):
                self.join()
            else:
                self.leave()
            if self.random.random() < 0.06:
                await mishap()
            await self.let_others_run()
            if self.random.random() < 0.04:
                await asyncio.sleep(self.random.random() * 2 * self.debounce_s)

    async def settle(self, truth) -> None:
        await truth.settled(self.workers)
        await self.reap_the_dead(self.reaper)
        await truth.settled(self.workers)

    async def end(self, truth) -> None:
        """Waits until everything agrees and has its rows. Then all leave, which makes rows too."""
        await self.settle(truth)
        await asyncio.sleep(self.debounce_s)
        await self.reported_within(truth)
        for worker in self.workers:
            worker.leave_all()
        await self.settle(truth)
        await self.control.finish()
        reported = self.control.reported()
        assert [what for what, rows in reported.items() if rows[-1][0]] == []
        assert await self.link.ask(b"KEYS", b"*:left") == []

    async def reported_within(self, truth, timeout_s: float = 60.0) -> None:
        """Waits until the last row of each channel and user matches its present state."""
        present = {(channel, None) for channel in (*ROOMS, *NEWS) if await truth.counts(channel)}
        present |= {(room, user) for room in ROOMS for user in await truth.users(room)}
        deadline = time.monotonic() + timeout_s
        while wrong := {what for what, rows in self.control.reported().items() if rows[-1][0]} ^ present:
            if time.monotonic() > deadline:
                pytest.fail(f"the last row differs from the present state: {wrong}")
            await asyncio.sleep(0.01)


@pytest.fixture
async def begin(start_worker, make_app, keys):
    histories: list[History] = []

    async def make(seed, server, link, debounce_s, workers=3) -> History:
        app = make_app(hooks="om", max_presence_members=0)
        await DirectoryWriter(link, keys).fill([app], 1)
        history = History(seed, start_worker, server, link, keys, app, debounce_s)
        histories.append(history)
        for _ in range(workers):
            await history.add_worker()
        return history

    yield make
    for history in histories:
        history.control._task.cancel()
        with suppress(asyncio.CancelledError):
            await history.control._task


@pytest.fixture
async def witness(redis, keys):
    witness = Witness(redis.path, keys)
    await witness.start()
    yield witness
    await witness.close()


def faults(history, witness) -> list[str]:
    happened, reported = witness.seen, history.control.reported()
    # Leaves have their time in ms.
    slack_us = 2_000
    debounce_us = round(1e6 * history.debounce_s)
    wrong = []
    for what in happened.keys() | reported.keys():
        wrong += faults_of(what, happened.get(what, []), reported.get(what, []), debounce_us, slack_us)
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
async def test_rows_of_a_random_history_report_what_happened(seed, begin, witness, redis, link, truth):
    history = await begin(seed, redis, link, 0.1)
    await history.run(150, history.mishap)
    await history.end(truth)
    await witness.finish()
    assert faults(history, witness) == []


@pytest.mark.parametrize("seed", SEEDS[: max(2, len(SEEDS) // 2)])
async def test_without_a_debounce_every_change_is_reported(seed, begin, witness, redis, link, truth):
    history = await begin(seed, redis, link, 0)
    await history.run(150, history.mishap)
    await history.end(truth)
    await witness.finish()
    assert faults(history, witness) == []


@pytest.mark.parametrize("seed", SEEDS[: max(1, len(SEEDS) // 5)])
async def test_rows_end_at_the_present_state_even_if_redis_is_killed(seed, begin, own_redis, make_truth, wait_until):
    truth = await make_truth(own_redis)
    history = await begin(seed, own_redis, truth.link, 0.1)

    async def mishap():
        if history.random.random() < 0.4:
            own_redis.kill()
            await wait_until(lambda: not truth.link.up)
            own_redis.start()
            await truth.link.wait_up()
        else:
            with suppress(LinkDown):
                await history.mishap()

    await history.run(150, mishap)
    await history.end(truth)
    for what, rows in history.control.reported().items():
        assert [came for came, _ in rows] == [n % 2 == 0 for n in range(len(rows))], what
