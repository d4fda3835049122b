"""What clients of the control port may do, against a whole control plane; then the port itself. Over real sockets."""

import asyncio

import pytest
from structlog.testing import capture_logs

from redpoll.config.proxies import TrustedProxies
from redpoll.control.http.control_port import ControlPort
from redpoll.control.http.response import Response
from redpoll.http.connection import State
from redpoll.http.messages import HEAD_ONLY

BODY = b'{"name":"e","channels":["c"],"data":"{}"}'
PAIR = b"X-Service-Key: 278d425bdf160c739803\r\nX-Service-Secret: 7ad3773142a6692b25b8\r\n"
POST = b"POST /apps/3/events HTTP/1.1\r\nHost: test\r\n" + PAIR
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"5;x=y\r\n%b\r\n" % BODY[:5]
CHUNKED += b"%x\r\n%b\r\n0\r\nX-Trailer: t\r\n\r\n" % (len(BODY) - 5, BODY[5:])
GET = b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n"
LARGE = b"0123456789abcdef" * (4 * 1024 * 1024 // 16)


@pytest.fixture
def download(plane):
    """`/healthz` answers with 4 MiB from now on."""
    plane.plane.routes.find("/healthz")[0]["GET"].handler = lambda request: Response(200, LARGE)


async def test_requests_of_all_shapes_in_one_packet_are_answered_in_order(plane):
    counted = POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    head = b"HEAD /healthz HTTP/1.1\r\nHost: test\r\n\r\n"
    missing = b"DELETE /nothing HTTP/1.1\r\nHost: test\r\n\r\n"
    plane.wire.send(GET + CHUNKED + head + counted + missing + GET)
    assert (await plane.wire.receive()).body == b'{"status":"ok"}'
    assert (await plane.wire.receive()).body == b"{}"
    assert (await plane.wire.receive(head_only=True)).headers["content-length"] == "15"
    assert (await plane.wire.receive()).body == b"{}"
    assert (await plane.wire.receive()).status == 404
    assert (await plane.wire.receive()).body == b'{"status":"ok"}'


@pytest.mark.parametrize("size", [1, 7])
async def test_a_request_may_come_in_small_pieces(plane, size):
    for request in (GET, CHUNKED, POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)):
        for at in range(0, len(request), size):
            plane.wire.send(request[at : at + size])
            await asyncio.sleep(0)
        assert (await plane.wire.receive()).status == 200


