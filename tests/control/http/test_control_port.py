"""What clients of the control port may do, against a whole control plane over real sockets."""

import asyncio

import pytest

from redpoll.control.http.response import Response

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
