"""Simulated workers: each has a real link, directory and registry, and sockets that record what a client would see."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from cluster.links import be_patient, deafen, hear, quick_link
from cluster.sums import counted
from redpoll import _frame
from redpoll.cluster.directory import Directory
from redpoll.cluster.membership.connection_limit import CONN
from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.registry import LocalChannel, Registry, Timings
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.survey import Answerers
from redpoll.protocol.apps import App

RUN = "0123456789ab"
APP = "7"


def record(**settings: Any) -> App:
    """The app of these tests."""
    return App(**{"id": APP, "name": "test", "keys": ()} | settings)


# What a worker does after a time, it does a twentieth as late as documented. What it gives up after a time, it doesn't
# give up on the slowest machine; a test of giving up passes a shorter time.
QUICK = {
    "beat_s": 0.05,
    "unanswered_s": 60.0,
    "canary_s": 0.1,
    "away_s": 60.0,
    "second_look_s": 0.25,
    "full_s": 0.0,
    "offline_s": 0.15,
    "admit_retry_s": 0.025,
    "max_admit_s": 60.0,
    "join_wait_s": 60.0,
    "retry_s": 0.01,
    "max_retry_s": 0.05,
}


@pytest.fixture(autouse=True)
def _patient_with_redis(monkeypatch):
    be_patient(monkeypatch)


@dataclass(eq=False)
class Socket:
    """One subscription as a client would know it. `users` are the members that it knows."""

    channel: str
    user: str | None
    state: str = "pending"
    reason: str | None = None
    users: set[str] = field(default_factory=set)
    snapshot: set[str] | None = None
    frames: list[tuple[str, str]] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    # The cached event it got as a joiner, and the counts it got, in order.
    cached: bytes | None = None
    counts: list[int] = field(default_factory=list)
    # With history: the position (epoch, offset) after which it has all events, which are `events[place_at:]`.
    place: tuple[str, int] | None = None
    place_at: int = 0
    join: Join | None = None


class Sockets:
    """Implements MembershipEvents. `faults` collects, as sentences, what a client would see go wrong."""

    def __init__(self) -> None:
        self.attached: dict[str, list[Socket]] = {}
        self.opened_channels: list[str] = []
        self.dropped_channels: list[str] = []
        self.faults: list[str] = []
        # The outcome of each connection, and the reported states of watched users.
        self.connections: dict[Join, int] = {}
        self.states: list[tuple[str, bool]] = []
        # Where channels with history went on after something was lost: channel, epoch, offset.
        self.lost_places: list[tuple[str, str, int]] = []
        self.console_copies: list[bytes] = []
        # The joins that waited for a second, as they print.
        self.waiting: list[str] = []
        # By channel, the offset of the last event.
        self.offsets: dict[str, int] = {}

    def opened(self, local_channel: LocalChannel) -> None:
        self.opened_channels.append(local_channel.channel)
        self.attached.setdefault(local_channel.channel, [])

    def dropped(self, local_channel: LocalChannel) -> None:
        self.dropped_channels.append(local_channel.channel)
        self.offsets.pop(local_channel.channel, None)
        if self.attached.pop(local_channel.channel):
            self.faults.append(f"{local_channel.channel} dropped with sockets attached")

    def joined(self, local_channel: LocalChannel, joins: list[Join], cached: bytes | None, total: int | None) -> None:
        for join in joins:
            socket = join.owner
            assert isinstance(socket, Socket)
            socket.state = "attached"
            socket.cached = cached
            if local_channel.history is not None:
                socket.place, socket.place_at = (local_channel.history.epoch, local_channel.history.last), 0
                if (
                    self.offsets.setdefault(local_channel.channel, local_channel.history.last)
                    != local_channel.history.last
                ):
                    self.faults.append(f"{local_channel.channel} joined at another position than its events begin at")
            if total is not None:
                socket.counts.append(total)
            self.attached[local_channel.channel].append(socket)
            if local_channel.roster is not None:
                socket.snapshot = set(local_channel.roster)
                socket.users = set(local_channel.roster)
                if socket.user not in socket.users:
                    self.faults.append(f"{socket.user} isn't in its own snapshot of {local_channel.channel}")

    def refused(self, local_channel: LocalChannel, join: Join, reason: str) -> None:
        assert isinstance(join.owner, Socket)
        join.owner.state = "refused"
        join.owner.reason = reason

    def settings_changed(self, local_channel: LocalChannel) -> None:
        pass

    def still_waiting(self, joins: Iterator[Join]) -> None:
        self.waiting = [str(join) for join in joins]

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        for socket in self.attached[local_channel.channel]:
            socket.frames.append(("added", user))
            if user in socket.users:
                self.faults.append(f"{user} added twice on {local_channel.channel}")
            socket.users.add(user)

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        for socket in self.attached[local_channel.channel]:
            socket.frames.append(("removed", user))
            if user not in socket.users:
                self.faults.append(f"{user} removed twice from {local_channel.channel}")
            socket.users.discard(user)

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        for socket in self.attached[local_channel.channel]:
            socket.counts.append(total)

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        offset, prev = _frame.offsets(payload)
        if offset and local_channel.history is not None:
            if self.offsets.setdefault(local_channel.channel, prev) != prev:
                self.faults.append(
                    f"{local_channel.channel}: {offset} follows {prev}, not {self.offsets[local_channel.channel]}"
                )
            self.offsets[local_channel.channel] = offset
        for socket in self.attached[local_channel.channel]:
            socket.events.append(payload)

    def console(self, local_channel: LocalChannel, payload: bytes) -> None:
        self.console_copies.append(payload)

    def lost(self, local_channel: LocalChannel) -> None:
        assert local_channel.history is not None
        self.lost_places.append((local_channel.channel, local_channel.history.epoch, local_channel.history.last))
        self.offsets[local_channel.channel] = local_channel.history.last
        for socket in self.attached[local_channel.channel]:
            socket.place, socket.place_at = (
                (local_channel.history.epoch, local_channel.history.last),
                len(socket.events),
            )

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        if (user_id, online) in self.states[-1:]:
            self.faults.append(f"{user_id}: the same state twice")
        self.states.append((user_id, online))

    def admitted(self, join: Join) -> None:
        self.connections[join] = 200

    def turned_away(self, join: Join, code: int) -> None:
        self.connections[join] = code


class Worker:
    """A worker process without its sockets, on a link of its own."""

    def __init__(self, url: str, k: int, settings: dict[str, Any], run: str = RUN) -> None:
        self.link = quick_link(url)
        self.keys = Keys(sharded=self.link.sharded)
        self.sockets = Sockets()
        self.directory = Directory(self.link, self.keys, again_s=0.01)
        self.answerers = Answerers(self.link, self.keys, lambda: self.registry.worker_id)
        self.app = record(max_presence_members=0)
        self.registry = Registry(
            self.link,
            self.keys,
            self.sockets,
            self.directory,
            run,
            k,
            self.answerers,
            debounce_s=settings.pop("debounce_s", 3.0),
            timings=Timings(**settings),
        )

    def join(self, channel: str, user: str | None = None, info: bytes = b"", cap: int = 0) -> Socket:
        socket = Socket(channel, user)
        socket.join = Join(socket, structs.replace(self.app, max_presence_members=cap), channel, user, info)
        self.registry.joins.add(socket.join)
        return socket

    async def attach(self, channel: str, user: str | None = None, **more: Any) -> Socket:
        """A subscription that has succeeded; `more` as in `join`."""
        socket = self.join(channel, user, **more)
        async with asyncio.timeout(60):
            while socket.state == "pending":
                await asyncio.sleep(0.005)
        assert socket.state == "attached"
        return socket

    def connect(self) -> Join:
        """Opens a connection of `self.app`; the outcome is in `sockets.connections`."""
        join = Join(None, self.app, CONN)
        self.registry.connection_limit.admit(join)
        return join

    def leave(self, socket: Socket) -> None:
        if socket.state == "attached":
            self.sockets.attached[socket.channel].remove(socket)
            self.registry.leave(APP, socket.channel, socket.user)
        elif socket.state == "pending":
            assert self.registry.joins.withdraw(socket, socket.channel)
        socket.state = "left"

    def leave_all(self) -> None:
        for sockets in list(self.sockets.attached.values()):
            for socket in list(sockets):
                self.leave(socket)

    def deafen(self) -> None:
        """Stops reading from Redis, which still carries out commands."""
        deafen(self.link)

    def hear(self) -> None:
        """Ends `deafen`."""
        hear(self.link)

    async def stop_beats(self) -> None:
        """No beat is sent or unanswered after this. `registry.incarnation.start()` ends it."""
        self.registry.incarnation.close()
        async with asyncio.timeout(60):
            while self.link.unanswered:
                await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """Ends like a killed process: sends nothing to Redis."""
        self.registry.close()
        await self.link.close()


@pytest.fixture
async def start_worker(redis) -> AsyncIterator[Callable[..., Any]]:
    """`await start_worker(k)`: a worker on the session's Redis, or on the one given as `server`."""
    workers: list[Worker] = []

    async def start(k: int = 0, *, server=redis, run: str = RUN, **times: float) -> Worker:
        worker = Worker(server.url, k, QUICK | times, run)
        workers.append(worker)
        async with asyncio.timeout(60):
            await worker.registry.start()
        return worker

    yield start
    for worker in workers:
        await worker.kill()


