import itertools

import pytest

from helpers.wire import BINARY, PING, PONG, TEXT, Socket, frame
from redpoll import _http as compiled
from redpoll.testing import FakeServer
from redpoll.testing.socket import upgrade_fault


async def test_silence_is_pinged_then_closed(server):
    silent = await Socket.connect(server)
    server.clock.advance(120)
    await silent.next("pusher:ping")
    server.clock.advance(30)
    assert (await silent.until_closed(), silent.close_reason) == (4201, "Pong reply not received in time")


async def test_a_client_that_answers_stays(server):
    client = await Socket.connect(server)
    for _ in range(2):
        server.clock.advance(120)
        await client.next("pusher:ping")
        await client.ping()
    await client.settle()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b"x" * 70_000), 1009),
        (frame(TEXT, b"{}", mask=None), 1002),
    ],
)
async def test_violations_of_the_framing_close(server, data, code):
    client = await Socket.connect(server)
    client.write(data)
    assert await client.until_closed() == code
    assert server.connections == []


async def test_fragments_and_control_frames(server):
    client = await Socket.connect(server)
    message = b'{"event":"pusher:subscribe","data":{"channel":"news"}}'
    client.write(frame(TEXT, message[:9], fin=False) + frame(PING, b"p") + frame(0, message[9:]))
    await client.next("pusher_internal:subscription_succeeded", "news")
    assert (PONG, b"p") in client.control
    client.write(frame(BINARY, b"x"))
    assert "binary" in (await client.next("pusher:error"))["data"]["message"]


@pytest.mark.parametrize(
    ("query", "extra", "key", "code"),
    [
        ("protocol=7", "", "nobody", 4001),
        ("protocol=x", "", None, 4006),
        ("protocol=4", "", None, 4007),
        ("protocol=7", "Origin: http://evil.example\r\n", None, 4009),
    ],
)
async def test_handshakes_are_refused_with_the_protocols_codes(query, extra, key, code):
    with FakeServer(allowed_origins=("good.example",)) as server:
        client = await Socket.connect(server, query=query, extra=extra, key=key, established=False)
        assert await client.until_closed() == code
        assert client.frames[0]["data"]["code"] == code


HEADERS = {
    b"host": (b"x", b"x, y", None),
    b"upgrade": (b"WebSocket", b"h2c, websocket", b"h2c"),
    b"connection": (b"keep-alive, Upgrade", b"close"),
    b"sec-websocket-version": (b"13", b"8", None),
    b"sec-websocket-key": (b"dGhlIHNhbXBsZSBub25jZQ==", b"c2hvcnQ=", b"dGhlIHNhbXBsZSBub25jZQ= =", b"!", None),
    b"content-length": (None, b"0", b"1"),
    b"transfer-encoding": (None, b"chunked"),
}


def test_upgrades_are_refused_as_the_server_refuses_them():
    def head(method: bytes, version: bytes, values: tuple) -> tuple:
        headers = {name: value for name, value in zip(HEADERS, values, strict=True) if value is not None}
        lines = [b"%b /app/k HTTP/%b" % (method, version), *(b"%b: %b" % pair for pair in headers.items())]
        return upgrade_fault(method, version, headers), compiled.upgrade_fault(
            compiled.parse_head(b"\r\n".join(lines) + b"\r\n\r\n")
        )

    right = next(itertools.product(*HEADERS.values()))
    cases = [(b"POST", b"1.1", right), (b"GET", b"1.0", right)]
    cases += [(b"GET", b"1.1", values) for values in itertools.product(*HEADERS.values())]
    for case in cases:
        ours, theirs = head(*case)
        assert ours == theirs, case
