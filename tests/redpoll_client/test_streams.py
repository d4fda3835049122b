"""`publish_stream`: deltas joined, numbered and bounded, and an end mark in every case."""

import asyncio
import heapq
import json
import time
from email.utils import formatdate

import pytest

from helpers.answering import CUT, Answering, reply
from redpoll.config.settings import Settings
from redpoll.control.http.ratelimit import RateLimit
from redpoll_client import AsyncPublisher, Publisher, RateLimited, Unconfirmed
from redpoll_client.calls import Attempts, Call
from redpoll_client.settings import endpoint_of
from redpoll_client.streams import Text

DEFAULT_RATE = Settings().trigger_rate_per_minute


def data_of(server):
    return [json.loads(asked.json["data"]) for asked in server.asked]


def text_of(events):
    assert [event["n"] for event in events] == list(range(len(events)))
    assert len({event["stream"] for event in events}) == 1
    text = ""
    for event in events:
        text += event.get("delta", "")
        assert event["length"] == len(text.encode("utf-16-le")) // 2
    return text


async def test_parts_that_come_fast_are_joined(opened):
    with Answering(reply(200)) as server:
        async with opened(url=server.url) as call:
            words = [f"word {number} ü🐦\n" for number in range(2000)]
            count = await call("publish_stream", "a", "token", iter(words), per_second=0.1)
        events = data_of(server)
        assert text_of(events) == "".join(words)
        assert events[-1]["state"] == "done"
        assert count == len(events) < 20
        assert all(len(asked.json["data"].encode()) <= 10_240 for asked in server.asked)


def test_text_is_sent_while_the_iterator_waits():
    """The second part comes only after the first was published."""
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:

        def parts():
            yield "one"
            server.came.wait()
            yield "two"

        publisher.publish_stream("a", "token", parts())
        assert text_of(data_of(server)) == "onetwo"


async def test_text_is_sent_while_the_async_iterator_waits():
    with Answering(reply(200)) as server:

        async def parts():
            yield "one"
            await asyncio.to_thread(server.came.wait)
            yield "two"

        async with AsyncPublisher(url=server.url) as publisher:
            await publisher.publish_stream("a", "token", parts())
        assert text_of(data_of(server)) == "onetwo"


async def test_an_iterator_that_raises_ends_as_failed(opened):
    def parts():
        yield "half"
        raise KeyError("model")

    with Answering(reply(200)) as server:
        async with opened(url=server.url) as call:
            with pytest.raises(KeyError, match="model"):
                await call("publish_stream", "a", "token", parts())
            with pytest.raises(TypeError, match="must be strings"):
                await call("publish_stream", "a", "token", [b"bytes"])
        events = data_of(server)
        assert text_of(events[:2]) == "half"
        assert [event.get("state") for event in events] == [None, "failed", "failed"]


async def test_a_cancelled_caller_leaves_an_end_mark():
    with Answering(reply(200)) as server:
        async with AsyncPublisher(url=server.url) as publisher:
            sent = asyncio.Event()

            async def endless():
                yield "begun"
                sent.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(publisher.publish_stream("a", "token", endless()))
            await sent.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert data_of(server)[-1]["state"] == "cancelled"


def test_an_interrupted_caller_leaves_an_end_mark():
    def parts():
        yield "begun"
        raise KeyboardInterrupt

    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:
        with pytest.raises(KeyboardInterrupt):
            publisher.publish_stream("a", "token", parts())
        assert data_of(server)[-1]["state"] == "cancelled"


async def test_an_unconfirmed_delta_ends_the_stream(opened):
    with Answering(reply(200), CUT, reply(200)) as server:
        async with opened(url=server.url) as call:
            with pytest.raises(Unconfirmed):
                await call("publish_stream", "a", "token", ("x" * 8000 for _ in range(10)), per_second=1000)
        assert data_of(server)[-1]["state"] == "failed"
        assert [event["n"] for event in data_of(server)] == [0, 1, 2]


