"""Random histories of several workers: joins, leaves, breaks, fencing, killed workers, a Redis that loses its data.

At the end of each history Redis, every worker and every client must agree, and no client may ever have seen a user
added twice or removed twice. The seed of a failing history is in the test's name.

`HISTORIES=10000 pytest tests/cluster/test_model.py` runs more of them.
"""

import asyncio
import os
import random

import pytest

from redpoll.cluster.membership.reaper import Reaper

ROOMS = ("presence-a", "presence-b")
NEWS = ("news-a", "news-b")
USERS = tuple(f"u{n}" for n in range(6))
HISTORIES = int(os.environ.get("HISTORIES", "12"))


class History:
    def __init__(self, seed: int, start_worker, link, keys) -> None:
        self.random = random.Random(seed)
        self.start_worker = start_worker
        self.link = link
        self.keys = keys
        self.reaper = Reaper(link, keys, "ffffffffffff")
        self.workers: list = []
        self.sockets: list = []
        self.k = 0

    async def begin(self, workers: int) -> None:
        for _ in range(workers):
            await self.add_worker()
        # One observer per room and worker stays until the end.
        for worker in self.workers:
            for number, room in enumerate(ROOMS):
                worker.join(room, f"observer-{worker.registry.w}-{number}")

    async def add_worker(self) -> None:
        self.k += 1
        self.workers.append(await self.start_worker(self.k, second_look_s=0.3))

    def join(self) -> None:
        worker = self.random.choice(self.workers)
        if self.random.random() < 0.7:
            user = self.random.choice(USERS)
            info = self.random.choice((b"", b'{"n":1}', b'{"n":2}'))
            socket = worker.join(self.random.choice(ROOMS), user, info)
        else:
            socket = worker.join(self.random.choice(NEWS))
        self.sockets.append((worker, socket))

    def leave(self) -> None:
        if self.sockets:
            worker, socket = self.sockets.pop(self.random.randrange(len(self.sockets)))
            worker.leave(socket)

    def cut(self) -> None:
        self.random.choice(self.workers).link.drop("cut")

    def lose_replies(self) -> None:
        # Redis carries out what is queued, and the replies are lost.
        worker = self.random.choice(self.workers)
        if worker.link.up:
            worker.deafen()
            worker.link.flush()
            asyncio.get_running_loop().call_later(0.01, worker.link.drop, "cut before the replies")

    async def reap_the_living(self) -> None:
        await self.reaper.reap(self.random.choice(self.workers).registry.w)

    async def kill(self) -> None:
        worker = self.workers.pop(self.random.randrange(len(self.workers)))
        self.sockets = [(owner, socket) for owner, socket in self.sockets if owner is not worker]
        await worker.kill()
        await self.reap_the_dead()
        await self.add_worker()

    async def reap_the_dead(self) -> None:
        living = {worker.registry.w for worker in self.workers}
        for name in await self.link.ask(b"HKEYS", self.keys.beat):
            if name.decode() not in living:
                await self.reaper.reap(name.decode())

    async def forget(self) -> None:
        await self.link.ask(b"FLUSHALL")

    async def run(self, steps: int, *, mishaps: bool = True) -> None:
        for _ in range(steps):
            chance = self.random.random()
            if chance < 0.50:
                self.join()
            elif chance < 0.86 or not mishaps:
                self.leave()
            elif chance < 0.90:
                self.cut()
            elif chance < 0.94:
                self.lose_replies()
            elif chance < 0.97:
                await self.reap_the_living()
            elif chance < 0.99:
                await self.kill()
            else:
                await self.forget()
            if self.random.random() < 0.5:
                await asyncio.sleep(self.random.choice((0, 0, 0.001, 0.01)))


async def end(history: History, truth) -> None:
    """Waits until everything agrees. Then all leave, and Redis must be empty."""
    await truth.settled(history.workers)
    await history.reap_the_dead()
    await truth.settled(history.workers)
    for worker in history.workers:
        worker.leave_all()
    await truth.settled(history.workers)
    assert await truth.channel_keys() == []


@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_random_history_ends_in_agreement(seed, start_worker, link, keys, truth):
    history = History(seed, start_worker, link, keys)
    await history.begin(3)
    await history.run(200)
    await end(history, truth)


@pytest.mark.parametrize("seed", range(3))
async def test_snapshots_and_deltas_agree_under_churn(seed, start_worker, link, keys, truth):
    history = History(seed, start_worker, link, keys)
    await history.begin(4)
    await history.run(1500, mishaps=False)
    await end(history, truth)
    assert all(worker.link.connects == 1 for worker in history.workers)
