import asyncio
import random
from contextlib import asynccontextmanager

from helpers.wire import BINARY, TEXT, frame
from redpoll.testing.relay import Relay, take_frames


def test_frames_are_taken_whole_however_the_bytes_come():
    chance = random.Random(1)
    sent = [
        (TEXT, b""),
        (TEXT, b"x" * 125),
        (BINARY, b"y" * 126),
        (TEXT, b"z" * 70_000),
        (TEXT, "ü".encode()),
    ]
    for mask in (None, b"\x01\x02\x03\x04"):
        stream = b"".join(frame(opcode, payload, mask=mask) for opcode, payload in sent)
        buffer, taken, at = bytearray(), [], 0
        while at < len(stream):
            size = chance.choice((1, 2, 3, 1000))
            buffer += stream[at : at + size]
            at += size
            taken += take_frames(buffer)
        assert [(opcode, payload) for _, opcode, payload in taken] == sent
        assert b"".join(whole for whole, _, _ in taken) == stream
        assert not buffer


@asynccontextmanager
async def relayed(upstream):
    """Yields the address of a relay to the server `upstream`, and what it notes: (path, status) of each answer."""
    noted = []
    relay = Relay(
        lambda _: None,
        lambda request, status: noted.append((request.path, status)),
        lambda _, __: None,
        lambda request: request.path == "/publish",
    )
    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    relay.upstream = server.sockets[0].getsockname()
    listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    async with server, listener, asyncio.timeout(60):
        yield listener.sockets[0].getsockname(), noted


async def test_a_stream_is_passed_on_as_it_comes_and_ends_with_its_client():
    received, left = asyncio.Event(), asyncio.Event()

    async def upstream(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await received.wait()
        writer.write(b"6\r\nsecond\r\n")
        assert await reader.read() == b""
        left.set()
        writer.close()

    async with relayed(upstream) as (address, noted):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n")
        await reader.readuntil(b"first")
        assert noted == [("/stream", 200)]
        received.set()
        await reader.readuntil(b"second")
        writer.close()
        await left.wait()


async def test_requests_of_one_connection_are_answered_in_their_order():
    async def upstream(reader, writer):
        while target := (await reader.readline()).split(b" ")[1:2]:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + target[0])
        writer.close()

    async with relayed(upstream) as (address, noted):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(3)))
        writer.write_eof()
        answers = await reader.read()
    assert [answer[-2:] for answer in answers.split(b"HTTP/1.1")[1:]] == [b"/0", b"/1", b"/2"]
    assert noted == [("/0", 200), ("/1", 200), ("/2", 200)]


async def test_a_subscriber_that_has_an_event_finds_it_noted():
    event, chunk = frame(TEXT, b"paid"), b"4\r\npaid\r\n"
    subscribers, sent, heard = [], asyncio.Event(), asyncio.Event()

    async def upstream(reader, writer):
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        if path == b"/publish":
            for subscriber, data in subscribers:
                subscriber.write(data)
            sent.set()
            # By then the relay has read the event, too.
            await heard.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        elif path == b"/stream":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            subscribers.append((writer, chunk))
        else:
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            subscribers.append((writer, event))
            await reader.readuntil(b"heard")
            heard.set()
        await reader.read()
        writer.close()

    async with relayed(upstream) as (address, noted):

        async def ask(path, more=b""):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET %b HTTP/1.1\r\nHost: h\r\n%b\r\n" % (path, more))
            return reader, writer

        socket, stream = await ask(b"/app/key", b"Upgrade: websocket\r\n"), await ask(b"/stream")
        for reader, _ in (socket, stream):
            await reader.readuntil(b"\r\n\r\n")
        publisher = await ask(b"/publish")
        await sent.wait()
        socket[1].write(frame(TEXT, b"heard", mask=bytes(4)))

        async def seen(reader, data):
            await reader.readuntil(data)
            return list(noted)

        found = await asyncio.gather(seen(socket[0], event), seen(stream[0], chunk))
        assert found == [[("/stream", 200), ("/publish", 200)]] * 2
        for _, writer in (socket, stream, publisher):
            writer.close()


async def test_a_client_that_is_connected_when_the_server_ends_causes_no_traceback():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    upgraded, ended = asyncio.Event(), asyncio.Event()

    async def upstream(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        upgraded.set()
        await reader.read()
        writer.close()
        ended.set()

    async with relayed(upstream) as (address, _):
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /app/key HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\n\r\n")
        await upgraded.wait()
        (serving,) = (task for task in asyncio.all_tasks() - before if task.get_coro().__name__ == "serve")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await ended.wait()
        writer.close()
    assert faults == []
