"""Random pairs of faults on three servers with one Redis and one PostgreSQL, and what must hold after them. Not a test.

`World` is the servers and what is around them: a primary and a replica of Redis behind one address, a proxy between
each node and PostgreSQL, and a receiver of webhooks. `play(world, number, seed, …)` injects two faults and returns an
`Outcome`. The kinds, the nodes and the pause between the two follow from the seed; which node leads doesn't.

See deploy/failures.md "Two faults at once".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from helpers.ports import reserved_ports
from helpers.postgres import PostgresServer
from helpers.proxy import Proxy
from helpers.receiver import Receiver
from helpers.sentinel import RedisPair, redis_pair
from helpers.server import APP_ID, Server, processes
from helpers.walk import WEBHOOKS, command
from helpers.wire import Api, Socket, signed_path
from redpoll.ipc.command_socket import CommandError, ask, socket_path

CHANNEL, ROOM = "everywhere", "presence-everywhere"
NAMES = ("one", "two", "three")
# Promised after any fault: publishes that are answered 200 reach everybody; webhooks go on and ghosts are gone.
DELIVERED_AFTER_S, REPAIRED_AFTER_S = 5.0, 8.0
PUBLISH_EVERY_S = 0.05


class Door(Proxy):
    """A proxy that can be shut: to everybody, or to some processes of this machine."""

    def __init__(self, upstream: str | tuple[str, int]) -> None:
        super().__init__(upstream)
        self._is_shut = False
        self._barred: set[int] = set()

    def shut(self) -> None:
        self._is_shut = True
        self.cut()

    def bar(self, pid: int) -> None:
        """Cuts the connections of this process, and takes no more of it."""
        self._barred.add(pid)
        ports = _ports_to(self.port, pid)
        self._do(lambda: [one.transport.abort() for one in self._open if _peer_port(one) in ports])

    def open(self) -> None:
        self._is_shut = False
        self._barred.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = _peer_port(writer)
        if self._is_shut or any(port in _ports_to(self.port, pid) for pid in self._barred):
            writer.transport.abort()
            return
        await super()._serve(reader, writer)


def _peer_port(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("peername")
    return peer[1] if isinstance(peer, tuple) else 0


def _ports_to(port: int, pid: int) -> set[int]:
    """The local ports of a process' connections to a port of this machine."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry.path))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port and f"socket:[{fields[9]}]" in inodes:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


@dataclass
class Hit:
    """What a fault did. `node` is the place of the node that it met, None for Redis and PostgreSQL as a whole; `dead`:
    that node serves nobody any more; `silent`: others may count it as dead, so its members may be missing meanwhile;
    its clients are served or disconnected."""

    kind: str
    node: int | None = None
    dead: bool = False
    silent: bool = False


@dataclass
class Outcome:
    """One round. `faults` has what didn't hold, in sentences."""

    number: int
    hits: list[Hit]
    pause_s: float
    accepted: int = 0
    webhooks_s: float | None = None
    ghosts_s: float | None = None
    took_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """For a table: number, faults, accepted, webhooks, ghosts, how long, what didn't hold."""
        names = " + ".join(hit.kind + ("" if hit.node is None else f" of {NAMES[hit.node]}") for hit in self.hits)
        times = [f"{at:.1f} s" if at is not None else "–" for at in (self.webhooks_s, self.ghosts_s)]
        verdict = "; ".join(self.faults) or "ok"
        return [str(self.number), f"{names}, {self.pause_s:.1f} s apart", str(self.accepted), *times,
                f"{self.took_s:.0f} s", verdict]  # fmt: skip


