"""One worker can't connect to Redis while everything else can, or a node dies with Redis: neither holds the others up,
and nobody listens there.

See deploy/failures.md "A worker without Redis" and "A Redis master fails".
"""

import asyncio
import contextlib
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator

import aiohttp
import pytest
import redis as redis_py

from failures.publishing import ControlPort, Publisher, check, delivery_is_back, is_right
from helpers.server import Server
from helpers.wire import Api, Socket, end_all, eventually, sockets_by_worker, subscribe_all

HEADING = "A worker without Redis"


@pytest.fixture(scope="module")
def nodes(redis_of_module, postgres_server) -> Iterator[tuple[Server, Server]]:
    settings = {
        "redis_url": redis_of_module.url,
        "database_url": postgres_server.url(postgres_server.create_database()),
        "webhook_debounce_s": 0,
    }
    with (
        Server(workers=1, node_name="a", **settings) as one,
        Server(workers=2, node_name="b", **settings) as two,
    ):
        yield one, two


@contextlib.contextmanager
def no_new_files(pid: int) -> Iterator[None]:
    """The process can open no file or socket meanwhile, and keeps those that it has."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def obstacle(node: Server) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{node.control_url}/readyz") as answer:
        return "" if answer.status == 200 else await answer.text()


async def is_named(node: Server, number: int) -> bool:
    return f"worker {number} can't reach Redis" in await obstacle(node)


class Crowd:
    """Subscribers of one channel: `stay` on node a and the first worker of node b, `leave` on the second one."""

    def __init__(self, nodes: tuple[Server, Server], channel: str) -> None:
        self.a, self.b = nodes
        self.channel = channel
        self.pid = self.b.worker_pids()[1]
        self.stay: list[Socket] = []
        self.leave: list[Socket] = []

    async def come(self) -> None:
        self.stay.append(await Socket.connect(self.a))
        while not self.leave:
            for pid, sockets in (await sockets_by_worker(self.b, 2)).items():
                (self.leave if pid == self.pid else self.stay).extend(sockets)
        await subscribe_all([*self.stay, *self.leave], self.channel)

    async def closed_s(self, since: float) -> float:
        """Waits until those on the second worker are closed with 4200. Returns when, in seconds from `since`."""
        assert {await socket.until_closed() for socket in self.leave} == {4200}
        return time.monotonic() - since

    async def returned(self) -> None:
        """Waits until the second worker admits clients again: two come."""
        await eventually(lambda: obstacle(self.b), "")
        self.leave = []
        await self.come()


async def publish_everywhere(crowd: Crowd) -> None:
    """A publish at each node reaches every subscriber."""
    for number, node in enumerate((crowd.a, crowd.b)):
        async with Api(ControlPort(node)) as api:
            await eventually(lambda: api.ask("POST", "/events", event(crowd.channel, number)), (200, {}))  # noqa: B023
        for socket in crowd.stay:
            await socket.next(f"from-{number}", crowd.channel)


def event(channel: str, number: int) -> dict[str, object]:
    return {"name": f"from-{number}", "channels": [channel], "data": ""}


async def test_worker_without_descriptors_holds_up_no_publish_after_redis_came_back(
    nodes, redis_of_module, within_s: Callable[[float], float], figures
) -> None:
    crowd = Crowd(nodes, "held")
    await crowd.come()
    publisher = Publisher(crowd.a, "held")
    async with publisher.running():
        await delivery_is_back(publisher, crowd.stay, time.monotonic(), 60)
        with no_new_files(crowd.pid):
            redis_of_module.kill()
            await asyncio.to_thread(redis_of_module.start)
            back_at = time.monotonic()
            closed_s = await crowd.closed_s(back_at)
            back_s = await delivery_is_back(publisher, crowd.stay, back_at, within_s(6))
            figures.note(HEADING, "Redis restarted: clients of that worker closed", closed_s, "s", "6 s")
            figures.note(HEADING, "Redis restarted: publishing back", back_s, "s", "6 s")
            await publish_everywhere(crowd)
            await eventually(lambda: is_named(crowd.b, 1), True)
    await check(publisher, crowd.stay)
    log = (crowd.a.folder / "err").read_text()
    assert re.search(r"publishes wait for workers.* of b", log)
    await crowd.returned()
    await publish_everywhere(crowd)
    await end_all([*crowd.stay, *crowd.leave])


# What keeps a process from connecting, and what ends that.
CAUSES = [
    (("maxclients", 1), ("maxclients", 10_000)),
    (("requirepass", "another"), ("requirepass", "")),
]


async def test_clients_of_a_worker_that_alone_lost_redis_connect_elsewhere(
    nodes, redis_of_module, within_s: Callable[[float], float], size: Callable[[int, int], int], figures
) -> None:
    """No gate closes, so publishes are answered with 200 and don't reach that worker."""
    crowd = Crowd(nodes, "alone")
    await crowd.come()
    causes = CAUSES[: size(1, 2)]
    for cause, remedy in causes:
        await lose_connection(crowd, redis_of_module, cause, remedy, within_s, figures)
        if (cause, remedy) != causes[-1]:
            await crowd.returned()
    await publish_everywhere(crowd)
    await end_all([*crowd.stay, *crowd.leave])


