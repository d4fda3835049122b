"""Whom publishes wait for after a break: a real Redis, with the topics and heartbeats of several nodes."""

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec
import pytest
from structlog.testing import capture_logs

from helpers.known_nodes import known
from redpoll.cluster.nodes import Node, NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.roll_call import answerers
from redpoll.control.publish import publish_gate
from redpoll.control.publish.publish_gate import PublishGate

OWN, OTHER = "a" * 12, "b" * 12


class World:
    """The gate of node `OWN`, and what other processes have in Redis."""

    def __init__(self, link, keys, connect, wait_until) -> None:
        self.link = link
        self.keys = keys
        self.view = NodesView(OWN)
        self.view.alive = [1]
        # It logs at once whom it waits for.
        times = {"check_every_s": 0.001, "read_nodes_every_s": 0.05, "first_log_s": 0.0}
        self.gate = PublishGate(link, keys, self.view, **times)
        link.on_push = self.gate.received
        # Who answers when its topic is called.
        self.heard: dict[bytes, Callable[[bytes], None]] = {}
        self.reads = 0
        read_nodes = self.gate._read_nodes

        async def counted(seen) -> None:
            await read_nodes(seen)
            self.reads += 1

        self.gate._read_nodes = counted
        self._connect = connect
        self._wait_until = wait_until
        self._beats = count(1)
        self._waiting: asyncio.Task | None = None
        self._beating: list[asyncio.Task] = []

    async def beat(self, run: str, workers=(1,), without_clients=()) -> int:
        """Returns the number of this heartbeat."""
        node = Node(
            name=run[0],
            version="1",
            store="s",
            started=0.0,
            workers=workers,
            greatest=9,
            control=True,
            beat=next(self._beats),
            without_clients=without_clients,
        )
        await self.link.ask(b"HSET", self.keys.nodes, run, msgspec.json.encode(node))
        return node.beat

    def keep_beating(self, run: str) -> None:
        async def go_on() -> None:
            while True:
                await self.beat(run)
                await asyncio.sleep(0.01)

        self._beating.append(asyncio.create_task(go_on()))

    def know(self, run: str = OTHER, *, last_beat: int | None = None, workers=(1,), without_clients=()) -> None:
        """What the supervisor says of another node. `last_beat`: it is dead since this heartbeat."""
        alive, beat = last_beat is None, last_beat or 0
        other = known(run, "b", alive=alive, workers=workers, beat=beat, without_clients=without_clients)
        self.view.update([known(OWN, workers=[1]), other], None)

    async def subscribe(self, *names: str, answers: bool = True) -> Link:
        """As workers do. Without `answers`: as a connection does that broke, while Redis doesn't know it."""
        link = await self._connect()
        for name in names if answers else ():
            self.heard |= answerers(link, self.keys, name)
        link.on_push = lambda topic, call: self.heard[topic](call) if answers else None
        subscribed = asyncio.get_running_loop().create_future()
        link.subscribe([self.keys.here_of(0, name) for name in names], subscribed.set_result)
        await subscribed
        return link

    def wait(self) -> None:
        self._waiting = asyncio.create_task(self.gate.wait())

    @property
    def is_open(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    async def opens(self) -> None:
        await self._wait_until(lambda: self.is_open)
        self._waiting.result()

    async def stays_closed(self, reads: int = 2 * publish_gate._MAX_READS_WITHOUT_SIGN) -> None:
        """The gate reads the nodes so often, and is still closed."""
        before = self.reads
        await self._wait_until(lambda: self.reads > before + reads or self.is_open)
        assert not self.is_open

    def end(self) -> None:
        for task in (*self._beating, *([self._waiting] if self._waiting else ())):
            task.cancel()


@pytest.fixture
async def world(redis, wait_until):
    links = []

    async def connect() -> Link:
        links.append(Link(redis.url))
        links[-1].start()
        await links[-1].wait_up()
        return links[-1]

    made = World(await connect(), Keys("rp"), connect, wait_until)
    yield made
    made.end()
    await asyncio.gather(*(link.close() for link in links))


async def test_it_waits_for_the_own_workers_and_those_of_other_nodes(world):
    world.know()
    await world.beat(OWN)
    await world.beat(OTHER)
    world.wait()
    await world.stays_closed(1)
    await world.subscribe(f"{OWN}.1")
    await world.stays_closed(1)
    await world.subscribe(f"{OTHER}.1")
    await world.opens()


async def test_it_waits_until_the_supervisor_knows_the_other_nodes(world):
    await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.stays_closed(1)
    world.view.update([], None)
    await world.opens()


async def test_connection_of_a_dead_worker_does_not_stand_in_for_a_living_one(world):
    world.know()
    world.keep_beating(OWN)
    world.keep_beating(OTHER)
    await world.subscribe(f"{OWN}.1", f"{OTHER}.7")
    world.wait()
    await world.stays_closed()
    await world.subscribe(f"{OTHER}.1")
    await world.opens()


@pytest.mark.parametrize("run", [OWN, OTHER])
async def test_connection_that_a_worker_had_before_does_not_stand_in_for_its_next_one(world, run):
    world.know()
    world.keep_beating(OWN)
    world.keep_beating(OTHER)
    await world.subscribe(f"{OTHER if run == OWN else OWN}.1")
    await world.subscribe(f"{run}.1", answers=False)
    world.wait()
    await world.stays_closed()
    await world.subscribe(f"{run}.1")
    await world.opens()


async def test_node_of_which_only_old_connections_are_left_shows_no_sign_of_life(world):
    world.know()
    world.keep_beating(OWN)
    await world.beat(OTHER)
    await world.subscribe(f"{OWN}.1")
    await world.subscribe(f"{OTHER}.1", answers=False)
    world.wait()
    await world.opens()


async def test_node_that_the_supervisor_does_not_know_yet_counts(world):
    world.view.update([], None)
    world.keep_beating(OWN)
    world.keep_beating(OTHER)
    await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.stays_closed()


async def test_worker_without_clients_is_not_waited_for_if_both_heartbeat_and_supervisor_say_so(world):
    world.view.alive, world.view.without_clients = [1, 2], [2]
    await world.subscribe(f"{OWN}.1", f"{OTHER}.1")
    world.keep_beating(OWN)
    await world.beat(OTHER, workers=(1, 2), without_clients=(2,))
    world.know(workers=(1, 2))
    world.wait()
    await world.stays_closed()
    world.know(workers=(1, 2), without_clients=(2,))
    await world.opens()


async def test_node_without_a_sign_of_life_is_left_out_while_our_own_has_written_a_heartbeat(world):
    """A machine with Redis and a node dies: publishes waited until the node counted as dead, 4 to 5 s."""
    world.know()
    await world.beat(OWN)
    await world.beat(OTHER)
    await world.subscribe(f"{OWN}.1")
    world.wait()
    # Our own heartbeats don't arrive either, so nothing is known.
    await world.stays_closed()
    world.keep_beating(OWN)
    await world.opens()


async def test_worker_that_answered_and_lost_its_connection_is_waited_for_again(world):
    """It answers at once, and its connection breaks while a node without a sign of life is waited for."""
    world.know()
    world.keep_beating(OWN)
    await world.beat(OTHER)
    first = await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.stays_closed(2)
    await first.close()
    await world.stays_closed()
    await world.subscribe(f"{OWN}.1")
    await world.opens()


async def test_node_that_lost_redis_forgot_counts_the_same(world):
    world.know()
    world.keep_beating(OWN)
    await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.opens()


@pytest.mark.parametrize("sign", ["a heartbeat", "a topic"])
async def test_node_with_a_sign_of_life_is_waited_for(world, sign):
    world.know(workers=(1, 2))
    world.keep_beating(OWN)
    await world.beat(OTHER, workers=(1, 2))
    await world.subscribe(f"{OWN}.1")
    if sign == "a topic":
        await world.subscribe(f"{OTHER}.1")
    else:
        world.keep_beating(OTHER)
    world.wait()
    await world.stays_closed()
    await world.subscribe(f"{OTHER}.1", f"{OTHER}.2")
    await world.opens()


async def test_dead_node_is_not_waited_for_unless_it_writes_again(world):
    last_beat = await world.beat(OTHER)
    world.know(last_beat=last_beat)
    await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.opens()
    world.keep_beating(OWN)
    await world.beat(OTHER)
    world.wait()
    await world.stays_closed(1)
    world.keep_beating(OTHER)
    await world.stays_closed()


async def test_node_that_dies_while_it_is_waited_for_holds_nobody_up(world):
    """It has sent a heartbeat after the break and dies before its workers are subscribed. Its entry stays until all of
    its workers are reaped, which may take long."""
    world.know()
    world.keep_beating(OWN)
    await world.beat(OTHER)
    await world.subscribe(f"{OWN}.1")
    world.wait()
    await world.stays_closed(1)
    last_beat = await world.beat(OTHER)
    await world.stays_closed()
    world.know(last_beat=last_beat)
    await world.opens()


async def test_those_who_are_waited_for_are_named(world):
    world.know()
    world.keep_beating(OTHER)
    with capture_logs() as logs:
        world.wait()
        await world.stays_closed()
    (line, *_) = [line for line in logs if line["event"] == "publishes wait for workers"]
    assert (line["missing"], line["count"]) == (f"{OWN}.1, {OTHER}.1 of b", 2)
