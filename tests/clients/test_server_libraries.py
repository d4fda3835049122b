"""The official server libraries, `pusher` from npm and from PyPI, and pysher: each call a backend makes."""

import asyncio
import json
import threading
import time
from typing import Any

import pusher
import pusher.errors
import pysher
import pytest

from clients.node import Node, NodeError
from helpers.server import Server
from helpers.wire import Socket, channel_auth


def python_library(server: Server) -> pusher.Pusher:
    return pusher.Pusher(
        app_id=server.app_id,
        key=server.app_key,
        secret=server.app_secret,
        host="127.0.0.1",
        port=server.port,
        ssl=False,
        timeout=60,
    )


async def node_library(server: Server, node: Node) -> None:
    options = {
        "appId": server.app_id,
        "key": server.app_key,
        "secret": server.app_secret,
        "host": "127.0.0.1",
        "port": str(server.port),
        "useTLS": False,
    }
    await node.call("server", client="backend", options=options)


async def node_calls(node: Node, method: str, *args: object) -> Any:
    answer = await node.call("server_call", client="backend", method=method, args=list(args))
    assert answer["status"] == 200
    assert len(answer["trace_id"]) == 32
    return answer["body"]


async def test_python_library_triggers_with_exclusion_and_info(server: Server) -> None:
    backend = python_library(server)
    heard, excluded = await Socket.connect(server), await Socket.connect(server)
    for one in (heard, excluded):
        await one.subscribe("py-news")
    assert await asyncio.to_thread(backend.trigger, "py-news", "one", {"n": 1}, excluded.socket_id) == {}
    assert await asyncio.to_thread(backend.trigger, ["py-news", "py-other"], "two", "text") == {}
    assert json.loads((await heard.next("one", "py-news"))["data"]) == {"n": 1}
    assert (await heard.next("two"))["data"] == "text"
    await excluded.next("two")
    assert not excluded.all("one")


async def test_python_library_sends_a_batch(server: Server) -> None:
    backend = python_library(server)
    reader = await Socket.connect(server)
    await reader.subscribe("py-batch")
    batch = [{"channel": "py-batch", "name": f"e{number}", "data": str(number)} for number in range(10)]
    assert await asyncio.to_thread(backend.trigger_batch, batch) == {}
    for number in range(10):
        assert (await reader.next(channel="py-batch"))["event"] == f"e{number}"


async def test_python_library_asks_about_channels(server: Server) -> None:
    """Its GET requests carry the body_md5 of an empty body, which other servers refuse."""
    backend = python_library(server)
    first, second = await Socket.connect(server), await Socket.connect(server)
    await first.subscribe("presence-py", 1, {"name": "One"})
    await second.subscribe("presence-py", 2)

    def ask() -> None:
        assert backend.channels_info("presence-py", ["user_count"]) == {"channels": {"presence-py": {"user_count": 2}}}
        info = backend.channel_info("presence-py", ["user_count", "subscription_count"])
        assert info == {"occupied": True, "user_count": 2, "subscription_count": 2}
        users = sorted(user["id"] for user in backend.users_info("presence-py")["users"])
        assert users == ["1", "2"]

    await asyncio.to_thread(ask)


async def test_python_library_signs_what_a_socket_may_use(server: Server) -> None:
    backend = python_library(server)
    socket = await Socket.connect(server)
    signed = backend.authenticate("presence-signed", socket.socket_id, {"user_id": "7", "user_info": {"a": 1}})
    socket.send({"event": "pusher:subscribe", "data": {"channel": "presence-signed", **signed}})
    success = await socket.next("pusher_internal:subscription_succeeded", "presence-signed")
    assert json.loads(success["data"])["presence"] == {"count": 1, "ids": ["7"], "hash": {"7": {"a": 1}}}


async def test_python_library_raises_on_a_wrong_secret(server: Server) -> None:
    """soketi answers every error with 200, so that a wrong secret looks like success."""
    backend = pusher.Pusher(
        server.app_id, server.app_key, "f" * 20, host="127.0.0.1", port=server.port, ssl=False, timeout=60
    )
    with pytest.raises(pusher.errors.PusherBadAuth, match="POST"):
        await asyncio.to_thread(backend.trigger, "any", "e", {})


@pytest.mark.parametrize(("skew_s", "accepted"), [(-500, True), (500, True), (-700, False), (700, False)])
async def test_python_library_with_a_wrong_clock(
    server: Server, monkeypatch: pytest.MonkeyPatch, skew_s: int, accepted: bool
) -> None:
    """The limit is 600 s. A slow machine has 100 s to either side of it."""
    backend = python_library(server)
    true_time = time.time
    monkeypatch.setattr("pusher.http.time.time", lambda: true_time() + skew_s)
    trigger = asyncio.to_thread(backend.trigger, "any", "e", {})
    if accepted:
        assert await trigger == {}
    else:
        with pytest.raises(pusher.errors.PusherBadAuth, match="600"):
            await trigger


