"""A Redis Cluster with three masters: one is killed, and a slot moves, while clients come, go and publish.

See deploy/failures.md "A Redis master fails".
"""

import asyncio
import contextlib
import json
import time
from binascii import crc_hqx
from collections import Counter
from collections.abc import Callable

import pytest
import redis

from failures.publishing import Publisher, check, delivery_is_back, numbers
from helpers.lengths import is_long
from helpers.sentinel import RedisCluster, RedisNode, redis_cluster
from helpers.server import APP_ID, Server
from helpers.walk import ADDED, REMOVED, WEBHOOKS, walk
from helpers.wire import Api, Socket, connect_many, end_all, eventually, subscribe_all
from redpoll.cluster.redis.keys import TAGS, Keys

HEADING = "A Redis master fails"


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster(node_timeout_ms=1000 if is_long() else 5000) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster):
    with Server(workers=2, redis_url=cluster.url, **WEBHOOKS) as server:
        yield server


def slot_of(server: Server, channel: str) -> int:
    return crc_hqx(TAGS[server.keys().shard(APP_ID, channel)], 0) % 16384


def rooms_in_every_third(server: Server) -> list[str]:
    """Names whose presence channels are in the slots of the first, second and third master."""
    found: dict[int, str] = {}
    for number in range(1000):
        found.setdefault(slot_of(server, f"presence-{number}") * 3 // 16384, str(number))
    return [found[third] for third in range(3)]


async def new_master(cluster: RedisCluster, killed: RedisNode) -> float:
    """Waits until all living nodes say that the cluster works without the killed one. Returns when that was."""

    def wait() -> float:
        nodes = [node for node in cluster.nodes if node is not killed]
        for node in nodes:
            with node.client() as client:
                while len(cluster.masters()) < 3 or "cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                    time.sleep(0.01)
        return time.monotonic()

    return await asyncio.to_thread(wait)


async def test_everything_works_on_a_cluster(server):
    await walk(server, rooms_in_every_third(server))


async def test_slot_moves_under_load(server, cluster, figures, within_s: Callable[[float], float]) -> None:
    room = "presence-moves"
    sockets = await connect_many(server, 8)
    await subscribe_all(sockets, "moves")
    for number, socket in enumerate(sockets):
        await socket.subscribe(room, f"user-{number}")
    publisher = Publisher(server, "moves")
    async with publisher.running():
        await delivery_is_back(publisher, sockets, time.monotonic(), 60)
        for channel in ("moves", room):
            await asyncio.to_thread(cluster.move_slot, slot_of(server, channel))
            moved_at = time.monotonic()
            await delivery_is_back(publisher, sockets, moved_at, within_s(5))
            figures.note(
                HEADING, "Cluster: publishing back after a slot moved", time.monotonic() - moved_at, "s", "1 s"
            )
    await compare(server, publisher, sockets, room, [f"user-{number}" for number in range(8)])
    for socket in sockets:
        assert not socket.all(REMOVED, room)
    await end_all(sockets)


async def test_master_is_killed(server, cluster, figures, within_s: Callable[[float], float]) -> None:
    # The channel, its members and the beats are on the master that is killed. Slots have moved, and replicas may have
    # taken over, so the masters are asked.
    killed = cluster.owner(crc_hqx(TAGS[0], 0) % 16384)
    names = [f"c{number}" for number in range(1000)]

    def is_there(channel: str) -> bool:
        return cluster.owner(slot_of(server, channel)) is killed

    name = next(name for name in names if is_there(name))
    elsewhere_name = next(name for name in names if not is_there(name))
    room = next(f"presence-{name}" for name in names if is_there(f"presence-{name}"))
    for node in cluster.nodes:
        with node.client() as client:
            client.config_set("cluster-require-full-coverage", "no")
    sockets = await connect_many(server, 12)
    await subscribe_all(sockets, name)
    stays, leaves, comes = sockets[:4], sockets[4:8], sockets[8:]
    for number, socket in enumerate((*stays, *leaves)):
        await socket.subscribe(room, f"user-{number}")
    publisher = Publisher(server, name)
    # The gate of other masters' channels stays open.
    others = await connect_many(server, 2)
    elsewhere = Publisher(server, elsewhere_name)
    await subscribe_all(others, elsewhere.channel)
    async with publisher.running(), elsewhere.running():
        await delivery_is_back(publisher, sockets, time.monotonic(), 60)
        await delivery_is_back(elsewhere, others, time.monotonic(), 60)
        killed.kill()
        killed_at = time.monotonic()
        for socket in leaves:
            socket.unsubscribe(room)
        for number, socket in enumerate(comes):
            socket.send(socket.subscribe_request(room, f"new-{number}"))
        new_master_at = await new_master(cluster, killed)
        await delivery_is_back(publisher, sockets, time.monotonic(), within_s(5))
        back_at = time.monotonic()
    figures.note(HEADING, "Cluster: fail-over", new_master_at - killed_at, "s")
    figures.note(HEADING, "Cluster: publishing back after the fail-over", back_at - new_master_at, "s", "1 s")
    assert back_at - new_master_at < within_s(1)
    # They were accepted before the gate opened again for the channels of the killed master.
    opened_at = min(one.answered_at for one in publisher.published if one.status == 200 and one.asked_at > killed_at)
    between = [one for one in elsewhere.published if one.asked_at > killed_at and one.answered_at < opened_at - 0.3]
    assert 200 in {one.status for one in between[1:]}
    await others[0].until(lambda: max(elsewhere.accepted()) in numbers(others[0])[-200:])
    await others[1].until(lambda: max(elsewhere.accepted()) in numbers(others[1])[-200:])
    await check(elsewhere, others)
    await end_all(others)
    names = [f"new-{number}" for number in range(4)] + [f"user-{number}" for number in range(4)]
    await compare(server, publisher, sockets, room, names)
    for socket in stays:
        await socket.until(lambda: set(users_in(socket, REMOVED, room)) == {f"user-{n}" for n in range(4, 8)})  # noqa: B023
        left, came = Counter(users_in(socket, REMOVED, room)), Counter(users_in(socket, ADDED, room))
        assert all(left[user] - came[user] in (0, 1) for user in left)
    await end_all(sockets)


async def compare(server: Server, publisher: Publisher, sockets: list[Socket], room: str, members: list[str]) -> None:
    """Nothing that was answered with 200 is missing, and Redis has these members and these workers only."""
    await check(publisher, sockets)
    async with Api(server) as api:
        users = {"users": [{"id": member} for member in members]}

        async def shown() -> tuple[int, object]:
            status, body = await api.ask("GET", f"/channels/{room}/users")
            if status == 200:
                body["users"].sort(key=lambda user: user["id"])
            return status, body

        await eventually(shown, (200, users))


async def test_no_worker_is_left_that_no_beat_names(server, cluster):
    async def ghosts() -> set[str]:
        held, beats = set(), set()
        for node in cluster.masters():
            with node.client() as client:
                held |= {key.split(":w:")[1] for key in client.scan_iter("rp:*:w:*", 1000)}
                # The others say that the key is elsewhere.
                with contextlib.suppress(redis.ResponseError):
                    beats |= set(client.hkeys(Keys().beat))
        return held - beats

    await eventually(ghosts, set())


def users_in(socket: Socket, event: str, room: str) -> list[str]:
    return [json.loads(frame["data"])["user_id"] for frame in socket.all(event, room)]