class World:
    """`async with World() as world:` three nodes that have settled."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.nodes: list[Server] = []
        self.receiver = Receiver()
        # By number of the node: processes of a supervisor that was killed.
        self._orphans: dict[int, list[int]] = {}
        self._stopped: list[tuple[bool, int]] = []

    async def __aenter__(self) -> Self:
        await self.receiver.__aenter__()
        await asyncio.to_thread(self._start)
        words = ("--events", "member.added", "--format", "pusher")
        await asyncio.to_thread(command, self.nodes[0], "webhook", "create", APP_ID, self.receiver.url, *words)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._stack.__exit__, *error)
        await self.receiver.__aexit__()

    def _start(self) -> None:
        enter = self._stack.enter_context
        self.pair: RedisPair = enter(redis_pair())
        self.redis_door = enter(Door(("127.0.0.1", self.pair.primary.port)))
        self.postgres = PostgresServer()
        self._stack.callback(self.postgres.close)
        self.postgres.start()
        database = self.postgres.create_database()
        upstream = f"{self.postgres.folder}/.s.PGSQL.5432"
        self.postgres_doors = [enter(Door(upstream)) for _ in NAMES]
        for name, door, port in zip(NAMES, self.postgres_doors, enter(reserved_ports(len(NAMES))), strict=True):
            url = f"postgresql://redpoll@127.0.0.1:{door.port}/{database}?sslmode=disable"
            node = Server(1, f"redis://127.0.0.1:{self.redis_door.port}", node_name=name, database_url=url, **WEBHOOKS)
            node.public_port = port
            self.nodes.append(node)
        with ThreadPoolExecutor(len(NAMES)) as pool:
            for node in pool.map(Server.__enter__, self.nodes):
                self._stack.push(node.__exit__)

    async def rows(self, node: int) -> list[dict[str, Any]]:
        """`redpoll node list` of the nodes that are alive, as this node knows them."""
        listed = await asyncio.to_thread(ask, socket_path(self.nodes[node].folder / "data"), "node list", {}, 60.0)
        return [row for row in listed if row["alive"]]

    async def leaders(self, node: int) -> list[str]:
        """The names of the nodes that lead."""
        return [row["name"] for row in await self.rows(node) if row["leader"]]

    async def leader(self, node: int) -> int:
        names = await self.leaders(node)
        return NAMES.index(names[0]) if names else node

    # -- faults

    def kill(self, node: int, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self, node: int, pid: int, *, whole: bool = False) -> None:
        """SIGSTOP until `heal`; `whole`: to all processes of the node."""
        self._stopped.append((whole, pid))
        (os.killpg if whole else os.kill)(pid, signal.SIGSTOP)

    def forget(self, node: int) -> None:
        """This node's supervisor was killed: `heal` starts it again."""
        self._orphans[node] = [one.pid for one in self.nodes[node]._family()]

    async def heal(self) -> None:
        """Ends all faults."""
        self.redis_door.open()
        for door in self.postgres_doors:
            door.open()
        for whole, pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole else os.kill)(pid, signal.SIGCONT)
        self._stopped.clear()
        if self.pair.replica.process is None:
            await asyncio.to_thread(self.pair.replica.start)
            await asyncio.to_thread(self.pair.replicate)
        orphans, self._orphans = self._orphans, {}
        await asyncio.gather(*(asyncio.to_thread(self._start_again, node, pids) for node, pids in orphans.items()))

    def _start_again(self, node: int, pids: list[int]) -> None:
        self.nodes[node].wait()
        deadline = time.monotonic() + 60
        while any(one.pid in pids for one in processes()):
            assert time.monotonic() < deadline, f"processes of {NAMES[node]} survived their supervisor"
            time.sleep(0.02)
        self.nodes[node].start()

    async def settled(self, within_s: float = 60.0) -> None:
        """Waits until all nodes are alive, agree on a leader, take publishes, and admit clients."""

        async def is_settled() -> bool:
            told = [tuple(await self.leaders(node)) for node in range(len(NAMES))]
            alive = await self.rows(0)
            statuses = [await self.status(node) for node in range(len(NAMES))]
            statuses += [await self.ready(node) for node in range(len(NAMES))]
            return len(set(told)) == 1 == len(told[0]) and len(alive) == len(NAMES) and set(statuses) == {200}

        await until(is_settled, within_s, "the servers settle")

    async def status(self, node: int) -> int:
        async with Api(self.nodes[node]) as api:
            status, _ = await api.ask("POST", "/events", {"name": "probe", "channels": ["probe"], "data": ""})
            return status

    async def ready(self, node: int) -> int:
        url = f"{self.nodes[node].control_url}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status