async def test_npm_library_triggers_with_exclusion_and_info(server: Server, node: Node) -> None:
    await node_library(server, node)
    heard, excluded = await Socket.connect(server), await Socket.connect(server)
    for one in (heard, excluded):
        await one.subscribe("presence-npm", one.socket_id)
    excluding = {"socket_id": excluded.socket_id, "info": "user_count,subscription_count"}
    body = await node_calls(node, "trigger", "presence-npm", "one", {"n": [1]}, excluding)
    assert body == {"channels": {"presence-npm": {"user_count": 2, "subscription_count": 2}}}
    assert await node_calls(node, "trigger", "presence-npm", "two", {}) == {}
    assert json.loads((await heard.next("one"))["data"]) == {"n": [1]}
    await excluded.next("two")
    assert not excluded.all("one")


async def test_npm_library_sends_a_batch_and_asks(server: Server, node: Node) -> None:
    await node_library(server, node)
    reader = await Socket.connect(server)
    await reader.subscribe("npm-batch")
    batch = [{"channel": "npm-batch", "name": f"e{number}", "data": {"n": number}} for number in range(10)]
    assert await node_calls(node, "triggerBatch", batch) == {}
    for number in range(10):
        assert (await reader.next(channel="npm-batch"))["event"] == f"e{number}"
    listed = await node_calls(node, "get", {"path": "/channels", "params": {"filter_by_prefix": "npm-"}})
    assert listed["channels"] == {"npm-batch": {}}
    asked = {"path": "/channels/npm-batch", "params": {"info": "subscription_count"}}
    assert await node_calls(node, "get", asked) == {"occupied": True, "subscription_count": 1}


async def test_npm_library_signs_what_a_socket_may_use(server: Server, node: Node) -> None:
    await node_library(server, node)
    socket = await Socket.connect(server)
    signed = await node.call("server_authorize", client="backend", args=[socket.socket_id, "private-npm"])
    assert signed["auth"] == channel_auth(server, socket.socket_id, "private-npm")
    socket.send({"event": "pusher:subscribe", "data": {"channel": "private-npm", **signed}})
    await socket.next("pusher_internal:subscription_succeeded", "private-npm")


@pytest.mark.parametrize("user", ["bob", "ann b", "auth0|5f7c", "jürgen"])
async def test_npm_library_terminates_a_user_with_any_id(server: Server, node: Node, user: str) -> None:
    """It signs the path before its HTTP client escapes it."""
    await node_library(server, node)
    socket = await Socket.connect(server)
    data = await node.call("server_authenticate_user", client="backend", args=[socket.socket_id, {"id": user}])
    socket.send({"event": "pusher:signin", "data": data})
    await socket.next("pusher:signin_success")
    assert await node_calls(node, "terminateUserConnections", user) == {}
    assert await socket.until_closed() == 4009


async def test_npm_library_is_refused_beyond_the_limits(server: Server, node: Node) -> None:
    await node_library(server, node)
    with pytest.raises(NodeError, match="413"):
        await node_calls(node, "trigger", "any", "e", "x" * 10_241)
    assert await node_calls(node, "trigger", "any", "e", "x" * 10_240) == {}
    assert await node_calls(node, "trigger", [f"c{number}" for number in range(100)], "e", "") == {}
    eleven = [{"channel": "c", "name": "e", "data": ""}] * 11
    with pytest.raises(NodeError, match="400"):
        await node_calls(node, "triggerBatch", eleven)


async def test_pysher_receives_an_event(server: Server) -> None:
    """An old client: protocol 6, an Origin header, a `pusher:ping` with empty data at once."""
    heard: dict[str, str] = {}
    subscribed, delivered = threading.Event(), threading.Event()
    client = pysher.Pusher(
        server.app_key, secure=False, custom_host="127.0.0.1", port=server.port, secret=server.app_secret
    )

    def connected(_: str) -> None:
        channel = client.subscribe("private-pysher")
        channel.bind("pusher_internal:subscription_succeeded", lambda _: subscribed.set())
        channel.bind("news", lambda data: (heard.update(data=data), delivered.set()))

    client.connection.bind("pusher:connection_established", connected)
    client.connect()
    try:
        assert await asyncio.to_thread(subscribed.wait, 60)
        await asyncio.to_thread(python_library(server).trigger, "private-pysher", "news", {"n": 1})
        assert await asyncio.to_thread(delivered.wait, 60)
    finally:
        # With a time limit: if the server's Close comes before pysher's reader, its thread waits on a closed
        # descriptor.
        client.disconnect(1)
    assert json.loads(heard["data"]) == {"n": 1}