async def test_a_rate_limit_is_waited_for_and_loses_nothing(opened):
    limited = reply(429, {"error": "slow"}, {"Retry-After": "0"})
    with Answering(reply(200), limited, limited, reply(200)) as server:
        async with opened(url=server.url) as call:
            await call("publish_stream", "a", "token", ("x" * 4000 for _ in range(4)), per_second=1000)
            accepted = [data for data, number in zip(data_of(server), range(99), strict=False) if number not in (1, 2)]
            assert text_of(accepted) == "x" * 16000
            server.answers = [reply(429, {"error": "for long"}, {"Retry-After": "3600"})]
            with pytest.raises(RateLimited):
                await call("publish_stream", "a", "token", ["x"])


# -- rate limits


def almost_used_up() -> bytes:
    """Accepts an event. Of its window, 40 s and 2 of 10 events are left by the server's clock, which is a day late."""
    now_s = int(time.time()) - 86_400
    limit = {"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "2", "X-RateLimit-Reset": str(now_s + 40)}
    return reply(200, {}, {"Date": formatdate(now_s, usegmt=True), **limit})


def test_a_stream_waits_when_its_rate_limit_is_almost_used_up():
    """The second part waits, although other events are sent meanwhile, and goes with the third."""
    with Answering(almost_used_up()) as server, Answering(reply(200)) as free, Publisher(url=server.url) as publisher:

        def parts():
            yield "one"
            server.came.wait()
            yield "two"
            with Publisher(url=free.url) as other:
                for _ in range(50):
                    other.trigger("a", "b", "c")
            yield "three"

        publisher.publish_stream("a", "token", parts(), per_second=1000)
        assert [event.get("delta") for event in data_of(server)] == ["one", "twothree", None]


async def test_an_async_stream_waits_when_its_rate_limit_is_almost_used_up():
    with Answering(almost_used_up()) as server, Answering(reply(200)) as free:

        async def parts():
            yield "one"
            await asyncio.to_thread(server.came.wait)
            yield "two"
            async with AsyncPublisher(url=free.url) as other:
                for _ in range(50):
                    await other.trigger("a", "b", "c")
            yield "three"

        async with AsyncPublisher(url=server.url) as publisher:
            await publisher.publish_stream("a", "token", parts(), per_second=1000)
        assert [event.get("delta") for event in data_of(server)] == ["one", "twothree", None]


@pytest.mark.parametrize("count", [1, 10, 40])
def test_streams_share_a_rate_limit_and_are_never_silent_for_long(count):
    """Simulated: `count` texts without an end, for ten minutes, at a server with its default limit."""
    now_s, call = 0.0, Call("POST", "/apps/1/events", correlation_id="id")
    attempts = Attempts(endpoint_of(url="http://key:secret@127.0.0.1/apps/1"), call, 1, 5, idempotent=False)
    rate = RateLimit(DEFAULT_RATE, clock=lambda: now_s, wall_clock=lambda: 1e9 + now_s)
    together: set[Text] = set()
    together |= {Text(together, None, 25, 10_240) for _ in range(count)}
    due = [(0.0, number, text) for number, text in enumerate(together)]
    while now_s < 600:
        now_s, number, text = heapq.heappop(due)
        window = rate.take("192.0.2.1")
        assert not window.passed
        lines = [line.split(": ") for line in window.headers(DEFAULT_RATE).decode().splitlines()]
        answer = attempts.answered(200, {"Date": formatdate(1e9 + now_s, usegmt=True), **dict(lines)}, b"{}")
        pause_s = text.interval_s(answer)
        assert pause_s <= 20
        heapq.heappush(due, (now_s + pause_s, number, text))


async def test_a_limit_of_a_day_slows_no_stream(opened):
    midnight_s = str(int(time.time()) + 40_000)
    day = {"X-RateLimit-Limit": "1000", "X-RateLimit-Remaining": "1", "X-RateLimit-Reset": midnight_s}
    with Answering(reply(200, {}, day)) as server:
        async with opened(url=server.url) as call:
            assert (await call("trigger", "a", "b", "c")).spacing_s == 0
