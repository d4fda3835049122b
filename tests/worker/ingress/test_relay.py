"""HTTP on the TLS port: the bytes through the relay, control's own connections at the other end."""

import asyncio
import json
import os

import pytest

from edge import Edge, first_frame, until_end, upgrade
from redpoll.control.connections import Connections
from redpoll.control.handover import Handover
from redpoll.control.response import Response

KEY = "278d425bdf160c739803"
PATH = f"/app/{KEY}?protocol=7"


class Control:
    """Control's end as it is, with a handler that tells what it saw. Answers to /wait are held until `proceed`."""

    def __init__(self, path: str) -> None:
        self.proceed = asyncio.Event()
        self.seen = []
        self.connections = Connections(
            self.handle, lambda *what: Response(what[0], repr(what).encode()), head_timeout_s=10.0
        )
        self.handover = Handover(path, self.connections)
        self.handover.start()

    async def handle(self, call):
        if "Upgrade" in call.headers:
            if await call.protocol.leave(call.message):
                return Response(503, b"")
            return Response(503, b"no worker", keep_alive=False)
        body = await call.content.read()
        self.seen.append((call.message.path, len(body), call.protocol.peername))
        if call.message.path == "/wait":
            await self.proceed.wait()
        if call.message.path == "/large":
            return Response(200, b"x" * 5_000_000)
        if call.message.path == "/huge":
            return Response(200, b"x" * 40_000_000)
        return Response(200, json.dumps([call.message.path, len(body)]).encode())

    async def close(self) -> None:
        self.proceed.set()
        self.handover.close()
        await self.connections.finish(1.0)


@pytest.fixture
async def control(tmp_path):
    control = Control(str(tmp_path / "handover.sock"))
    yield control
    await control.close()


@pytest.fixture
async def edge(bench, tmp_path, control):
    edge = Edge(await bench.start(), tmp_path)
    await edge.doors.open()
    yield edge
    edge.close()


