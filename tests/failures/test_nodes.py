"""A server with another record store than the one that uses the same Redis doesn't start.

See deploy/failures.md "Node killed"; test_three_nodes.py has servers that share a record store.
"""

import asyncio
import json
import subprocess
import sys

import pytest

from helpers.server import Server, ServerFailed
from helpers.wire import Api, Socket


def listed(server: Server) -> dict[str, dict]:
    """`redpoll node list --json` by name."""
    command = [sys.executable, "-m", "redpoll", "node", "list", "--json", "--data-dir", str(server.folder / "data")]
    answer = subprocess.run(
        command, env=server.environment(), stdout=subprocess.PIPE, cwd=server.folder, check=True, timeout=60
    )
    return {node["name"]: node for node in json.loads(answer.stdout)}


def node(redis, name: str) -> Server:
    """A server that isn't started yet."""
    return Server(workers=1, redis_url=redis.url, node_name=name)


def state(server: Server) -> dict[str, tuple[bool, bool]]:
    """By name: whether a node is alive, and whether it leads."""
    return {name: (row["alive"], row["leader"]) for name, row in listed(server).items()}


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
