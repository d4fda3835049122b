"""Publishes at a steady rate while something fails, and compares what was accepted with what clients received.

Not a test.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from helpers.lengths import is_long
from helpers.server import APP_ID, APP_KEY, APP_SECRET, Server
from helpers.wire import Socket, signed_path, was_late


def is_right(status: int, took_s: float, answer: Any) -> bool:
    """Whether a publish that nothing should refuse was answered with 200. In CI, where other work shares the machine,
    it may also be given up."""
    return status == 200 or (not is_long() and was_late(status, took_s, answer))


async def publish_number(server: Server, session: aiohttp.ClientSession, channel: str, number: int) -> bool:
    """Publish a number as `data`. True if it is confirmed; else it may be sent again, because the server compares its
    `correlation_id`."""
    content = {"name": "n", "channels": [channel], "data": str(number), "correlation_id": f"{channel}-{number}"}
    body = json.dumps(content).encode()
    target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(f"{server.public_url}{target}", data=body) as answer:
            await answer.read()
            assert answer.status in (200, 503), await answer.text()
            return answer.status == 200
    return False


@dataclass
class Published:
    number: int
    asked_at: float
    status: int = 0
    answered_at: float = 0.0
    answer: Any = None
    retry_after: str | None = None


@dataclass
class ControlPort:
    """The API of a node on its control port, which no worker answers."""

    server: Server

    def __post_init__(self) -> None:
        self.port = self.server.control_port
        self.app_id, self.app_key, self.app_secret = APP_ID, APP_KEY, APP_SECRET


@dataclass
class Publisher:
    """Publishes a number every 20 ms, without waiting for the previous answer."""

    server: Server
    channel: str
    published: list[Published] = field(default_factory=list)

    async def one(self, session: aiohttp.ClientSession) -> Published:
        record = Published(len(self.published), time.monotonic())
        self.published.append(record)
        content = {"name": "n", "channels": [self.channel], "data": str(record.number)}
        body = json.dumps(content).encode()
        target = signed_path(self.server, "POST", f"/apps/{self.server.app_id}/events", body)
        async with session.post(f"{self.server.public_url}{target}", data=body) as answer:
            record.answer = json.loads(await answer.text())
            record.status, record.retry_after = answer.status, answer.headers.get("Retry-After")
            record.answered_at = time.monotonic()
        return record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks: list[asyncio.Task[Published]] = []

            async def go_on() -> None:
                while True:
                    tasks.append(asyncio.create_task(self.one(session)))
                    await asyncio.sleep(0.02)  # the pace, not a wait

            pace = asyncio.create_task(go_on())
            try:
                yield
            finally:
                pace.cancel()
                await asyncio.gather(*tasks)

    def accepted(self) -> list[int]:
        return [one.number for one in self.published if one.status == 200]


def numbers(socket: Socket) -> list[int]:
    return [int(one["data"]) for one in socket.all("n")]


async def delivery_is_back(publisher: Publisher, sockets: list[Socket], since: float, limit_s: float) -> float:
    """Seconds from `since` until an event that was published later has reached every subscriber."""
    while True:
        reached = set.intersection(*(set(numbers(socket)[-50:]) for socket in sockets))
        if any(publisher.published[number].asked_at > since for number in reached):
            return time.monotonic() - since
        assert time.monotonic() < since + limit_s, "delivery did not come back"
        await asyncio.sleep(0.01)


async def check(publisher: Publisher, sockets: list[Socket]) -> None:
    """Call it when the publisher has ended. The last events may still be under way."""
    accepted = set(publisher.accepted())
    for one in publisher.published:
        assert one.status in (200, 503), one
        assert one.status == 200 or one.retry_after, one
    for socket in sockets:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await socket.until(lambda: accepted <= set(numbers(socket)))  # noqa: B023
        assert not socket.lost, "a client connection was dropped"
        seen = numbers(socket)
        twice = [number for number, times in Counter(seen).items() if times > 1]
        assert not twice, f"delivered twice: {twice}"
        lost = sorted(accepted - set(seen))
        assert not lost, f"answered 200 and lost: {[publisher.published[number] for number in lost]}"
