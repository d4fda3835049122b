"""Channels read over HTTP, and what only redpoll's publishers can end: channels, subscriptions and grants."""

import asyncio
import secrets
from urllib.parse import parse_qs, urlsplit

import pytest

from helpers.answering import CUT, Answering, reply
from helpers.wire import Socket, eventually
from redpoll_client import AsyncPublisher, BadRequest, Gone, Publisher, Unavailable, mint_grant

from .conftest import url_of


async def all_of(reader):
    async with reader:
        return [(message.event, message.data) async for message in reader]


async def test_a_reader_gets_what_is_stored_and_what_comes_until_the_end(server):
    async with AsyncPublisher(url=url_of(server)) as publisher:
        await publisher.trigger("kept-answer", "text", "0")
        stored, live = asyncio.Event(), []

        async def read():
            async with publisher.read("kept-answer") as reader:
                async for message in reader:
                    live.append(message.data)
                    stored.set()
                assert reader.ended
                return reader.position

        reading = asyncio.create_task(read())
        await stored.wait()
        await publisher.publish_stream("kept-answer", "text", ["1"], end=True)
        position = await reading
        assert [live[0], len(live)] == ["0", 3]
        assert '"state":"done"' in live[2]
        with pytest.raises(BadRequest, match="ended"):
            await publisher.trigger("kept-answer", "text", "2")
        # An ended channel has nothing more for anybody.
        assert await all_of(publisher.read("kept-answer", position)) == []
        assert (await publisher.delete_history("kept-answer"))["epoch"]
        with pytest.raises(Gone):
            await all_of(publisher.read("kept-answer", position))
        await publisher.trigger("kept-answer", "text", "3", end=True)
        assert await all_of(publisher.read("kept-answer")) == [("text", "3")]


def test_a_blocking_reader_goes_on_at_its_position(server):
    with Publisher(url=url_of(server)) as publisher:
        publisher.trigger_batch([{"channel": "kept-read", "name": "n", "data": str(number)} for number in range(5)])
        with publisher.read("kept-read", live=False) as reader:
            first = [next(reader).data, next(reader).data]
        with publisher.read("kept-read", reader.position, live=False) as rest:
            assert first + [message.data for message in rest] == ["0", "1", "2", "3", "4"]
        with publisher.read("kept-read", rest.position, live=False) as more:
            assert list(more) == []
        with publisher.read("kept-read", "now", live=False) as more:
            assert list(more) == []
        with publisher.read("public", live=False) as reader, pytest.raises(BadRequest, match="history"):
            next(reader)
        with pytest.raises(ValueError, match="offset"):
            publisher.read("kept-read", "")
    with pytest.raises(RuntimeError, match="closed"):
        publisher.read("kept-read")


def test_waiting_readers_leave_the_pool_free(server):
    with Publisher(url=url_of(server), connections=1) as publisher, publisher.read("kept-free") as reader:
        publisher.trigger("kept-free", "n", "1")
        assert next(reader).data == "1"
        publisher.trigger("kept-free", "n", "2")
        assert next(reader).data == "2"


@pytest.mark.parametrize("answer", [reply(200, "[]"), reply(200, "{}"), reply(200, "<html>"), reply(204, "")])
def test_an_answer_that_is_no_stream_raises(answer):
    with (
        Answering(answer) as server,
        Publisher(url=server.url) as publisher,
        publisher.read("a") as reader,
        pytest.raises(Unavailable, match="Pusher-compatible"),
    ):
        next(reader)


async def test_a_reader_tries_again_for_as_long_as_there_is_time(monkeypatch):
    monkeypatch.setattr("redpoll_client.calls.random.uniform", lambda least, most: 0)
    page = [{"offset": 1, "event": "n", "data": "1", "time_ms": 1}]
    last = reply(200, page, {"Stream-Next-Offset": "e_01", "Stream-Closed": "true"})
    answers = [*[reply(503)] * 9, CUT, last]
    with Answering(*answers) as server, Publisher(url=server.url) as publisher:
        assert await asyncio.to_thread(lambda: [message.data for message in publisher.read("a")]) == ["1"]
    with Answering(*answers) as server:
        async with AsyncPublisher(url=server.url) as publisher:
            assert await all_of(publisher.read("a")) == [("n", "1")]


async def test_a_reader_from_now_misses_nothing_when_its_requests_fail(server, monkeypatch):
    monkeypatch.setattr("redpoll_client.calls.random.uniform", lambda least, most: 0)
    page = [{"offset": 2, "event": "n", "data": "1", "time_ms": 1}]
    last = reply(200, page, {"Stream-Next-Offset": "e_02", "Stream-Closed": "true"})
    answers = (reply(503), reply(200, [], {"Stream-Next-Offset": "e_01"}), CUT, last)
    with Answering(*answers) as away, Publisher(url=away.url) as publisher:
        assert await asyncio.to_thread(lambda: [message.data for message in publisher.read("a", "now")]) == ["1"]
    asked = [parse_qs(urlsplit(one.target).query) for one in away.asked]
    assert [(one["offset"], one.get("live")) for one in asked] == [
        (["now"], None),
        (["now"], None),
        (["e_01"], ["long-poll"]),
        (["e_01"], ["long-poll"]),
    ]
    async with AsyncPublisher(url=url_of(server)) as publisher, publisher.read("kept-now", "now") as reader:
        reading = asyncio.create_task(anext(reader))

        async def has_position():
            return reader.position != "now"

        await eventually(has_position, True)
        await publisher.trigger("kept-now", "n", "1")
        assert (await reading).data == "1"


async def test_a_user_is_removed_and_its_grant_revoked(server, opened):
    async with opened(url=url_of(server)) as call:
        # Revocations stay.
        user, jti = secrets.token_hex(8), secrets.token_hex(8)
        grant = mint_grant(server.app_key, server.app_secret, ["private-g", "presence-g"], user_id=user, jti=jti)
        member = await Socket.connect(server)
        for channel in ("private-g", "presence-g"):
            member.send({"event": "pusher:subscribe", "data": {"channel": channel, "auth": grant}})
            await member.next("pusher_internal:subscription_succeeded", channel)
        # A worker that is late isn't counted, and ends the subscription as well.
        assert (await call("unsubscribe", "presence-g", user_id=user))["unsubscribed"] <= 1
        await member.next("pusher:subscription_error", "presence-g")
        assert (await call("revoke_grants", jti=jti))["unsubscribed"] <= 1
        await member.next("pusher:subscription_error", "private-g")
        await member.subscribe("private-other")
        assert (await call("unsubscribe", "private-other", socket_id=member.socket_id))["unsubscribed"] <= 1
        await member.next("pusher:subscription_error", "private-other")
        assert (await call("revoke_grants", user_id=user))["unsubscribed"] == 0
        await member.close()
        for wrong in ({}, {"user_id": "1", "socket_id": "1.2"}, {"socket_id": "x"}):
            with pytest.raises(ValueError, match="socket_id"):
                await call("unsubscribe", "private-g", **wrong)
        with pytest.raises(ValueError, match="private-"):
            await call("unsubscribe", "news", user_id="1")
        with pytest.raises(ValueError, match="jti"):
            await call("revoke_grants")
