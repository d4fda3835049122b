"""Channels with history lose nothing when a client is cut and recovers, Redis restarts, or a process is killed.

The publisher repeats requests that got 503 with the same correlation id, and the app has idempotency on
(protocol/README.md "Idempotency").
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from click.testing import CliRunner

from failures.publishing import publish_number
from helpers.server import Server
from helpers.wire import Socket, UpgradeRefused
from redpoll.cli import main

CHANNEL = "stored-news"
# How long a back end and a client wait before they try again.
PAUSE_S = 0.02


def command(server: Server, *words: str) -> None:
    result = CliRunner().invoke(main, [*words, "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output


@contextmanager
def keeping(server: Server) -> Iterator[Server]:
    """A server whose app stores the messages of `stored-…` and has idempotency on."""
    with server:
        command(server, "app", "set", server.app_id, "idempotency=true")
        rule = ("--prefix", "stored-", "--keep", "10000", "--seconds", "3600")
        command(server, "history", "rule", "add", server.app_id, *rule)
        yield server


@dataclass
class Publisher:
    """Publishes numbers one after another on one keep-alive connection, as fast as answers come."""

    server: Server
    channel: str
    count: int
    accepted: int = 0
    repeated: int = 0

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), timeout=timeout) as session:
            while self.accepted < self.count:
                if await publish_number(self.server, session, self.channel, self.accepted):
                    self.accepted += 1
                else:
                    self.repeated += 1
                    await asyncio.sleep(PAUSE_S)


@dataclass
class Reader:
    """A client that recovers: it continues from the position of the last message it received."""

    server: Server
    channel: str
    seen: list[int] = field(default_factory=list)
    epoch: str = ""
    offset: int = 0
    connects: int = 0
    socket: Socket | None = None

    async def run(self) -> None:
        while True:
            try:
                await self._read()
            except (ConnectionError, UpgradeRefused, OSError):
                await asyncio.sleep(PAUSE_S)

    async def _read(self) -> None:
        socket = await Socket.connect(self.server, query="protocol=7&recover=1")
        try:
            request = socket.subscribe_request(self.channel)
            if self.epoch:
                request["data"]["since"] = {"epoch": self.epoch, "offset": self.offset}
            socket.send(request)
            success = await socket.next("pusher_internal:subscription_succeeded", self.channel, timeout_s=60)
            place = json.loads(success["data"])
            assert place.get("recovered", True) is True, place
            self.epoch, self.offset = place["epoch"], place["offset"]
            self.connects += 1
            self.socket = socket
            while True:
                frame = await socket.next("n", self.channel, timeout_s=600)
                self.seen.append(int(frame["data"]))
                self.offset = frame["offset"]
        finally:
            self.socket = None
            socket.abort()

    def cut(self) -> None:
        """Breaks the connection, if there is one."""
        if self.socket is not None:
            self.socket.abort()


@asynccontextmanager
async def running(work: Reader | Publisher) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def cut_at_random(reader: Reader, publisher: Publisher, times: int, wait_until: Callable) -> None:
    """Cuts the client, spread over the whole time of publishing."""
    for at in sorted(random.sample(range(publisher.count), times)):
        await wait_until(lambda at=at: publisher.accepted >= at, timeout_s=120)
        before = reader.connects
        reader.cut()
        # Cut again only after it is back, so that each cut counts.
        await wait_until(lambda before=before: reader.connects > before, timeout_s=60)


async def everything_arrives(publisher: Publisher, reader: Reader, wait_until: Callable) -> None:
    await wait_until(lambda: len(reader.seen) >= publisher.count, timeout_s=60, what="every message")
    assert reader.seen == list(range(publisher.count))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers on an embedded Redis. Each test uses a channel of its own."""
    with keeping(Server(workers=2)) as running:
        yield running


async def test_a_client_that_is_cut_gets_every_message_once_and_in_order(
    server: Server, size: Callable[[int, int], int], wait_until: Callable
) -> None:
    channel = f"{CHANNEL}-cut"
    reader, publisher = Reader(server, channel), Publisher(server, channel, size(600, 10_000))
    async with running(reader):
        await wait_until(lambda: reader.connects)
        async with running(publisher):
            await cut_at_random(reader, publisher, 20, wait_until)
            await everything_arrives(publisher, reader, wait_until)


async def test_no_message_is_lost_while_redis_is_killed_and_started_again(
    own_redis, size: Callable[[int, int], int], wait_until: Callable
) -> None:
    with keeping(Server(workers=2, redis_url=own_redis.url)) as server:
        reader, steady = Reader(server, CHANNEL), Reader(server, CHANNEL)
        publisher = Publisher(server, CHANNEL, size(400, 10_000))
        async with running(reader), running(steady):
            await wait_until(lambda: reader.connects and steady.connects)
            async with running(publisher):
                cutting = asyncio.create_task(cut_at_random(reader, publisher, size(4, 20), wait_until))
                for at, away_s in ((0.3, 0.0), (0.6, 2.5)):
                    await wait_until(lambda at=at: publisher.accepted > publisher.count * at, timeout_s=120)
                    own_redis.kill()
                    await asyncio.sleep(away_s)  # How long Redis is away. In the longer outage requests get 503.
                    if away_s:
                        await wait_until(lambda: publisher.repeated)
                    await asyncio.to_thread(own_redis.start)
                await cutting
                await everything_arrives(publisher, reader, wait_until)
                # This client was never cut: its worker fills the gap from the stream.
                await everything_arrives(publisher, steady, wait_until)
        assert steady.connects == 1
        assert publisher.repeated, "no request met the outage"


@pytest.mark.parametrize("victim", ["worker", "control"])
async def test_no_message_is_lost_while_a_process_is_killed(
    server: Server, victim: str, size: Callable[[int, int], int], wait_until: Callable
) -> None:
    channel = f"{CHANNEL}-{victim}"
    await wait_until(lambda: len(server.worker_pids()) == 2)
    readers = [Reader(server, channel) for _ in range(4)]
    publisher = Publisher(server, channel, size(400, 10_000))
    async with contextlib.AsyncExitStack() as stack:
        for reader in readers:
            await stack.enter_async_context(running(reader))
        await wait_until(lambda: all(reader.connects for reader in readers))
        await stack.enter_async_context(running(publisher))
        for number in range(2):
            await wait_until(
                lambda number=number: publisher.accepted > publisher.count * (number + 1) / 3, timeout_s=120
            )
            await wait_until(lambda: len(server.worker_pids()) == 2)
            pid = server.worker_pids()[number] if victim == "worker" else server.control_pid
            os.kill(pid, signal.SIGKILL)
        for reader in readers:
            await everything_arrives(publisher, reader, wait_until)
