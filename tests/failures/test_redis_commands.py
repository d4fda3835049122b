"""The number of Redis commands of a connect and a subscribe, counted at a proxy."""

import asyncio
from collections.abc import Callable

import pytest

from helpers.lengths import amount
from helpers.proxy import Proxy
from helpers.server import Server
from helpers.wire import Api, Socket, connect_many, eventually


def concerning_clients(commands: list[list[bytes]]) -> list[list[bytes]]:
    """Leaves out periodic commands: a worker's heartbeat, statistics and canaries, and the control plane's look into
    the outboxes every 100 ms."""
    return [command for command in commands if not any(map(_is_periodic, command)) and not _drains(command)]


def _is_periodic(word: bytes) -> bool:
    return b":beat" in word or b":stats:" in word or b":canary:" in word


def _drains(command: list[bytes]) -> bool:
    """The drain script: only its keys are clock, outbox and leaves of a shard."""
    return command[0] == b"EVALSHA" and command[2] == b"3" and command[5].endswith(b":left")


async def commands_for(server: Server, proxy: Proxy, sockets: list[Socket], channel: Callable[[int], str]) -> float:
    proxy.note_commands()
    for number, socket in enumerate(sockets):
        await socket.subscribe(channel(number), f"user-{number}")
    return len(concerning_clients(list(proxy.commands))) / len(sockets)


@pytest.mark.parametrize("workers", amount([1, 3], [1, 2, 4]))
async def test_commands_per_connection_and_subscription(
    redis, workers: int, size: Callable[[int, int], int], figures
) -> None:
    with Proxy(redis.path) as proxy, Server(workers=workers, redis_url=proxy.url) as server:
        count = size(40, 100)
        proxy.note_commands()
        sockets = await connect_many(server, count)
        connecting = len(concerning_clients(list(proxy.commands))) / count
        public = await commands_for(server, proxy, sockets, lambda _: "public")
        fresh = await commands_for(server, proxy, sockets, lambda number: f"own-{number}")
        presence = await commands_for(server, proxy, sockets, lambda _: "presence-room")
        counts = {"connect": connecting, "public": public, "new channel": fresh, "presence": presence}
        for what, commands in counts.items():
            figures.note("Redis restarts or is away", f"Redis commands, {workers} workers, {what}", commands, "", "≤ 4")
        assert connecting + max(public, fresh, presence) <= 4
        await asyncio.gather(*(socket.close() for socket in sockets))


async def test_a_worker_cut_off_from_redis_for_a_moment_loses_no_client(redis) -> None:
    """Only the connections are cut: the worker subscribes again and writes what it holds to Redis again."""
    with Proxy(redis.path) as proxy, Server(workers=2, redis_url=proxy.url) as server:
        sockets = await connect_many(server, 10)
        for number, socket in enumerate(sockets):
            await socket.subscribe("presence-cut", f"user-{number}")
        proxy.cut()
        async with Api(server) as api:
            event = {"name": "e", "channels": ["presence-cut"], "data": ""}
            await eventually(lambda: api.ask("POST", "/events", event), (200, {}))
            for socket in sockets:
                await socket.next("e", "presence-cut")
            assert await api.users("presence-cut") == sorted(f"user-{number}" for number in range(10))
            assert await api.subscription_count("presence-cut") == 10
        for socket in sockets:
            assert not socket.all("pusher_internal:member_removed")
        await asyncio.gather(*(socket.close() for socket in sockets))