async def until(holds: Callable[[], Awaitable[object]], within_s: float, what: str) -> None:
    """Asks until the answer is true. Errors of a server that isn't ready count as "not yet"."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError, KeyError, CommandError, aiohttp.ClientError):
            if await holds():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.05)


Inject = Callable[[World, random.Random, int], Awaitable[Hit]]


async def _redis_changed(world: World, rng: random.Random, leader: int) -> Hit:
    if world.pair.replica.process is None:
        return Hit("redis not changed without a replica")
    world.redis_door.upstream = ("127.0.0.1", world.pair.replica.port)
    await asyncio.to_thread(world.pair.switch)
    return Hit("redis changed in place")


async def _redis_killed(world: World, rng: random.Random, leader: int) -> Hit:
    pair = world.pair
    pair.primary.kill()
    pair.primary, pair.replica = pair.replica, pair.primary
    with pair.primary.client() as client:
        client.replicaof("NO", "ONE")
    world.redis_door.upstream = ("127.0.0.1", pair.primary.port)
    return Hit("redis killed")


async def _postgres_cut_from_one(world: World, rng: random.Random, leader: int) -> Hit:
    node = rng.choice([leader, rng.randrange(len(NAMES))])
    await asyncio.to_thread(world.postgres_doors[node].shut)
    return Hit("postgres cut", node)


async def _postgres_cut_from_all(world: World, rng: random.Random, leader: int) -> Hit:
    for door in world.postgres_doors:
        await asyncio.to_thread(door.shut)
    return Hit("postgres cut from all")


async def _supervisor_killed(world: World, rng: random.Random, leader: int) -> Hit:
    world.forget(leader)
    world.kill(leader, [world.nodes[leader].pid])
    return Hit("supervisor killed", leader, dead=True)


async def _supervisor_stopped(world: World, rng: random.Random, leader: int) -> Hit:
    world.stop(leader, world.nodes[leader].pid)
    return Hit("supervisor stopped", leader, silent=True)


async def _control_killed(world: World, rng: random.Random, leader: int) -> Hit:
    world.kill(leader, world.nodes[leader].control_pids())
    return Hit("control killed", leader)


async def _control_stopped(world: World, rng: random.Random, leader: int) -> Hit:
    for pid in world.nodes[leader].control_pids():
        world.stop(leader, pid)
    return Hit("control stopped", leader)


async def _machine_killed(world: World, rng: random.Random, leader: int) -> Hit:
    world.forget(leader)
    os.killpg(world.nodes[leader].pid, signal.SIGKILL)
    return Hit("machine killed", leader, dead=True)


async def _machine_stopped(world: World, rng: random.Random, leader: int) -> Hit:
    world.stop(leader, world.nodes[leader].pid, whole=True)
    return Hit("machine stopped", leader, dead=True)


async def _worker_without_redis(world: World, rng: random.Random, leader: int) -> Hit:
    node = rng.randrange(len(NAMES))
    for pid in world.nodes[node].worker_pids():
        await asyncio.to_thread(world.redis_door.bar, pid)
    return Hit("worker without redis", node, silent=True)


KINDS: tuple[Inject, ...] = (
    _redis_changed, _redis_killed, _postgres_cut_from_one, _postgres_cut_from_all, _supervisor_killed,
    _supervisor_stopped, _control_killed, _control_stopped, _machine_killed, _machine_stopped, _worker_without_redis,
)  # fmt: skip


@dataclass
class _Sent:
    id: str
    node: int
    asked_at: float
    status: int = 0


class _Load:
    """Publishes at each node, and clients of each node that listen. Used for one round."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.sent: list[_Sent] = []
        self.clients: list[list[Socket]] = []
        # The ids of users who joined to see whether webhooks go on, and when.
        self.joined: dict[str, float] = {}
        self.announced: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for at, node in enumerate(self.world.nodes):
            self.clients.append([await Socket.connect(node) for _ in range(2)])
            for socket in self.clients[-1]:
                await socket.subscribe(CHANNEL)
            await self.clients[-1][0].subscribe(ROOM, f"{self.number}-{NAMES[at]}")
        timeout, connector = aiohttp.ClientTimeout(total=20), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            paces = [asyncio.create_task(self._publish(session, at)) for at in range(len(NAMES))]
            try:
                yield
            finally:
                for task in paces:
                    task.cancel()
                await asyncio.gather(*self._tasks, *paces, return_exceptions=True)

    async def close(self) -> None:
        for socket in (socket for sockets in self.clients for socket in sockets):
            if not socket.lost:
                socket.abort()

    async def _publish(self, session: aiohttp.ClientSession, at: int) -> None:
        while True:
            self._tasks.append(asyncio.create_task(self._one(session, at)))
            await asyncio.sleep(PUBLISH_EVERY_S)  # the pace, not a wait

    async def _one(self, session: aiohttp.ClientSession, at: int) -> None:
        node = self.world.nodes[at]
        one = _Sent(f"{self.number}-{len(self.sent)}", at, time.monotonic())
        self.sent.append(one)
        body = json.dumps({"name": "n", "channels": [CHANNEL], "data": one.id}).encode()
        target = signed_path(node, "POST", f"/apps/{node.app_id}/events", body)
        with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError):
            async with session.post(f"http://127.0.0.1:{node.public_port}{target}", data=body) as answer:
                await answer.read()
                one.status = answer.status

    async def join(self, at: int) -> None:
        """A user joins a room at a node, whose webhook is awaited."""
        user = f"{self.number}-joins-{len(self.joined)}"
        self.joined[user] = time.monotonic()
        socket = await Socket.connect(self.world.nodes[at], timeout_s=5)
        try:
            await socket.subscribe(f"presence-{user}", user)
        finally:
            socket.abort()

    def webhooks(self) -> Iterator[tuple[str, float]]:
        """The users whose joins were announced since the last call, and when they joined."""
        for request in self.world.receiver.requests:
            for event in request.json().get("events", ()):
                user = event.get("user_id", "")
                if user in self.joined and user not in self.announced:
                    self.announced[user] = time.monotonic()
                    yield user, self.joined[user]
        self.world.receiver.requests.clear()


