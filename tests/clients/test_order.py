"""Every subscriber on four workers gets all events in order."""

import asyncio

from helpers.server import Server
from helpers.wire import Api, Socket, connect_many, subscribe_all

# The kernel picks the worker: one of four gets none of 64 connections with a probability of 4e-8.
SUBSCRIBERS = 64


def numbers(socket: Socket, event: str) -> list[int]:
    return [int(one["data"]) for one in socket.all(event)]


async def subscribed_on_all_workers(server: Server, channel: str) -> list[Socket]:
    sockets = await connect_many(server, SUBSCRIBERS)
    ports = {socket.port for socket in sockets}
    holders = [pid for pid, held in server.client_ports().items() if held & ports]
    assert len(holders) == server.workers, "64 connections and a worker without one: the kernel does not spread"
    await subscribe_all(sockets, channel)
    return sockets


async def close_all(sockets: list[Socket]) -> None:
    await asyncio.gather(*(socket.close() for socket in sockets))


async def test_requests_one_after_another_arrive_in_order(server: Server) -> None:
    sockets = await subscribed_on_all_workers(server, "in-turn")
    async with Api(server) as api:
        for number in range(200):
            await api.publish("in-turn", "n", str(number))
    for socket in sockets:
        await socket.until(lambda: len(socket.all("n")) >= 200, what="200 events")  # noqa: B023
        assert numbers(socket, "n") == list(range(200))
    await close_all(sockets)


async def test_events_of_a_batch_arrive_in_order(server: Server) -> None:
    """Ten batches of ten under way at once: whole batches may pass each other, their events may not."""
    sockets = await subscribed_on_all_workers(server, "batched")

    async def send(api: Api, first: int) -> None:
        items = [{"channel": "batched", "name": "n", "data": str(first + place)} for place in range(10)]
        assert (await api.ask("POST", "/batch_events", {"batch": items}))[0] == 200

    async with Api(server) as api:
        for hundred in range(0, 1000, 100):
            await asyncio.gather(*(send(api, hundred + ten) for ten in range(0, 100, 10)))
    for socket in sockets:
        await socket.until(lambda: len(socket.all("n")) >= 1000, what="1,000 events")  # noqa: B023
        seen = numbers(socket, "n")
        assert sorted(seen) == list(range(1000))
        for start in range(0, 1000, 10):
            batch = [number for number in seen if start <= number < start + 10]
            assert batch == list(range(start, start + 10))
        hundreds = [number // 100 for number in seen]
        assert hundreds == sorted(hundreds), "a request overtook one that was answered before it was sent"
    await close_all(sockets)


async def test_every_subscriber_sees_one_channel_in_the_same_order(server: Server) -> None:
    """Publishers race each other; Redis decides once, for all workers and sockets alike."""
    sockets = await subscribed_on_all_workers(server, "same-order")
    async with Api(server) as api:
        await asyncio.gather(*(api.publish("same-order", "n", str(number)) for number in range(300)))
    for socket in sockets:
        await socket.until(lambda: len(socket.all("n")) >= 300, what="300 events")  # noqa: B023
    first = numbers(sockets[0], "n")
    assert sorted(first) == list(range(300))
    for socket in sockets:
        assert numbers(socket, "n") == first
    await close_all(sockets)


async def test_client_events_of_one_sender_arrive_in_order(server: Server) -> None:
    sender, *others = await connect_many(server, 12)
    await subscribe_all([sender, *others], "private-turns")
    for number in range(10):  # the burst that a connection is allowed
        sender.send({"event": "client-n", "channel": "private-turns", "data": str(number)})
    for socket in others:
        await socket.until(lambda: len(socket.all("client-n")) >= 10, what="10 client events")  # noqa: B023
        assert numbers(socket, "client-n") == list(range(10))
    await sender.settle()
    assert not sender.all("client-n")
    await close_all([sender, *others])