def request(path: str, body: bytes = b"", extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (path.encode(), len(body), extra, body)


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 200 "), head
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return await asyncio.wait_for(reader.readexactly(int(length[16:])), 10)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_requests_of_one_connection_are_answered_one_after_another(edge, control):
    reader, writer = await edge.connect()
    for number in range(20):
        writer.write(request(f"/{number}", b"b" * number))
        assert json.loads(await answer(reader)) == [f"/{number}", number]
    writer.write(b"".join(request(f"/{number}") for number in range(20)))
    for number in range(20):
        assert json.loads(await answer(reader)) == [f"/{number}", 0]
    # As long as the client stays it is one connection there, too, with the client's own address.
    assert {peer for *_, peer in control.seen} == {writer.get_extra_info("sockname")}
    assert len(control.connections.connections) == 1
    assert edge.worker.gate.handed_over_total == 1


async def test_large_bodies_pass_in_both_directions(edge, control):
    reader, writer = await edge.connect()
    for size in (100_000, 1_000_000, 3_000_000):
        writer.write(request("/body", os.urandom(size)))
        assert json.loads(await answer(reader)) == ["/body", size]
    writer.write(request("/large"))
    assert await answer(reader) == b"x" * 5_000_000


async def test_nobody_reads_for_a_client_that_does_not_read(edge, control, wait_until):
    reader, writer = await edge.connect()
    writer.transport.pause_reading()
    writer.write(request("/huge"))
    (relay,) = await until(lambda: list(edge.worker.gate.relays.values()), wait_until)
    (connection,) = control.connections.connections

    def kept() -> tuple[int, int]:
        return relay._client.transport.get_write_buffer_size(), connection.transport.get_write_buffer_size()

    # What kernels don't take of the forty megabytes has stayed with control, which made them.
    before = (0, 0)
    while before != kept() or not before[1]:
        before = kept()
        await asyncio.sleep(0.2)
    assert before[0] < 1_000_000
    assert before[1] > 20_000_000
    writer.transport.resume_reading()
    assert await answer(reader) == b"x" * 40_000_000


async def until(something, wait_until):
    await wait_until(something)
    return something()


async def test_connection_close_is_obeyed_and_nothing_is_left(edge, control, wait_until):
    # The way to control is made with the first request.
    assert b" 200 OK" in await edge.ask(request("/first", extra=b"Connection: close\r\n"))
    await wait_until(lambda: edge.worker.gate.connections == 0)
    before = descriptors()
    for _ in range(20):
        assert b" 200 OK" in await edge.ask(request("/more", b"x" * 1000, b"Connection: close\r\n"))
        edge.writers.pop().transport.abort()
    await wait_until(lambda: edge.worker.gate.connections == 0)
    await wait_until(lambda: descriptors() <= before)
    assert not edge.worker.gate.relays
    assert not control.connections.connections


async def test_a_client_that_leaves_is_gone_at_control_as_well(edge, control, wait_until):
    reader, writer = await edge.connect()
    writer.write(request("/a"))
    await answer(reader)
    _, half = await edge.connect()
    half.write(request("/b", b"x" * 1000)[:-1])
    _, waits = await edge.connect()
    waits.write(request("/wait"))
    await wait_until(lambda: len(control.connections.connections) == 3 and len(control.seen) == 2)
    for each in (writer, half, waits):
        each.transport.abort()
    # Who waits for the rest of a body is told at once; who works on an answer finishes it.
    await wait_until(lambda: len(control.connections.connections) == 1)
    control.proceed.set()
    await wait_until(lambda: not control.connections.connections)
    await wait_until(lambda: edge.worker.gate.connections == 0)
    assert not edge.worker.gate.relays


async def test_an_upgrade_behind_requests_becomes_a_websocket(bench, edge, control, wait_until):
    """As proxies do that keep connections to us (decisions.md)."""
    await bench.change(tls_required=True)
    reader, writer = await edge.connect()
    for _ in range(3):
        writer.write(request("/before"))
        await answer(reader)
    writer.write(upgrade(PATH))
    assert b"connection_established" in await first_frame(reader)
    assert control.handover.handed_back_total == 1
    assert not control.connections.connections
    await bench.publish("news", "n", "nobody hears this")
    frame = json.dumps({"event": "pusher:subscribe", "data": {"channel": "news"}}).encode()
    writer.write(b"\x81" + bytes([0x80 | len(frame)]) + bytes(4) + frame)
    succeeded = await asyncio.wait_for(reader.readuntil(b"}"), 5)
    assert b"subscription_succeeded" in succeeded
    # Requests end with the doors, this WebSocket by its own goodbye.
    edge.doors.close()
    await bench.publish("news", "n", "heard")
    assert b"heard" in await asyncio.wait_for(reader.readuntil(b"heard"), 5)
    for connection in list(edge.worker.hub.everyone):
        connection.shut(4200, "enough")
    assert b"enough" in await until_end_of(reader, b"enough")
    writer.write(b"\x88\x80" + bytes(4))
    assert await until_end(reader) == b""
    await wait_until(lambda: edge.worker.gate.connections == 0)
    assert not edge.worker.gate.relays


async def until_end_of(reader: asyncio.StreamReader, word: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(word), 5) + await asyncio.wait_for(reader.readuntil(word), 5)


async def test_the_doors_close_behind_the_answers_under_way(edge, control, wait_until):
    idle_reader, idle = await edge.connect()
    idle.write(request("/idle"))
    await answer(idle_reader)
    reader, writer = await edge.connect()
    writer.write(request("/wait", b"b" * 100_000))
    await wait_until(lambda: len(control.seen) == 2)
    edge.doors.close()
    assert await until_end(idle_reader) == b""
    assert edge.worker.gate.relays
    control.proceed.set()
    assert json.loads(await answer(reader)) == ["/wait", 100_000]
    assert await until_end(reader) == b""
    await wait_until(lambda: edge.worker.gate.connections == 0)


async def test_without_control_the_worker_answers_itself(edge, control):
    await control.close()
    assert b" 503 " in await edge.ask(request("/apps/1/events"))
    assert b" 200 OK" in await edge.ask(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_when_control_ends_its_clients_are_told(edge, control, wait_until):
    reader, writer = await edge.connect()
    writer.write(request("/a"))
    await answer(reader)
    await control.close()
    assert await until_end(reader) == b""
    await wait_until(lambda: edge.worker.gate.connections == 0)


async def test_a_worker_that_ends_cuts_what_is_left(edge, control, wait_until):
    _, writer = await edge.connect()
    writer.write(request("/wait"))
    await wait_until(lambda: control.seen)
    edge.worker.gate.close()
    await wait_until(lambda: edge.worker.gate.connections == 0)
    assert not edge.worker.gate.relays