async def play(world: World, number: int, seed: int, patience_s: float = 0.0) -> Outcome:
    """One round: two faults that follow from the seed and the round's number. `patience_s` is added to the promised
    times, because other work may share the machine."""
    began = time.monotonic()
    rng = random.Random(f"{seed}-{number}")
    injects, pause_s = rng.sample(KINDS, 2), rng.uniform(0, 1.5)
    outcome = Outcome(number, [], pause_s)
    await world.settled()
    load = _Load(world, number)
    async with load.running():
        for inject in injects:
            struck = {hit.node for hit in outcome.hits if hit.dead or hit.silent or "control" in hit.kind}
            untouched = [node for node in range(len(NAMES)) if node not in struck]
            leader = await world.leader(untouched[0])
            if leader in {hit.node for hit in outcome.hits if hit.dead}:
                # The others don't know yet. One of them will lead.
                leader = rng.choice(untouched)
            outcome.hits.append(await inject(world, rng, leader))
            await asyncio.sleep(pause_s if inject is injects[0] else 0)
        since = time.monotonic()
        struck = {hit.node for hit in outcome.hits if hit.node is not None}
        await _observe(load, outcome, min(set(range(len(NAMES))) - struck), since, patience_s)
        healed_at = time.monotonic()
    await _compare(load, outcome, since, healed_at)
    await world.heal()
    await load.close()
    outcome.took_s = time.monotonic() - began
    return outcome


