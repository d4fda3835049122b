"""Redis is killed or hangs: sockets stay, events that were answered 200 arrive, and nothing arrives twice.

See deploy/failures.md "Redis restarts or is away".
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import aiohttp
import pytest

from failures.publishing import ControlPort, Publisher, check, delivery_is_back
from helpers.proxy import Proxy
from helpers.server import Server, rss_bytes
from helpers.wire import Api, Socket, connect_many, eventually, signed_path, subscribe_all

SUBSCRIBERS = 24


@pytest.fixture(scope="module")
def server(redis_of_module) -> Iterator[Server]:
    """Two workers. Each test uses channels of its own, and leaves a Redis that answers."""
    with Server(workers=2, redis_url=redis_of_module.url) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(redis_server) -> Iterator[Proxy]:
    redis_server.flush()
    with Proxy(redis_server.path, splits_replies=True) as running:
        yield running


@pytest.fixture(scope="module")
def behind_proxy(proxy: Proxy) -> Iterator[Server]:
    """One worker, whose Redis is behind `proxy`."""
    with Server(workers=1, redis_url=proxy.url) as running:
        yield running


async def test_redis_killed_and_started_again(
    server,
    redis_of_module,
    size: Callable[[int, int], int],
    within_s: Callable[[float], float],
    figures,
    wait_until: Callable,
) -> None:
    sockets = await connect_many(server, SUBSCRIBERS)
    await subscribe_all(sockets, "through")
    member = await Socket.connect(server)
    await member.subscribe("presence-through", "stays")
    publisher = Publisher(server, "through")
    async with publisher.running():
        await delivery_is_back(publisher, sockets, time.monotonic(), 60)
        for _ in range(size(1, 20)):
            redis_of_module.kill()
            killed_at = time.monotonic()
            # A client that comes while Redis is away waits for its subscription, and gets it.
            sockets[0].send(sockets[0].subscribe_request("asked-meanwhile"))
            # By its pong the worker knows that Redis has closed the connection.
            await member.ping()
            member.send({"event": "client-x", "channel": "presence-through", "data": {}})
            refused = await member.next("pusher:error")
            assert refused["data"]["code"] == 4301
            await asyncio.sleep(size(2, 5) - (time.monotonic() - killed_at))  # How long Redis is away.
            # If the publisher was stopped meanwhile, nothing has met the outage yet.
            await wait_until(lambda: any(one.status == 503 for one in publisher.published))
            # Starting it waits for its first answer, in a thread: the publisher continues.
            await asyncio.to_thread(redis_of_module.start)
            back_s = await delivery_is_back(publisher, sockets, time.monotonic(), within_s(3))
            figures.note("Redis restarts or is away", "Redis killed: delivery back after it is", back_s, "s", "3 s")
            await sockets[0].next("pusher_internal:subscription_succeeded", "asked-meanwhile", within_s(3))
            sockets[0].unsubscribe("asked-meanwhile")
    slowest = max(one.answered_at - one.asked_at for one in publisher.published)
    figures.note("Redis restarts or is away", "Redis killed: slowest answer to a publish", slowest, "s", "2 s")
    assert slowest < within_s(2.2)  # 2 s, and a moment for the answer to travel
    assert any(one.status == 503 for one in publisher.published)
    await check(publisher, sockets)
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
            await delivery_is_back(publisher, sockets, time.monotonic(), 60)
            killed = server.redis_pid
            os.kill(killed, signal.SIGKILL)
            await delivery_is_back(publisher, sockets, time.monotonic(), within_s(5))
            assert server.redis_pid != killed
        await check(publisher, sockets)
        for socket in sockets:
            assert not socket.all("pusher_internal:member_removed")
        await asyncio.gather(*(socket.close() for socket in sockets))


async def test_memory_of_control_is_bounded_while_redis_hangs_and_what_waited_is_not_published_later(
    server, redis_of_module, size: Callable[[int, int], int], figures
) -> None:
    """Large publishes to many channels: without a bound, each would leave 320 kB of commands in the control plane."""
    socket = await Socket.connect(server)
    await socket.subscribe("large")
    channels = ["large", *(f"large-{number}" for number in range(31))]
    body = json.dumps({"name": "e", "channels": channels, "data": "x" * 10_000}).encode()
    before = rss_bytes(server.control_pid)
    answers: Counter[int] = Counter()
    left = iter(range(size(900, 10_000)))
    timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def publish() -> None:
            for _ in left:
                target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
                async with session.post(f"{server.public_url}{target}", data=body) as answer:
                    await answer.read()
                    answers[answer.status] += 1

        redis_of_module.pause()
        try:
            await asyncio.gather(*(publish() for _ in range(300)))
            grown = rss_bytes(server.control_pid) - before
        finally:
            redis_of_module.resume()
    async with Api(server) as api:

        async def published() -> int:
            status, _ = await api.ask("POST", "/events", {"name": "last", "channels": ["large"], "data": ""})
            return status

        await eventually(published, 200)
    await socket.next("last", "large")
    delivered = len(socket.all("e", "large"))
    figures.note("Redis restarts or is away", "Redis stopped: memory of control", grown / 2**20, "MiB", "150 MiB")
    figures.note("Redis restarts or is away", "Redis stopped: published after 503", delivered, f"of {answers[503]}")
    assert answers.keys() == {503}
    assert grown < 150 * 2**20
    assert delivered < answers[503] / 4
    await socket.close()


async def test_redis_that_hangs(
    server, redis_of_module, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    """SIGSTOP: publishes are answered, pings are answered at once, and everything continues after SIGCONT."""
    sockets = await connect_many(server, SUBSCRIBERS)
    await subscribe_all(sockets, "hangs")
    publisher = Publisher(server, "hangs")
    async with publisher.running():
        await delivery_is_back(publisher, sockets, time.monotonic(), 60)
        redis_of_module.pause()
        try:
            pings = []
            until = time.monotonic() + size(4, 60)
            while time.monotonic() < until:
                pings.append(await sockets[len(pings) % len(sockets)].ping())
                await asyncio.sleep(0.02)  # the pace
        finally:
            redis_of_module.resume()
        back_s = await delivery_is_back(publisher, sockets, time.monotonic(), within_s(3))
    slowest = max(one.answered_at - one.asked_at for one in publisher.published)
    figures.note("Redis restarts or is away", "Redis stopped: slowest answer to a publish", slowest, "s", "2 s")
    figures.note("Redis restarts or is away", "Redis stopped: slowest ping", max(pings) * 1000, "ms", "50 ms")
    figures.note("Redis restarts or is away", "Redis stopped: delivery back after SIGCONT", back_s, "s", "3 s")
    assert slowest < within_s(2.2)
    assert max(pings) < within_s(0.05)
    assert any(one.status == 503 for one in publisher.published)
    await check(publisher, sockets)
    await asyncio.gather(*(socket.close() for socket in sockets))


async def test_connection_to_a_redis_that_says_nothing_is_replaced(proxy, behind_proxy, figures) -> None:
    """No RST, no FIN, no answer: each process replaces its connection."""
    server = behind_proxy
    socket = await Socket.connect(server)
    await socket.subscribe("presence-stalled", "member")
    before = len((server.folder / "err").read_text())
    proxy.stall()
    stalled_at = time.monotonic()
    left = {"supervisor", "control", "worker 0"}
    while left:
        assert time.monotonic() < stalled_at + 60, f"still on the old connection: {left}"
        await asyncio.sleep(0.05)
        log = (server.folder / "err").read_text()[before:]
        left = {process for process in left if f" {process} redis connection lost " not in log}
    replaced_s = time.monotonic() - stalled_at
    figures.note("Redis restarts or is away", "Redis silent: connections replaced", replaced_s, "s", "15 s")
    proxy.resume()
    async with Api(server) as api:
        event = {"name": "e", "channels": ["presence-stalled"], "data": ""}
        await eventually(lambda: api.ask("POST", "/events", event), (200, {}))
        await socket.next("e")
        assert await api.users("presence-stalled") == ["member"]
    assert not socket.all("pusher_internal:member_removed")
    await socket.close()


async def test_no_event_is_confirmed_for_the_connection_that_a_worker_had_before(
    proxy, behind_proxy, wait_until
) -> None:
    """The network is cut, and Redis keeps the connections. Control is back before the worker, whose old connection
    still has its subscriptions there."""
    server = behind_proxy
    (worker_pid,) = server.worker_pids()
    socket = await Socket.connect(server)
    await socket.subscribe("orphaned")
    async with Api(ControlPort(server)) as api:
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            connections = proxy.accepted
            proxy.orphan()
            # Control and the supervisor.
            await wait_until(lambda: proxy.accepted >= connections + 2)
            event = {"name": "early", "channels": ["orphaned"], "data": ""}
            assert (await api.ask("POST", "/events", event))[0] == 503
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        event = {"name": "e", "channels": ["orphaned"], "data": ""}
        await eventually(lambda: api.ask("POST", "/events", event), (200, {}))
        await socket.next("e", "orphaned")
    assert not socket.all("early")
    await socket.close()


async def test_worker_that_gets_no_messages_is_named_and_replaces_its_connection(proxy, behind_proxy, figures) -> None:
    """Commands are answered and messages don't arrive: no other check sees that."""
    heading = "Redis restarts or is away"
    server = behind_proxy

    async def named() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{server.control_url}/readyz") as answer:
            return "Redis delivers no messages to worker 0" in await answer.text()

    socket = await Socket.connect(server)
    await socket.subscribe("news")
    proxy.swallow_messages()
    swallowed_at = time.monotonic()
    connections = proxy.accepted
    await eventually(named, True)
    figures.note(heading, "messages swallowed: /readyz says so", time.monotonic() - swallowed_at, "s", "8 s")

    async def replaced() -> bool:
        return proxy.accepted > connections

    await eventually(replaced, True)
    proxy.deliver_messages()
    await eventually(named, False)
    async with Api(server) as api:

        async def delivers() -> bool:
            # The first canary of the new connection arrives before the worker has subscribed to all channels again.
            await api.ask("POST", "/events", {"name": "e", "channels": ["news"], "data": ""})
            return bool(socket.all("e", "news"))

        await eventually(delivers, True)
    await socket.close()
