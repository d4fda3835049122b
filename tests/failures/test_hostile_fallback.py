"""Requests of the HTTP fallback that no library sends (deploy/failures.md "Hostile input"): sessions guessed, resumed
after their end, flooded; bodies that lie. Each gets its exact answer, and nobody else notices.

Afterwards the workers are the same processes, have hardly grown, and have logged no traceback (tests/helpers/server.py
fails on one).
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from helpers.fallback_wire import FallbackClosed, FallbackSocket, ask, head_of, read_head
from helpers.server import Server, rss_bytes

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        workers=2, max_message_bytes=4096, max_connections_per_address=60, trusted_proxies="127.0.0.1"
    ) as running:
        pids = running.worker_pids()
        before = {pid: rss_bytes(pid) for pid in [*pids, running.control_pid]}
        yield running
        assert running.worker_pids() == pids, "a worker was replaced"
        grown = {pid: rss_bytes(pid) - size for pid, size in before.items()}
        assert all(growth < 24 * MIB for growth in grown.values()), grown


@pytest.fixture
async def victim(server: Server) -> AsyncIterator[FallbackSocket]:
    """A session that is used properly. At the end of the test it still works."""
    async with session_of(server) as session:
        yield session
        assert await session.send('{"event":"pusher:ping","data":{}}') == 204
        assert json.loads(await session.recv()) == {"event": "pusher:pong", "data": "{}"}


@contextlib.asynccontextmanager
async def session_of(server: Server, kind: str = "xhr_streaming") -> AsyncIterator[FallbackSocket]:
    session = FallbackSocket([("127.0.0.1", server.port)], server.app_key, kind)
    await session.open()
    try:
        assert json.loads(await session.recv())["event"] == "pusher:connection_established"
        yield session
    finally:
        await session.close()


async def post(server: Server, path: str, body: bytes = b"", **headers: str) -> int:
    return (await ask("127.0.0.1", server.port, "POST", path, body, **headers)).status


async def raw(server: Server, data: bytes) -> bytes:
    """The bytes that come until the server closes, or until its answer is whole and it waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            response = await read_head(reader)
            body = await reader.readexactly(int(response.headers.get("content-length", 0)))
        return b"%d " % response.status + body
    finally:
        writer.close()


async def every_message(session: FallbackSocket) -> None:
    """Reads until the session is closed."""
    while True:
        await session.recv()


# -- sessions of others


async def test_guessed_sessions_are_unknown(server: Server, victim: FallbackSocket) -> None:
    base = f"/pusher/app/{server.app_key}"
    number, name = victim.session.split("/")
    guesses = [f"{number}/{secrets.token_hex(4)}" for _ in range(50)]
    guesses += [f"{int(number) + 1}/{name}", f"{number}/{name.upper()}x", f"{number}/{name}x", f"0{number}/{name}"]
    for guess in guesses:
        assert await post(server, f"{base}/{guess}/xhr_send?t=1&n=1", b'["{}"]') == 404, guess


async def test_session_of_another_key_is_unknown(server: Server, victim: FallbackSocket) -> None:
    for key in ("nobody", server.app_key[:-1], f"{server.app_key}x", f"{server.app_key}%00"):
        assert await post(server, f"/pusher/app/{key}/{victim.session}/xhr_send?n=9", b'["{}"]') == 404


async def test_ended_session_is_not_resumed(server: Server) -> None:
    async with session_of(server) as session:
        pass
    # Until the worker has seen the end, the session is there; nobody gets a second `o` of it.
    async with asyncio.timeout(60):
        while await session.send('{"event":"pusher:ping","data":{}}') != 404:
            await asyncio.sleep(0.01)
    for action in ("xhr", "xhr_streaming"):
        assert await post(server, session.path(action, "protocol=7")) == 404


