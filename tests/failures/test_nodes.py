"""Several servers on one Redis: one leads, another takes over, and a server with another record store doesn't start.

See deploy/failures.md "Node killed". The servers are on one machine, so they can share an SQLite file. In production
the record store of several servers is PostgreSQL.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from server import Server, ServerFailed
from wire import Api, Socket, eventually

ROOM = "presence-room"
ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"


def listed(server: Server) -> dict[str, dict]:
    """`redpoll node list --json` by name."""
    command = [sys.executable, "-m", "redpoll", "node", "list", "--json", "--data-dir", str(server.folder / "data")]
    answer = subprocess.run(
        command, env=server.environment(), stdout=subprocess.PIPE, cwd=server.folder, check=True, timeout=60
    )
    return {node["name"]: node for node in json.loads(answer.stdout)}


def node(redis, name: str, shares: Server | None = None, **settings: object) -> Server:
    """A server that isn't started yet. `shares`: with the record store of this server."""
    made = Server(workers=1, redis_url=redis.url, node_name=name, **settings)
    if shares is not None:
        (made.folder / "data").mkdir(mode=0o700)
        (made.folder / "data" / "redpoll.sqlite").symlink_to(shares.folder / "data" / "redpoll.sqlite")
    return made


def processes_of(server: Server):
    async def count() -> int:
        return len(server.worker_pids())

    return count


def state(server: Server) -> dict[str, tuple[bool, bool]]:
    """By name: whether a node is alive, and whether it leads."""
    return {name: (row["alive"], row["leader"]) for name, row in listed(server).items()}


async def test_killed_node_is_followed_by_another_which_removes_its_members(own_redis, figures, within_s):
    with node(own_redis, "one") as one, node(own_redis, "two", one) as two:
        assert await asyncio.to_thread(state, two) == {"one": (True, True), "two": (True, False)}
        watcher, member = await Socket.connect(two), await Socket.connect(one)
        await watcher.subscribe(ROOM, "watcher")
        await member.subscribe(ROOM, "member")
        await watcher.next(ADDED, ROOM)
        async with Api(one) as api:
            await api.publish(ROOM, "said", "on the other node")
        await watcher.next("said", ROOM)

        # The leader with all its processes.
        began = time.monotonic()
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()
        gone = await watcher.next(REMOVED, ROOM, timeout_s=within_s(6))
        figures.note("Node killed", "member_removed seen", time.monotonic() - began, "s", "6 s")
        assert json.loads(gone["data"])["user_id"] == "member"
        assert (await asyncio.to_thread(state, two))["two"] == (True, True)

        # It comes back, and doesn't take the lead from the other one.
        await asyncio.to_thread(one.start)
        assert await asyncio.to_thread(state, one) == {"one": (True, False), "two": (True, True)}
        # Of the death of its worker only its own supervisor knows. The other node removes the members.
        member = await Socket.connect(one)
        await member.subscribe(ROOM, "again")
        await watcher.next(ADDED, ROOM)
        began = time.monotonic()
        one.kill_worker(0)
        await watcher.next(REMOVED, ROOM, timeout_s=within_s(2))
        figures.note("Node killed", "worker of another node: member_removed seen", time.monotonic() - began, "s", "2 s")
        await eventually(processes_of(one), 1)


async def test_server_with_another_record_store_does_not_start_and_the_first_is_unaffected(own_redis):
    with node(own_redis, "one") as one:
        client = await Socket.connect(one)
        await client.subscribe("news")
        other = node(own_redis, "other")
        with pytest.raises(ServerFailed, match="serve ended with 1") as failure:
            await asyncio.to_thread(other.__enter__)
        (line,) = [line for line in str(failure.value).splitlines() if "start failed" in line]
        assert "the server one, up since" in line
        assert "give both servers the same database_url, or this one another redis_prefix" in line
        async with Api(one) as api:
            await api.publish("news", "still", "here")
        await client.next("still", "news")
        assert await asyncio.to_thread(state, one) == {"one": (True, True)}
