"""What is `AsyncPublisher`'s own: its loop, many requests at once, cancelling."""

import asyncio
import threading

import pytest

from helpers.answering import CUT, SILENCE, Answering, reply
from redpoll_client import AsyncPublisher, Unconfirmed, async_publisher


@pytest.fixture
def no_idle_limit(monkeypatch):
    """Connections are used again, however long the machine pauses between two requests."""
    monkeypatch.setattr(async_publisher, "IDLE_S", 600.0)


async def test_many_tasks_share_the_pool(no_idle_limit):
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url, timeout=60, connections=4) as publisher:
            await asyncio.gather(*(publisher.trigger("a", "e", number) for number in range(100)))
        assert server.connections <= 4
        assert len({asked.json["correlation_id"] for asked in server.asked}) == 100


async def test_it_belongs_to_one_loop():
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url) as publisher:
            await publisher.trigger("a", "e", "")
            found = []

            def elsewhere() -> None:
                try:
                    asyncio.run(publisher.trigger("a", "e", ""))
                except RuntimeError as error:
                    found.append(str(error))

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "another event loop" in found[0]
            assert len(server.asked) == 1


@pytest.fixture(params=["directly", "by the session"])
def way(request, monkeypatch):
    """Both ways of sending a request: that of a version of aiohttp which lacks the direct calls is used by large
    requests of every version."""
    assert async_publisher.DIRECT
    monkeypatch.setattr(async_publisher, "DIRECT", request.param == "directly")


HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_answers_of_every_form(way):
    answers = (
        HEAD.encode() + b'3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n',
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + reply(200, {"a": 2}),
        reply(200, {"a": 3}) + reply(200, {"a": 4}),
        reply(200, {"a": "x" * 1_000_000}),
        b"HTTP/1.1 2000 what\r\n\r\n",
    )
    with Answering(*answers) as server:
        async with AsyncPublisher(url=server.url, connections=1) as publisher:
            assert [await publisher.trigger("a", "e", number) for number in range(3)] == [{"a": 1}, {"a": 2}, {"a": 3}]
            # What came unasked with the answer before isn't taken for this one's.
            assert len((await publisher.trigger("a", "e", ""))["a"]) == 1_000_000
            with pytest.raises(Unconfirmed):
                await publisher.trigger("a", "e", "")
        assert [asked.json["data"] for asked in server.asked] == ["0", "1", "2", "", ""]


async def test_large_requests_and_small_ones_share_the_pool(no_idle_limit):
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url, connections=1, max_data_bytes=200_000) as publisher:
            for data in ("", "x" * 200_000, ""):
                await publisher.trigger("a", "e", data)
        assert server.connections == 1
        assert [len(asked.json["data"]) for asked in server.asked] == [0, 200_000, 0]


async def test_a_cancelled_request_leaves_a_free_pool():
    with Answering(b"HTTP/1.1 100 Continue\r\n\r\n", reply(200)) as server:
        async with AsyncPublisher(url=server.url, connections=1) as publisher:
            waiting = asyncio.create_task(publisher.trigger("a", "e", "1"))
            await asyncio.to_thread(server.came.wait)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await publisher.trigger("a", "e", "2")


async def test_closing_ends_what_waits_for_a_connection_with_an_error_of_its_own(way):
    with Answering(SILENCE) as server:
        publisher = AsyncPublisher(url=server.url, connections=1)
        sent = asyncio.create_task(publisher.trigger("a", "e", "1"))
        await asyncio.to_thread(server.came.wait)
        waiting = asyncio.create_task(publisher.trigger("a", "e", "2"))
        await asyncio.sleep(0)
        await publisher.close()
        with pytest.raises(Unconfirmed):
            await sent
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        assert [asked.json["data"] for asked in server.asked] == ["1"]


async def test_closing_between_two_attempts_leaves_the_first_unconfirmed(way):
    with Answering(CUT) as server:
        publisher = AsyncPublisher(url=server.url, idempotency=True, attempts=100, total_timeout=60)
        publishing = asyncio.create_task(publisher.trigger("a", "e", "", correlation_id="order-7"))
        await asyncio.to_thread(server.came.wait)
        await publisher.close()
        with pytest.raises(Unconfirmed) as caught:
            await publishing
        assert caught.value.correlation_id == "order-7"
        with pytest.raises(RuntimeError, match="closed"):
            await publisher.trigger("a", "e", "")
