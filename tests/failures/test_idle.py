"""A silent client is pinged and closed; one that sends anything stays connected (deploy/failures.md "Slow clients")."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from helpers.server import Server
from helpers.wire import Api, Socket, frame

# The test itself may be stopped for a second before it answers a ping.
ACTIVITY_TIMEOUT_S, PONG_TIMEOUT_S = 1, 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Time-outs of a few seconds instead of 120 and 30."""
    with Server(workers=1, activity_timeout_s=ACTIVITY_TIMEOUT_S, pong_timeout_s=PONG_TIMEOUT_S) as running:
        yield running


async def test_client_that_never_answers_a_ping_is_closed_with_4201(server: Server) -> None:
    # It must not come too late to see the other one leave.
    watcher = await Socket.connect(server)
    keeping = asyncio.create_task(keep_alive(watcher))
    await watcher.subscribe("presence-dead", "watcher")
    began = time.monotonic()
    dead = await Socket.connect(server)
    await dead.subscribe("presence-dead", "dead")
    assert await dead.until_closed() == 4201
    assert time.monotonic() - began >= 0.8 * (ACTIVITY_TIMEOUT_S + PONG_TIMEOUT_S)
    assert dead.all("pusher:ping") or any(opcode == 9 for opcode, _ in dead.control), "closed without a ping"
    await watcher.next("pusher_internal:member_removed", "presence-dead")
    async with Api(server) as api:
        assert await api.users("presence-dead") == ["watcher"]
    keeping.cancel()
    await watcher.close()


async def keep_alive(socket: Socket) -> None:
    """Answers the server's pings and sends nothing else."""
    answered = 0
    while True:
        pings = len(socket.all("pusher:ping"))
        for _ in range(pings - answered):
            socket.send({"event": "pusher:pong", "data": {}})
        answered = pings
        await asyncio.sleep(0.02)


async def test_client_that_answers_pings_is_kept(server: Server) -> None:
    socket = await Socket.connect(server)
    keeping = asyncio.create_task(keep_alive(socket))
    await socket.until(lambda: len(socket.all("pusher:ping")) >= 4, 60, "four pings")
    assert not socket.lost
    keeping.cancel()
    await socket.close()


async def test_any_received_byte_counts_as_life(server: Server) -> None:
    """An unsolicited WebSocket pong counts like a message (protocol/README.md "Connecting")."""
    socket = await Socket.connect(server)
    until = time.monotonic() + 1.6 * (ACTIVITY_TIMEOUT_S + PONG_TIMEOUT_S)
    while time.monotonic() < until:
        socket.write(frame(10, b""))
        await asyncio.sleep(0.2)
        assert not socket.lost
    await socket.close()


async def test_greeting_names_the_activity_timeout_in_force(server: Server) -> None:
    socket = await Socket.connect(server)
    assert f'"activity_timeout":{ACTIVITY_TIMEOUT_S}' in socket.frames[0]["data"].replace(" ", "")
    await socket.close()
