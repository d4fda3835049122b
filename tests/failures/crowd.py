"""Clients and publishers of several servers, for failure tests.

`async with Crowd(nodes, clients=60) as crowd:` connects the clients, each to the node with the fewest, as a load
balancer with `leastconn` does. A client that loses its connection connects again, to any node, and recovers. Each
client is subscribed to a channel with history and to a presence channel. Publishers send numbers to the channels with
history at a steady rate, and repeat what wasn't answered with 200. `check` compares what each client got with what was
published, and the rosters with the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import aiohttp

from helpers.server import Server
from helpers.wire import Frame, Socket, UpgradeRefused, connect_patiently, signed_path

ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"
SUCCEEDED = "pusher_internal:subscription_succeeded"
_ROOM_SIZE = 10
# How long a node gets nothing more after it failed.
_AVOIDED_S = 0.3


class _Frames(list[Frame]):
    """Passes each frame on instead of storing it."""

    def __init__(self, take: Callable[[Frame], None]) -> None:
        super().__init__()
        self._take = take

    def append(self, frame: Frame) -> None:
        self._take(frame)


class Client:
    """One client. `seen` has the numbers that it got, `connects` counts its connections. `changes` has (user, event)
    of its presence channel. `inside`: it is connected and subscribed."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        self.user = f"user-{number:04d}"
        self.number = number % crowd.channels
        self.channel = crowd.channel(self.number)
        self.room = f"{crowd.rooms}{number // _ROOM_SIZE}"
        self.seen: list[int] = []
        self.changes: list[tuple[str, str]] = []
        self.roster: set[str] = set()
        self.connects = 0
        self.gaps = 0
        self.node: Server | None = None
        self.socket: Socket | None = None
        self.inside = asyncio.Event()
        self._position: dict[str, Any] | None = None

    async def run(self) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            self.node = node = self.crowd.choose()
            if node is None:
                pause_s = 0.1
                continue
            try:
                pause_s = await self._stay(node)
            except (ConnectionError, UpgradeRefused, OSError, TimeoutError):
                # As a load balancer: this node gets no clients for a moment.
                self.crowd.avoid(node)
                pause_s = random.uniform(0.01, 0.1)
            finally:
                self.inside.clear()
                self.node = self.socket = None

    async def _stay(self, node: Server) -> float:
        """Returns the pause before the next connection."""
        socket = await Socket.connect(node, query="protocol=7&recover=1", timeout_s=60)
        try:
            self.connects += 1
            self.socket = socket
            socket.frames = _Frames(self._take)
            request = socket.subscribe_request(self.channel)
            if self._position is not None:
                request["data"]["since"] = dict(self._position)
            socket.send(request)
            socket.send(socket.subscribe_request(self.room, self.user))
            code = await socket.until_closed(timeout_s=3_600)
            return 0.0 if code is not None and 4200 <= code < 4300 else random.uniform(0.1, 0.5)
        finally:
            socket.abort()

    def _take(self, frame: Frame) -> None:
        event = frame["event"]
        if event == "n":
            self.seen.append(int(frame["data"]))
            assert self._position is not None
            self._position["offset"] = frame["offset"]
        elif event in (ADDED, REMOVED):
            user = json.loads(frame["data"])["user_id"]
            self.changes.append((user, event))
            (self.roster.add if event == ADDED else self.roster.discard)(user)
        elif event == "pusher:position" or (event == SUCCEEDED and frame["channel"] == self.channel):
            self._moved(json.loads(frame["data"]))
        elif event == SUCCEEDED:
            self.roster = set(json.loads(frame["data"])["presence"]["ids"])
            self.inside.set()

    def _moved(self, place: dict[str, Any]) -> None:
        self.gaps += place.get("recovered", True) is not True
        self._position = {"epoch": place["epoch"], "offset": place["offset"]}


