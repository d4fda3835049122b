"""Random rules with a rate, publishes, slow readers, cuts and replays: each client's text is the published one.

Each event has a number, and the text of a piece is its number, so what a client shows says which events it got. The
long form: `pytest --long`; the seed is in the test's name.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket

import pytest
import websockets

from helpers.bus_publishing import publish_all
from helpers.lengths import seeds

CHANNEL = "chat-a"
SEEDS = seeds(6)
# A replay of so many events has everything.
REPLAY = 1_000


class Reader:
    """One client over all its connections. `numbers` are the events that it got, in order. It must have those from
    `first` on."""

    def __init__(self, bench, worker, recovers: bool, slow: bool) -> None:
        self.bench = bench
        self.worker = worker
        self.recovers = recovers
        self.slow = slow
        self.first = 0
        self.numbers: list[int] = []
        self.offsets: list[int] = []
        self.position: dict | None = None
        self.client = None
        self.reading: asyncio.Task | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.done = asyncio.Event()

    async def connect(self, **more) -> None:
        raw = None
        if self.slow:
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", self.worker.port))
        query = "&recover=1" if self.recovers else ""
        self.client = await self.bench.client(self.worker, query=query, sock=raw, max_queue=1 if raw else None)
        await self.client.ask(CHANNEL, **more)
        while (frame := await self.client.next())["event"] != "pusher_internal:subscription_succeeded":
            pass
        data = json.loads(frame["data"])
        if self.recovers:
            assert data.get("recovered", True), data
            self.position = self.position or data
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            await self.may_read.wait()
            try:
                frame = json.loads(await self.client.socket.recv())
            except websockets.ConnectionClosed:
                return
            if frame["event"].startswith("pusher"):
                continue
            if self.recovers:
                self.offsets.append(frame["offset"])
            self.numbers += numbers_of(frame)
            if frame["event"] == "end":
                self.done.set()

    async def end(self) -> None:
        """Wait for the last event. Raises what ended the reading before."""
        done = asyncio.create_task(self.done.wait())
        await asyncio.wait({done, self.reading}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            self.reading.result()
            pytest.fail("the connection ended before the last event")

    async def cut(self) -> None:
        """The connection is lost at any moment, and what was received until then counts."""
        self.reading.cancel()
        (outcome,) = await asyncio.gather(self.reading, return_exceptions=True)
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
        self.client.socket.transport.abort()
        since = {"epoch": self.position["epoch"], "offset": ([self.position["offset"], *self.offsets])[-1]}
        self.may_read.set()
        await self.connect(since=since)


def numbers_of(frame: dict) -> list[int]:
    if frame["event"] == "text":
        return [int(n) for n in json.loads(frame["data"])["delta"].split()]
    if frame["event"] == "end":
        return []
    return [int(frame["data"].split()[0])]


class Model:
    """`published` has the key of each number: the message whose text it is, or None for an event that passes."""

    def __init__(self, bench, worker, seed: int) -> None:
        self.choice = random.Random(seed)
        self.bench = bench
        self.worker = worker
        self.published: list[str | None] = []
        self.readers: list[Reader] = []
        self.joins = self.choice.random() < 0.75
        self.by = self.choice.random() < 0.7

    async def set_rule(self) -> None:
        choice = self.choice
        rule: dict = {
            "keep": 10_000,
            "replay": choice.choice((0, REPLAY)),
            "max_rate": choice.choice((3, 20, 100, 1000)),
        }
        if self.joins:
            rule |= {"join": "delta", "by": "id" if self.by else ""}
        else:
            rule |= {"latest": True}
        await self.bench.change(max_data_bytes=choice.choice((4_000, 5_000, 10_240)))
        await self.bench.keep("chat-", **rule)
        self.replays = rule["replay"] > 0

    async def publish(self) -> None:
        choice, items = self.choice, []
        messages = choice.sample("mno", choice.randint(1, 3))
        filler = "x" * choice.choice((0, 50, 200, 3_000))
        for _ in range(min(choice.choice((1, 3, 30, 80)), REPLAY - len(self.published))):
            number = len(self.published)
            if choice.random() < 0.05:
                name, data = choice.choice((("mark", f"{number} "), ("note", f'{number} {{"delta":"x"}}')))
                self.published.append(None if self.joins else name)
            elif self.joins:
                of = choice.choice(messages)
                name, data = "text", json.dumps({"id": of, "delta": f"{number} ", "filler": filler})
                self.published.append(of if self.by else "")
            else:
                name = choice.choice(messages)
                data = f"{number} {filler}"
                self.published.append(name)
            items.append((CHANNEL, name, data, None))
        await publish_all(self.bench.bus, self.bench.app, items)

    async def join(self) -> None:
        choice = self.choice
        recovers, slow = choice.random() < 0.5, choice.random() < 0.4
        rewinds = choice.random() < 0.5
        reader = Reader(self.bench, self.worker, recovers, slow)
        await reader.connect(**({"rewind": {"count": REPLAY}} if rewinds else {}))
        if not (rewinds or self.replays):
            reader.first = len(self.published)
        self.readers.append(reader)

    async def cut(self) -> None:
        able = [reader for reader in self.readers if reader.recovers]
        if able:
            await self.choice.choice(able).cut()

    async def pause(self) -> None:
        able = [reader for reader in self.readers if reader.slow]
        if able:
            reader = self.choice.choice(able)
            if reader.may_read.is_set():
                reader.may_read.clear()
            else:
                reader.may_read.set()

    async def rest(self) -> None:
        await asyncio.sleep(self.choice.random() / 50)

    async def run(self, steps: int) -> None:
        await self.set_rule()
        await self.join()
        for _ in range(steps):
            step = self.choice.choices(
                (self.publish, self.join, self.cut, self.pause, self.rest, self.set_rule), (10, 2, 2, 3, 2, 0.5)
            )[0]
            await step()
        for reader in self.readers:
            reader.may_read.set()
        await self.bench.publish(CHANNEL, "end", "{}")
        await asyncio.wait_for(asyncio.gather(*(reader.end() for reader in self.readers)), 60)

    def check(self, reader: Reader) -> None:
        numbers = reader.numbers
        assert len(set(numbers)) == len(numbers), "twice"
        if not self.joins:
            # Ascending, and the last of each name.
            assert numbers == sorted(numbers)
            last = {name: number for number, name in enumerate(self.published)}
            assert {n for n in last.values() if n >= reader.first} <= set(numbers)
            return
        first = min([reader.first, *numbers])
        assert sorted(numbers) == list(range(first, len(self.published))), "a gap"
        if reader.recovers:
            assert numbers == sorted(numbers)
            assert reader.offsets == sorted(set(reader.offsets))
        for key in set(self.published):
            own = [n for n in numbers if self.published[n] == key]
            assert own == sorted(own)
        for at, number in enumerate(numbers):
            if self.published[number] is None:
                assert max(numbers[:at], default=-1) < number
                assert min(numbers[at + 1 :], default=len(self.published)) > number


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_client_shows_what_was_published(bench, seed: int):
    worker = await bench.start()
    # Accepted sockets get the same small buffer, so that kernels are full after a few events.
    with socket.socket(fileno=os.dup(worker.start_message.listen_fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    model = Model(bench, worker, seed)
    await model.run(60)
    for reader in model.readers:
        model.check(reader)
    assert worker.flushing.flusher.overruns == 0
    assert worker.statistics.loop_exceptions_total == 0
