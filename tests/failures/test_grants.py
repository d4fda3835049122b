"""Grants and subscriptions that are taken back, on two nodes, while something is away (deploy/failures.md "A grant is
revoked")."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.granting import mint
from helpers.leading import command
from helpers.postgres import PostgresServer
from helpers.reading import EVENTS, Reading, keep
from helpers.server import Server
from helpers.wire import Api, Socket, channel_auth, connect_patiently
from redpoll.cluster.redis.keys import Keys
from redpoll.ipc.command_socket import ask, socket_path

HEADING = "A grant is revoked"
SUCCEEDED = "pusher_internal:subscription_succeeded"
REFUSED = "pusher:subscription_error"


@pytest.fixture(scope="module")
def database(own_postgres) -> str:
    return own_postgres.create_database()


@pytest.fixture(scope="module")
def nodes(redis_of_module, own_postgres, database) -> Iterator[list[Server]]:
    settings = {"workers": 1, "database_url": own_postgres.url(database)}
    nodes = [Server(redis_url=redis_of_module.url, node_name=name, **settings) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        for node in pool.map(lambda node: node.__enter__(), nodes):
            assert node.port
        command(nodes[0], "app", "set", nodes[0].app_id, "grants=true")
    try:
        yield nodes
    finally:
        for node in nodes:
            node.__exit__(None, None, None)


def grant(node: Server, *channels: str, **claims: object) -> str:
    return mint(node.app_key, node.app_secret, *channels, **claims)


async def answer(socket: Socket, channel: str, auth: str) -> dict:
    """The first frame that answers a subscribe."""
    socket.send({"event": "pusher:subscribe", "data": {"channel": channel, "auth": auth}})
    return await socket.next(None, channel)


def check(node: Server, auth: str) -> dict:
    """What `redpoll grant check --json` prints; its exit code says whether the grant is accepted."""
    return ask(socket_path(node.folder / "data"), "grant check", {"app": node.app_id, "auth": auth, "channel": None})


async def until_granted(node: Server) -> None:
    """Waits until the node's control plane and its worker know that the app accepts grants."""
    probe = grant(node, "private-probe")
    while not (await asyncio.to_thread(check, node, probe))["valid"]:
        await asyncio.sleep(0.05)
    while True:
        socket = await Socket.connect(node)
        frame = await answer(socket, "private-probe", probe)
        socket.abort()
        if frame["event"] == SUCCEEDED:
            return


async def revoked_error(socket: Socket, channel: str) -> None:
    frame = await socket.next(REFUSED, channel)
    assert '"type":"AuthError"' in frame["data"]
    assert '"status":401' in frame["data"]
    assert "access was revoked" in frame["data"]


async def ended_at_most(api: Api, count: int, path: str, body: dict[str, str]) -> None:
    """Ends this many subscriptions. A worker that answers later than the 2 s of a survey ends its own, uncounted; that
    they end, the clients show."""
    status, answer = await api.ask("POST", path, body)
    assert status == 200, answer
    assert answer["unsubscribed"] <= count


async def revoke_one(node: Server, **body: str) -> None:
    """Takes a grant back by which one subscription was made."""
    async with Api(node) as api:
        await ended_at_most(api, 1, "/grants/revoke", body)


