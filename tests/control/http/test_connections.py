"""The control port's connections on aiohttp's server, over real sockets."""

import asyncio

import pytest

from redpoll.config.proxies import TrustedProxies
from redpoll.control.http.connections import Connections
from redpoll.control.http.request import CutOff
from redpoll.control.http.response import Response


def error_page(status, code, text):
    return Response(status, f"{code}: {text}".encode())


REQUEST = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"


async def echo(call):
    """The request as the handler saw it."""
    await call.read_body(10.0)
    seen = f"{call.method} {call.target} {len(call.body)} {call.remote}"
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


async def test_http_1_0_closes_unless_the_client_asks_for_keep_alive(serve, connect):
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


async def test_a_body_is_read_chunked_or_by_its_length(serve, connect):
    _, port = await serve()
    wire = await connect(port)
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert reply.body.startswith(b"POST / 3 ")
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd")
    assert reply.body.startswith(b"POST / 4 ")


# Parsers disagree about where each of these requests ends: request smuggling (RFC 9112 section 11.2).
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
async def test_an_ambiguous_request_is_refused_and_the_bytes_after_it_are_not_parsed(serve, connect, request_bytes):
    seen = []

    async def handler(call):
        await call.read_body(10.0)
        seen.append(call.path)
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


async def test_a_slow_head_is_refused_at_its_deadline_and_an_idle_connection_stays(serve, connect, wait_until):
    connections, port = await serve(head_timeout_s=0.05)
    slow, idle = await connect(port), await connect(port)
    await slow.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    slow.send(b"GET / HTTP/1.1\r\n")
    await wait_until(lambda: any(connection.half_head_since for connection in connections.connections))
    (trickling,) = [connection for connection in connections.connections if connection.half_head_since]
    since = trickling.half_head_since
    trickling.data_received(b"X")
    assert trickling.half_head_since == since  # more bytes don't extend the time

    def one_is_cut():
        connections.sweep()
        return len(connections.connections) == 1

    await wait_until(one_is_cut)
    reply = await slow.receive()
    assert reply.status == 408
    assert reply.headers["connection"] == "close"
    connections.sweep()
    assert (await idle.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")).status == 200


@pytest.mark.parametrize(
    "packets", [[REQUEST + REQUEST[:9]], [REQUEST, REQUEST[:9]], [REQUEST[:9], REQUEST[9:], b"GET"]]
)
async def test_a_head_that_began_during_the_answer_before_has_the_same_deadline(serve, connect, wait_until, packets):
    began, go_on = asyncio.Event(), asyncio.Event()

    async def handler(call):
        began.set()
        await go_on.wait()
        return Response(200, b"")

    connections, port = await serve(handler, head_timeout_s=0.05)
    client = await connect(port)
    for packet in packets:
        client.send(packet)
    await began.wait()
    (connection,) = connections.connections
    await wait_until(lambda: connection.half_head_since)
    go_on.set()
    assert (await client.receive()).status == 200

    def is_cut():
        connections.sweep()
        return not connections.connections

    await wait_until(is_cut)
    assert (await client.receive()).status == 408


async def test_a_request_that_waits_for_the_answer_before_is_no_slow_head(serve, connect, wait_until):
    connections, port = await serve(head_timeout_s=0.05)
    client = await connect(port)
    client.send(POST + REQUEST + POST)
    for _ in range(3):
        assert (await client.receive()).status == 200
    (connection,) = connections.connections
    assert (connection.waits_for_a_head, connection.half_head_since) == (True, 0.0)


async def test_a_slow_body_does_not_hit_the_deadline_of_heads(serve, connect, wait_until):
    connections, port = await serve(head_timeout_s=0.01)
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n")
    await wait_until(lambda: connections.requests_count)
    wire.send(b"ab")
    await asyncio.sleep(0.03)
    connections.sweep()
    assert (await wire.ask(b"cd")).body.startswith(b"POST / 4 ")


async def test_a_failing_handler_gets_500_without_details(serve, connect, caplog):
    async def fails(call):
        raise RuntimeError("the secret is 1234")

    _, port = await serve(fails)
    wire = await connect(port)
    reply = await wire.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert reply.status == 500
    assert reply.body == b"internal: internal error"
    assert reply.headers["connection"] == "close"


async def test_a_client_that_disconnects_causes_no_error(serve, connect, wait_until):
    proceed = asyncio.Event()

    async def waits(call):
        await proceed.wait()
        return Response(200, b"")

    connections, port = await serve(waits)
    wire = await connect(port)
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await wait_until(lambda: connections.requests_count)
    wire.writer.transport.abort()
    await wait_until(lambda: all(connection.transport is None for connection in connections.connections))
    proceed.set()
    await wait_until(lambda: not connections.connections)


async def test_the_error_for_garbage_is_rendered_after_the_client_disconnected(serve):
    """aiohttp drops its server at connection_lost, and may render the parser's error after that."""
    connections, _port = await serve()
    connection = connections()
    connection.connection_lost(None)
    answer = connection.handle_error(None, 400, message="Bad request line:")
    assert (answer.status, answer.body) == (400, b"bad_request: not an HTTP request: Bad request line")


async def test_responses_stop_while_a_client_does_not_read(serve, connect, wait_until):
    answered = 0

    async def large(call):
        nonlocal answered
        answered += 1
        return Response(200, b"x" * 1_000_000)

    connections, port = await serve(large)
    wire = await connect(port)
    wire.writer.transport.pause_reading()
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 200)
    await wait_until(lambda: any(connection.writing_paused for connection in connections.connections))
    assert answered < 50


