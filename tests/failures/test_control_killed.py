"""The control plane is killed while back ends publish (deploy/failures.md "Control plane killed").

The long form kills it twenty times at 5,000 publishes a second on 64 connections:

    python -m bench.soak.failures control_killed
"""

import asyncio
import hashlib
import hmac
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import Frame, Socket
from redpoll.cli import main

CHANNEL = "killed"
# One connection repeats what wasn't answered 200, under the same correlation_id; the next one never does. Both have
# idempotency on.
REPEATING = 2


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(workers=1) as running:
        words = ["app", "set", running.app_id, "idempotency=true", "--data-dir", str(running.folder / "data")]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        yield running


class Arrivals(list[Frame]):
    """Counts the published events by number, and stores the other frames."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def append(self, frame: Frame) -> None:
        if frame["event"] == "n":
            self.counts[int(frame["data"])] += 1
        else:
            super().append(frame)


class Publisher(asyncio.Protocol):
    """One keep-alive connection that sends an event every `every_s` seconds, or as soon as the last one is answered.

    `answers`: the last status of each event. `waits`: seconds from each request to its answer. `statuses` counts them.
    """

    def __init__(self, server: Server, first: int, every_s: float, repeats: bool) -> None:
        self.answers: dict[int, int] = {}
        self.waits: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.stopping = False
        self.done = asyncio.get_running_loop().create_future()
        self._server = server
        self._repeats = repeats
        self._number = first
        self._every_s = every_s
        self._due = time.monotonic()
        self._sent_at = 0.0
        self._received = b""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._target = f"/apps/{server.app_id}/events"

    async def start(self) -> None:
        await self._loop.create_connection(lambda: self, "127.0.0.1", self._server.port)
        self._send()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._closed = False

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        if self._sent_at:
            self.done.set_exception(AssertionError(f"closed without an answer to event {self._number}"))
        elif not self.done.done():
            self._loop.create_task(self.start())

    def _send(self) -> None:
        """Signs as the libraries do; `hmac` and `hashlib` are most of this client's cost."""
        server, number = self._server, self._number
        body = b'{"name":"n","channels":["%b"],"data":"%d"' % (CHANNEL.encode(), number)
        body += b',"correlation_id":"%d"}' % number if self._repeats else b"}"
        query = (
            f"auth_key={server.app_key}&auth_timestamp={int(time.time())}&auth_version=1.0"
            f"&body_md5={hashlib.md5(body).hexdigest()}"
        )
        signature = hmac.digest(server.app_secret.encode(), f"POST\n{self._target}\n{query}".encode(), "sha256").hex()
        head = f"POST {self._target}?{query}&auth_signature={signature} HTTP/1.1\r\nHost: h\r\n"
        self._sent_at = time.monotonic()
        self._transport.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        head, found, content = received.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        if not found or len(content) < int(head[at + 16 :].split(b"\r", 1)[0]):
            return
        self._received = b""
        now = time.monotonic()
        self.waits.append(now - self._sent_at)
        self._sent_at = 0.0
        status = int(head[9:12])
        self.statuses[status] += 1
        self.answers[self._number] = status
        if status == 200 or not self._repeats:
            if self.stopping:
                self.done.set_result(None)
                self._transport.close()
                return
            self._number += 1
            self._due += self._every_s
        else:
            # Retry-After is a second; a tenth makes more repetitions.
            self._due = now + 0.1
        self._loop.call_later(max(0.0, self._due - now), self._next)

    def _next(self) -> None:
        if not self._closed:
            self._send()


async def test_each_event_answered_200_arrives_once_whenever_control_is_killed(
    server: Server, size: Callable[[int, int], int], within_s: Callable[[float], float], figures: Any
) -> None:
    kills, connections, rate = size(2, 20), size(16, 64), size(400, 5_000)
    listener = await Socket.connect(server)
    await listener.subscribe(CHANNEL)
    arrivals = Arrivals()
    listener.frames = arrivals
    publishers = [
        Publisher(server, number * 10_000_000, connections / rate, number % REPEATING == 0)
        for number in range(connections)
    ]
    began = time.monotonic()
    await asyncio.gather(*(publisher.start() for publisher in publishers))

    async def answered(count: int) -> None:
        """Until so many more were answered 200."""
        before = sum(publisher.statuses[200] for publisher in publishers)
        async with asyncio.timeout(60):
            while sum(publisher.statuses[200] for publisher in publishers) < before + count:
                await asyncio.sleep(0.01)

    for _ in range(kills):
        await answered(rate // 2)
        os.kill(server.control_pid, signal.SIGKILL)
        # Unanswered by now: at least what was under way.
        await answered(1)
    await answered(rate // 2)
    for publisher in publishers:
        publisher.stopping = True
    async with asyncio.timeout(60):
        await asyncio.gather(*(publisher.done for publisher in publishers))
    lasted_s = time.monotonic() - began
    good = [number for publisher in publishers for number, status in publisher.answers.items() if status == 200]
    # An answer and its event come over different connections to Redis.
    await listener.until(lambda: all(arrivals.counts[number] for number in good), what="every event that was answered")
    await listener.settle()

    statuses: Counter[int] = Counter()
    for publisher in publishers:
        statuses += publisher.statuses
    assert set(statuses) == {200, 503}
    counts = arrivals.counts
    assert [number for number, count in counts.items() if count > 1] == []
    assert [number for number in good if counts[number] != 1] == []
    for publisher in publishers[::REPEATING]:
        assert set(publisher.answers.values()) == {200}
    waits = sorted(wait for publisher in publishers for wait in publisher.waits)
    heading = "Control plane killed"
    figures.note(heading, f"{kills} kills, {connections} connections: publishes answered 200", statuses[200], "")
    figures.note(heading, "publishes answered 200 a second, over all", statuses[200] / lasted_s, "/s")
    figures.note(heading, "answered 503", statuses[503], "")
    figures.note(heading, "of these, delivered all the same", len(counts) - len(good), "")
    figures.note(heading, "longest wait for an answer", waits[-1], "s", "2.5 s")
    figures.note(heading, "wait for an answer, p99", waits[int(len(waits) * 0.99)] * 1000, "ms")
    assert waits[-1] < within_s(2.5)
    await listener.close()
