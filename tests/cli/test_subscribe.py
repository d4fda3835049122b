"""`redpoll subscribe` against a server."""

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from helpers.wire import Socket, eventually
from redpoll.cli.remote import RemoteError
from redpoll.cli.subscribe import Follower
from redpoll.doctor.target import parse


def lines_of(process):
    return [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]


async def test_events_of_public_private_and_presence_channels_are_lines(background, on_server_async, server):
    other = await Socket.connect(server)
    await other.subscribe("presence-room", user_id="1", user_info={"name": "Ann"})
    following = background("subscribe", "news", "private-a", "presence-room", "--user-id", "7", "--count", "6")
    await other.next("pusher_internal:member_added", "presence-room")
    for channel, data in (("news", '{"n":1}'), ("private-a", "text")):
        await eventually(lambda: _occupied(on_server_async, channel), True)  # noqa: B023
        await on_server_async("publish", channel, "e", data)
    other.send({"event": "client-x", "channel": "presence-room", "data": [1]})
    lines = await asyncio.to_thread(lines_of, following)
    assert following.returncode == 0
    by_channel = {name: [line for line in lines if line["channel"] == name] for name in ("news", "private-a")}
    for name, data in (("news", {"n": 1}), ("private-a", "text")):
        first, second = by_channel[name]
        assert first["event"] == "pusher_internal:subscription_succeeded"
        assert (second["event"], second["data"]) == ("e", data)
    room = [line for line in lines if line["channel"] == "presence-room"]
    assert room[0]["data"]["presence"]["hash"] == {"1": {"name": "Ann"}, "7": {}}
    assert (room[1]["event"], room[1]["data"], room[1]["user_id"]) == ("client-x", [1], "1")
    other.abort()


async def _occupied(on_server_async, channel):
    return json.loads((await on_server_async("channels", channel, "--json")).stdout)["occupied"]


def _wait_for_history(on_server, channel):
    """Workers learn of a new rule within a second."""
    deadline = time.monotonic() + 60
    while "epoch" not in on_server("subscribe", channel, "--count", "1").stdout:
        assert time.monotonic() < deadline, "the rule has not reached the workers"


def test_the_history_comes_first(on_server, server):
    where = ("--data-dir", str(server.folder / "data"))
    on_server("history", "rule", "add", server.app_id, "--prefix", "kept-", "--keep", "10", "--seconds", "60", *where)
    _wait_for_history(on_server, "kept-1")
    for number in range(3):
        on_server("publish", "kept-1", "e", f"[{number}]")
    result = on_server("subscribe", "kept-1", "--history", "2", "--event", "e", "--count", "2")
    assert [json.loads(line)["data"] for line in result.stdout.splitlines()] == [[1], [2]]


async def test_after_a_lost_connection_nothing_is_missing(on_server, on_server_async, server):
    where = ("--data-dir", str(server.folder / "data"))
    await on_server_async(
        "history", "rule", "add", server.app_id, "--prefix", "cut-", "--keep", "10", "--seconds", "60", *where
    )
    await asyncio.to_thread(_wait_for_history, on_server, "cut-1")
    notes = []
    follower = Follower(parse(server.pusher_url), ("cut-1",), {"user_id": "1"}, note=notes.append)
    lines = follower.lines()
    assert (await anext(lines))["event"] == "pusher_internal:subscription_succeeded"
    await on_server_async("publish", "cut-1", "e", "[1]")
    assert (await anext(lines))["data"] == [1]
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    await eventually(lambda: _published(on_server_async, "cut-1", "[2]"), True)
    assert (await anext(lines))["data"]["recovered"] is True
    assert (await anext(lines))["data"] == [2]
    assert notes
    await lines.aclose()


async def test_a_channel_without_history_is_followed_after_a_lost_connection(on_server_async, server):
    follower = Follower(parse(server.pusher_url), ("plain",), {"user_id": "1"}, note=lambda text: None)
    lines = follower.lines()
    assert (await anext(lines))["event"] == "pusher_internal:subscription_succeeded"
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    assert (await anext(lines))["event"] == "pusher_internal:subscription_succeeded"
    # Publishes get 503 until the new worker has registered.
    await eventually(lambda: _published(on_server_async, "plain", "[1]"), True)
    async with asyncio.timeout(60):
        assert (await anext(lines))["data"] == [1]
    await lines.aclose()