async def _observe(load: _Load, outcome: Outcome, asked: int, since: float, patience_s: float) -> None:
    """While the faults last: webhooks, ghosts and the leader, as the node `asked` sees them."""
    world, limit = load.world, since + REPAIRED_AFTER_S + patience_s
    dead = {hit.node for hit in outcome.hits if hit.dead}
    unsure = {f"{load.number}-{NAMES[hit.node]}" for hit in outcome.hits if hit.silent and hit.node is not None}
    expected = {f"{load.number}-{name}" for at, name in enumerate(NAMES) if at not in dead} - unsure
    need_webhooks = all(hit.kind != "postgres cut from all" for hit in outcome.hits)
    join_at, members = since, set()
    async with Api(world.nodes[asked]) as api:
        while time.monotonic() < since + REPAIRED_AFTER_S or (
            time.monotonic() < limit and (outcome.ghosts_s is None or (need_webhooks and outcome.webhooks_s is None))
        ):
            now = time.monotonic()
            if now >= join_at:
                join_at = now + 0.5
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(3):
                        await load.join(asked)
            for _, joined_at in load.webhooks():
                # Those who join just now are announced before the fault is noticed.
                if joined_at > since + REPAIRED_AFTER_S / 2 and outcome.webhooks_s is None:
                    outcome.webhooks_s = now - since
            with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError, AssertionError, KeyError):
                async with asyncio.timeout(3):
                    members = set(await api.users(ROOM)) - unsure
                if members != expected:
                    outcome.ghosts_s = None
                elif outcome.ghosts_s is None:
                    outcome.ghosts_s = now - since
            await asyncio.sleep(0.05)
    if need_webhooks and outcome.webhooks_s is None:
        outcome.faults.append(f"no webhook within {limit - since:g} s")
    if outcome.ghosts_s is None:
        outcome.faults.append(f"members are {sorted(members)}, not {sorted(expected)}")
    leaders = await world.leaders(asked)
    if len(leaders) != 1:
        outcome.faults.append(f"{len(leaders)} nodes lead")
    elif NAMES.index(leaders[0]) in dead:
        outcome.faults.append(f"{leaders[0]} leads and is dead")


async def _compare(load: _Load, outcome: Outcome, since: float, healed_at: float) -> None:
    """What was answered with 200 from the fifth second on has reached each client, once."""
    dead = {hit.node for hit in outcome.hits if hit.dead}
    struck = dead | {hit.node for hit in outcome.hits if hit.silent}
    late = [one for one in load.sent if one.status == 200 and since + DELIVERED_AFTER_S <= one.asked_at <= healed_at]
    outcome.accepted = len(late)
    wanted = {one.id for one in late}
    if not late:
        outcome.faults.append("no publish was accepted")
    for at, sockets in enumerate(load.clients):
        for socket in sockets:
            # A client that was disconnected knows that it may have missed something.
            if at in dead or socket.lost:
                continue
            with contextlib.suppress(TimeoutError):
                await socket.until(lambda: wanted <= _received(socket).keys() or socket.lost, 60.0)  # noqa: B023
            received = _received(socket)
            lost = [one for one in late if one.id not in received]
            if lost and not socket.lost:
                first = min(one.asked_at for one in lost) - since
                places = sorted({NAMES[one.node] for one in lost})
                said = f"a client of {NAMES[at]} missed {len(lost)} of {len(late)} published at {', '.join(places)}"
                outcome.faults.append(f"{said}, the first after {first:.1f} s")
            twice = [one for one, times in received.items() if times > 1]
            if twice:
                outcome.faults.append(f"a client of {NAMES[at]} got {len(twice)} events twice")
    if any(socket.lost for at, sockets in enumerate(load.clients) if at not in struck for socket in sockets):
        outcome.faults.append("a client of a healthy node was disconnected")


def _received(socket: Socket) -> Counter[str]:
    return Counter(frame["data"] for frame in socket.all("n", CHANNEL))
