"""Random histories of several workers: joins, leaves, breaks, fencing, killed workers, a Redis that loses its data.

At the end of each history Redis, every worker and every client must agree, and no client may ever have seen a user
added twice or removed twice. The seed of a failing history is in the test's name.

`pytest --long` runs more of them.
"""

import pytest

from cluster.random_history import ROOMS, RandomHistory
from helpers.lengths import amount, seeds
from redpoll.cluster.membership.reaper import Reaper

SEEDS = seeds(6)


class History(RandomHistory):
    def __init__(self, seed: int, start_worker, link, keys) -> None:
        super().__init__(seed, link, keys)
        self.start_worker = start_worker
        self.reaper = Reaper(link, keys, "ffffffffffff")
        self.workers = []
        self.k = 0

    async def begin(self, workers: int) -> None:
        for _ in range(workers):
            await self.add_worker()
        # One observer per room and worker stays until the end.
        for worker in self.workers:
            for number, room in enumerate(ROOMS):
                worker.join(room, f"observer-{worker.registry.worker_id}-{number}")

    async def add_worker(self) -> None:
        self.k += 1
        self.workers.append(await self.start_worker(self.k, second_look_s=0.3, unanswered_s=30))

    async def kill(self, worker) -> None:
        await self.remove(worker)
        await self.reap_the_dead(self.reaper)
        await self.add_worker()

    async def run(self, steps: int, *, mishaps: bool = True) -> None:
        for _ in range(steps):
            chance = self.random.random()
            worker = self.random.choice(self.workers)
            if chance < 0.50:
                self.join()
            elif chance < 0.86 or not mishaps:
                self.leave()
            elif chance < 0.90:
                worker.link.drop("cut")
            elif chance < 0.94:
                self.lose_replies(worker)
            elif chance < 0.97:
                await self.reaper.reap(worker.registry.worker_id)
            elif chance < 0.99:
                await self.kill(worker)
            else:
                await self.link.ask(b"FLUSHALL")
            await self.let_others_run()


async def end(history: History, truth) -> None:
    """Waits until everything agrees. Then all leave, and Redis must be empty."""
    await truth.settled(history.workers)
    await history.reap_the_dead(history.reaper)
    await truth.settled(history.workers)
    for worker in history.workers:
        worker.leave_all()
    await truth.settled(history.workers)
    assert await truth.channel_keys() == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_history_ends_in_agreement(seed, start_worker, link, keys, truth):
    history = History(seed, start_worker, link, keys)
    await history.begin(3)
    await history.run(200)
    await end(history, truth)


@pytest.mark.parametrize("seed", range(amount(1, 3)))
async def test_snapshots_and_deltas_agree_under_churn(seed, start_worker, link, keys, truth):
    history = History(seed, start_worker, link, keys)
    await history.begin(4)
    await history.run(1500, mishaps=False)
    await end(history, truth)
    assert all(worker.link.connects == 1 for worker in history.workers)