async def _published(on_server_async, channel, data):
    return (await on_server_async("publish", channel, "e", data)).exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("private-a", "--url", "ws://127.0.0.1:9/app/K"), 2, "has no secret"),
        (("presence-a", "--user-info", "{"), 2, "not JSON"),
        (("a", "--url", "ws://127.0.0.1:9/app/K"), 1, "can't be reached"),
        (("no spaces",), 1, "refused the subscription"),
    ],
)
def test_what_is_wrong_is_said(on_server, words, code, says):
    result = on_server("subscribe", *words)
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


def test_a_wrong_secret_and_a_wrong_key_end_with_1(typed, server):
    right = server.pusher_url
    refused = typed("subscribe", "private-a", "--url", right.replace(server.app_secret, "wrong"))
    assert (refused.exit_code, "refused the subscription private-a" in refused.stderr) == (1, True)
    closed = typed("subscribe", "a", "--url", right.replace(server.app_key, "wrong"))
    assert (closed.exit_code, "4001" in closed.stderr) == (1, True)


def test_without_a_secret_it_follows_public_channels_and_ends_after_the_seconds_given(typed, server):
    url = f"ws://127.0.0.1:{server.port}/app/{server.app_key}"
    result = typed("subscribe", "a", "--seconds", "0.1", "--url", url)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)


def test_interrupted_it_ends_with_130(background):
    following = background("subscribe", "a")
    assert following.stdout is not None
    following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert following.wait(60) == 130
    assert "Traceback" not in following.stderr.read()


@asynccontextmanager
async def answering_subscribes(*frames, **greeting):
    """A server that answers each frame with these and never closes. Yields the app's address."""

    async def serve(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        data = json.dumps({"socket_id": "1.1", **greeting})
        await socket.send_json({"event": "pusher:connection_established", "data": data})
        async for _ in socket:
            for frame in frames:
                await socket.send_json(frame)
        return socket

    app = web.Application()
    app.router.add_get("/app/K", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://K:S@127.0.0.1:{runner.addresses[0][1]}/apps/1"
    finally:
        await runner.cleanup()


UNAUTHORIZED = {"event": "pusher:error", "data": '{"code":4009,"message":"Connection is unauthorized"}'}


async def test_an_error_in_answer_to_a_subscribe_ends_with_1_though_the_connection_stays():
    """As Reverb does after a wrong signature."""
    async with answering_subscribes(UNAUTHORIZED) as url, asyncio.timeout(60):
        with pytest.raises(RemoteError, match="answered with the error 4009: Connection is unauthorized"):
            await anext(Follower(parse(url), ("private-a",), {}).lines())


async def test_an_error_that_asks_for_a_new_connection_gets_one():
    notes = []
    away = {"event": "pusher:error", "data": {"code": 4200, "message": "moving"}}
    async with answering_subscribes(away) as url, asyncio.timeout(60):
        follower = Follower(
            parse(url), ("a",), {}, note=lambda text: notes.append(text) or asyncio.current_task().cancel()
        )
        with pytest.raises(asyncio.CancelledError):
            await anext(follower.lines())
        asyncio.current_task().uncancel()
    assert [note.partition(" answered ")[2] for note in notes] == ["with the error 4200: moving; connecting again"]


async def test_an_error_after_the_subscription_ends_nothing():
    subscribed = {"event": "pusher_internal:subscription_succeeded", "channel": "a", "data": "{}"}
    event = {"event": "e", "channel": "a", "data": "x"}
    async with answering_subscribes(subscribed, UNAUTHORIZED, event) as url, asyncio.timeout(60):
        lines = Follower(parse(url), ("a",), {}).lines()
        assert [(await anext(lines))["event"] for _ in range(2)] == [subscribed["event"], "e"]
        await lines.aclose()


async def test_a_server_that_answers_no_ping_is_left_whatever_activity_timeout_it_announces(monkeypatch):
    monkeypatch.setattr("redpoll.cli.subscribe._PONG_TIMEOUT_S", 0.1)
    notes = []
    async with answering_subscribes(activity_timeout=0.1) as url, asyncio.timeout(60):
        follower = Follower(
            parse(url), ("a",), {}, note=lambda text: notes.append(text) or asyncio.current_task().cancel()
        )
        with pytest.raises(asyncio.CancelledError):
            await anext(follower.lines())
        asyncio.current_task().uncancel()
    assert [note.partition(" doesn't ")[2] for note in notes] == ["answer a ping; connecting again"]
