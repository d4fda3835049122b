"""Connections that workers hand over, through a real passage, with a real TCP client."""

import asyncio
import os
import socket

import pytest

from redpoll import handover as passages
from redpoll.control.connections import Connections
from redpoll.control.handover import Handover
from redpoll.control.response import Response


async def handler(call):
    if "Upgrade" in call.headers and await call.protocol.leave(call.message):
        return Response(503, b"")
    body = await call.content.read()
    return Response(200, f"{call.method} {call.path} {len(body)} {sum(body)} {call.remote}".encode())


@pytest.fixture
async def handover(tmp_path):
    connections = Connections(handler, lambda *what: Response(what[0], repr(what).encode()), head_timeout_s=10.0)
    handover = Handover(str(tmp_path / "handover.sock"), connections)
    handover.start()
    yield handover
    handover.close()
    await connections.finish(1.0)


@pytest.fixture
async def worker(handover, tmp_path):
    """A worker's end of the passage, and what was handed back to it."""
    back = []
    passage = passages.connect(str(tmp_path / "handover.sock"), lambda *what: back.append(what), lambda: None)
    passage.back = back
    yield passage
    passage.close()
    for descriptor, *_ in back:
        os.close(descriptor)


async def client_and_accepted():
    """A client, and its connection as a worker accepted it: (reader, writer, socket)."""
    listener = socket.create_server(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    accepted, _ = listener.accept()
    listener.close()
    return reader, writer, accepted


async def body_of(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    return await reader.readexactly(int(length.split()[1]))


async def test_a_large_body_and_keep_alive_and_the_true_address_survive_the_hand_over(worker, wait_until):
    reader, writer, accepted = await client_and_accepted()
    body = bytes(range(256)) * 1200
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    so_far = head + body[:60_000]
    assert worker.send(os.dup(accepted.fileno()), ("203.0.113.9", 4711), so_far)
    accepted.close()
    writer.write(body[60_000:])
    assert await body_of(reader) == f"POST /a {len(body)} {sum(body)} 203.0.113.9".encode()
    writer.write(b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n")
    assert await body_of(reader) == b"GET /b 0 0 203.0.113.9"
    writer.close()


async def test_an_upgrade_that_comes_late_is_handed_back_to_its_worker(handover, worker, wait_until):
    reader, writer, accepted = await client_and_accepted()
    head = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
    worker.send(os.dup(accepted.fileno()), ("203.0.113.9", 4711), head, secure=True)
    accepted.close()
    assert await body_of(reader) == b"GET /a 0 0 203.0.113.9"
    upgrade = b"GET /app/k HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    writer.write(upgrade)
    await wait_until(lambda: worker.back)
    descriptor, peer, data, secure = worker.back[0]
    assert secure
    assert (peer, data) == (("203.0.113.9", 4711), upgrade)
    os.write(descriptor, b"101")
    assert await reader.readexactly(3) == b"101"
    assert handover.handed_back_total == 1
    writer.close()


async def test_an_upgrade_goes_to_another_worker_when_its_own_is_gone(handover, worker, tmp_path, wait_until):
    reader, writer, accepted = await client_and_accepted()
    worker.send(os.dup(accepted.fileno()), ("h", 1), b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    accepted.close()
    await body_of(reader)
    taken = []
    other = passages.connect(str(tmp_path / "handover.sock"), lambda *what: taken.append(what), lambda: None)
    await wait_until(lambda: handover.workers == 2)
    worker.close()
    await wait_until(lambda: handover.workers == 1)
    writer.write(b"GET /app/k HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    await wait_until(lambda: taken)
    os.close(taken[0][0])
    other.close()
    writer.close()


async def test_without_any_worker_the_upgrade_is_answered_by_the_handler(handover, worker, wait_until):
    reader, writer, accepted = await client_and_accepted()
    worker.send(os.dup(accepted.fileno()), ("h", 1), b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    accepted.close()
    await body_of(reader)
    worker.close()
    await wait_until(lambda: handover.workers == 0)
    writer.write(b"GET /app/k HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert await body_of(reader) == b"GET /app/k 0 0 h"
    writer.close()


async def test_a_client_that_is_gone_on_arrival_costs_nothing(handover, worker, wait_until):
    _, writer, accepted = await client_and_accepted()
    writer.transport.abort()
    worker.send(os.dup(accepted.fileno()), ("h", 1), b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    accepted.close()
    await wait_until(lambda: handover.received_total == 1 and not handover._connections.connections)


async def test_what_a_killed_predecessor_left_at_the_path_is_replaced(tmp_path):
    path = str(tmp_path / "left.sock")
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(path)
    left.close()
    connections = Connections(handler, lambda *what: Response(what[0], repr(what).encode()), head_timeout_s=10.0)
    handover = Handover(path, connections)
    handover.start()
    passage = passages.connect(path, lambda *_: None, lambda: None)
    assert passage is not None
    passage.close()
    handover.close()
    assert not list(tmp_path.iterdir())
