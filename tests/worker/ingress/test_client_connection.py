"""One client's connection: messages reach the session, and a fault affects only the connection that caused it."""

import asyncio

import pytest
import websockets

from helpers.bus_publishing import publish_all


async def test_a_ping_of_the_protocol_is_answered(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.send("pusher:ping")
    assert await client.next() == {"event": "pusher:pong", "data": "{}"}


async def test_a_binary_message_is_answered_like_bad_json(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.socket.send(b"\x00\x01")
    frame = await client.next()
    assert frame["event"] == "pusher:error"
    assert frame["data"]["code"] is None
    await client.nothing_more()


@pytest.mark.parametrize("message", ["not json", "[]", "1", '"x"', "null", "{}", '{"event":1}', "[" * 60_000])
async def test_a_message_of_the_wrong_shape_leaves_the_socket_open(bench, message):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.socket.send(message)
    frame = await client.next()
    assert frame["event"] == "pusher:error"
    assert frame["data"]["code"] is None
    await client.nothing_more()


async def test_a_message_beyond_the_limit_is_closed_with_1009(bench):
    worker = await bench.start(max_message_bytes=1024)
    client = await bench.client(worker)
    await client.socket.send("x" * 2000)
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await client.socket.recv()
    assert closed.value.rcvd.code == 1009


async def test_an_exception_closes_only_its_connection_and_is_counted(bench, monkeypatch):
    """An exception in a callback from the engine is neither swallowed nor shared."""
    worker = await bench.start()
    victim, witness = await bench.client(worker), await bench.client(worker)
    session = next(c.session for c in worker.hub.open_connections if c.session.socket_id == victim.socket_id)

    def fail(message, now):
        raise RuntimeError("injected")

    class Faulty(type(session)):
        __slots__ = ()
        receive = staticmethod(fail)

    session.__class__ = Faulty
    await victim.send("pusher:ping")
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await victim.socket.recv()
    assert closed.value.rcvd.code == 1011
    await bench.settled(worker, lambda: worker.statistics.loop_exceptions_total == 1)
    await witness.nothing_more()


async def test_a_client_that_does_not_read_is_closed_and_its_frames_are_freed(bench):
    """The limit of unsent bytes (deploy/failures.md "Slow clients"): 1 MiB by default, 64 KiB here."""
    worker = await bench.start(max_unsent_bytes=65_536)
    reading, stalled = await bench.client(worker), await bench.client(worker)
    await reading.subscribe("news")
    await stalled.subscribe("news")
    stalled.socket.transport.pause_reading()
    payload = "x" * 10_000
    sent = 0
    while worker.flushing.flusher.overruns == 0:
        await publish_all(bench.bus, bench.app, [("news", "n", payload, None)] * 10)
        sent += 10
        assert sent < 5_000, "never closed"
        for _ in range(10):
            await reading.until("n")
    await bench.settled(worker, lambda: len(worker.hub.open_connections) == 1)
    assert sum(connection.unsent_bytes for connection in worker.hub.open_connections) == 0
    await reading.nothing_more()
    stalled.socket.transport.resume_reading()
    await asyncio.wait_for(stalled.socket.wait_closed(), 60)
    assert stalled.socket.close_code == 4100
