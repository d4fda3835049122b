"""The requests of all official server libraries and proxies take the short way: the worker reads each in one step, and
control publishes it by its fast path. /metrics counts both."""

import asyncio

import pytest

from helpers.leading import command
from helpers.library_requests import LIBRARY_REQUESTS
from helpers.server import Server
from helpers.wire import eventually

CONTROL = ("redpoll_publishes_fast_total", "worker=control")


async def answer_to(server: Server, packets: tuple[bytes, ...]) -> bytes:
    """The response to a request on a connection of its own. A client that asks first waits until it may send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(60):
            for packet in packets:
                writer.write(packet)
                await writer.drain()
                if b"Expect: 100-continue" in packet and packet.endswith(b"\r\n\r\n"):
                    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            return await reader.readuntil(b"\r\n\r\n{}")
    finally:
        writer.close()


async def test_each_request_of_a_library_or_proxy_takes_the_short_way() -> None:
    # A traced call takes the other way.
    with Server(workers=1, trusted_proxies="127.0.0.1", trace_calls_per_second=0) as server:
        token = command(server, "token", "create", server.app_id, "--name", "t", "--scope", "publish")["token"]
        published = server.metrics()[CONTROL]
        for name, request in LIBRARY_REQUESTS.items():
            packets = request.signed(server.app_id, server.app_key, server.app_secret, token)
            assert (await answer_to(server, packets)).startswith(b"HTTP/1.1 200 OK\r\n"), name
            published += 1
            assert server.metrics()[CONTROL] == published, f"not by control's fast path: {name}"

        async def counted() -> tuple[float | None, float | None]:
            """Of the worker, which writes its counters every few seconds."""
            found = {name: value for (name, _), value in server.metrics().items()}
            return found.get("redpoll_http_forwarded_total"), found.get("redpoll_http_usual_total")

        await eventually(counted, (len(LIBRARY_REQUESTS), len(LIBRARY_REQUESTS)))


@pytest.mark.parametrize("name", LIBRARY_REQUESTS)
def test_requests_are_signed_for_the_app_that_is_asked_for(name: str) -> None:
    shape = LIBRARY_REQUESTS[name]
    head = shape.signed("77", "other-key", "other-secret", "other-token")[0]
    assert b" /apps/77/events" in head.replace(b"/api/v1", b"")
    assert (b"auth_signature=" in head) == (b"auth_key=key" in shape.packets[0])
    assert b"other-" in head
    assert b"key=key" not in head
