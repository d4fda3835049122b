"""The daily counter while processes are killed. It is never below the number of accepted messages, and above it at
most by the requests that a kill interrupted (deploy/failures.md "Control plane killed")."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import signed_path
from redpoll.cli import main

FREE_PLAN = 200_000
PUBLISHERS = 8


@dataclass
class Spender:
    """Publishes on a limited plan from several connections, one event after another on each."""

    server: Server
    accepted: int = 0
    under_way: int = 0
    lost_at_kills: int = 0
    paused: bool = False

    async def publish(self, session: aiohttp.ClientSession) -> int:
        """Publishes one event; returns the remaining count from the answer, -1 if it wasn't accepted."""
        body = json.dumps({"name": "n", "channels": ["news"], "data": "{}"}).encode()
        target = signed_path(self.server, "POST", f"/apps/{self.server.app_id}/events", body)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(f"{self.server.public_url}{target}", data=body) as answer:
                await answer.read()
                if answer.status == 200:
                    self.accepted += 1
                    return int(answer.headers["X-RateLimit-Remaining"])
                assert answer.status == 503, answer
        return -1

    async def go_on(self, session: aiohttp.ClientSession) -> None:
        while True:
            if self.paused:
                await asyncio.sleep(0.01)
                continue
            self.under_way += 1
            try:
                refused = await self.publish(session) < 0
            finally:
                self.under_way -= 1
            if refused:
                # Back ends wait before they repeat a request.
                await asyncio.sleep(0.02)

    async def more(self, count: int) -> None:
        """Waits until this many more were accepted."""
        goal = self.accepted + count
        async with asyncio.timeout(60):
            while self.accepted < goal:
                await asyncio.sleep(0.01)

    def kill(self, pid: int) -> None:
        self.lost_at_kills += self.under_way
        os.kill(pid, signal.SIGKILL)


def set_plan(server: Server, plan: str) -> None:
    line = ["app", "set", server.app_id, f"plan={plan}", "--data-dir", str(server.folder / "data")]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0, result.output


async def kill(spender: Spender, victim: str, wait_until: Callable) -> None:
    server = spender.server
    if victim == "control":
        spender.kill(server.control_pid)
    elif victim == "redis":
        spender.kill(server.redis_pid)
    elif victim == "supervisor":
        spender.kill(server.pid)
        spender.paused = True
        assert await asyncio.to_thread(server.wait) == -signal.SIGKILL
        await wait_until(lambda: spender.under_way == 0, timeout_s=60)
        await asyncio.to_thread(server.start)
        spender.paused = False
    else:
        await wait_until(lambda: len(server.worker_pids()) == server.workers)
        spender.kill(server.worker_pids()[int(victim)])


def counted_before_midnight(server: Server) -> int:
    """What was counted on the days before the last one, because the test may run at midnight UTC."""
    with server.redis() as client:
        *earlier, _ = sorted(client.scan_iter(server.keys().spent(server.app_id, "*")))
        return sum(int(client.get(key)) for key in earlier)


async def test_the_daily_counter_survives_the_end_of_every_process(
    size: Callable[[int, int], int], wait_until: Callable, figures
) -> None:
    with Server(workers=2) as server:
        await asyncio.to_thread(set_plan, server, "free")
        spender = Spender(server)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            publishers = [asyncio.create_task(spender.go_on(session)) for _ in range(PUBLISHERS)]
            try:
                for _ in range(size(1, 10)):
                    for victim in ("0", "1", "control", "redis", "supervisor"):
                        await spender.more(100)
                        await kill(spender, victim, wait_until)
                await spender.more(100)
            finally:
                # Requests that are cut off here may have been counted.
                spender.lost_at_kills += spender.under_way
                for publisher in publishers:
                    publisher.cancel()
                for end in await asyncio.gather(*publishers, return_exceptions=True):
                    # A publisher ends by itself at an answer that is wrong.
                    if isinstance(end, Exception):
                        raise end
            async with asyncio.timeout(60):
                while (left := await spender.publish(session)) < 0:
                    # It may have been counted.
                    spender.lost_at_kills += 1
        counted = FREE_PLAN - left + counted_before_midnight(server)
        above = counted - spender.accepted
        figures.note(
            "Control plane killed",
            f"daily counter above the accepted (at most {spender.lost_at_kills})",
            above,
            "messages",
        )
        assert spender.accepted <= counted <= spender.accepted + spender.lost_at_kills
