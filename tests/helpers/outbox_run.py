"""Runs Django's outbox with two senders while processes are killed, and compares what was committed with what arrived.

tests/redpoll_client/test_outbox.py runs it small, bench/soak/outbox.py in full. Not a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from helpers.outbox_site import CHANNELS
from redpoll_client import Subscriber
from redpoll_client.channel import Channel

SITE = [sys.executable, "-m", "helpers.outbox_site"]
WITHIN_S = 240


class Site:
    """Runs the processes of outbox_site.py."""

    def __init__(self, database: str, url: str, lease_s: float = 1.0) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        self.environment = {
            **os.environ,
            "OUTBOX_DATABASE": database,
            "OUTBOX_LEASE_S": str(lease_s),
            "REDPOLL_URL": url,
            "PYTHONPATH": path,
        }
        self.run("migrate")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [*SITE, *words], env=self.environment, timeout=280, text=True, capture_output=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*SITE, *words, env=self.environment, stdout=asyncio.subprocess.PIPE)


@dataclass
class Received:
    """What came on each channel, in order: the data, and the Unix time."""

    events: dict[str, list[tuple[str, float]]] = field(default_factory=lambda: {name: [] for name in CHANNELS})
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, channel: Channel) -> None:
        async for event in channel:
            self.events[channel.name].append((event.data, time.time()))
            self.news.set()

    def count(self) -> int:
        return sum(map(len, self.events.values()))

    async def until(self, count: int) -> None:
        """Waits for so many events. Each must come within `WITHIN_S` of the one before."""
        while self.count() < count:
            self.news.clear()
            async with asyncio.timeout(WITHIN_S):
                await self.news.wait()


@dataclass(frozen=True)
class Result:
    """`committed` and `received` are the data by channel, in order. `latencies_s` are the times from each commit to the
    receipt, sorted; for what arrived."""

    committed: dict[str, list[str]]
    received: dict[str, list[str]]
    latencies_s: list[float]

    def percentile_s(self, share: float) -> float:
        return self.latencies_s[int(len(self.latencies_s) * share)]


async def run_outbox(
    site: Site,
    url: str,
    transactions: int,
    *,
    seed: int = 1,
    rate: float = 0,
    sender_kills: int = 0,
    kills: Sequence[Callable[[], Awaitable[object]]] = (),
) -> Result:
    """Writes transactions while two senders publish them. Evenly over the run, `sender_kills` times a sender is killed
    and another one started, and each of `kills` is called once."""
    received = Received()
    async with AsyncExitStack() as stack:
        subscriber = await stack.enter_async_context(Subscriber(url=url, queue=100_000))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        channels = [await stack.enter_async_context(subscriber.subscribe(name)) for name in CHANNELS]
        readers = [group.create_task(received.listen(channel)) for channel in channels]
        writer = await site.start("write", str(transactions), str(seed), str(rate))
        senders = [await site.start("send"), await site.start("send")]

        async def kill_a_sender() -> None:
            senders[0].kill()
            await senders[0].wait()
            senders[:] = [senders[1], await site.start("send")]

        try:
            for number, kill in enumerate(_mixed([kill_a_sender] * sender_kills, kills), start=1):
                # About as many events as transactions are committed.
                await received.until(transactions * number // (sender_kills + len(kills) + 1) * 9 // 10)
                await kill()
            committed = json.loads((await writer.communicate())[0])
            await received.until(sum(map(len, committed.values())))
            # What comes later must be nothing: the end of the outbox comes after every repeat.
            for sender in senders:
                sender.terminate()
            # One that was still starting dies of the signal.
            assert {await sender.wait() for sender in senders} <= {0, -signal.SIGTERM}
            await asyncio.to_thread(site.run, "send", "--once")
            assert all(channel.recovered is not False for channel in channels), "a history was lost"
        finally:
            for sender in senders:
                if sender.returncode is None:
                    sender.kill()
                    await sender.wait()
            for reader in readers:
                reader.cancel()
    return _compared(committed, received)


def _mixed(
    many: Sequence[Callable[[], Awaitable[object]]], few: Sequence[Callable[[], Awaitable[object]]]
) -> list[Callable[[], Awaitable[object]]]:
    """All of them, the few spread over the many."""
    places = [(number / len(group), action) for group in (many, few) for number, action in enumerate(group, start=1)]
    return [action for _, action in sorted(places, key=lambda pair: pair[0])]


def _compared(committed: dict[str, list[tuple[str, float]]], received: Received) -> Result:
    times = {data: at for events in committed.values() for data, at in events}
    latencies_s = sorted(
        at - times[data] for events in received.events.values() for data, at in events if data in times
    )
    return Result(
        {name: [data for data, _ in events] for name, events in committed.items()},
        {name: [data for data, _ in events] for name, events in received.events.items()},
        latencies_s,
    )
