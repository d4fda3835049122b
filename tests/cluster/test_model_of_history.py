"""Channels with history under random mishaps: breaks, fences, kills, clearings, a Redis that loses its data.

At the end of each, no subscriber may have got an event twice or out of order, and each must have got every stored event
after its last position. So a subscriber that was sent no new position missed nothing. The seed of a failing run is in
the test's name.

`pytest --long` runs more of them.
"""

import asyncio

import pytest

from cluster.random_history import RandomHistory
from helpers.bus_publishing import Outgoing, publish_all
from helpers.lengths import seeds
from redpoll import _frame
from redpoll.cluster.bus import Bus
from redpoll.cluster.history import History
from redpoll.cluster.membership.reaper import Reaper
from redpoll.protocol.apps import HistoryRule

# One channel keeps everything, one keeps 20 messages, one has members.
RULES = (
    HistoryRule(id="000001", name="all", keep=10_000, seconds=3_600, client_events=True),
    HistoryRule(id="000002", name="few", keep=20, seconds=3_600),
    HistoryRule(id="000003", name="presence-all", keep=10_000, seconds=3_600),
)
CHANNELS = tuple(rule.name for rule in RULES)
SEEDS = seeds(4)


class Scenario(RandomHistory):
    def __init__(self, seed: int, start_worker, app, link, keys) -> None:
        super().__init__(seed, link, keys)
        self.start_worker = start_worker
        self.app = app
        self.bus = Bus(link, keys)
        self.history = History(link, keys)
        self.reaper = Reaper(link, keys, "ffffffffffff")
        self.workers = []
        # All sockets that ever attached to a worker that still lives.
        self.ever_attached: list = []
        # What was published to each channel since its history began.
        self.sent: dict[str, list[str]] = {channel: [] for channel in CHANNELS}
        self.k = self.number = 0

    async def begin(self) -> None:
        for _ in range(3):
            await self.add_worker()

    async def add_worker(self) -> None:
        self.k += 1
        worker = await self.start_worker(self.k, second_look_s=0.3)
        worker.app = self.app
        self.workers.append(worker)
        for channel in CHANNELS:
            self._attach(worker, channel, f"observer-{self.k}")

    def _attach(self, worker, channel: str, user: str) -> None:
        socket = worker.join(channel, user if channel.startswith("presence-") else None)
        self.ever_attached.append((worker, socket))
        if not user.startswith("observer-"):
            self.sockets.append((worker, socket))

    def join(self) -> None:
        worker, channel = self.random.choice(self.workers), self.random.choice(CHANNELS)
        self._attach(worker, channel, self.random.choice(("u1", "u2", "u3")))

    async def publish(self) -> None:
        channel, count = self.random.choice(CHANNELS), self.random.choice((1, 1, 3, 30, 150))
        texts = [str(self.number + at) for at in range(count)]
        self.number += count
        await publish_all(self.bus, self.app, [Outgoing(channel, "e", text) for text in texts])
        self.sent[channel] += texts

    async def publish_as_client(self) -> None:
        # On the worker's own connection, which also receives what it publishes.
        worker = self.random.choice(self.workers)
        text, outcome = str(self.number), asyncio.get_running_loop().create_future()
        self.number += 1
        bus = Bus(worker.link, self.keys)
        bus.publish(self.app, "all", "client-e", text, skip="1.2", done=outcome.set_result)
        if self.random.random() < 0.3:
            self.join()
        if not isinstance(await outcome, Exception):
            self.sent["all"].append(text)

    async def kill(self, worker) -> None:
        self.ever_attached = [(owner, socket) for owner, socket in self.ever_attached if owner is not worker]
        await self.remove(worker)
        await self.reaper.reap(worker.registry.worker_id)
        await self.add_worker()

    async def clear(self) -> None:
        channel = self.random.choice(CHANNELS)
        await self.history.clear("7", channel)
        self.sent[channel].clear()

    async def expire(self) -> None:
        channel = self.random.choice(CHANNELS)
        await self.link.ask(b"DEL", self.keys.history("7", channel), self.keys.history_meta("7", channel))
        self.sent[channel].clear()

    async def flush(self) -> None:
        await self.link.ask(b"FLUSHALL")
        for texts in self.sent.values():
            texts.clear()

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.random.random()
            worker = self.random.choice(self.workers)
            if chance < 0.35:
                await self.publish()
            elif chance < 0.45:
                await self.publish_as_client()
            elif chance < 0.65:
                self.join()
            elif chance < 0.80:
                self.leave()
            elif chance < 0.86:
                worker.link.drop("cut")
            elif chance < 0.92:
                self.lose_replies(worker)
            elif chance < 0.94:
                await self.reaper.reap(worker.registry.worker_id)
            elif chance < 0.95:
                await self.kill(worker)
            elif chance < 0.97:
                await self.clear()
            elif chance < 0.985:
                await self.expire()
            else:
                await self.flush()
            await self.let_others_run()

    async def end(self, truth, wait_until) -> None:
        await truth.settled(self.workers)
        # The last event, which comes after all messages that a subscriber catches up with.
        for channel in CHANNELS:
            await publish_all(self.bus, self.app, [Outgoing(channel, "e", "end")])
            self.sent[channel].append("end")
        attached = [socket for _, socket in self.ever_attached if socket.state == "attached"]
        await wait_until(lambda: all(socket.events and socket.events[-1].endswith(b"end") for socket in attached))
        await truth.settled(self.workers)
        for channel in CHANNELS:
            await self._compare(channel, [socket for socket in attached if socket.channel == channel])

    async def _compare(self, channel: str, sockets: list) -> None:
        page = await self.history.read("7", channel, limit=20_000, since=0)
        stored = [(row.offset, row.data) for row in page.rows]
        if channel != "few":
            texts = [text for _, text in stored]
            assert len(set(texts)) == len(texts)
            # Every acknowledged event; events sent during a break may be missing.
            assert set(texts) >= set(self.sent[channel])
        for socket in sockets:
            seen = [_frame.envelope(payload) for payload in socket.events]
            offsets = [envelope[0] for envelope in seen]
            assert offsets == sorted(set(offsets))
            epoch, since = socket.place
            assert epoch == page.epoch
            got = [(envelope[0], envelope[7].decode()) for envelope in seen[socket.place_at :]]
            expected = [(offset, text) for offset, text in stored if offset > since]
            assert got == expected if channel != "few" else got[-len(expected) :] == expected


@pytest.fixture
def app(make_app):
    return make_app(history=RULES, max_presence_members=0)


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_stored_message_arrives_once_and_in_order(seed, start_worker, app, link, keys, truth, wait_until):
    scenario = Scenario(seed, start_worker, app, link, keys)
    await scenario.begin()
    await scenario.run(150)
    await scenario.end(truth, wait_until)
