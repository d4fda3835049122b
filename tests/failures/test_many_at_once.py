"""Mass disconnects, the limit of descriptors, floods, huge channels: other clients are served meanwhile.

See deploy/failures.md "Reconnect storms", "Out of descriptors" and "Hostile input".
"""

import asyncio
import resource
import socket as sockets
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helpers.server import Server, cpu_s, rss_bytes
from helpers.wire import Api, Socket, connect_many, end_all, eventually, frame, subscribe_all, upgrade_request

MIB = 1 << 20


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Server]:
    with Server(workers=1) as running:
        yield running


def percentile_99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1] if len(values) > 1 else values[0]


async def test_all_members_of_a_crowd_reset_at_once(
    server: Server, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    """New clients are accepted while the members of a presence channel are removed."""
    count, room = size(600, 10_000), "presence-crowd"
    crowd = await connect_many(server, count)
    for number, socket in enumerate(crowd):
        socket.send(socket.subscribe_request(room, f"user-{number % 99:02d}"))
    for socket in crowd:
        await socket.next("pusher_internal:subscription_succeeded", room)
    async with Api(server) as api:
        await eventually(lambda: api.subscription_count(room), count)
        assert len(await api.users(room)) == 99
        began = time.monotonic()
        for socket in crowd:
            socket.reset()
        greeted = []
        while await api.users(room):
            assert time.monotonic() < began + within_s(5), "members stayed"
            before = time.monotonic()
            newcomer = await Socket.connect(server)
            greeted.append(time.monotonic() - before)
            await newcomer.close()
        cleaned_s = time.monotonic() - began
        assert await api.subscription_count(room) == 0
    figures.note("Reconnect storms", f"{count} reset: cleaned up", cleaned_s, "s", "5 s")
    if greeted:
        worst = percentile_99(greeted)
        figures.note("Reconnect storms", "a new client greeted meanwhile, p99", worst * 1000, "ms", "100 ms")
        assert worst < within_s(0.1)


async def test_at_the_limit_of_descriptors_new_clients_are_refused_and_others_stay(
    size: Callable[[int, int], int], figures
) -> None:
    """The soft limit is raised to the hard one; near it new clients are refused, and the worker doesn't spin."""
    hard = size(400, 1024)
    with Server(workers=1, files=(128, hard)) as server:
        (worker,) = server.worker_pids()
        assert resource.prlimit(worker, resource.RLIMIT_NOFILE) == (hard, hard)
        held: list[Socket] = []
        # In a row: one that the busy machine refuses early is no sign of the limit.
        refused = 0

        async def come() -> None:
            nonlocal refused
            try:
                socket = await Socket.connect(server, established=False)
                if socket.status == 101:
                    first = await socket.next()
                    if first["event"] == "pusher:connection_established":
                        held.append(socket)
                        refused = 0
                        return
                    assert first["data"]["code"] == 4100
                    assert await socket.until_closed() == 4100
                else:
                    assert socket.status == 503
                refused += 1
            except (ConnectionError, TimeoutError):
                refused += 1

        while refused < 40 and len(held) < hard:
            await come()
        assert hard * 0.5 < len(held) < hard, "clients were refused before the limit, or accepted beyond it"
        used = cpu_s(worker)
        began = time.monotonic()
        async with Api(server, connections=1) as api:
            await subscribe_all(held[:1], "still")
            await api.publish("still", "word", "{}")
            await held[0].next("word", "still")
            assert await api.subscription_count("still") == 1
            status, _ = await api.ask("GET", "/channels")
            assert status == 200
        await asyncio.gather(*(socket.ping() for socket in held))
        # A loop that spins on accept would use the whole of this.
        await asyncio.sleep(1)
        share = (cpu_s(worker) - used) / (time.monotonic() - began)
        figures.note("Out of descriptors", f"limit {hard}: connections held", len(held), "")
        figures.note("Out of descriptors", f"limit {hard}: processor share at the limit", share * 100, "%", "5 %")
        assert share < 0.5
        await asyncio.gather(*(socket.close() for socket in held[: len(held) // 2]))
        held.append(await Socket.connect(server))  # Descriptors are free again.
        await end_all(held)


def flood(server: Server, count: int) -> int:
    """Sends `count` pings as fast as the kernel takes them, reads the answers, and returns how many bytes came back.

    Blocking, to be run in a thread: the test's event loop measures another client meanwhile.
    """
    ping, pong = frame(1, b'{"event":"pusher:ping","data":{}}'), b'{"event":"pusher:pong","data":"{}"}'
    with sockets.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(upgrade_request(server))
        greeting = raw.recv(65_536)
        while b"connection_established" not in greeting:
            greeting += raw.recv(65_536)
        sender = threading.Thread(target=raw.sendall, args=(ping * count,))
        sender.start()
        received = 0
        while received < count * (2 + len(pong)):
            received += len(raw.recv(1 << 18)) or 1 << 62
        sender.join()
        return received


async def test_flood_of_pings_is_answered_and_delays_others_little(
    one_worker: Server, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    """`pusher:ping` as fast as the socket takes it, from a client that reads the answers."""
    count = size(8_000, 100_000)
    server = one_worker
    (worker,) = server.worker_pids()
    other = await Socket.connect(server)
    alone = [await other.ping() for _ in range(200)]
    before = rss_bytes(worker)
    flooding = asyncio.create_task(asyncio.to_thread(flood, server, count))
    beside = []
    while not flooding.done():
        beside.append(await other.ping(within_s(5)))
    assert await flooding == count * 37, "not every ping was answered, or more than that"
    figures.note("Hostile input", "another client's ping, p99, before the flood", percentile_99(alone) * 1000, "ms")
    figures.note("Hostile input", f"the same beside {count} pings at once", percentile_99(beside) * 1000, "ms")
    assert percentile_99(beside) < within_s(0.05)
    assert rss_bytes(worker) - before < 16 * MIB
    await other.close()


async def test_subscriptions_beyond_the_limit_are_refused_one_by_one(server: Server) -> None:
    """Five thousand subscriptions on one socket; a thousand are allowed (protocol/README.md "Limits")."""
    socket = await Socket.connect(server)
    for hundred in range(0, 5000, 100):
        for number in range(hundred, hundred + 100):
            socket.send(socket.subscribe_request(f"many-{number}"))
        # It reads its answers; a client that doesn't is closed as a slow client.
        await socket.ping()
    answers = {"pusher_internal:subscription_succeeded", "pusher:subscription_error"}
    await socket.until(lambda: sum(one["event"] in answers for one in socket.frames) >= 5000, 60, "5,000 answers")
    assert len(socket.all("pusher_internal:subscription_succeeded")) == 1000
    errors = socket.all("pusher:subscription_error")
    assert len(errors) == 4000
    assert all('"LimitReached"' in one["data"] and "413" in one["data"] for one in errors)
    await socket.close()


async def test_eleventh_client_event_of_a_second_is_refused(server: Server) -> None:
    """Ten a second, then 4301 in band, at most one such frame a second; the socket stays."""
    sender, listener = await connect_many(server, 2)
    await subscribe_all([sender, listener], "private-loud")
    began = time.monotonic()
    for number in range(200):
        sender.send({"event": "client-n", "channel": "private-loud", "data": str(number)})
    await sender.settle()
    errors = sender.all("pusher:error")
    # A slow machine takes more than a second to read them.
    seconds = 1 + int(time.monotonic() - began)
    assert 1 <= len(errors) <= 1 + seconds
    assert errors[0]["data"]["code"] == 4301
    await listener.until(lambda: len(listener.all("client-n")) >= 10, what="the ten that are allowed")
    # The bucket of ten fills by ten a second, also within one.
    assert len(listener.all("client-n")) <= 11 + 10 * (time.monotonic() - began)
    await asyncio.gather(sender.close(), listener.close())


async def test_huge_channel_does_not_delay_a_ping(
    one_worker: Server, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    """10 KB to every subscriber of a large channel, and a ping on another connection of that worker."""
    count = size(300, 10_000)
    server = one_worker
    crowd = await connect_many(server, count)
    await subscribe_all(crowd, "fat")
    other = await Socket.connect(server)
    # They don't read meanwhile, because this process must be idle to time a ping. The kernel buffers their data.
    for socket in crowd:
        socket.pause()
    waits = []
    async with Api(server) as api:
        for number in range(3):
            publishing = asyncio.create_task(api.publish("fat", "big", str(number) * 10_000))
            while not publishing.done():
                waits.append(await other.ping())
            # The fan-out continues after the answer.
            for _ in range(20):
                waits.append(await other.ping())
    for socket in crowd:
        socket.resume()
    for socket in crowd:
        await socket.until(lambda: len(socket.all("big")) == 3, 60, "the three events")  # noqa: B023
    figures.note("Slow clients", f"{count} × 10 KB: slowest ping beside it", max(waits) * 1000, "ms", "50 ms")
    assert max(waits) < within_s(0.05)
    await end_all([*crowd, other])