async def test_second_stream_takes_the_place_of_the_first(server: Server) -> None:
    """Who knows a session's name is its client: the name is what is secret."""
    async with session_of(server) as session:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head_of("POST", session.path("xhr_streaming", "protocol=7"), {}, 0))
        assert (await read_head(reader)).status == 200
        with pytest.raises(FallbackClosed) as closed:
            await session.recv()
        assert closed.value.code == 2010
        writer.close()


# -- bodies that lie

LIES = {
    "less than announced, then nothing": (b"Content-Length: 20\r\n\r\n[]", None),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n[]", 400),
    "length and chunks": (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n", 400),
    "negative length": (b"Content-Length: -1\r\n\r\n[]", 400),
    "bad chunk": (b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n[]\r\n0\r\n\r\n", 400),
    "announced too large": (b"Content-Length: 999999999\r\n\r\n[", 413),
    "announced too large, with a question": (b"Content-Length: 50000\r\nExpect: 100-continue\r\n\r\n", 413),
    "chunks beyond the limit": (
        b"Transfer-Encoding: chunked\r\n\r\n2328\r\n" + b"x" * 9000 + b"\r\n0\r\n\r\n",
        413,
    ),
    "compressed": (b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00", 400),
}


@pytest.mark.parametrize("lie", LIES)
async def test_bodies_that_lie_are_refused(server: Server, victim: FallbackSocket, lie: str) -> None:
    rest, status = LIES[lie]
    async with session_of(server) as session:
        head = f"POST {session.path('xhr_send')} HTTP/1.1\r\nHost: x\r\n".encode()
        if status is None:
            # It counts as incomplete until its deadline; the connection goes before that.
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + rest)
            await writer.drain()
            writer.close()
            assert await session.send('{"event":"pusher:ping","data":{}}') == 204
            return
        assert (await raw(server, head + rest)).startswith(b"%d " % status)
        if status == 413:
            with pytest.raises(FallbackClosed) as closed:
                await every_message(session)
            assert closed.value.code == 1009


NO_MESSAGES = {
    "empty": b"",
    "null": b"null",
    "an object": b"{}",
    "a text": b'"x"',
    "a number in it": b"[1]",
    "an object in it": b'[{"event":"pusher:ping"}]',
    "a list in it": b'[["x"]]',
    "null in it": b"[null]",
    "cut off": b'["x"',
    "two lists": b"[][]",
    "not UTF-8": b'["\xff"]',
    "lone surrogate": b'["\\ud800"]',
    "deep": b"[" * 4000,
    "too many": b"[" + b'"",' * 1000 + b'""]',
    "byte order mark": b"\xef\xbb\xbf[]",
}


@pytest.mark.parametrize("name", NO_MESSAGES)
async def test_bodies_that_are_no_messages_are_refused(server: Server, victim: FallbackSocket, name: str) -> None:
    assert await victim.send_raw(NO_MESSAGES[name]) == 400
    assert json.loads(await victim.recv())["data"]["code"] is None


async def test_bad_messages_are_answered_as_on_a_websocket(server: Server) -> None:
    """As many as close a WebSocket close the session, with the same code."""
    async with session_of(server) as session:
        for _ in range(3):
            await session.send_raw(json.dumps(["\x00"] * 50).encode())
        with pytest.raises(FallbackClosed) as closed:
            await every_message(session)
        assert closed.value.code == 4100


TARGETS = [
    "/pusher/app/{key}/1/short/xhr",
    "/pusher/app/{key}/1/" + "a" * 65 + "/xhr",
    "/pusher/app/{key}/99999/abcdefgh/xhr",
    "/pusher/app/{key}/1/abcdefgh/xhr_streaming/more",
    "/pusher/app/{key}/1/abcdefgh/eventsource",
    "/pusher/app/{key}/1/abcdefgh/htmlfile?c=alert",
    "/pusher/app/{key}/../1/abcdefgh/xhr",
    "/pusher/app/{key}/1/abcd%2Fefgh/xhr",
    "/pusher/app//1/abcdefgh/xhr",
]


@pytest.mark.parametrize("target", TARGETS)
async def test_other_addresses_open_nothing(server: Server, target: str) -> None:
    assert await post(server, target.format(key=server.app_key)) in (400, 404, 405, 426)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
async def test_other_methods_open_nothing(server: Server, method: str) -> None:
    path = f"/pusher/app/{server.app_key}/1/{secrets.token_hex(4)}/xhr"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head_of(method, path, {}, 0))
    assert (await read_head(reader)).status in (404, 405)
    writer.close()


async def test_numbers_that_lie_delay_only_their_own_session(server: Server, victim: FallbackSocket) -> None:
    async with session_of(server) as session:
        base = f"{session.base}/{session.session}/xhr_send"
        ping = b'["{\\"event\\":\\"pusher:ping\\",\\"data\\":{}}"]'
        for number in ("-1", "x", "9" * 15, "9" * 400, "0", "1e9", ""):
            assert await session.send_raw(ping, path=f"{base}?t=1&n={number}") == 204
        for number in range(10_000, 10_100):
            assert await session.send_raw(ping, path=f"{base}?t=1&n={number}") == 204
        for _ in range(107):
            assert json.loads(await session.recv())["event"] == "pusher:pong"


# -- floods


async def test_streams_that_are_opened_and_broken_off_leave_nothing(server: Server, victim: FallbackSocket) -> None:
    for _ in range(4):
        writers = []
        for _ in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            path = f"/pusher/app/{server.app_key}/1/{secrets.token_hex(4)}/xhr_streaming?protocol=7&n=1"
            writer.write(head_of("POST", path, {}, 0))
            writers.append(writer)
        for writer in writers:
            writer.transport.abort()

    def sessions() -> float:
        return sum(value for (name, _), value in server.metrics().items() if name == "redpoll_fallback_sessions")

    async with asyncio.timeout(60):
        while await asyncio.to_thread(sessions) != 1:
            await asyncio.sleep(0.2)


async def test_flood_of_sessions_of_an_address_is_bounded(server: Server, victim: FallbackSocket) -> None:
    """The test is a trusted proxy, and names the client."""
    bodies = []
    for _ in range(10):
        paths = [f"/pusher/app/{server.app_key}/1/{secrets.token_hex(4)}/xhr?protocol=7" for _ in range(30)]
        asked = (ask("127.0.0.1", server.port, "POST", path, X_Forwarded_For="192.0.2.9") for path in paths)
        bodies += [response.body for response in await asyncio.gather(*asked)]
    opened = [body for body in bodies if b"connection_established" in body]
    # Each of the two workers counts for itself.
    assert 60 <= len(opened) <= 120
    assert all(b"c[4100," in body for body in bodies if body not in opened)
    path = f"/pusher/app/{server.app_key}/1/{secrets.token_hex(4)}/xhr?protocol=7"
    other = await ask("127.0.0.1", server.port, "POST", path, X_Forwarded_For="192.0.2.10")
    assert b"connection_established" in other.body


async def test_flood_of_pipelined_requests_is_answered_in_order(server: Server, victim: FallbackSocket) -> None:
    count = 300
    requests = b"".join(
        head_of("POST", victim.path("xhr_send"), {}, 2) + b"[]"
        if number % 2
        else b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        for number in range(count)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(requests)
    async with asyncio.timeout(60):
        for number in range(count):
            response = await read_head(reader)
            await reader.readexactly(int(response.headers.get("content-length", 0)))
            assert response.status == (204 if number % 2 else 200)
    writer.close()


async def test_more_requests_on_a_stream_wait_for_its_end(server: Server) -> None:
    """A client that goes on sending on the connection of its stream isn't read."""
    async with session_of(server) as session:
        for _ in range(100):
            session.writer.write(head_of("POST", session.path("xhr_send"), {}, 2) + b"[]")
        assert await session.send('{"event":"pusher:ping","data":{}}') == 204
        assert json.loads(await session.recv())["event"] == "pusher:pong"
