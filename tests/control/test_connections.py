"""aiohttp's server with our connections, over real sockets."""

import asyncio
import os
import socket

import pytest

from redpoll.control.connections import Connections
from redpoll.control.response import Response
from redpoll.proxies import TrustedProxies


def error_page(status, code, text):
    return Response(status, f"{code}: {text}".encode())


async def echo(call):
    """The request as the handler saw it."""
    body = await call.content.read()
    seen = f"{call.method} {call.message.path} {len(body)} {call.remote}"
    return Response(200, seen.encode())


@pytest.fixture
async def serve():
    """`await serve(handler)`: (connections, port) of a control port."""
    servers = []

    async def start(handler=echo, head_timeout_s=10.0):
        connections = Connections(handler, error_page, head_timeout_s=head_timeout_s)
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
        servers.append((server, connections))
        return connections, server.sockets[0].getsockname()[1]

    yield start
    for server, connections in servers:
        server.close()
        await connections.finish(1.0)


async def test_requests_of_one_connection_are_answered_in_order(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    wire.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(50)))
    for number in range(50):
        assert (await wire.receive()).body.startswith(b"GET /%d " % number)


async def test_http_1_0_closes_unless_it_asks_to_stay(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    reply = await wire.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert reply.headers["connection"] == "keep-alive"
    reply = await wire.ask(b"GET / HTTP/1.0\r\n\r\n")
    assert reply.headers["connection"] == "close"
    assert await wire.wait_closed() == b""


async def test_connection_close_is_obeyed(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    reply = await wire.ask(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert reply.headers["connection"] == "close"
    assert await wire.wait_closed() == b""


async def test_a_body_comes_chunked_or_counted(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert reply.body.startswith(b"POST / 3 ")
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd")
    assert reply.body.startswith(b"POST / 4 ")


# Each of these makes two parsers disagree about where a request ends (failures.md row 26).
SMUGGLED = {
    "length and chunked": (
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "two lengths": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "negative length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\na",
    "length of words": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: one\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\0b\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nHost: h\r\nX-A : a\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\r\n b\r\n\r\n",
    "bare line feed": b"GET / HTTP/1.1\nHost: h\n\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "chunk size of words": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
    "long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(300)) + b"\r\n",
}


@pytest.mark.parametrize("request_bytes", SMUGGLED.values(), ids=SMUGGLED)
async def test_an_ambiguous_request_is_refused_and_what_is_behind_it_never_read(serve, connect, request_bytes):
    seen = []

    async def handler(call):
        await call.content.read()
        seen.append(call.message.path)
        return Response(200, b"")

    _, port = await serve(handler)
    wire = await connect(port)
    wire.send(request_bytes + b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
    everything = await wire.wait_closed()
    assert everything == b"" or everything.startswith(b"HTTP/1.1 400 ")
    assert everything.count(b"HTTP/1.1 ") <= 1
    assert "/smuggled" not in seen
    if everything:
        assert b"bad_request: not an HTTP request" in everything


async def test_a_compressed_body_is_not_inflated(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")
    assert reply.body.startswith(b"POST / 3 ")


async def test_a_head_that_trickles_is_cut_at_its_deadline_and_an_idle_connection_is_not(serve, connect, wait_until):
    connections, port = await serve(head_timeout_s=0.05)
    slow, idle = await connect(port), await connect(port)
    await slow.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    slow.send(b"GET / HTTP/1.1\r\n")
    await wait_until(lambda: any(each.half_head_since for each in connections.connections))
    (trickling,) = [each for each in connections.connections if each.half_head_since]
    since = trickling.half_head_since
    trickling.data_received(b"X")
    assert trickling.half_head_since == since  # a further byte buys no time

    def one_is_cut():
        connections.sweep()
        return len(connections.connections) == 1

    await wait_until(one_is_cut)
    reply = await slow.receive()
    assert reply.status == 408
    assert reply.headers["connection"] == "close"
    connections.sweep()
    assert (await idle.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")).status == 200


async def test_a_slow_body_is_no_slow_head(serve, connect, wait_until):
    connections, port = await serve(head_timeout_s=0.01)
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n")
    await wait_until(lambda: connections.requests_count)
    wire.send(b"ab")
    await asyncio.sleep(0.03)
    connections.sweep()
    assert (await wire.ask(b"cd")).body.startswith(b"POST / 4 ")


async def test_a_failing_handler_costs_one_answer_and_tells_nothing(serve, connect, caplog):
    async def fails(call):
        raise RuntimeError("the secret is 1234")

    _, port = await serve(fails)
    wire = await connect(port)
    reply = await wire.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert reply.status == 500
    assert reply.body == b"internal: internal error"
    assert reply.headers["connection"] == "close"


async def test_a_client_that_left_is_nobodys_error(serve, connect, wait_until):
    proceed = asyncio.Event()

    async def waits(call):
        await proceed.wait()
        return Response(200, b"")

    connections, port = await serve(waits)
    wire = await connect(port)
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await wait_until(lambda: connections.requests_count)
    wire.writer.transport.abort()
    await wait_until(lambda: all(each.transport is None for each in connections.connections))
    proceed.set()
    await wait_until(lambda: not connections.connections)


async def test_garbage_of_a_client_that_left_at_once_is_still_rendered(serve):
    """aiohttp forgets its server at connection_lost, and may come with the parser's fault after it."""
    connections, _port = await serve()
    connection = connections()
    connection.connection_lost(None)
    answer = connection.handle_error(None, 400, message="Bad request line:")
    assert (answer.status, answer.body) == (400, b"bad_request: not an HTTP request: Bad request line")


async def test_a_client_that_reads_nothing_is_not_answered_without_end(serve, connect, wait_until):
    answered = 0

    async def large(call):
        nonlocal answered
        answered += 1
        return Response(200, b"x" * 1_000_000)

    connections, port = await serve(large)
    wire = await connect(port)
    wire.writer.transport.pause_reading()
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 200)
    await wait_until(lambda: any(each.writing_paused for each in connections.connections))
    assert answered < 50


async def test_finish_lets_the_answer_under_way_go_out(serve, connect, wait_until):
    proceed = asyncio.Event()

    async def waits(call):
        await proceed.wait()
        return Response(200, b"done")

    connections, port = await serve(waits)
    busy, idle = await connect(port), await connect(port)
    busy.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await wait_until(lambda: connections.requests_count and len(connections.connections) == 2)
    finishing = asyncio.create_task(connections.finish(5.0))
    assert await idle.wait_closed() == b""
    proceed.set()
    assert (await busy.receive()).body == b"done"
    await finishing


async def test_finish_lets_a_body_that_is_on_its_way_arrive(serve, connect, wait_until):
    connections, port = await serve()
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab")
    await wait_until(lambda: connections.requests_count)
    finishing = asyncio.create_task(connections.finish(5.0))
    await asyncio.sleep(0)
    reply = await wire.ask(b"cd")
    assert reply.body.startswith(b"POST / 4 ")
    assert reply.headers["connection"] == "close"
    await finishing


async def test_finish_takes_in_what_was_on_its_way_and_closes_behind_it(serve):
    connections, _ = await serve()
    connections.finishing = True
    reader, writer = await taken(connections, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b"Connection: close" in await reader.read()
    writer.close()


async def test_finish_cuts_what_outlasts_the_grace(serve, connect, wait_until):
    connections, port = await serve()
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab")
    await wait_until(lambda: connections.requests_count)
    await connections.finish(0.05)
    assert await wire.wait_closed() == b""
    await wait_until(lambda: not connections.connections)


async def taken(connections, data, hand_back=lambda *_: False, peer=("203.0.113.9", 4711)):
    """A connection that a worker accepted: our end of it as a StreamReader and StreamWriter."""
    client, accepted = socket.socketpair()
    accepted.setblocking(False)
    await connections.take(accepted, peer, data, hand_back)
    return await asyncio.open_connection(sock=client)


async def test_a_taken_connection_shows_the_clients_address_and_goes_on(serve):
    connections, _ = await serve()
    reader, writer = await taken(connections, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\nGET /b HT")
    assert b"GET /a 0 203.0.113.9" in await reader.readuntil(b"203.0.113.9")
    writer.write(b"TP/1.1\r\nHost: h\r\n\r\n")
    assert b"GET /b 0 203.0.113.9" in await reader.readuntil(b"203.0.113.9")
    writer.close()


UPGRADE = (
    b"GET /app/k?protocol=7 HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-A: \xc3\xa9\r\n\r\n"
)


async def test_an_upgrade_behind_other_requests_leaves_with_every_byte(serve):
    handed = []

    async def handler(call):
        if "Upgrade" in call.headers:
            assert await call.protocol.leave(call.message)
            return Response(503, b"")
        return Response(200, b"first")

    def hand_back(descriptor, peer, data):
        handed.append((descriptor, peer, data))
        return True

    connections, _ = await serve(handler)
    first = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    reader, writer = await taken(connections, first + UPGRADE + b"\x81\x80frame", hand_back)
    assert (await reader.readuntil(b"first")).startswith(b"HTTP/1.1 200 OK")
    while not handed:
        await asyncio.sleep(0)
    descriptor, peer, data = handed[0]
    assert peer == ("203.0.113.9", 4711)
    assert data == UPGRADE + b"\x81\x80frame"
    # Still open, and ours no more: what is written to the descriptor is what the client reads next.
    os.write(descriptor, b"HTTP/1.1 101 ")
    assert await reader.readexactly(13) == b"HTTP/1.1 101 "
    os.close(descriptor)
    assert await reader.read() == b""
    writer.close()


async def test_behind_a_trusted_proxy_each_request_has_a_client_of_its_own(serve):
    connections, _ = await serve()
    connections.trusted = TrustedProxies(["10.0.0.0/8"])
    reader, writer = await taken(connections, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n", peer=("10.1.1.1", 4711))
    assert b"GET /a 0 10.1.1.1" in await reader.readuntil(b"10.1.1.1")
    for client in (b"198.51.100.1", b"198.51.100.2"):
        writer.write(b"GET /b HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 1.2.3.4, %b\r\n\r\n" % client)
        assert b"GET /b 0 " + client in await reader.readuntil(client)
    writer.close()


async def test_what_a_relayed_client_asked_is_answered_behind_its_end_of_file(serve, wait_until):
    """A worker ends its relays so (worker/ingress/relay.py)."""
    proceed = asyncio.Event()

    async def waits(call):
        await proceed.wait()
        return Response(200, await call.content.read())

    connections, _ = await serve(waits)
    reader, writer = await taken(connections, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd")
    await wait_until(lambda: connections.requests_count)
    writer.write_eof()
    await asyncio.sleep(0.05)
    proceed.set()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"abcd")
    await wait_until(lambda: not connections.connections)
    writer.close()


@pytest.mark.parametrize("rest", [b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab", b"GET / HT", b""])
async def test_a_relayed_client_that_ends_half_way_is_not_waited_for(serve, wait_until, rest):
    connections, _ = await serve()
    reader, writer = await taken(connections, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    await reader.readuntil(b"203.0.113.9")
    writer.write(rest)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 5)
    await wait_until(lambda: not connections.connections, 2)
    writer.close()
