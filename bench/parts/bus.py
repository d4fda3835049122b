"""How many envelopes per second a worker receives from Redis, compared with a bare hiredis reader in the same run.

`python -m bench.parts.bus [--envelopes N] [--data-bytes N] [--channels N] [--rounds N]` starts a Redis and lets it
publish from a script, so that no publisher and no parsing of commands is measured. It receives with a worker's parts:
Link, Registry, and a listener that makes the WebSocket frame. No sockets of clients are involved. Goal: 300,000
envelopes/s.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hiredis
import structlog
import uvloop

from bench.arguments import parser_of
from bench.report import save
from redpoll._frame import frame_of
from redpoll.cluster.directory import Directory
from redpoll.cluster.envelopes import event_envelope
from redpoll.cluster.membership.join import Join
from redpoll.cluster.membership.registry import LocalChannel, Registry
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Answerers
from redpoll.host import embedded
from redpoll.protocol.apps import App

APP = "1"
# One call publishes this many. Redis serves no other client during a call.
A_CALL = 5_000
PUBLISH = """
for i = 0, tonumber(ARGV[2]) - 1 do
  redis.call('PUBLISH', KEYS[i % #KEYS + 1], ARGV[1])
end
"""


class Count:
    """Counts what arrived, and says when it was all."""

    def __init__(self) -> None:
        self.left = 0
        self.done = asyncio.Event()

    def expect(self, envelopes: int) -> None:
        self.left = envelopes
        self.done.clear()


class Frames:
    """The listener: makes the frame of every event, as the hub does."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self.attached = 0

    def opened(self, local_channel: LocalChannel) -> None:
        local_channel.audience = local_channel.channel.encode()

    def joined(self, local_channel: LocalChannel, joins: list[Join], cached: bytes | None, total: int | None) -> None:
        self.attached += len(joins)

    def event(self, local_channel: LocalChannel, payload: bytes) -> None:
        frame_of(payload, local_channel.audience)
        count = self._count
        count.left -= 1
        if not count.left:
            count.done.set()

    def refused(self, local_channel: LocalChannel, join: Join, reason: str) -> None:
        raise AssertionError(reason)

    def still_waiting(self, joins: Iterator[Join]) -> None:
        """Redis is still busy with the first subscribes."""

    def member_added(self, local_channel: LocalChannel, user: str, info: bytes) -> None:
        raise AssertionError("no presence channels here")

    def member_removed(self, local_channel: LocalChannel, user: str) -> None:
        raise AssertionError("no presence channels here")

    def dropped(self, local_channel: LocalChannel) -> None:
        raise AssertionError("no member leaves here")

    def counted(self, local_channel: LocalChannel, total: int) -> None:
        raise AssertionError("no counts are sent here")

    def user_state(self, app_id: str, user_id: str, online: bool) -> None:
        raise AssertionError("no user is watched here")

    def admitted(self, join: Join) -> None:
        raise AssertionError("no connection is counted here")

    def turned_away(self, join: Join, code: int) -> None:
        raise AssertionError("no connection is counted here")


class BareReader(asyncio.BufferedProtocol):
    """The reference: reads pushes and counts them, nothing else."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._buffer = bytearray(32 * 1024)
        self._reader = hiredis.Reader(notEnoughData=None)
        self._reader.setmaxbuf(1024 * 1024)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(self._buffer, 0, nbytes)
        gets, count = self._reader.gets, self._count
        while (item := gets()) is not None:
            if type(item) is hiredis.PushNotification and item[0] == b"message":
                count.left -= 1
                if not count.left:
                    count.done.set()


async def measure(count: Count, control: Link, topics: list[bytes], envelope: bytes, envelopes: int):
    """Envelopes a second, and µs of this process' time for each."""
    count.expect(envelopes)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(envelopes // A_CALL):
        control.call(b"EVAL", PUBLISH, len(topics), *topics, envelope, A_CALL)
    async with asyncio.timeout(120):
        await count.done.wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return envelopes / wall, cpu / envelopes * 1e6


async def run(url: str, path: str, options: argparse.Namespace) -> None:
    keys = Keys()
    channels = [f"channel-{n}" for n in range(options.channels)]
    topics = [keys.topic(APP, channel) for channel in channels]
    envelope = event_envelope("order-shipped", "x" * options.data_bytes, trace="ab" * 16)
    control = Link(url)
    control.start()
    await control.wait_up()
    count = Count()

    async def bare() -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: BareReader(count), path)
        for command in (("HELLO", 3), ("SUBSCRIBE", *topics)):
            transport.write(hiredis.pack_command(command))
        while (await control.ask(b"PUBSUB", b"NUMSUB", topics[-1]))[1] != 1:
            await control.ask(b"PING")
        return transport.close

    async def worker() -> Callable[[], None]:
        link = Link(url)
        frames = Frames(count)
        registry = Registry(
            link, keys, frames, Directory(link, keys), "0123456789ab", 0, Answerers(link, keys, lambda: "")
        )
        await registry.start()
        for channel in channels:
            registry.joins.add(Join(None, App(id=APP, name="bench", keys=()), channel))
        while frames.attached < len(channels):
            await link.ask(b"PING")

        def close() -> None:
            registry.close()
            link.drop("end of the run")

        return close

    names = {"bare reader": bare, "Link + Registry + frame": worker}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, begin in names.items():
            close = await begin()
            figures[name].append(await measure(count, control, topics, envelope, options.envelopes))
            close()
            await control.ask(b"FLUSHALL")
    print(f"{options.envelopes} envelopes of {len(envelope)} B, {len(topics)} channels, {options.rounds} rounds")
    for name, rounds in figures.items():
        rate = statistics.median(rate for rate, _ in rounds)
        cpu = statistics.median(cpu for _, cpu in rounds)
        print(f"{name:26} {rate:>10,.0f} envelopes/s   {cpu:.2f} µs of its own each")
    medians = [statistics.median(rate for rate, _ in rounds) for rounds in figures.values()]
    print(f"ratio {medians[1] / medians[0]:.2f}")
    if options.json is not None:
        figures = {"per_s": round(medians[1]), "bare_per_s": round(medians[0])}
        save(options.json, "bus", {**figures, "ratio": round(medians[1] / medians[0], 2)})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--envelopes", type=int, default=300_000)
    parser.add_argument("--data-bytes", type=int, default=200)
    parser.add_argument("--channels", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.envelopes -= options.envelopes % A_CALL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    binary = str(embedded.find_binary())
    with tempfile.TemporaryDirectory(prefix="rp") as folder:
        path = str(Path(folder) / "redis.sock")
        settings = ["--port", "0", "--unixsocket", path, "--dir", folder, "--save", ""]
        settings += ["--client-output-buffer-limit", "pubsub 0 0 0"]
        redis = subprocess.Popen([binary, *settings], stdout=subprocess.DEVNULL)
        try:
            uvloop.run(run(f"unix://{path}", path, options))
        finally:
            redis.terminate()
            redis.wait()


if __name__ == "__main__":
    main()