async def test_a_revocation_ends_the_subscription_on_another_node_also_without_postgres_and_after_redis_lost_its_data(
    nodes, redis_of_module, own_postgres, database, figures, wait_until
):
    one, two = nodes
    await until_granted(one)
    await until_granted(two)
    auths = {jti: grant(two, "private-a-*", jti=jti, sub=f"user {jti}") for jti in ("first", "second", "third")}
    sockets = {jti: await Socket.connect(two) for jti in auths}
    for jti, socket in sockets.items():
        assert (await answer(socket, f"private-a-{jti}", auths[jti]))["event"] == SUCCEEDED

    began = time.monotonic()
    await revoke_one(one, jti="first")
    await revoked_error(sockets["first"], "private-a-first")
    figures.note(HEADING, "asked on one node, ended on the other", time.monotonic() - began, "s", "below 1")
    again = await answer(sockets["first"], "private-a-other", auths["first"])
    assert (again["event"], "access was revoked" in again["data"]) == (REFUSED, True)

    own_postgres.kill()
    began = time.monotonic()
    await revoke_one(one, sub="user second")
    await revoked_error(sockets["second"], "private-a-second")
    figures.note(HEADING, "the same while PostgreSQL is away", time.monotonic() - began, "s", "below 1")

    # Redis comes back empty, and a worker that has never seen the revocations with it.
    redis_of_module.kill()
    shutil.rmtree(redis_of_module.folder / "appendonlydir")
    redis_of_module.start()
    await wait_until(lambda: redis_of_module.call("XLEN", Keys().revoked_grants))
    before = two.worker_pids()
    two.kill_worker(0)
    await wait_until(lambda: two.worker_pids() not in ([], before))
    for jti in ("first", "second"):
        async with asyncio.timeout(60):
            socket = await connect_patiently(two)
            refused = await answer(socket, f"private-a-{jti}", auths[jti])
            assert refused["event"] == REFUSED
            assert "access was revoked" in refused["data"]
            socket.abort()
    socket = await connect_patiently(two)
    assert (await answer(socket, "private-a-third", auths["third"]))["event"] == SUCCEEDED
    await asyncio.to_thread(own_postgres.start)
    for jti in ("first", "second"):
        checked = await asyncio.to_thread(check, one, auths[jti])
        assert (checked["valid"], checked["reason"]) == (False, "access was revoked")
    while await asyncio.to_thread(stored, own_postgres, database) != {"jti first", "sub user second"}:
        await asyncio.sleep(0.05)
    for socket in sockets.values():
        socket.abort()


def stored(postgres: PostgresServer, database: str) -> set[str]:
    return {row["subject"] for row in postgres.execute(database, "SELECT subject FROM revoked_grants")}


async def test_a_user_is_removed_from_one_channel_on_all_nodes_and_needs_a_new_signature(nodes, wait_until):
    one, two = nodes
    member = await Socket.connect(two)
    other = await Socket.connect(one)
    await other.subscribe("presence-room", "anna")
    await member.subscribe("presence-room", "ben")
    await member.subscribe("private-mine", None)
    await other.next("pusher_internal:member_added", "presence-room")
    async with Api(one) as api:
        path = "/channels/presence-room/unsubscribe"
        await ended_at_most(api, 1, path, {"user_id": "ben"})
        await revoked_error(member, "presence-room")
        await other.next("pusher_internal:member_removed", "presence-room")
        assert await api.users("presence-room") == ["anna"]
        assert await api.ask("POST", path, {"user_id": "ben"}) == (200, {"unsubscribed": 0})
        data = '{"user_id": "ben"}'
        auth = channel_auth(two, member.socket_id, "presence-room", data)
        request = {"channel": "presence-room", "auth": auth, "channel_data": data}
        member.send({"event": "pusher:subscribe", "data": request})
        await revoked_error(member, "presence-room")
        # Its other channel and the connection stay.
        path = "/channels/private-mine/unsubscribe"
        await ended_at_most(api, 1, path, {"socket_id": member.socket_id})
        await revoked_error(member, "private-mine")
        await member.ping()
    # A signature for another connection is a new one.
    returned = await Socket.connect(two)
    await returned.subscribe("presence-room", "ben")
    for socket in (member, other, returned):
        await socket.close()


async def test_a_reader_over_http_ends_when_another_node_takes_its_grant_back(nodes):
    one, two = nodes
    for prefix in ("kept-", "private-kept-"):
        await asyncio.to_thread(keep, one, prefix)
    auths = [grant(two, "kept-*", "private-kept-*", jti="read", sub="anna"), grant(two, "private-kept-*", sub="ben")]
    async with Reading(two, auths[0]) as anna, Reading(two, auths[1]) as ben:
        for reading in (anna, ben):
            while (await reading.ask("private-kept-a")).status != 200:
                await asyncio.sleep(0.05)
        async with (
            anna.stream("kept-a", headers=EVENTS) as first,
            ben.stream("private-kept-a", headers=EVENTS) as second,
        ):
            await revoke_one(one, jti="read")
            (last,) = await first.rest()
            assert (last.name, last.json["error"]) == ("pusher:error", "access was revoked")
            async with Api(one) as api:
                path = "/channels/private-kept-a/unsubscribe"
                await ended_at_most(api, 1, path, {"user_id": "ben"})
            assert [event.name for event in await second.rest()] == ["pusher:error"]
        for reading in (anna, ben):
            assert (await reading.ask("private-kept-a")).status == 401
