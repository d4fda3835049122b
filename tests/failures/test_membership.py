"""Announced members and counts are right in the end, in whatever way clients connect and disconnect."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable

from helpers.server import Server, open_files
from helpers.wire import Api, Socket, connect_many, connect_patiently

ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"
ROOMS = ["presence-a", "presence-b", "presence-c"]


class History:
    """One random run of joins, leaves, resets, closes and killed workers, and the state that must follow."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.rooms = [f"{room}-{seed}" for room in ROOMS]
        # The rooms of each open socket: room → user.
        self.joined: dict[Socket, dict[str, str]] = {}
        # The sockets that killed workers had.
        self.cut: list[Socket] = []

    async def run(self, steps: int, kills: int) -> None:
        observer = await connect_patiently(self.server)  # An earlier run may have killed a worker.
        safe = self.server.worker_of(observer.port)
        present: dict[str, set[str]] = {}
        for room in self.rooms:
            success = await observer.subscribe(room, "observer")
            present[room] = set(json.loads(success["data"])["presence"]["ids"])
        killing_steps = set(self.random.sample(range(steps), kills))
        for step in range(steps):
            if step in killing_steps:
                self.kill_one_but(safe)
            await self.step()
        await self.settle()
        # HTTP asks Redis, but frames to the observer may be under way. They come in order, so an event marks the end.
        async with Api(self.server) as api:
            await api.publish(self.rooms, "end", "")
        for room in self.rooms:
            await observer.until(lambda: observer.all("end", room), what="the end")  # noqa: B023
            expected = {user for rooms in self.joined.values() for name, user in rooms.items() if name == room}
            for one in observer.frames:
                if one.get("channel") == room and one["event"] in (ADDED, REMOVED):
                    user = json.loads(one["data"])["user_id"]
                    if one["event"] == ADDED:
                        assert user not in present[room], f"{user} announced twice in {room}"
                        present[room].add(user)
                    else:
                        assert user in present[room], f"{user} removed twice from {room}"
                        present[room].remove(user)
            assert present[room] == expected | {"observer"}
        await asyncio.gather(*(one.close() for one in [observer, *self.joined]))

    async def step(self) -> None:
        # The model learns of a killed worker only by finding its sockets lost.
        self.joined = {socket: rooms for socket, rooms in self.joined.items() if not socket.lost}
        action = self.random.choice(["join", "join", "join", "leave", "reset", "close", "drop"])
        if action == "join" or not self.joined:
            await self.join()
            return
        socket = self.random.choice(list(self.joined))
        if action == "leave":
            if self.joined[socket]:
                room = self.random.choice(list(self.joined[socket]))
                del self.joined[socket][room]
                socket.unsubscribe(room)
            return
        del self.joined[socket]
        if action == "reset":
            socket.reset()
        elif action == "drop":
            socket.abort()
        else:
            await socket.close()

    async def join(self) -> None:
        """Subscribes on a new or an old socket; sometimes waits for the answer."""
        try:
            if not self.joined or self.random.random() < 0.3:
                socket = await connect_patiently(self.server)
                self.joined[socket] = {}
            socket = self.random.choice(list(self.joined))
            free = [room for room in self.rooms if room not in self.joined[socket]]
            if not free:
                return
            room, user = self.random.choice(free), f"user-{self.random.randrange(6)}"
            self.joined[socket][room] = user
            if self.random.random() < 0.5:
                await socket.subscribe(room, user)
            else:
                socket.send(socket.subscribe_request(room, user))
        except ConnectionError:
            return  # Its worker is being replaced. The model drops such a socket when its connection is lost.

    def kill_one_but(self, safe: int) -> None:
        # By process id: the places in the list change when a killed worker is started again.
        others = [pid for pid in self.server.worker_pids() if pid != safe]
        if others:
            pid = self.random.choice(others)
            ports = self.server.client_ports().get(pid, set())
            self.cut += [socket for socket in self.joined if socket.port in ports]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def settle(self) -> None:
        """Waits until HTTP answers what the model expects, counts included."""
        async with Api(self.server) as api:
            deadline = time.monotonic() + 60
            # A killed process may take a moment to end.
            while any(socket in self.joined and not socket.lost for socket in self.cut):
                assert time.monotonic() < deadline, "a killed worker has connections"
                await asyncio.sleep(0.02)
            while True:
                self.joined = {socket: rooms for socket, rooms in self.joined.items() if not socket.lost}
                expected, seen = {}, {}
                for room in self.rooms:
                    tabs = [rooms[room] for rooms in self.joined.values() if room in rooms]
                    expected[room] = (sorted({*tabs, "observer"}), len(tabs) + 1)
                    seen[room] = (await api.users(room), await api.subscription_count(room))
                if seen == expected:
                    return
                assert time.monotonic() < deadline, f"{seen} instead of {expected}"
                await asyncio.sleep(0.02)


