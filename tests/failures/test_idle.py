"""A silent client is pinged and closed; one that sends anything stays connected (deploy/failures.md "Slow clients")."""

import time
from collections.abc import Callable, Iterator

import pytest

from helpers.server import Server
from helpers.wire import Api, Socket, eventually, frame

ACTIVITY_TIMEOUT_S, PONG_TIMEOUT_S = 1, 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Pings after a second instead of 120. Clients that live have the usual 30 s for their answer, because the test
    itself may be stopped for some seconds."""
    with Server(workers=1, activity_timeout_s=ACTIVITY_TIMEOUT_S) as running:
        yield running


async def test_client_that_never_answers_a_ping_is_closed_with_4201() -> None:
    with Server(workers=1, activity_timeout_s=ACTIVITY_TIMEOUT_S, pong_timeout_s=PONG_TIMEOUT_S) as impatient:
        await _is_closed(impatient)


async def _is_closed(server: Server) -> None:
    began = time.monotonic()
    dead = await Socket.connect(server)
    await dead.subscribe("presence-dead", "dead")
    assert await dead.until_closed() == 4201
    assert time.monotonic() - began >= 0.8 * (ACTIVITY_TIMEOUT_S + PONG_TIMEOUT_S)
    assert dead.all("pusher:ping") or any(opcode == 9 for opcode, _ in dead.control), "closed without a ping"
    async with Api(server) as api:
        await eventually(lambda: api.users("presence-dead"), [])


async def is_kept(server: Server, answer: Callable[[Socket], None]) -> None:
    """The server pings a silent client once, and again only after a sign of life."""
    socket = await Socket.connect(server)
    for number in range(1, 5):
        await socket.until(lambda: len(socket.all("pusher:ping")) == number, 60, "a ping")  # noqa: B023
        answer(socket)
    await socket.ping()
    assert not socket.lost
    await socket.close()


async def test_client_that_answers_pings_is_kept(server: Server) -> None:
    await is_kept(server, lambda socket: socket.send({"event": "pusher:pong", "data": {}}))


async def test_any_received_byte_counts_as_life(server: Server) -> None:
    """An unsolicited WebSocket pong counts like a message (protocol/README.md "Connecting")."""
    await is_kept(server, lambda socket: socket.write(frame(10, b"")))


async def test_greeting_names_the_activity_timeout_in_force(server: Server) -> None:
    socket = await Socket.connect(server)
    assert f'"activity_timeout":{ACTIVITY_TIMEOUT_S}' in socket.frames[0]["data"].replace(" ", "")
    await socket.close()
