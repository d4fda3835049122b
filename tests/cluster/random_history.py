"""The common part of the random histories in tests/cluster/test_model*.py: clients that join and leave, and workers
that lose replies or die."""

import asyncio
import random

ROOMS = ("presence-a", "presence-b")
NEWS = ("news-a", "news-b")


class RandomHistory:
    """Everything is drawn from `random`, so a seed repeats its history as far as time allows.

    A subclass provides `workers`, a list of those that live. `sockets` has the worker and the socket of each client
    that is to leave some day.
    """

    workers: list
    users: tuple[str, ...] = tuple(f"u{n}" for n in range(6))

    def __init__(self, seed: int, link, keys) -> None:
        self.random = random.Random(seed)
        self.link = link
        self.keys = keys
        self.sockets: list = []

    def random_info(self) -> bytes:
        return self.random.choice((b"", b'{"n":1}', b'{"n":2}'))

    def join(self) -> None:
        worker = self.random.choice(self.workers)
        if self.random.random() < 0.7:
            socket = worker.join(self.random.choice(ROOMS), self.random.choice(self.users), self.random_info())
        else:
            socket = worker.join(self.random.choice(NEWS))
        self.sockets.append((worker, socket))

    def leave(self) -> None:
        if self.sockets:
            worker, socket = self.sockets.pop(self.random.randrange(len(self.sockets)))
            worker.leave(socket)

    def lose_replies(self, worker) -> None:
        """Redis carries out what is queued, and the replies are lost."""
        if worker.link.up:
            worker.deafen()
            worker.link.flush()
            asyncio.get_running_loop().call_later(0.01, worker.link.drop, "cut before the replies")

    def forget(self, worker) -> None:
        """The clients of a worker that died."""
        self.sockets = [(owner, socket) for owner, socket in self.sockets if owner is not worker]

    async def remove(self, worker) -> None:
        self.workers.remove(worker)
        self.forget(worker)
        await worker.kill()

    async def reap_the_dead(self, reaper) -> None:
        living = {worker.registry.worker_id for worker in self.workers}
        for name in await self.link.ask(b"HKEYS", self.keys.beat):
            if name.decode() not in living:
                await reaper.reap(name.decode())

    async def let_others_run(self) -> None:
        """Half of the time, for up to 10 ms."""
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.choice((0, 0, 0.001, 0.01)))
