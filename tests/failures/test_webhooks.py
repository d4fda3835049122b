"""Webhooks are right even if processes are killed: clients join and leave at random on four workers while workers, the
control plane and Redis are killed. In the end all deliveries are compared with the final state.

The receiver always answers at once. It orders by `seq` and drops repeats by delivery id, as receivers should
(protocol/README.md "Webhooks").
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import Socket, UpgradeRefused
from redpoll.cli import main

DEBOUNCE_S = 1.0
# How often each client joins or leaves after the last kill: about 3 s.
STEPS = 12
# While everything is up, a webhook must arrive within this time after its debounce, so 10 s after the change.
TRUTH_WITHIN_S = 10.0
CLIENTS = 24
USERS = 8
CHANNELS = [*(f"room-{number}" for number in range(5)), *(f"presence-{number}" for number in range(5))]
INTRANET = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8", "webhook_debounce_s": DEBOUNCE_S}


def command(server: Server, *words: str) -> Any:
    result = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@dataclass
class Receiver:
    """Every delivery by its id. `secret` is set once the endpoint exists. The next `failures` requests get 500."""

    secret: str = ""
    url: str = ""
    bodies: dict[str, bytes] = field(default_factory=dict)
    received: int = 0
    failures: int = 0
    accepted: list[bytes] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.received += 1
        delivery = request.headers["X-Service-Delivery"]
        expected = hmac.new(self.secret.encode(), body, hashlib.sha256).hexdigest()
        if self.secret and not hmac.compare_digest(expected, request.headers["X-Service-Signature"]):
            self.faults.append(f"a wrong signature on {body!r}")
        if self.bodies.setdefault(delivery, body) != body:
            self.faults.append(f"two bodies under the delivery id {delivery}")
        if self.failures:
            self.failures -= 1
            return web.Response(status=500)
        self.accepted.append(body)
        return web.Response()

    def events(self) -> list[dict[str, Any]]:
        """Every event once, in order of `seq`."""
        events = [json.loads(body) for body in self.bodies.values()]
        return sorted(events, key=lambda event: event["data"]["seq"])

    def announced(self) -> tuple[dict[str, list[str]], dict[tuple[str, str], list[str]]]:
        """The names of events, by channel and by (channel, user)."""
        channels: dict[str, list[str]] = {}
        members: dict[tuple[str, str], list[str]] = {}
        for event in self.events():
            kind, data = event["event"], event["data"]
            if kind.startswith("channel."):
                channels.setdefault(data["channel"], []).append(kind)
            elif kind.startswith("member."):
                members.setdefault((data["channel"], data["user_id"]), []).append(kind)
        return channels, members


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    application = web.Application()
    application.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


@dataclass
class Visitor:
    """Joins and leaves at random, and reconnects when its connection breaks. `inside` is where it is now."""

    server: Server
    user: str
    inside: set[str] = field(default_factory=set)
    steps: int = 0
    still: bool = False
    settled: bool = False

    async def run(self) -> None:
        while not self.still:
            with contextlib.suppress(ConnectionError, OSError, TimeoutError, UpgradeRefused):
                await self._visit()
            await asyncio.sleep(0.05)  # Clients wait before they connect again.

    async def _visit(self) -> None:
        socket = await Socket.connect(self.server)
        try:
            while not self.still:
                channel = random.choice(CHANNELS)
                if channel in self.inside:
                    socket.unsubscribe(channel)
                    self.inside.discard(channel)
                else:
                    await socket.subscribe(channel, self.user, timeout_s=60)
                    self.inside.add(channel)
                self.steps += 1
                await asyncio.sleep(random.expovariate(4))
                if socket.lost:
                    return
            await socket.settle()
            self.settled = True
            await socket.until_closed(timeout_s=600)
        finally:
            self.inside.clear()
            random.choice((socket.abort, socket.reset))()


async def kill_at_random(server: Server, seconds: float) -> list[str]:
    """Kills one running process after another."""
    killed = []
    # Each of the three kinds at least once.
    wanted = random.sample(("worker", "control", "redis"), 3)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(set(killed)) < len(wanted):
        victim = next((kind for kind in wanted if kind not in killed), None)
        victim = victim or random.choice(("worker", "worker", "control", "redis"))
        with contextlib.suppress(ValueError, IndexError, ProcessLookupError):
            if victim == "worker":
                pid = random.choice(server.worker_pids())
            else:
                pid = server.control_pid if victim == "control" else server.redis_pid
            os.kill(pid, signal.SIGKILL)
            killed.append(victim)
        await asyncio.sleep(random.uniform(0.3, 1.5))
    return killed


async def until_still(visitors: list[Visitor], tasks: list[asyncio.Task], wait_until: Callable) -> None:
    """Joins and leaves go on after the last kill, which takes a while on a busy machine. Then everyone stays."""
    goals = [visitor.steps + STEPS for visitor in visitors]
    await wait_until(
        lambda: all(visitor.steps >= goal for visitor, goal in zip(visitors, goals, strict=True)),
        timeout_s=120,
        what="joins and leaves of every client",
    )
    for visitor in visitors:
        visitor.still = True
    await wait_until(
        lambda: all(task.done() or visitor.settled for task, visitor in zip(tasks, visitors, strict=True)),
        timeout_s=60,
    )


def alternates(announced: list[str], first: str, second: str) -> bool:
    return announced == [first, second] * (len(announced) // 2) + [first] * (len(announced) % 2)


def faults_of(receiver: Receiver, visitors: list[Visitor]) -> list[str]:
    """The faults of all announcements, given the present members."""
    channels, members = receiver.announced()
    faults = list(receiver.faults)
    for channel in CHANNELS:
        announced = channels.get(channel, [])
        if not alternates(announced, "channel.occupied", "channel.vacated"):
            faults.append(f"{channel}: {announced}")
        occupied = any(channel in visitor.inside for visitor in visitors)
        if occupied != (announced[-1:] == ["channel.occupied"]):
            faults.append(f"{channel} is {'occupied' if occupied else 'vacated'}, announced {announced[-1:]}")
    present = {
        (channel, visitor.user) for visitor in visitors for channel in visitor.inside if channel.startswith("presence-")
    }
    for member in present | members.keys():
        announced = members.get(member, [])
        if not alternates(announced, "member.added", "member.removed"):
            faults.append(f"{member}: {announced}")
        if (member in present) != (announced[-1:] == ["member.added"]):
            faults.append(f"{member} is {'in' if member in present else 'out'}, announced {announced[-1:]}")
    return faults


async def test_announcements_alternate_and_end_in_the_right_state_after_any_kill(
    size: Callable[[int, int], int], wait_until: Callable, figures
) -> None:
    async with receiving() as receiver:
        with Server(workers=size(2, 4), **INTRANET) as server:
            made = await asyncio.to_thread(command, server, "webhook", "create", server.app_id, receiver.url)
            receiver.secret = made["secret"]
            for _ in range(size(1, 10)):
                visitors = [Visitor(server, f"user-{number % USERS}") for number in range(CLIENTS)]
                async with asyncio.TaskGroup() as visits:  # What a client raises fails the test.
                    tasks = [visits.create_task(visitor.run()) for visitor in visitors]
                    killed = await kill_at_random(server, size(6, 30))
                    await until_still(visitors, tasks, wait_until)
                    assert any(visitor.inside for visitor in visitors)
                    began = time.monotonic()
                    await wait_until(
                        lambda visitors=visitors: not faults_of(receiver, visitors),
                        timeout_s=TRUTH_WITHIN_S * size(12, 1),
                        what="announcements that agree with the final state",
                    )
                    figures.note(
                        "Webhook receivers down",
                        "webhooks complete after the last change",
                        time.monotonic() - began,
                        "s",
                        "10 s",
                    )
                    # Nothing more arrives that would change it.
                    await asyncio.sleep(2 * DEBOUNCE_S)
                    assert not faults_of(receiver, visitors)
                    assert len(set(killed)) == 3, killed
                    for task in tasks:
                        task.cancel()
            assert not await asyncio.to_thread(command, server, "dead-letter", "list", server.app_id)
            repeated = receiver.received / len(receiver.bodies) - 1
            figures.note(
                "Webhook receivers down", f"deliveries repeated, of {len(receiver.bodies)}", 100 * repeated, "%", "1 %"
            )


async def test_batched_webhooks_lose_no_event_when_control_is_killed(wait_until: Callable) -> None:
    """The receiver fails again and again, so that retries are under way too."""
    channels = [f"room-{number}" for number in range(150)]
    async with receiving() as receiver:
        with Server(workers=1, **INTRANET | {"webhook_retry_after_s": "0.5,0.5,0.5,0.5,0.5"}) as server:
            words = ("--format", "pusher", "--batch", "--events", "channel.occupied")
            made = await asyncio.to_thread(command, server, "webhook", "create", server.app_id, receiver.url, *words)
            receiver.secret = made["secret"]
            socket, kills = await Socket.connect(server), 0
            for at in range(0, len(channels), 50):
                receiver.failures, heard = 1, receiver.received
                for channel in channels[at : at + 50]:
                    await socket.subscribe(channel, timeout_s=60)
                await wait_until(lambda heard=heard: receiver.received > heard, timeout_s=60, what="a request")
                # It may be starting, after the kill before.
                await wait_until(lambda: len(server.control_pids()) == 1, timeout_s=60, what="a control plane")
                with contextlib.suppress(ValueError, ProcessLookupError):
                    os.kill(server.control_pid, signal.SIGKILL)
                    kills += 1
            assert kills
            came: set[str] = set()

            def all_came() -> bool:
                came.update(event["channel"] for body in receiver.accepted for event in json.loads(body)["events"])
                return came == set(channels)

            await wait_until(all_came, timeout_s=60, what="all events")
            assert not receiver.faults
            assert any(len(json.loads(body)["events"]) > 1 for body in receiver.accepted)
            assert not await asyncio.to_thread(command, server, "dead-letter", "list", server.app_id)
            await socket.close()


async def test_a_short_absence_is_not_announced_and_a_long_one_once(wait_until: Callable) -> None:
    """A page reload."""
    async with receiving() as receiver:
        # A short absence is much shorter than the debounce, however slow the machine is.
        with Server(workers=2, **INTRANET | {"webhook_debounce_s": 15}) as server:
            made = await asyncio.to_thread(command, server, "webhook", "create", server.app_id, receiver.url)
            receiver.secret = made["secret"]

            async def visit(away_s: float) -> Socket:
                await asyncio.sleep(away_s)
                socket = await Socket.connect(server)
                await socket.subscribe("presence-room", "anna")
                return socket

            socket = await visit(0)
            for away_s in (0.0, 0.2):
                socket.abort()
                socket = await visit(away_s)
            await wait_until(lambda: len(receiver.bodies) >= 2)
            socket.abort()
            await wait_until(lambda: len(receiver.bodies) >= 4)
            socket = await visit(0)
            await wait_until(lambda: len(receiver.bodies) >= 6)
            channels, members = receiver.announced()
            assert channels == {"presence-room": ["channel.occupied", "channel.vacated", "channel.occupied"]}
            assert members == {("presence-room", "anna"): ["member.added", "member.removed", "member.added"]}
            assert not receiver.faults
            await socket.close()