async def lose_connection(crowd: Crowd, redis_of_module, cause, remedy, within_s, figures) -> None:
    # The worker's connection is the one with these channels.
    for number in range(60):
        await crowd.leave[0].subscribe(f"mark-{number}")
    publisher = Publisher(crowd.a, "alone")
    with redis_py.Redis(unix_socket_path=redis_of_module.path) as redis:
        connection = max(redis.client_list(), key=lambda client: int(client["sub"]))
        async with publisher.running():
            await delivery_is_back(publisher, [*crowd.stay, *crowd.leave], time.monotonic(), 60)
            redis.config_set(*cause)
            try:
                redis.client_kill_filter(_id=connection["id"])
                killed_at = time.monotonic()
                closed_s = await crowd.closed_s(killed_at)
                figures.note(HEADING, "clients closed after that", closed_s, "s", "5 s")
                assert closed_s < within_s(5)
                await eventually(lambda: is_named(crowd.b, 1), True)
            finally:
                redis.config_set(*remedy)
    wrong = [one for one in publisher.published if not is_right(one.status, one.answered_at - one.asked_at, one.answer)]
    assert wrong == []


def states(node: Server) -> list[str]:
    """The state of each worker's connection to Redis, in /metrics."""
    return sorted(
        labels.partition("state=")[2].partition(",")[0]
        for (name, labels), value in node.metrics().items()
        if name == "redpoll_redis_connection_state" and value
    )


async def test_metrics_show_workers_without_redis_as_down(nodes, redis_of_module) -> None:
    """The alert RedpollRedisNotConnected is about these. Their own figures expire after 15 s: here they are deleted."""
    crowd = Crowd(nodes, "shown")
    await crowd.come()
    for number in range(60):
        await crowd.leave[0].subscribe(f"mark-{number}")
    await eventually(lambda: asyncio.to_thread(states, crowd.b), ["open", "open"])
    with redis_py.Redis(unix_socket_path=redis_of_module.path) as redis, no_new_files(crowd.pid):

        async def states_without_old_figures() -> list[str]:
            for key in redis.scan_iter("*stats:*"):
                redis.delete(key)
            return await asyncio.to_thread(states, crowd.b)

        connection = max(redis.client_list(), key=lambda client: int(client["sub"]))
        redis.client_kill_filter(_id=connection["id"])
        # The other worker has no figures until it writes them again, and isn't shown as down meanwhile.
        await eventually(states_without_old_figures, ["down"])
        await eventually(lambda: asyncio.to_thread(states, crowd.b), ["down", "open"])
    await eventually(lambda: asyncio.to_thread(states, crowd.b), ["open", "open"])
    redis_of_module.kill()
    try:
        await eventually(lambda: asyncio.to_thread(states, crowd.b), ["down", "down"])
    finally:
        await asyncio.to_thread(redis_of_module.start)
    await crowd.returned()
    await publish_everywhere(crowd)
    await end_all([*crowd.stay, *crowd.leave])


async def test_worker_whose_supervisor_is_stopped_decides_by_itself(
    nodes, redis_of_module, within_s: Callable[[float], float], figures
) -> None:
    crowd = Crowd(nodes, "alone")
    await crowd.come()
    for number in range(60):
        await crowd.leave[0].subscribe(f"mark-{number}")
    with redis_py.Redis(unix_socket_path=redis_of_module.path) as redis, no_new_files(crowd.pid):
        connection = max(redis.client_list(), key=lambda client: int(client["sub"]))
        crowd.b.signal(signal.SIGSTOP)
        try:
            redis.client_kill_filter(_id=connection["id"])
            closed_s = await crowd.closed_s(time.monotonic())
            figures.note(HEADING, "its supervisor stopped: clients closed", closed_s, "s", "5 s")
        finally:
            crowd.b.signal(signal.SIGCONT)
        await eventually(lambda: is_named(crowd.b, 1), True)
    await crowd.returned()
    await publish_everywhere(crowd)
    await end_all([*crowd.stay, *crowd.leave])


async def test_node_that_dies_with_redis_holds_up_no_publish_until_it_counts_as_dead(
    nodes, redis_of_module, within_s: Callable[[float], float], figures
) -> None:
    """The last test here: node b doesn't come back."""
    a, b = nodes
    socket = await Socket.connect(a)
    await socket.subscribe("through")
    publisher = Publisher(a, "through")
    async with publisher.running():
        await delivery_is_back(publisher, [socket], time.monotonic(), 60)
        redis_of_module.kill()
        b.signal(signal.SIGKILL)
        b.wait()
        # As long as a fail-over takes: such a pause of the heartbeats restarts the count of a dead node.
        await asyncio.sleep(3)
        await asyncio.to_thread(redis_of_module.start)
        back_s = await delivery_is_back(publisher, [socket], time.monotonic(), within_s(3))
        figures.note(
            "A Redis master fails", "a node dies with Redis: publishing back after Redis", back_s, "s", "2.5 s"
        )
    await check(publisher, [socket])
    await end_all([socket])
