"""Events published right after a worker became ready reach its subscribers (Sockudo: 285 of 285 lost)."""

import asyncio

from helpers.server import Server
from helpers.wire import Api, connect_many, connect_patiently, subscribe_all


async def test_first_publish_after_the_ready_line_reaches_subscribers_of_every_worker() -> None:
    with Server(workers=4) as server:
        sockets = await connect_many(server, 24)
        await subscribe_all(sockets, "first")
        async with Api(server) as api:
            await api.publish("first", "word", "{}")
        await asyncio.gather(*(socket.next("word", "first") for socket in sockets))
        await asyncio.gather(*(socket.close() for socket in sockets))


async def test_first_subscriber_of_a_new_worker_misses_nothing(server: Server) -> None:
    """Publishes to the first connection that the replacement of a killed worker accepts."""
    for _ in range(3):
        old = set(server.worker_pids())
        killed = server.kill_worker(0)
        async with Api(server) as api:
            while True:
                socket = await connect_patiently(server)
                if server.worker_of(socket.port) not in old - {killed}:
                    break
                await socket.close()
            await socket.subscribe("newcomer")
            for number in range(50):
                await api.publish("newcomer", "n", str(number))
            await socket.until(lambda: len(socket.all("n")) == 50, what="50 events")  # noqa: B023
            assert [int(one["data"]) for one in socket.all("n")] == list(range(50))
        await socket.close()
