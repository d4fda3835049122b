"""A worker killed with -9 leaves no ghost member and no wrong count, and its clients are served again.

See deploy/failures.md "Worker killed".
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from clients.node import Node, auth_endpoint, local_signer
from helpers.server import Server
from helpers.wire import Api, Socket, eventually, sockets_by_worker

ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"


def removed_users(observer: Socket, channel: str) -> list[str]:
    return sorted(json.loads(one["data"])["user_id"] for one in observer.all(REMOVED, channel))


def keys_naming(server: Server, incarnations: set[str]) -> list[str]:
    """Keys of Redis that name one of these worker incarnations; its last statistics expire by themselves."""
    with server.redis() as redis:
        keys = [key.decode() for key in redis.scan_iter(count=1000)]
    return sorted(key for key in keys if key.rpartition(":")[2] in incarnations and ":stats:" not in key)


def living(server: Server) -> set[str]:
    """The worker incarnations that have a beat."""
    with server.redis() as redis:
        (beat,) = [key for key in redis.scan_iter(count=1000) if key.endswith(b":beat")]
        return {name.decode() for name in redis.hkeys(beat)}


async def gone_from(server: Server, before: set[str]) -> int:
    return len(before - living(server))


def processes_of(server: Server) -> Callable[[], Awaitable[int]]:
    """The number of worker processes, for `eventually`."""

    async def count() -> int:
        return len(server.worker_pids())

    return count


async def test_members_of_a_killed_worker_are_removed_once_and_counted_no_more(
    server: Server, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    members = 50
    for repetition in range(size(1, 20)):
        channel, plain, alone = (f"{kind}-kill-{repetition}" for kind in ("presence", "public", "alone"))
        held = await sockets_by_worker(server, members)
        victim = max(held, key=lambda pid: len(held[pid]))
        observers = [one for pid, sockets in held.items() if pid != victim for one in sockets[:1]]
        everyone = [socket for sockets in held.values() for socket in sockets]
        names = [f"member-{number:02d}" for number in range(members)]
        for socket, name in zip(held[victim], names, strict=False):
            await socket.subscribe(channel, name)
            await socket.subscribe(plain)
            await socket.subscribe(alone)
        for number, observer in enumerate(observers):
            await observer.subscribe(channel, f"observer-{number}")
            await observer.subscribe(plain)
        before = living(server)
        async with Api(server) as api:
            assert len(await api.users(channel)) == members + len(observers)
            began = time.monotonic()
            server.kill_worker(server.worker_pids().index(victim))
            for observer in observers:
                await observer.until(
                    lambda: len(observer.all(REMOVED, channel)) >= members,  # noqa: B023
                    within_s(1),
                    f"{members} member_removed",
                )
            announced_s = time.monotonic() - began
            left = [f"observer-{number}" for number in range(len(observers))]
            await eventually(lambda: api.users(channel), left, within_s(1))  # noqa: B023
            assert await api.subscription_count(channel) == len(left)
            await eventually(lambda: api.subscription_count(plain), len(left), within_s(1))  # noqa: B023
            empty = {"occupied": False, "subscription_count": 0}
            await eventually(lambda: api.get(f"/channels/{alone}"), empty, within_s(1))  # noqa: B023
            right_s = time.monotonic() - began
            assert alone not in (await api.get("/channels"))["channels"]
            # Frames come in order, so an event marks the end of the others.
            await api.publish(channel, "end", "{}")
        for observer in observers:
            await observer.next("end", channel)
            assert removed_users(observer, channel) == names, "missing or sent twice"
        for socket in held[victim]:
            assert socket.lost or await socket.until_closed() is None
        # The reaper removes the name last, after all that it announced.
        await eventually(lambda: gone_from(server, before), 1)  # noqa: B023
        gone = before - living(server)
        assert not keys_naming(server, gone), "a dead worker's keys are still there"
        figures.note("Worker killed", "kill -9: every member_removed seen", announced_s, "s", "1 s")
        figures.note("Worker killed", "kill -9: counts right", right_s, "s", "1 s")
        await asyncio.gather(*(one.close() for one in everyone if not one.lost))
        await eventually(processes_of(server), server.workers)


async def test_clients_of_a_killed_worker_come_back_and_are_served(
    server: Server, within_s: Callable[[float], float]
) -> None:
    """With pusher-js: its subscriptions work again without help from the page."""
    async with auth_endpoint(local_signer(server)) as url, Node(server) as node, Api(server) as api:
        names = [f"user-{number}" for number in range(8)]
        before = server.client_ports()
        for name in names:
            await node.connect(name, f"{url}?user={name}")
            await node.subscribe(name, "presence-return")
            await node.subscribe(name, "private-return")
        after = server.client_ports()
        victim = max(after, key=lambda pid: len(after[pid] - before.get(pid, set())))
        hit = len(after[victim] - before[victim])
        server.kill_worker(server.worker_pids().index(victim))
        # pusher-js waits a second after a broken connection.
        success = {"event": "pusher:subscription_succeeded", "channel": "private-return"}
        await node.seen(len(names) + hit, within_s(3), **success)
        await eventually(lambda: api.users("presence-return"), names, within_s(3))
        await api.publish("private-return", "again", "{}")
        for name in names:
            await node.seen(client=name, channel="private-return", event="again")
            assert len(node.matching(client=name, event="again")) == 1
