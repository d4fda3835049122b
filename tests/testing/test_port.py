import asyncio

import pytest

from helpers.wire import signed_path

BODY = b'{"name":"n","channel":"c","data":"d"}'


async def exchange(server, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def post(server, *, more: str = "") -> bytes:
    target = signed_path(server, "POST", "/apps/1/events", BODY)
    return f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n{more}\r\n".encode()


async def test_requests_of_one_connection_are_answered_in_order(server):
    request = post(server) + BODY
    answers = await exchange(
        server, request + request[:40], request[40:] + post(server, more="Connection: close\r\n") + BODY
    )
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    server.assert_published("n", times=3)


async def test_a_body_is_let_in_when_it_is_announced(server):
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        async with asyncio.timeout(60):
            writer.write(post(server, more="Expect: 100-continue\r\nConnection: close\r\n"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 17_000 + b"\r\n\r\n", 431),
        (b"POST /apps/1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 1100000\r\n\r\n", 413),
        (b"GET /app/fake-key HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 426),
        (b"GET /app/fake-key HTTP/1.1\r\nHost: x\r\n\r\n", 426),
    ],
)
async def test_what_is_no_request_is_refused(server, request_bytes, status):
    assert (await exchange(server, request_bytes)).startswith(b"HTTP/1.1 %d " % status)


async def test_http_1_0_closes_after_the_answer(server):
    assert (await exchange(server, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nOK")


async def test_routes_for_other_suites_are_off_unless_asked_for(server):
    answer = await exchange(server, b"GET /fake/published HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