@pytest.mark.parametrize("length", [b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"])
async def test_a_client_that_waits_for_100_continue_gets_it_or_the_refusal(plane, connect, length):
    wait = length + b"Expect: 100-continue\r\n\r\n"
    assert (await plane.wire.ask(POST + wait)).status == 100
    body = BODY if length.startswith(b"Content") else b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert (await plane.wire.ask(body)).status == 200
    refused = await plane.wire.ask(POST.replace(PAIR, b"") + wait)
    assert (refused.status, refused.headers["connection"]) == (401, "close")
    assert await plane.wire.wait_closed() == b""


async def test_a_body_that_came_with_its_head_is_not_announced_with_100(plane):
    request = POST + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n%b" % (len(BODY), BODY)
    assert (await plane.wire.ask(request + GET)).status == 200
    assert (await plane.wire.receive()).body == b'{"status":"ok"}'


async def test_http_1_0_needs_no_host_and_stays_only_if_it_asks_to(plane):
    reply = await plane.wire.ask(b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert (reply.status, reply.headers["connection"]) == (200, "keep-alive")
    reply = await plane.wire.ask(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert await plane.wire.wait_closed() == b""


async def test_a_connection_stays_open_after_errors(plane):
    for request, status in (
        (b"GET /nothing HTTP/1.1\r\nHost: test\r\n\r\n", 404),
        (b"POST /apps/3/events HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}", 401),
        (b"GET /metrics HTTP/1.1\r\nHost: other\r\n\r\n", 403),
        (GET, 200),
    ):
        assert (await plane.wire.ask(request)).status == status


@pytest.mark.parametrize("closes", [b"", b"Connection: close\r\n"])
async def test_a_large_download_reaches_a_client_that_reads_slowly(plane, download, closes):
    transport = plane.wire.writer.transport
    plane.wire.send(GET.replace(b"\r\n\r\n", b"\r\n" + closes + b"\r\n"))
    # So that the whole answer waits in the server, whose buffers in the kernel are smaller.
    transport.pause_reading()
    await asyncio.sleep(0.2)
    transport.resume_reading()
    assert (await plane.wire.receive()).body == LARGE
    if closes:
        assert await plane.wire.wait_closed() == b""
    else:
        assert (await plane.wire.ask(GET)).status == 200


async def test_head_of_a_large_download_has_its_length_alone(plane, download):
    reply = await plane.wire.ask(b"HEAD /healthz HTTP/1.1\r\nHost: test\r\n\r\n", head_only=True)
    assert reply.headers["content-length"] == str(len(LARGE))
    assert (await plane.wire.ask(GET)).body == LARGE


async def test_the_refusal_of_a_body_reaches_a_client_that_is_still_sending(plane):
    plane.wire.send(POST.replace(PAIR, b"") + b"Content-Length: 500000\r\n\r\n" + b"x" * 400_000)
    reply = await plane.wire.receive()
    assert (reply.status, reply.headers["connection"]) == (401, "close")
    assert await plane.wire.wait_closed() == b""


async def test_the_body_of_a_request_that_takes_none_is_not_waited_for(plane):
    reply = await plane.wire.ask(GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 100\r\n\r\nabc"))
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert await plane.wire.wait_closed() == b""
    assert plane.plane.routes.find("/healthz")[0]["GET"].answers == {200: 1}


async def test_fields_that_handlers_read_reach_them_in_any_spelling(plane):
    seen = {}

    def handler(request):
        seen.update(request.headers)
        return Response(200, b"")

    plane.plane.routes.find("/healthz")[0]["GET"].handler = handler
    names = ["Authorization", "Content-Encoding", "Cookie", "HX-Current-URL", "HX-Request", "If-None-Match", "Origin"]
    names += ["Sec-Fetch-Site", "X-CSRF-Token", "X-Forwarded-Proto", "X-Service-Key", "X-Service-Secret", "traceparent"]
    lines = "".join(f"{name.swapcase()}: {name} ü\r\n" for name in names).encode()
    reply = await plane.wire.ask(b"GET /healthz HTTP/1.1\r\nhOST: test\r\nContent-Type: text/plain\r\n%b\r\n" % lines)
    assert reply.status == 200
    seen = {name.lower(): value for name, value in seen.items()}
    assert {name: seen.get(name.lower()) for name in names} == {name: f"{name} ü" for name in names}
    assert (seen["host"], seen["content-type"]) == ("test", "text/plain")


# -- the port -----------------------------------------------------------------------------------------------------

REQUEST = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD_OF_4 = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n"


def error_page(status, code, text):
    return Response(status, f"{code}: {text}".encode())


def echo(request):
    """The request as the handler saw it."""
    return Response(200, f"{request.method} {request.target} {len(request.body)} {request.remote}".encode())


@pytest.fixture
async def serve():
    """`await serve(handler)`: (port, number) of a ControlPort. `handler(request)` gets whole requests and returns a
    response or a coroutine; all bodies are let in. `port.heads` counts the heads that came before their bodies."""
    servers, tasks = [], set()

    async def start(handler=echo, head_timeout_s=10.0, body_timeout_s=10.0):
        async def respond(request):
            response = handler(request)
            request.respond(response if isinstance(response, Response) else await response)

        def received(request):
            if request.refusal:
                request.respond(Response(request.refusal, b""))
            elif request.flags & HEAD_ONLY:
                port.heads += 1
                request.route = type("Route", (), {"wants_credential": False})
                request.let_body_in()
            else:
                task = asyncio.create_task(respond(request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        port = ControlPort(received, error_page, head_timeout_s=head_timeout_s, body_timeout_s=body_timeout_s)
        port.heads = 0
        server = await asyncio.get_running_loop().create_server(port, "127.0.0.1", 0)
        servers.append((server, port))
        return port, server.sockets[0].getsockname()[1]

    yield start
    for server, port in servers:
        server.close()
        await port.finish(1.0)


@pytest.fixture
def waiting():
    """`waiting.handler` answers `/waits` only after `waiting.go_on.set()`; `waiting.began` counts requests."""

    class Waiting:
        began = 0

        def __init__(self):
            self.go_on = asyncio.Event()

        async def handler(self, request):
            self.began += 1
            if request.path == "/waits":
                await self.go_on.wait()
            return Response(200, b"done")

    return Waiting()


WAITS = REQUEST.replace(b"/ ", b"/waits ")


async def test_a_thousand_requests_in_one_packet_are_answered_in_order(serve, connect):
    _, number = await serve()
    wire = await connect(number)
    wire.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % n for n in range(1000)))
    for n in range(1000):
        assert (await wire.receive()).body.startswith(b"GET /%d " % n)


async def test_a_compressed_body_is_not_inflated(serve, connect):
    _, number = await serve()
    wire = await connect(number)
    reply = await wire.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")
    assert reply.body.startswith(b"POST / 3 ")


async def test_bytes_that_are_no_request_get_the_error_page_and_what_follows_is_not_read(serve, connect):
    _, number = await serve()
    for data, status in ((b"\x16\x03\x01\r\n\r\n", 400), (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431)):
        wire = await connect(number)
        wire.send(data + REQUEST)
        reply = await wire.receive()
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert reply.body.startswith(b"bad_request: ")
        assert await wire.wait_closed() == b""


async def test_a_slow_head_is_refused_at_its_deadline_and_an_idle_connection_stays(serve, connect):
    _, number = await serve(head_timeout_s=0.05)
    slow, idle = await connect(number), await connect(number)
    for wire in (slow, idle):
        assert (await wire.ask(REQUEST)).status == 200
    slow.send(b"GET / HTTP/1.1\r\n")
    reply = await slow.receive()
    assert (reply.status, reply.headers["connection"]) == (408, "close")
    assert await slow.wait_closed() == b""
    assert (await idle.ask(REQUEST)).status == 200


async def test_more_bytes_of_a_head_or_body_do_not_extend_its_time(serve, connect, wait_until):
    port, number = await serve()
    for start in (b"GET / HTTP/1.1\r\nX: ", HEAD_OF_4.replace(b"4", b"400")):
        wire = await connect(number)
        wire.send(start)
        await wait_until(lambda: [h for h in port.connections.values() if h.state in (State.HEAD, State.BODY)])
        (stream,) = [stream for stream, h in port.connections.items() if h.state is not State.IDLE]
        due = stream.timer.when()
        for _ in range(5):
            stream.data_received(b"x")
        assert stream.timer.when() == due
        wire.writer.close()
        await wait_until(lambda: not port.connections)


@pytest.mark.parametrize(
    "packets", [[WAITS + REQUEST[:9]], [WAITS, REQUEST[:9]], [WAITS[:9], WAITS[9:], b"GET"]], ids=["1", "2", "3"]
)
async def test_a_head_that_began_during_the_answer_before_has_the_same_deadline(
    serve, connect, wait_until, waiting, packets
):
    _, number = await serve(waiting.handler, head_timeout_s=0.05)
    client = await connect(number)
    for packet in packets:
        client.send(packet)
    await wait_until(lambda: waiting.began)
    waiting.go_on.set()
    assert (await client.receive()).status == 200
    assert (await client.receive()).status == 408


async def test_a_slow_body_has_its_own_deadline(serve, connect, wait_until):
    port, number = await serve(head_timeout_s=0.01, body_timeout_s=60.0)
    wire = await connect(number)
    wire.send(HEAD_OF_4)
    await wait_until(lambda: port.heads)
    await asyncio.sleep(0.05)
    assert (await wire.ask(b"abcd")).status == 200
    port.body_timeout_s = 0.2
    assert (await wire.ask(HEAD_OF_4 + b"ab")).status == 408
    assert await wire.wait_closed() == b""
    assert port.reading_bytes == 0


def limit_idle_time(port, seconds):
    """From now on, as if it had been so when the open connections came: a slow machine would have closed them first."""
    port.idle_timeout_s = seconds
    for stream in list(port.connections):
        port.late(stream)


async def test_an_idle_connection_is_closed_after_the_idle_timeout(serve, connect):
    port, number = await serve()
    used = await connect(number)
    assert (await used.ask(REQUEST)).status == 200
    limit_idle_time(port, 0.1)
    unused = await connect(number)
    assert await used.wait_closed() == await unused.wait_closed() == b""


async def test_a_client_that_disconnects_causes_no_error(serve, connect, wait_until, waiting):
    port, number = await serve(waiting.handler)
    wire = await connect(number)
    wire.send(WAITS)
    await wait_until(lambda: waiting.began)
    wire.writer.transport.abort()
    waiting.go_on.set()
    await wait_until(lambda: not port.connections)
    assert (await (await connect(number)).ask(REQUEST)).status == 200


async def test_a_client_that_disconnects_within_its_body_leaves_nothing_behind(serve, connect, wait_until):
    port, number = await serve()
    wire = await connect(number)
    wire.send(HEAD_OF_4 + b"ab")
    await wait_until(lambda: port.reading_bytes)
    wire.writer.close()
    await wait_until(lambda: not port.connections)
    assert port.reading_bytes == 0


async def test_a_client_that_closes_its_side_gets_its_answers(serve, connect, wait_until, waiting):
    _, number = await serve(waiting.handler)
    wire = await connect(number)
    wire.send(WAITS + REQUEST)
    wire.writer.write_eof()
    await wait_until(lambda: waiting.began)
    waiting.go_on.set()
    assert [(await wire.receive()).body for _ in range(2)] == [b"done"] * 2
    assert await wire.wait_closed() == b""


async def test_responses_stop_while_a_client_does_not_read(serve, connect, wait_until):
    answered = 0

    def large(request):
        nonlocal answered
        answered += 1
        return Response(200, b"x" * 1_000_000)

    port, number = await serve(large)
    wire = await connect(number)
    wire.writer.transport.pause_reading()
    wire.send(REQUEST * 80)
    await wait_until(lambda: any(http.state is State.UNREAD for http in port.connections.values()))
    assert answered < 50
    wire.writer.transport.resume_reading()
    for _ in range(80):
        assert len((await wire.receive()).body) == 1_000_000


@pytest.fixture
def unread(connect, wait_until):
    """`await unread(port, number, count)`: a client that reads nothing of the first of `count` long answers."""

    async def leave(port, number, count=1):
        before = set(port.connections)
        wire = await connect(number)
        wire.writer.transport.pause_reading()
        wire.send(REQUEST * count)
        await wait_until(lambda: any(stream.unsent_bytes for stream in set(port.connections) - before))
        return wire

    return leave


def long_answer(request):
    return Response(200, b"x" * 20_000_000)


async def test_an_idle_connection_whose_client_reads_nothing_is_cut_off(serve, unread, wait_until):
    port, number = await serve(long_answer)
    port.stalled_s = 0.05
    await unread(port, number)
    limit_idle_time(port, 0.05)
    await wait_until(lambda: not port.open_streams)


async def test_a_client_that_closes_its_side_and_reads_nothing_is_cut_off(serve, unread, wait_until):
    port, number = await serve(long_answer)
    port.stalled_s = 0.05
    wire = await unread(port, number)
    wire.writer.write_eof()
    await wait_until(lambda: not port.open_streams)


async def test_a_client_that_reads_slowly_gets_all_of_its_last_answer(serve, unread, wait_until):
    port, number = await serve(long_answer)
    # It ends while the client reads, and each read is progress.
    port.stalled_s = 60.0
    wire = await unread(port, number)
    limit_idle_time(port, 0.05)
    await wait_until(lambda: all(http.state is State.ENDED for http in port.connections.values()))
    wire.writer.transport.resume_reading()
    assert len((await wire.receive()).body) == 20_000_000
    assert await wire.wait_closed() == b""
    await wait_until(lambda: not port.open_streams)


async def test_idle_connections_whose_clients_read_nothing_make_room_at_once(serve, connect, unread, wait_until):
    port, number = await serve(long_answer)
    port.max_connections = 2
    unreading = [await unread(port, number) for _ in range(2)]
    for _ in unreading:
        await connect(number)
    await wait_until(lambda: port.open_streams == len(port.idle) == 2)


async def test_a_download_is_cut_off_only_if_no_other_connection_is_idle(serve, connect, unread, wait_until):
    port, number = await serve(lambda request: long_answer(request) if request.path == "/" else echo(request))
    port.max_connections = 2
    download = await unread(port, number)
    idle = await connect(number)
    assert (await idle.ask(REQUEST.replace(b"/ ", b"/short "))).status == 200
    await connect(number)
    assert await idle.wait_closed() == b""
    download.writer.transport.resume_reading()
    assert len((await download.receive()).body) == 20_000_000


async def test_a_connection_counts_until_its_client_has_read_the_end(serve, connect, unread, wait_until):
    port, number = await serve(long_answer)
    port.max_connections = 1
    wire = await unread(port, number, 2)
    limit_idle_time(port, 0.05)
    await wait_until(lambda: [http.state for http in port.connections.values()] == [State.ENDED])
    assert (await (await connect(number)).receive()).status == 503
    wire.writer.transport.abort()
    await wait_until(lambda: not port.open_streams)
    port.idle_timeout_s = 60.0
    await connect(number)
    await wait_until(lambda: port.idle)


async def test_finish_waits_for_the_current_response(serve, connect, wait_until, waiting):
    port, number = await serve(waiting.handler)
    busy, idle, half = await connect(number), await connect(number), await connect(number)
    busy.send(WAITS)
    half.send(REQUEST[:9])
    await wait_until(lambda: waiting.began and len(port.connections) == 3 and len(port.idle) == 1)
    finishing = asyncio.create_task(port.finish(60.0))
    assert await idle.wait_closed() == await half.wait_closed() == b""
    waiting.go_on.set()
    reply = await busy.receive()
    assert (reply.body, reply.headers["connection"]) == (b"done", "close")
    await finishing


async def test_finish_waits_for_a_body_that_is_still_arriving(serve, connect, wait_until):
    port, number = await serve()
    wire = await connect(number)
    wire.send(HEAD_OF_4 + b"ab")
    await wait_until(lambda: port.heads)
    finishing = asyncio.create_task(port.finish(60.0))
    await wait_until(lambda: port.draining)
    reply = await wire.ask(b"cd")
    assert reply.body.startswith(b"POST / 4 ")
    assert reply.headers["connection"] == "close"
    await finishing


async def test_finish_cuts_requests_off_after_the_grace_period(serve, connect, wait_until):
    port, number = await serve()
    wire = await connect(number)
    wire.send(HEAD_OF_4 + b"ab")
    await wait_until(lambda: port.heads)
    await port.finish(0.05)
    assert await wire.wait_closed() == b""
    await wait_until(lambda: not port.connections)


async def test_bytes_of_unfinished_bodies_are_bounded(serve, connect, wait_until):
    port, number = await serve()
    port.max_reading_bytes = 100_000
    first, second = await connect(number), await connect(number)
    with capture_logs() as logs:
        for wire in (first, second):
            wire.send(HEAD_OF_4.replace(b"4", b"70000") + b"x" * 60_000)
        await wait_until(lambda: port.refused["bodies"])
    assert [entry["limit"] for entry in logs] == ["HTTP bodies"]
    for wire in (first, second):
        wire.send(b"x" * 10_000)
    assert sorted([(await first.receive()).status, (await second.receive()).status]) == [200, 503]
    assert port.reading_bytes == 0
    assert (await (await connect(number)).ask(HEAD_OF_4 + b"abcd")).status == 200


async def test_each_request_of_a_trusted_proxy_has_its_own_client_address(serve, connect):
    port, number = await serve(lambda request: Response(200, f"{request.remote} {request.secure}".encode()))
    plain = b"GET / HTTP/1.1\r\nHost: h\r\n%b\r\n"
    forwarded = b"X-Forwarded-For: 1.2.3.4, 198.51.100.1\r\nX-Forwarded-Proto: https\r\n"
    assert (await (await connect(number)).ask(plain % forwarded)).body == b"127.0.0.1 False"
    port.trusted = TrustedProxies(["127.0.0.0/8"])
    wire = await connect(number)
    assert (await wire.ask(plain % b"")).body == b"127.0.0.1 False"
    assert (await wire.ask(plain % forwarded)).body == b"198.51.100.1 True"


async def test_above_the_limit_idle_connections_close_and_busy_ones_stay(serve, connect, wait_until, waiting):
    port, number = await serve(waiting.handler)
    port.max_connections = 2
    busy, idle = await connect(number), await connect(number)
    busy.send(WAITS)
    await idle.ask(REQUEST)
    third = await connect(number)
    assert await idle.wait_closed() == b""
    third.send(WAITS)
    await wait_until(lambda: waiting.began == 3)
    fourth = await connect(number)
    assert (await fourth.receive()).status == 503
    assert await fourth.wait_closed() == b""
    assert port.refused["connections"] == 1
    waiting.go_on.set()
    assert (await busy.receive()).status == (await third.receive()).status == 200
