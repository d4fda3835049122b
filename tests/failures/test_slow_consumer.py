"""A client that doesn't read is closed at a limit of unsent bytes; others notice nothing.

See deploy/failures.md "Slow clients".
"""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest

from helpers.server import Server, rss_bytes
from helpers.wire import PING, Api, Socket, connect_many, eventually, frame, subscribe_all

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(workers=1) as running:
        yield running


async def publish_numbers(api: Api, channel: str, first: int, count: int) -> None:
    """Events of 10 KB, ten a request, one request after another."""
    padding = "x" * 10_000
    for start in range(first, first + count, 10):
        items = [
            {"channel": channel, "name": "n", "data": json.dumps({"n": number, "x": padding})}
            for number in range(start, start + 10)
        ]
        status, body = await api.ask("POST", "/batch_events", {"batch": items})
        assert status == 200, body


async def test_client_that_does_not_read_is_closed_and_the_others_get_everything(
    server: Server, size: Callable[[int, int], int], figures
) -> None:
    slow_count, reader_count, events = size(20, 200), size(10, 200), size(1000, 3000)
    (worker,) = server.worker_pids()
    readers = await connect_many(server, reader_count)
    slow = await connect_many(server, slow_count, receive_buffer_bytes=4096)
    await subscribe_all([*readers, *slow], "wide")
    async with Api(server) as api:
        # Redis gets the number of a plain channel's sockets a little later than the sockets their answers.
        await eventually(lambda: api.subscription_count("wide"), reader_count + slow_count)
        await publish_numbers(api, "wide", 0, 10)
        for socket in [*readers, *slow]:
            await socket.until(lambda: len(socket.all("n")) == 10, what="the first events")  # noqa: B023
        before = greatest = rss_bytes(worker)
        for socket in slow:
            socket.pause()
        sent = 10
        while sent < events and await api.subscription_count("wide") > reader_count:
            # Few, so that the loop ends soon after the last client was closed, and some still take their close frames.
            await publish_numbers(api, "wide", sent, 10)
            sent += 10
            for socket in readers:  # At most these 100 KB are ever unsent to the readers.
                await socket.until(lambda: len(socket.all("n")) == sent, 60, "10 events")  # noqa: B023
            greatest = max(greatest, rss_bytes(worker))
        assert await api.subscription_count("wide") == reader_count, f"still subscribed after {sent} events"
    # At once: a client that doesn't take its close frame within 5 s is cut off.
    for socket in slow:
        socket.resume()
    for socket in readers:
        await socket.until(lambda: len(socket.all("n")) >= sent, 60, "all events")  # noqa: B023
        assert [json.loads(one["data"])["n"] for one in socket.all("n")] == list(range(sent))
    for socket in slow:
        assert await socket.until_closed() in (4100, None)
        seen = [json.loads(one["data"])["n"] for one in socket.all("n")]
        assert seen == list(range(len(seen))), "whole frames, in order, until the cut"
    closed_with_4100 = sum(1 for socket in slow if socket.close_code == 4100)
    assert closed_with_4100 > 0, "no client got 4100"
    grown = (greatest - before) / MIB
    after = (rss_bytes(worker) - before) / MIB
    figures.note(
        "Slow clients", f"{slow_count} that don't read: memory at most", grown, "MiB", f"{1.5 * slow_count:g} MiB"
    )
    figures.note("Slow clients", f"{slow_count} that don't read: memory after", after, "MiB")
    assert grown < slow_count * 1.5 + 8
    assert after < 8 + 0.1 * before / MIB
    # The drops are in the metrics, and the others are still served.
    await readers[0].ping()
    await asyncio.gather(*(socket.close() for socket in readers))


async def test_unread_pongs_count_as_unsent_bytes(server: Server) -> None:
    """Pongs count as unsent bytes: a flood of pings from a client that doesn't read must not grow memory."""
    socket = await Socket.connect(server, receive_buffer_bytes=4096)
    (worker,) = server.worker_pids()
    before = rss_bytes(worker)
    socket.pause()
    flood = frame(PING, b"x" * 100) * 1000
    for _ in range(300):
        socket.write(flood)
        if socket.lost:
            break
        await asyncio.sleep(0)
    other = await Socket.connect(server)
    await other.ping()
    assert rss_bytes(worker) - before < 8 * MIB
    socket.abort()
    await other.close()