async def test_random_runs_end_in_the_right_state(server: Server, size: Callable[[int, int], int]) -> None:
    for seed in range(size(24, 3_000)):
        await History(server, seed).run(steps=40, kills=0)


async def test_random_runs_with_killed_workers_end_in_the_right_state(
    server: Server, size: Callable[[int, int], int]
) -> None:
    for seed in range(1000, 1000 + size(2, 60)):
        await History(server, seed).run(steps=60, kills=2)


async def test_hopping_clients_leave_no_channel_occupied_or_missing(
    server: Server, size: Callable[[int, int], int]
) -> None:
    """Clients hop over channels, on all workers, without waiting."""
    channels = [f"hop-{number}" for number in range(20)]
    # The run before may have killed a worker.
    clients = await asyncio.gather(*(connect_patiently(server) for _ in range(size(40, 200))))
    chance = random.Random(3)
    where: dict[Socket, str] = {}
    for _ in range(size(12, 300)):
        for client in clients:
            if client in where:
                client.unsubscribe(where[client])
            where[client] = chance.choice(channels)
            client.send(client.subscribe_request(where[client]))
        await clients[0].ping()
    expected = {
        channel: {"subscription_count": count}
        for channel in channels
        if (count := sum(1 for there in where.values() if there == channel))
    }
    async with Api(server) as api:
        deadline = time.monotonic() + 60
        while True:
            seen = await api.get("/channels", filter_by_prefix="hop-", info="subscription_count")
            if seen["channels"] == expected:
                break
            assert time.monotonic() < deadline, f"{seen} instead of {expected}"
            await asyncio.sleep(0.02)
    await asyncio.gather(*(client.close() for client in clients))


async def test_counts_and_descriptors_return_to_their_start_values(
    server: Server, size: Callable[[int, int], int], wait_until: Callable, figures
) -> None:
    """Connect, subscribe, end: a third by RST, a third by FIN, a third by a close frame."""
    at_once = size(100, 250)

    async def cycle() -> None:
        sockets = await connect_many(server, at_once)
        for number, socket in enumerate(sockets):
            socket.send(socket.subscribe_request("cycled"))
            socket.send(socket.subscribe_request("presence-cycled", f"user-{number % 50}"))
        await sockets[-1].ping()
        for number, socket in enumerate(sockets):
            if number % 3 == 0:
                socket.reset()
            elif number % 3 == 1:
                socket.abort()
        await asyncio.gather(*(socket.close() for socket in sockets[2::3]))

    async def settle() -> None:
        """Waits until nobody is connected."""
        async with Api(server) as api:
            deadline = time.monotonic() + 60
            while any(server.client_ports().values()) or (await api.get("/channels"))["channels"]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert await api.subscription_count("cycled") == 0

    def descriptors() -> list[int]:
        return [open_files(pid) for pid in server.worker_pids()]

    def keys() -> set[bytes]:
        with server.redis() as redis:
            return {key for key in redis.scan_iter(count=1000) if b":stats:" not in key}

    await cycle()  # What stays after the first round, such as pools and the clock of a shard, isn't a leak.
    await settle()
    files_before = descriptors()
    for _ in range(size(4, 400)):
        await cycle()
    await settle()
    # The HTTP session of `settle` itself may hold a descriptor for a moment, and some keys expire soon.
    await wait_until(lambda: all(now <= before + 2 for now, before in zip(descriptors(), files_before, strict=True)))
    files, keys_before = descriptors(), keys()
    await cycle()
    await settle()
    await wait_until(lambda: keys() <= keys_before)
    figures.note("Worker killed", "connections made and ended", at_once * size(4, 400), "")
    figures.note("Worker killed", "descriptors more than before, all workers", sum(files) - sum(files_before), "", "0")
