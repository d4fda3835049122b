"""Redis is killed or hangs: sockets stay, events that were answered 200 arrive, and nothing arrives twice.

See deploy/failures.md "Redis restarts or is away".
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from proxy import Proxy
from server import Server
from wire import Api, Socket, connect_many, eventually, signed_path, subscribe_all

SUBSCRIBERS = 24


@dataclass
class Published:
    number: int
    asked_at: float
    status: int = 0
    answered_at: float = 0.0
    retry_after: str | None = None


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
            await answer.read()
            record.status, record.retry_after = answer.status, answer.headers.get("Retry-After")
            record.answered_at = time.monotonic()
        return record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=30)
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


def check(publisher: Publisher, sockets: list[Socket]) -> None:
    accepted = set(publisher.accepted())
    for one in publisher.published:
        assert one.status in (200, 503), one
        assert one.status == 200 or one.retry_after, one
    for socket in sockets:
        assert not socket.lost, "a client connection was dropped"
        seen = numbers(socket)
        twice = [number for number, times in Counter(seen).items() if times > 1]
        assert not twice, f"delivered twice: {twice}"
        lost = sorted(accepted - set(seen))
        assert not lost, f"answered 200 and lost: {[publisher.published[number] for number in lost]}"


async def test_redis_killed_and_started_again(
    own_redis, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    with Server(workers=2, redis_url=own_redis.url) as server:
        sockets = await connect_many(server, SUBSCRIBERS)
        await subscribe_all(sockets, "through")
        member = await Socket.connect(server)
        await member.subscribe("presence-through", "stays")
        publisher = Publisher(server, "through")
        async with publisher.running():
            await delivery_is_back(publisher, sockets, time.monotonic(), 10)
            for _ in range(size(1, 20)):
                own_redis.kill()
                killed_at = time.monotonic()
                # A client that comes while Redis is away waits for its subscription, and gets it.
                sockets[0].send(sockets[0].subscribe_request("asked-meanwhile"))
                member.send({"event": "client-x", "channel": "presence-through", "data": {}})
                refused = await member.next("pusher:error")
                assert refused["data"]["code"] == 4301
                await asyncio.sleep(size(2, 5) - (time.monotonic() - killed_at))  # How long Redis is away.
                # Starting it waits for its first answer, in a thread: the publisher continues.
                await asyncio.to_thread(own_redis.start)
                back_s = await delivery_is_back(publisher, sockets, time.monotonic(), within_s(3))
                figures.note("Redis restarts or is away", "Redis killed: delivery back after it is", back_s, "s", "3 s")
                await sockets[0].next("pusher_internal:subscription_succeeded", "asked-meanwhile", within_s(3))
                sockets[0].unsubscribe("asked-meanwhile")
        slowest = max(one.answered_at - one.asked_at for one in publisher.published)
        figures.note("Redis restarts or is away", "Redis killed: slowest answer to a publish", slowest, "s", "2 s")
        assert slowest < within_s(2.2)  # 2 s, and a moment for the answer to travel
        assert any(one.status == 503 for one in publisher.published)
        last = max(publisher.accepted())
        for socket in sockets:
            await socket.until(lambda: last in numbers(socket)[-200:], what="the last event")  # noqa: B023
        check(publisher, sockets)
        await member.settle()
        assert not member.all("pusher_internal:member_removed")
        await asyncio.gather(*(socket.close() for socket in [*sockets, member]))


async def test_embedded_redis_is_started_again_with_its_data(
    within_s: Callable[[float], float],
) -> None:
    with Server(workers=2) as server:
        sockets = await connect_many(server, 8)
        await subscribe_all(sockets, "embedded")
        for number, socket in enumerate(sockets):
            await socket.subscribe("presence-embedded", f"user-{number}")
        publisher = Publisher(server, "embedded")
        async with publisher.running():
            await delivery_is_back(publisher, sockets, time.monotonic(), 10)
            killed = server.redis_pid
            os.kill(killed, signal.SIGKILL)
            await delivery_is_back(publisher, sockets, time.monotonic(), within_s(5))
            assert server.redis_pid != killed
        last = max(publisher.accepted())
        for socket in sockets:
            await socket.until(lambda: last in numbers(socket)[-200:], what="the last event")  # noqa: B023
        check(publisher, sockets)
        for socket in sockets:
            assert not socket.all("pusher_internal:member_removed")
        await asyncio.gather(*(socket.close() for socket in sockets))


async def test_redis_that_hangs(
    own_redis, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    """SIGSTOP: publishes are answered, pings are answered at once, and everything continues after SIGCONT."""
    with Server(workers=2, redis_url=own_redis.url) as server:
        sockets = await connect_many(server, SUBSCRIBERS)
        await subscribe_all(sockets, "hangs")
        publisher = Publisher(server, "hangs")
        async with publisher.running():
            await delivery_is_back(publisher, sockets, time.monotonic(), 10)
            own_redis.pause()
            try:
                pings = []
                until = time.monotonic() + size(4, 60)
                while time.monotonic() < until:
                    pings.append(await sockets[len(pings) % len(sockets)].ping())
                    await asyncio.sleep(0.02)  # the pace
            finally:
                own_redis.resume()
            back_s = await delivery_is_back(publisher, sockets, time.monotonic(), within_s(3))
        slowest = max(one.answered_at - one.asked_at for one in publisher.published)
        figures.note("Redis restarts or is away", "Redis stopped: slowest answer to a publish", slowest, "s", "2 s")
        figures.note("Redis restarts or is away", "Redis stopped: slowest ping", max(pings) * 1000, "ms", "50 ms")
        figures.note("Redis restarts or is away", "Redis stopped: delivery back after SIGCONT", back_s, "s", "3 s")
        assert slowest < within_s(2.2)
        assert max(pings) < within_s(0.05)
        assert any(one.status == 503 for one in publisher.published)
        last = max(publisher.accepted())
        for socket in sockets:
            await socket.until(lambda: last in numbers(socket)[-200:], what="the last event")  # noqa: B023
        check(publisher, sockets)
        await asyncio.gather(*(socket.close() for socket in sockets))


async def test_connection_to_a_redis_that_says_nothing_is_replaced(redis, figures) -> None:
    """No RST, no FIN, no answer: the worker replaces the connection."""
    with Proxy(redis.path) as proxy, Server(workers=1, redis_url=proxy.url) as server:
        socket = await Socket.connect(server)
        await socket.subscribe("presence-stalled", "member")
        connections = proxy.accepted
        proxy.stall()
        stalled_at = time.monotonic()
        while proxy.accepted < connections + 2:  # The worker's connection and control's.
            assert time.monotonic() < stalled_at + 30, "still on the old connections"
            await asyncio.sleep(0.05)
        replaced_s = time.monotonic() - stalled_at
        figures.note("Redis restarts or is away", "Redis silent: both connections replaced", replaced_s, "s", "15 s")
        proxy.resume()
        async with Api(server) as api:
            event = {"name": "e", "channels": ["presence-stalled"], "data": ""}
            await eventually(lambda: api.ask("POST", "/events", event), (200, {}))
            await socket.next("e")
            assert await api.users("presence-stalled") == ["member"]
        assert not socket.all("pusher_internal:member_removed")
        await socket.close()
