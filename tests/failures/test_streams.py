"""Readers over HTTP lose nothing and get nothing twice while workers and Redis are killed, in each way to read.

The publisher repeats requests that got 503 with the same correlation id, and the app has idempotency on, as in
test_history.py. `pytest --long` kills 20 times.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from click.testing import CliRunner

from failures.publishing import publish_number
from helpers.lengths import amount
from helpers.reading import EVENTS, Reading, Stream, keep, read_token
from helpers.server import Server
from helpers.wire import Api, eventually
from redpoll.cli import main

CHANNEL = "kept-news"
KILLS = amount(3, 20)


@dataclass
class Publisher:
    """Publishes numbers one after the other until it is stopped; each until it is confirmed."""

    server: Server
    confirmed: int = 0
    stopped: bool = False

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while not self.stopped:
                if await publish_number(self.server, session, CHANNEL, self.confirmed):
                    self.confirmed += 1
                # A pace: fewer events than are stored.
                await asyncio.sleep(0.01)


@dataclass
class Client:
    """Reads from its last position on, again after each end. `stored` is what it has got."""

    reading: Reading
    position: str
    seen: list[int] = field(default_factory=list)
    begun: int = 0

    async def run(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, EOFError, asyncio.IncompleteReadError):
                await self.read()
            # As clients do before they connect again.
            await asyncio.sleep(0.02)

    async def read(self) -> None:
        raise NotImplementedError


class Sse(Client):
    async def read(self) -> None:
        async with self._opened(live="sse", offset=self.position) as stream:
            numbers: list[int] = []
            while True:
                event = await stream.next()
                if event.name == "data":
                    numbers += [int(message["data"]) for message in event.json]
                else:
                    # Only now, as the protocol's clients: messages without their position come again.
                    self.position = event.json["streamNextOffset"]
                    self.seen += numbers
                    numbers = []

    @asynccontextmanager
    async def _opened(self, headers=None, **query: str) -> AsyncIterator[Stream]:
        url = f"{self.reading.url}/channels/{CHANNEL}/stream"
        async with self.reading.session.get(
            url, params=query, headers={**self.reading.headers, **(headers or {})}
        ) as response:
            # An EventSource would never come again after a 503.
            assert response.status in ((200,) if headers else (200, 503)), await response.text()
            if response.status == 503:
                raise ConnectionError
            self.begun += 1
            yield Stream(response)


class EventSource(Sse):
    async def read(self) -> None:
        async with self._opened({**EVENTS, "Last-Event-ID": self.position}) as stream:
            while True:
                event = await stream.next()
                self.position = event.id
                self.seen.append(int(event.data))


class LongPoll(Client):
    async def read(self) -> None:
        answer = await self.reading.ask(CHANNEL, live="long-poll", offset=self.position)
        assert answer.status in (200, 204, 503), answer
        if answer.status != 503:
            self.begun += 1
            self.position = answer.next
            self.seen += [int(data) for data in answer.data] if answer.body else []


@pytest.fixture
def storing(own_redis):
    """Two workers; the app keeps 10,000 messages of `kept-…` and has idempotency on."""
    with Server(workers=2, redis_url=own_redis.url) as server:
        keep(server, "kept-", keep=10_000)
        words = ["app", "set", server.app_id, "idempotency=true", "--data-dir", str(server.folder / "data")]
        assert CliRunner().invoke(main, words).exit_code == 0
        yield server


@asynccontextmanager
async def running(*parts: Client | Publisher) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            # What failed by itself: the cause, also where the test has waited in vain for what it didn't do.
            if isinstance(end, Exception):
                raise end


async def test_readers_get_each_message_once_while_workers_and_redis_are_killed(
    storing, own_redis, wait_until: Callable
) -> None:
    server = storing
    async with Reading(server, read_token(server)) as reading:
        position = (await reading.ask(CHANNEL, offset="now")).next
        clients = [kind(reading, position) for kind in (Sse, EventSource, LongPoll)]
        publisher = Publisher(server)
        async with running(publisher, *clients):
            for number in range(KILLS):
                before = publisher.confirmed
                await wait_until(
                    lambda before=before: (
                        publisher.confirmed > before + 10 and all(len(client.seen) > before + 10 for client in clients)
                    ),
                    timeout_s=120,
                )
                if number % 2:
                    own_redis.kill()
                    await asyncio.to_thread(own_redis.start)
                else:
                    await wait_until(lambda: len(server.worker_pids()) == 2)
                    os.kill(server.worker_pids()[number // 2 % 2], signal.SIGKILL)
            before = publisher.confirmed
            await wait_until(lambda: publisher.confirmed > before + 10, timeout_s=120)
            publisher.stopped = True
            await wait_until(lambda: all(len(client.seen) >= publisher.confirmed for client in clients), timeout_s=120)
        for client in clients:
            # The last one may have been published without its confirmation.
            assert client.seen[: publisher.confirmed] == list(range(publisher.confirmed))
            assert len(client.seen) - publisher.confirmed in (0, 1)
            assert client.begun > 1


async def test_reader_that_does_not_read_is_closed_and_others_get_everything(wait_until: Callable) -> None:
    with Server(workers=1) as server, socket.socket() as slow:
        keep(server, "kept-")
        token = read_token(server)
        async with (
            Reading(server, token) as reading,
            Api(server) as api,
            reading.stream(CHANNEL, offset="now") as quick,
        ):
            await quick.next()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            path = f"/apps/{server.app_id}/channels/{CHANNEL}/stream?live=sse&offset=now"
            slow.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
            assert (await asyncio.to_thread(slow.recv, 15)).startswith(b"HTTP/1.1 200 ")
            # More than the kernel takes and max_unsent_bytes together: 10 MB.
            for first in range(0, 1_000, 10):
                data = [f"{number}:{'x' * 10_000}" for number in range(first, first + 10)]
                batch = [{"channel": CHANNEL, "name": "n", "data": text} for text in data]
                assert await api.ask("POST", "/batch_events", {"batch": batch}) == (200, {})
                assert [message["data"] for message in await quick.messages(10)] == data
            await wait_until(lambda: _slow_consumers(server) == 1, timeout_s=60)
            received = await asyncio.to_thread(_all_of, slow)
        # It was cut: the last chunk is missing, and what came is what was sent.
        assert not received.endswith(b"0\r\n\r\n")
        found = [int(number) for number in re.findall(rb'"data":"([0-9]+):x', received)]
        assert found == list(range(len(found)))
        assert len(found) < 1_000


def _slow_consumers(server: Server) -> float:
    return sum(value for (_, labels), value in server.metrics().items() if "reason=slow_consumer" in labels)


def _all_of(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65_536):
            parts.append(data)
    return b"".join(parts)


async def test_readers_of_two_nodes_get_the_same_and_change_places(redis, postgres_url) -> None:
    shared = {"workers": 1, "redis_url": redis.url, "database_url": postgres_url}
    with Server(node_name="one", **shared) as one, Server(node_name="two", **shared) as two:
        keep(one, "kept-")
        token = read_token(one)
        async with Reading(one, token) as at_one, Reading(two, token) as at_two, Api(one) as api, Api(two) as other:
            await api.publish(CHANNEL, "n", "1")
            # The rule and the token reach the other node a moment later.
            await eventually(lambda: _status(at_two), 200)
            async with at_one.stream(CHANNEL, offset="-1") as here, at_two.stream(CHANNEL, offset="-1") as there:
                for number, publisher in enumerate((api, other, api, other), 2):
                    await publisher.publish(CHANNEL, "n", str(number))
                first, second = [[message["data"] for message in await stream.messages(5)] for stream in (here, there)]
                assert first == second == ["1", "2", "3", "4", "5"]
            position = (await at_one.ask(CHANNEL, "HEAD")).next
            await other.publish(CHANNEL, "n", "6", end=True)
            answer = await at_two.ask(CHANNEL, offset=position)
            assert (answer.data, answer.headers["Stream-Closed"]) == (["6"], "true")
            assert (await at_one.ask(CHANNEL, offset=position)).data == ["6"]


async def _status(reading: Reading) -> int:
    return (await reading.ask(CHANNEL, "HEAD")).status
