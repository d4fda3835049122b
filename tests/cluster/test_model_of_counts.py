"""Random histories of counts: subscription counts, watched users, and connections of an app with a limit.

Connections break, workers are fenced and killed, and Redis loses its data. At the end of each history every subscriber
must have the last count, every watcher the present state of its users, and Redis the real numbers. The seed of a
failing history is in the test's name.

`pytest --long` runs more of them.
"""

import asyncio
import time
from itertools import pairwise

import pytest

from cluster.random_history import RandomHistory
from cluster.sums import counted
from helpers.lengths import amount, seeds
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.membership.reaper import Reaper

CHANNELS = ("news", "cache-news", "private-news")
USERS = tuple(f"u{n}" for n in range(5))
LIMIT = 12
SEEDS = seeds(4)


class History(RandomHistory):
    def __init__(self, seed, start_worker, app, link, keys):
        super().__init__(seed, link, keys)
        self.start_worker = start_worker
        self.app = app
        self.reaper = Reaper(link, keys, "ffffffffffff")
        self.workers = []
        # Pairs of the worker and the user or join.
        self.signed_in, self.joins = [], []
        self.k = 0

    async def add_worker(self):
        self.k += 1
        worker = await self.start_worker(self.k, second_look_s=0.3, max_admit_s=0.5)
        worker.app = self.app
        for user in USERS:
            worker.registry.online.watch("7", user)
        for channel in CHANNELS:
            self.sockets.append((worker, worker.join(channel)))
        self.workers.append(worker)

    def step(self):
        worker = self.random.choice(self.workers)
        chance = self.random.random()
        if chance < 0.25:
            self.sockets.append((worker, worker.join(self.random.choice(CHANNELS))))
        elif chance < 0.45 and self.sockets:
            self.leave()
        elif chance < 0.6:
            user = self.random.choice(USERS)
            worker.registry.signed_in.sign_in(self.app, user)
            self.signed_in.append((worker, user))
        elif chance < 0.75 and self.signed_in:
            owner, user = self.signed_in.pop(self.random.randrange(len(self.signed_in)))
            owner.registry.signed_in.sign_out("7", user)
        elif chance < 0.88:
            self.joins.append((worker, worker.connect()))
        elif self.joins:
            self.disconnect(self.random.randrange(len(self.joins)))

    def disconnect(self, at):
        owner, join = self.joins.pop(at)
        outcome = owner.sockets.connections.pop(join, None)
        if outcome is None:
            owner.registry.connection_limit.cancel(join)
        elif outcome == 200:
            owner.registry.connection_limit.depart("7")

    async def mishap(self):
        chance = self.random.random()
        worker = self.random.choice(self.workers)
        if chance < 0.35:
            worker.link.drop("cut")
        elif chance < 0.6:
            self.lose_replies(worker)
        elif chance < 0.75:
            await self.reaper.reap(worker.registry.worker_id)
        elif chance < 0.9:
            await self.kill(worker)
        else:
            await self.link.ask(b"FLUSHALL")
            await DirectoryWriter(self.link, self.keys).fill([self.app], 1)

    async def kill(self, worker):
        for entries in (self.signed_in, self.joins):
            entries[:] = [(owner, entry) for owner, entry in entries if owner is not worker]
        await self.remove(worker)
        await self.reap_the_dead(self.reaper)
        await self.add_worker()

    async def count_in_redis(self, channel):
        return await counted(self.link, self.keys, channel)

    async def differences(self):
        wrong = [fault for worker in self.workers for fault in worker.sockets.faults]
        for channel in CHANNELS:
            attached = [socket for _, socket in self.sockets if socket.channel == channel]
            if any(socket.state != "attached" for socket in attached):
                wrong.append(f"{channel}: a socket waits")
            counts = {socket.counts[-1] if socket.counts else None for socket in attached}
            if attached and counts != {len(attached)}:
                wrong.append(f"{channel}: {len(attached)} attached, subscribers got {counts}")
            if await self.count_in_redis(channel) != len(attached):
                wrong.append(f"{channel}: {len(attached)} attached, Redis has {await self.count_in_redis(channel)}")
        for user in USERS:
            n = sum(name == user for _, name in self.signed_in)
            if await self.count_in_redis(f"%u:{user}") != n:
                wrong.append(f"{user}: {n} connections, Redis has {await self.count_in_redis(f'%u:{user}')}")
            for worker in self.workers:
                states = [online for name, online in worker.sockets.states if name == user]
                if states[-1:] != [n > 0]:
                    wrong.append(f"{user}: {n} connections, {worker.registry.worker_id} got the states {states[-2:]}")
                if any(before == after for before, after in pairwise(states)):
                    wrong.append(f"{user}: the same state twice")
        admitted = [owner.sockets.connections.get(join) for owner, join in self.joins]
        if None in admitted:
            wrong.append("a connection waits")
        if await self.count_in_redis("%conn") != admitted.count(200):
            wrong.append(f"{admitted.count(200)} connections, Redis has {await self.count_in_redis('%conn')}")
        return wrong

    async def settled(self, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while wrong := await self.differences():
            if time.monotonic() > deadline:
                pytest.fail("; ".join(wrong[:8]))
            await asyncio.sleep(0.02)

    async def run(self, steps, *, mishaps=True):
        for _ in range(steps):
            self.step()
            if mishaps and self.random.random() < 0.08:
                await self.mishap()
            await self.let_others_run()

    async def end(self, truth):
        await self.settled()
        await self.reap_the_dead(self.reaper)
        await self.settled()
        for owner, socket in self.sockets:
            owner.leave(socket)
        for owner, user in self.signed_in:
            owner.registry.signed_in.sign_out("7", user)
        while self.joins:
            self.disconnect(0)
        deadline = time.monotonic() + 60
        while any([*worker.registry.local_channels()] for worker in self.workers):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert await truth.channel_keys() == []


@pytest.fixture
async def begin(start_worker, make_app, link, keys):
    async def make(seed, workers):
        app = make_app(subscription_count=True, watchlist=True, max_connections=LIMIT)
        await DirectoryWriter(link, keys).fill([app], 1)
        history = History(seed, start_worker, app, link, keys)
        for _ in range(workers):
            await history.add_worker()
        return history

    return make


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_history_ends_with_the_right_counts_and_states(seed, begin, truth):
    history = await begin(seed, 3)
    await history.run(250)
    await history.end(truth)


@pytest.mark.parametrize("seed", range(amount(8, 60)))
async def test_without_failures_no_connection_exceeds_the_limit(seed, begin, truth):
    history = await begin(seed, 4)
    for _ in range(10):
        await history.run(100, mishaps=False)
        admitted = sum(owner.sockets.connections.get(join) == 200 for owner, join in history.joins)
        assert admitted <= LIMIT
    await history.end(truth)