@pytest.fixture
async def a(start_worker) -> Worker:
    return await start_worker(1)


@pytest.fixture
async def b(start_worker) -> Worker:
    return await start_worker(2)


@pytest.fixture
def make_app() -> Callable[..., App]:
    """`make_app(watchlist=True)`: the record of these tests' app."""
    return record


@pytest.fixture
async def link(redis) -> AsyncIterator[Link]:
    """A link of the test's own, to look into Redis or to act as control. It sends no commands by itself."""
    link = Link(redis.url, first_delay_s=0.01, max_delay_s=0.05, look_every_s=3600.0)
    link.start()
    async with asyncio.timeout(60):
        await link.wait_up()
    yield link
    await link.close()


@pytest.fixture
def full(link) -> Callable[[], AbstractAsyncContextManager[None]]:
    """`async with full():`, with a Redis that has no memory left."""

    @asynccontextmanager
    async def without_memory() -> AsyncIterator[None]:
        await link.ask(b"CONFIG", b"SET", b"maxmemory", 1)
        try:
            yield
        finally:
            await link.ask(b"CONFIG", b"SET", b"maxmemory", 0)

    return without_memory


@pytest.fixture
def keys() -> Keys:
    return Keys()


class Truth:
    """Compares what Redis holds with the sockets of the workers."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.link, self.keys = link, keys

    async def counts(self, channel: str) -> int:
        return await counted(self.link, self.keys, channel)

    async def users(self, channel: str) -> set[str]:
        return {user.decode() for user in await self.link.ask(b"HKEYS", self.keys.members(APP, channel))}

    async def channel_keys(self) -> list[bytes]:
        """Every key of Redis that belongs to a channel, or to a worker that holds one."""
        found = []
        for key in await self.link.scan(b"*"):
            kind = key.split(b":")[2]
            if kind in (b"c", b"p", b"a") or (kind == b"w" and await self.link.ask(b"HLEN", key) > 1):
                found.append(key)
        return sorted(found)

    async def differences(self, workers: list[Worker]) -> list[str]:
        """What is wrong now, as sentences."""
        wrong = [fault for worker in workers for fault in worker.sockets.faults]
        count: dict[str, int] = {}
        users: dict[str, set[str]] = {}
        for worker in workers:
            for channel, sockets in worker.sockets.attached.items():
                count[channel] = count.get(channel, 0) + len(sockets)
                users.setdefault(channel, set()).update(socket.user for socket in sockets if socket.user is not None)
        for channel, expected in count.items():
            if await self.counts(channel) != expected:
                wrong.append(f"{channel}: {await self.counts(channel)} counted, {expected} attached")
            if await self.users(channel) != users[channel]:
                wrong.append(f"{channel}: {await self.users(channel)} listed, {users[channel]} attached")
        for worker in workers:
            for local_channel in worker.registry.local_channels():
                if not local_channel.has_topic:
                    continue
                attached = worker.sockets.attached[local_channel.channel]
                if local_channel.queued or local_channel.busy:
                    wrong.append(f"{local_channel.channel}: a call is under way")
                elif local_channel.attached != len(attached):
                    wrong.append(f"{local_channel.channel}: {local_channel.attached} known, {len(attached)} attached")
                elif local_channel.attached == 0:
                    wrong.append(f"{local_channel.channel}: held by {worker.registry.worker_id} without a subscriber")
                elif local_channel.roster is not None and set(local_channel.roster) != users[local_channel.channel]:
                    name = local_channel.channel
                    wrong.append(f"{name}: roster {set(local_channel.roster)}, not {users[name]}")
                for socket in attached:
                    if local_channel.roster is not None and socket.users != users[local_channel.channel]:
                        wrong.append(f"{local_channel.channel}: a client knows {socket.users}")
        occupied = sorted(channel for channel, n in count.items() if n)
        listed = [channel for at in range(SHARDS) for channel in await self._listed(at)]
        if sorted(listed) != occupied:
            wrong.append(f"{sorted(listed)} occupied, not {occupied}")
        return wrong

    async def _differences_or_away(self, workers: list[Worker]) -> list[str]:
        try:
            return await self.differences(workers)
        except LinkDown:
            await self.link.wait_up()
            return ["Redis was away"]

    async def _listed(self, at: int) -> list[str]:
        return [name.decode() for name in await self.link.ask(b"SMEMBERS", self.keys.occupied(at, APP))]

    async def settled(self, workers: list[Worker], timeout_s: float = 60.0) -> None:
        """Waits until nothing is wrong; fails with the faults that remain."""
        deadline = time.monotonic() + timeout_s
        while wrong := await self._differences_or_away(workers):
            if time.monotonic() > deadline:
                pytest.fail("; ".join(wrong[:8]))
            await asyncio.sleep(0.01)


@pytest.fixture
def truth(link, keys) -> Truth:
    return Truth(link, keys)


@pytest.fixture
async def make_truth(keys) -> AsyncIterator[Callable[..., Any]]:
    """`await make_truth(server)`: the comparison with another Redis than the session's."""
    links: list[Link] = []

    async def make(server) -> Truth:
        link = quick_link(server.url)
        links.append(link)
        link.start()
        async with asyncio.timeout(60):
            await link.wait_up()
        return Truth(link, keys)

    yield make
    for link in links:
        await link.close()
