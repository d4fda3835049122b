"""Sessions of the HTTP fallback on two servers: requests of a session reach both, and a worker is killed.

See src/redpoll/worker/fallback/README.md "Requests that reach another worker".
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from helpers.fallback_wire import FallbackClosed, FallbackSocket
from helpers.server import Server
from helpers.wire import Api, Socket, channel_auth

ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"


@pytest.fixture(scope="module")
def nodes(redis_of_module, own_postgres) -> Iterator[list[Server]]:
    database_url = own_postgres.url(own_postgres.create_database())
    common = {"redis_url": redis_of_module.url, "workers": 1, "database_url": database_url, "shutdown_grace_s": 2}
    with Server(node_name="one", **common) as one, Server(node_name="two", **common) as two:
        yield [one, two]


@asynccontextmanager
async def session_on(nodes: list[Server], kind: str) -> AsyncIterator[tuple[FallbackSocket, str]]:
    """A session whose requests go to the nodes by turns, and its socket id."""
    session = FallbackSocket([("127.0.0.1", node.port) for node in nodes], nodes[0].app_key, kind)
    await session.open()
    try:
        greeting = json.loads(await session.recv())
        yield session, json.loads(greeting["data"])["socket_id"]
    finally:
        await session.close()


async def subscribe(server: Server, session: FallbackSocket, socket_id: str, channel: str, user: str) -> None:
    member = json.dumps({"user_id": user})
    data = {"channel": channel, "channel_data": member, "auth": channel_auth(server, socket_id, channel, member)}
    assert await session.send(json.dumps({"event": "pusher:subscribe", "data": data})) == 204
    while json.loads(await session.recv())["event"] != "pusher_internal:subscription_succeeded":
        pass


async def numbers(session: FallbackSocket, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        message = json.loads(await session.recv())
        if message["event"] == "n":
            found.append(json.loads(message["data"])["n"])
    return found


@pytest.mark.parametrize("kind", ["xhr_streaming", "xhr"])
async def test_session_whose_requests_reach_two_nodes_misses_nothing(nodes: list[Server], kind: str) -> None:
    channel = f"presence-two-nodes-{kind}"
    watchers = [await Socket.connect(node) for node in nodes]
    for number, watcher in enumerate(watchers):
        await watcher.subscribe(channel, f"watcher-{number}")
    async with session_on(nodes, kind) as (session, socket_id), Api(nodes[1]) as api:
        await subscribe(nodes[0], session, socket_id, channel, "anna")
        for watcher in watchers:
            await watcher.until(lambda watcher=watcher: "anna" in users(watcher, ADDED, channel), 60, "anna")
        # More than a stream carries, so that it is opened again: on the other node.
        pad = "x" * 8000
        for number in range(80):
            await api.publish(channel, "n", json.dumps({"n": number, "pad": pad}))
        async with asyncio.timeout(60):
            assert await numbers(session, 80) == list(range(80))
        assert session.streams > 1
        assert set(session.answers) == {204}
        assert session.lines.count("o") == 1
        await session.asked.wait()
    for watcher in watchers:
        await watcher.until(lambda watcher=watcher: users(watcher, REMOVED, channel) == ["anna"], 60, "anna")
    # Only now: the others see a watcher leave, too.
    for watcher in watchers:
        watcher.abort()


def users(socket: Socket, event: str, channel: str) -> list[str]:
    return [json.loads(one["data"])["user_id"] for one in socket.all(event, channel)]


async def test_client_of_a_killed_worker_connects_again_and_is_counted_once(nodes: list[Server]) -> None:
    """Its polls are on one node and its session on the other, whose worker is killed."""
    one, two = nodes
    channel = "presence-killed"
    watcher = await Socket.connect(two)
    await watcher.subscribe(channel, "watcher")
    async with session_on([one], "xhr_streaming") as (session, socket_id):
        await subscribe(one, session, socket_id, channel, "anna")
        await watcher.until(lambda: users(watcher, ADDED, channel) == ["anna"], 60, "anna")
        # From now on its requests go to the other node: its stream is opened again there.
        session.targets[:] = [("127.0.0.1", two.port)]
        async with Api(two) as api:
            for number in range(60):
                await api.publish(channel, "n", json.dumps({"n": number, "pad": "x" * 8000}))
        async with asyncio.timeout(60):
            assert await numbers(session, 60) == list(range(60))
        one.kill_worker(0)
        with pytest.raises(FallbackClosed):
            await numbers(session, 1)
    await watcher.until(lambda: users(watcher, REMOVED, channel) == ["anna"], 60, "anna removed")
    # The other node, because this one is starting a worker.
    async with session_on([two], "xhr_streaming") as (session, socket_id):
        await subscribe(one, session, socket_id, channel, "anna")
        await watcher.until(lambda: users(watcher, ADDED, channel) == ["anna"] * 2, 60, "anna again")
    watcher.abort()
