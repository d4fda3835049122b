"""Two servers at one address of Redis, whose primary is changed in place: their connections stay open, and lead to a
replica now.

See deploy/failures.md "A Redis master fails".
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

import pytest

from failures.publishing import Publisher, check, delivery_is_back
from helpers.proxy import Proxy
from helpers.sentinel import redis_pair
from helpers.server import Server
from helpers.wire import Api, Socket, connect_many, end_all, eventually, subscribe_all

HEADING = "A Redis master fails"


@pytest.fixture(scope="module")
def pair():
    with redis_pair() as pair:
        yield pair


@pytest.fixture(scope="module")
def proxy(pair):
    with Proxy(("127.0.0.1", pair.primary.port)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def nodes(proxy, postgres_server):
    name = postgres_server.create_database()
    url = f"redis://127.0.0.1:{proxy.port}"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Server(workers=1, redis_url=url, node_name=node, database_url=postgres_server.url(name))
            )
            for node in ("leads", "follows")
        ]
    postgres_server.drop_database(name)


async def all_received(publisher: Publisher, sockets: list[Socket]) -> None:
    """Nothing that was answered with 200 is missing at any client, and nothing came twice."""
    await check(publisher, sockets)


async def test_primary_is_changed_in_place(
    nodes, pair, proxy, size: Callable[[int, int], int], within_s: Callable[[float], float], figures
) -> None:
    for number in range(size(1, 10)):
        channel = f"here-{number}"
        sockets = [socket for node in nodes for socket in await connect_many(node, 4)]
        await subscribe_all(sockets, channel)
        # This node's control writes nothing to Redis by itself.
        follows = Publisher(nodes[1], channel)
        async with follows.running():
            await delivery_is_back(follows, sockets, time.monotonic(), 60)
            proxy.upstream = ("127.0.0.1", pair.replica.port)
            switched_at = time.monotonic()
            await asyncio.to_thread(pair.switch)
            await delivery_is_back(follows, sockets, time.monotonic(), within_s(5))
            back_s = time.monotonic() - switched_at
        figures.note(HEADING, "changed in place: delivery back", back_s, "s", "5 s")
        await all_received(follows, sockets)
        assert any(one.status == 503 for one in follows.published)
        await end_all(sockets)


async def test_publishes_are_refused_while_redis_has_too_few_replicas_to_write(nodes, pair, figures) -> None:
    async def answer(node: Server) -> int:
        async with Api(node) as api:
            status, _ = await api.ask("POST", "/events", {"name": "e", "channels": ["news"], "data": ""})
            return status

    async def answers() -> list[int]:
        return [await answer(node) for node in nodes]

    with pair.primary.client() as client:
        client.config_set("min-replicas-max-lag", 2)
        client.config_set("min-replicas-to-write", 1)
        try:
            await eventually(answers, [200, 200])
            stopped_at = time.monotonic()
            pair.replica.signal(signal.SIGSTOP)
            await eventually(answers, [503, 503])
            figures.note(HEADING, "replica stopped, min-replicas-max-lag 2: 503", time.monotonic() - stopped_at, "s")
            pair.replica.signal(signal.SIGCONT)
            await eventually(answers, [200, 200])
        finally:
            client.config_set("min-replicas-to-write", 0)
