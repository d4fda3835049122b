"""WebSocket and HTTP on the one public port, as proxies and keep-alive clients use it."""

import asyncio
import json

from helpers.server import Server
from helpers.wire import TEXT, Api, Socket, connect_many, frame, signed_path, subscribe_all, upgrade_request


class Wire:
    """One TCP connection to the public port, on which a test speaks HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: Server) -> "Wire":
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)).decode("latin-1")
        length = next(
            (int(line.partition(":")[2]) for line in head.split("\r\n") if line.lower().startswith("content-length:")),
            0,
        )
        return int(head.split(" ", 2)[1]), await asyncio.wait_for(self.reader.readexactly(length), 60)


def publish_request(server: Server, channel: str, name: str, data: str = "") -> bytes:
    body = json.dumps({"name": name, "channels": [channel], "data": data}).encode()
    target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    return f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_one_connection_carries_many_requests(server: Server) -> None:
    (listener,) = await connect_many(server, 1)
    await listener.subscribe("kept-alive")
    wire = await Wire.open(server)
    for number in range(50):
        wire.writer.write(publish_request(server, "kept-alive", "n", str(number)))
        assert await wire.answer() == (200, b"{}")
    await listener.until(lambda: len(listener.all("n")) == 50, what="50 events")
    assert [int(one["data"]) for one in listener.all("n")] == list(range(50))
    wire.writer.close()
    await listener.close()


async def test_requests_sent_without_waiting_are_answered_in_turn(server: Server) -> None:
    wire = await Wire.open(server)
    health = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    wire.writer.write(health + publish_request(server, "pipelined", "e") + health)
    assert (await wire.answer())[0] == 200
    assert await wire.answer() == (200, b"{}")
    assert (await wire.answer())[0] == 200
    wire.writer.close()


async def test_upgrade_on_a_connection_that_carried_requests_becomes_a_websocket(server: Server) -> None:
    """As from a proxy that reuses connections: the control plane hands the connection back to a worker."""
    wire = await Wire.open(server)
    wire.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await wire.answer())[0] == 200
    # From here on it is a socket like any other of these tests, on the same connection.
    socket = Socket()
    transport = wire.writer.transport
    transport.set_protocol(socket)
    socket.connection_made(transport)
    socket.write(upgrade_request(server))
    await socket.until(lambda: socket.status, what="an answer to the upgrade")
    assert socket.status == 101
    await socket.next("pusher:connection_established")
    socket.send({"event": "pusher:subscribe", "data": {"channel": "came-late"}})
    await socket.next("pusher_internal:subscription_succeeded")
    async with Api(server) as api:
        await api.publish("came-late", "word", "{}")
    await socket.next("word", "came-late")
    await socket.close()


async def test_large_body_in_pieces_is_taken_whole(server: Server) -> None:
    """600 kB of JSON for 100 kB of data, in pieces that arrive one after another."""
    (listener,) = await connect_many(server, 1)
    await listener.subscribe("large")
    data = "\x01" * 10_240  # six bytes each in JSON
    items = [{"channel": "large", "name": f"e{number}", "data": data} for number in range(10)]
    body = json.dumps({"batch": items}).encode()
    assert len(body) > 600_000
    target = signed_path(server, "POST", f"/apps/{server.app_id}/batch_events", body)
    wire = await Wire.open(server)
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for start in range(0, len(head + body), 10_007):
        wire.writer.write((head + body)[start : start + 10_007])
        await wire.writer.drain()
        await asyncio.sleep(0)
    assert await wire.answer() == (200, b"{}")
    for number in range(10):
        assert (await listener.next(f"e{number}"))["data"] == data
    wire.writer.close()
    await listener.close()


async def test_body_beyond_a_mebibyte_and_compressed_bodies_are_refused(server: Server) -> None:
    async with Api(server) as api:
        status, answer = await api.ask("POST", "/events", {"name": "e", "channels": ["c"], "data": "x" * (1 << 20)})
        assert (status, answer["code"]) == (413, "payload_too_large")
    wire = await Wire.open(server)
    request = publish_request(server, "c", "e").replace(b"Host: x\r\n", b"Host: x\r\nContent-Encoding: gzip\r\n")
    wire.writer.write(request)
    assert (await wire.answer())[0] == 415
    wire.writer.close()


async def test_upgrade_by_firefox_and_below_a_path_prefix(server: Server) -> None:
    """`Connection: keep-alive, Upgrade`; pusher-js' `wsPath` puts anything before /app/KEY."""
    wire = await Wire.open(server)
    request = upgrade_request(server).replace(b"Connection: Upgrade", b"Connection: keep-alive, Upgrade")
    wire.writer.write(request.replace(b"GET /app/", b"GET /some/where/app/"))
    assert (await asyncio.wait_for(wire.reader.readline(), 60)).startswith(b"HTTP/1.1 101")
    assert b"connection_established" in await asyncio.wait_for(wire.reader.readuntil(b"}"), 60)
    wire.writer.close()


async def test_frames_after_the_upgrade_in_one_packet_are_not_lost(server: Server) -> None:
    wire = await Wire.open(server)
    subscribe = frame(TEXT, b'{"event":"pusher:subscribe","data":{"channel":"eager"}}')
    wire.writer.write(upgrade_request(server) + subscribe)
    text = b""
    while b"subscription_succeeded" not in text:
        text += await asyncio.wait_for(wire.reader.read(65_536), 60)
    wire.writer.close()


async def test_publishers_on_many_connections_reach_subscribers_of_every_worker(server: Server) -> None:
    sockets = await connect_many(server, 16)
    await subscribe_all(sockets, "from-many")
    async with Api(server, connections=50) as api:
        await asyncio.gather(*(api.publish("from-many", "n", str(number)) for number in range(100)))
    for socket in sockets:
        await socket.until(lambda: len(socket.all("n")) == 100, what="100 events")  # noqa: B023
    await asyncio.gather(*(socket.close() for socket in sockets))