async def test_finish_waits_for_the_current_response(serve, connect, wait_until):
    proceed = asyncio.Event()

    async def waits(call):
        await proceed.wait()
        return Response(200, b"done")

    connections, port = await serve(waits)
    busy, idle = await connect(port), await connect(port)
    busy.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await wait_until(lambda: connections.requests_count and len(connections.connections) == 2)
    finishing = asyncio.create_task(connections.finish(60.0))
    assert await idle.wait_closed() == b""
    proceed.set()
    assert (await busy.receive()).body == b"done"
    await finishing


async def test_finish_waits_for_a_body_that_is_still_arriving(serve, connect, wait_until):
    connections, port = await serve()
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab")
    await wait_until(lambda: connections.requests_count)
    finishing = asyncio.create_task(connections.finish(60.0))
    await asyncio.sleep(0)
    reply = await wire.ask(b"cd")
    assert reply.body.startswith(b"POST / 4 ")
    assert reply.headers["connection"] == "close"
    await finishing


async def test_finish_cancels_requests_after_the_grace_period(serve, connect, wait_until):
    connections, port = await serve()
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab")
    await wait_until(lambda: connections.requests_count)
    await connections.finish(0.05)
    assert await wire.wait_closed() == b""
    await wait_until(lambda: not connections.connections)


async def test_a_client_that_disconnects_within_its_body_is_counted_as_400(serve, connect, wait_until):
    faults = []

    async def handler(call):
        try:
            await call.read_body(10.0)
        except CutOff as fault:
            faults.append((fault.status, str(fault)))
        return Response(200, b"")

    _, port = await serve(handler)
    wire = await connect(port)
    wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab")
    wire.writer.close()
    await wait_until(lambda: faults)
    assert faults == [(400, "the client closed the connection before its body was complete")]


async def test_bytes_of_unfinished_bodies_are_bounded(serve, connect, wait_until):
    refusals = []

    async def handler(call):
        try:
            await call.read_body(10.0)
        except CutOff as fault:
            refusals.append((fault.status, fault.code))
            return Response(fault.status, b"")
        return Response(200, b"")

    connections, port = await serve(handler)
    connections.max_reading_bytes = 100_000
    first, second = await connect(port), await connect(port)
    for wire in (first, second):
        wire.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 70000\r\n\r\n" + b"x" * 60_000)
    await wait_until(lambda: refusals)
    assert refusals == [(503, "unavailable")]
    for wire in (first, second):
        wire.send(b"x" * 10_000)
    assert sorted([(await first.receive()).status, (await second.receive()).status]) == [200, 503]
    assert connections.reading_bytes == 0
    assert (await (await connect(port)).ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab")).status == 200


async def test_each_request_of_a_trusted_proxy_has_its_own_client_address(serve, connect):
    async def whose(call):
        return Response(200, f"{call.remote} {call.secure}".encode())

    connections, port = await serve(whose)
    plain = b"GET / HTTP/1.1\r\nHost: h\r\n%b\r\n"
    forwarded = b"X-Forwarded-For: 1.2.3.4, 198.51.100.1\r\nX-Forwarded-Proto: https\r\n"
    assert (await (await connect(port)).ask(plain % forwarded)).body == b"127.0.0.1 False"
    connections.trusted = TrustedProxies(["127.0.0.0/8"])
    wire = await connect(port)
    assert (await wire.ask(plain % b"")).body == b"127.0.0.1 False"
    assert (await wire.ask(plain % forwarded)).body == b"198.51.100.1 True"


async def test_above_the_limit_idle_connections_close_and_busy_ones_stay(serve, connect, wait_until):
    proceed = asyncio.Event()

    async def waits(call):
        if call.path == "/waits":
            await proceed.wait()
        return Response(200, b"")

    connections, port = await serve(waits)
    connections.max_connections = 2
    busy, idle = await connect(port), await connect(port)
    busy.send(b"GET /waits HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    third = await connect(port)
    assert await idle.wait_closed() == b""
    third.send(b"GET /waits HTTP/1.1\r\nHost: h\r\n\r\n")
    await wait_until(lambda: connections.requests_count == 3)
    fourth = await connect(port)
    assert (await fourth.receive()).status == 503
    assert connections.refused == 1
    proceed.set()
    assert (await busy.receive()).status == (await third.receive()).status == 200