class Crowd:
    """`per_s` numbers per second are published to each of the `channels`. `longest_s` is the longest time from the
    first attempt of a publish to its 200, `repeated` counts attempts that got no 200. `rooms` is the beginning of all
    presence channels."""

    def __init__(self, nodes: Sequence[Server], clients: int, *, channels: int = 5, per_s: float = 10.0) -> None:
        # Channels of its own: members who left another crowd's would still be in the debounce of webhooks.
        self.name = secrets.token_hex(3)
        self.rooms = f"presence-{self.name}-"
        self.nodes = list(nodes)
        self.channels = channels
        self.published = [0] * channels
        self.longest_s = 0.0
        self.repeated = 0
        self.clients = [Client(self, number) for number in range(clients)]
        self._pause_s = 1 / per_s
        self._avoided: dict[Server, float] = {}
        # Of publishers alone: a node that refuses a publish may have room for clients.
        self._refusing: dict[Server, float] = {}
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._publishers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for client in self.clients:
            self._tasks.append(asyncio.create_task(client.run()))
            if len(self._tasks) % 50 == 0:
                await self._tasks_inside()
        await self._tasks_inside()
        self._publishers = [asyncio.create_task(self._publish(number)) for number in range(self.channels)]
        return self

    async def _tasks_inside(self) -> None:
        async with asyncio.timeout(60):
            for client in self.clients[: len(self._tasks)]:
                await client.inside.wait()

    async def __aexit__(self, *_: object) -> None:
        for task in (*self._tasks, *self._publishers):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._publishers, return_exceptions=True)

    def channel(self, number: int) -> str:
        """One of the channels with history."""
        return f"stored-{self.name}-{number}"

    # -- where clients connect

    def choose(self) -> Server | None:
        """The node with the fewest clients, of those that admitted clients lately."""
        now = time.monotonic()
        return self._emptiest([node for node in self.nodes if self._avoided.get(node, 0.0) < now])

    def _emptiest(self, nodes: list[Server]) -> Server | None:
        held = self.per_node()
        return min(nodes, key=lambda node: held[node], default=None)

    def avoid(self, node: Server) -> None:
        self._avoided[node] = time.monotonic() + _AVOIDED_S

    def per_node(self) -> Counter[Server]:
        return Counter(client.node for client in self.clients if client.node is not None)

    def of(self, node: Server) -> list[Client]:
        return [client for client in self.clients if client.node is node]

    def connects(self) -> int:
        return sum(client.connects for client in self.clients)

    # -- publishing

    async def _publish(self, channel: int) -> None:
        timeout = aiohttp.ClientTimeout(total=4)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            due = time.monotonic()
            while not self._ending:
                number = self.published[channel]
                content = {"name": "n", "channels": [self.channel(channel)], "data": str(number)}
                body = json.dumps({**content, "correlation_id": f"{self.name}-{channel}-{number}"}).encode()
                began = time.monotonic()
                while not await self._accepted(session, body):
                    self.repeated += 1
                    await asyncio.sleep(0.02)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.published[channel] += 1
                due = max(due + self._pause_s, time.monotonic() - 1)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _accepted(self, session: aiohttp.ClientSession, body: bytes) -> bool:
        now = time.monotonic()
        avoided = [self._avoided, self._refusing]
        open_nodes = [node for node in self.nodes if all(until.get(node, 0.0) < now for until in avoided)]
        node = self._emptiest(open_nodes) or self.nodes[0]
        target = signed_path(node, "POST", f"/apps/{node.app_id}/events", body)
        try:
            async with session.post(f"{node.public_url}{target}", data=body) as answer:
                text = await answer.text()
                assert answer.status in (200, 503), text
                if answer.status == 200:
                    return True
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        self._refusing[node] = time.monotonic() + _AVOIDED_S
        return False

    # -- what must hold

    async def check(self, within_s: float = 60.0) -> int:
        """Ends publishing, waits until all have everything, and raises AssertionError if something is missing, repeated
        or in another order, or if a roster is wrong. Returns the number of deliveries."""
        self._ending = True
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._publishers)
        rooms: dict[str, set[str]] = {}
        for client in self.clients:
            rooms.setdefault(client.room, set()).add(client.user)
        deadline = time.monotonic() + within_s
        while faults := self._faults(rooms):
            assert time.monotonic() < deadline, f"{len(faults)} faults: {faults[:5]}"
            await asyncio.sleep(0.02)
        return sum(len(client.seen) for client in self.clients)

    def _faults(self, rooms: dict[str, set[str]]) -> list[str]:
        faults = []
        for client in self.clients:
            expected = self.published[client.number]
            if client.seen != list(range(expected)):
                repeated = [number for number, count in Counter(client.seen).items() if count > 1]
                missing = sorted(set(range(expected)) - set(client.seen))
                faults.append(f"{client.user} got {len(client.seen)} of {expected}: {repeated=} {missing=}")
            if client.gaps:
                faults.append(f"{client.user} was told of a gap")
            if not client.inside.is_set() or client.roster != rooms[client.room]:
                faults.append(f"{client.user} sees {sorted(client.roster ^ rooms[client.room])} wrong")
        return faults


@contextlib.asynccontextmanager
async def visitors(node: Server, room: str, count: int):
    """Members of a presence channel who don't come back when their connection ends."""
    sockets = [await connect_patiently(node) for _ in range(count)]
    for number, socket in enumerate(sockets):
        await socket.subscribe(room, f"visitor-{number}")
    yield sockets
    for socket in sockets:
        socket.abort()
