"""A model's answer to many subscribers: processor time for each piece, with and without a rule, and what readers show.

    python -m bench.load.growing                1,000 subscribers, 1,000 pieces/s for 10 s, at most 20 frames/s
    python -m bench.load.growing --subscribers 100 --seconds 3

The pieces are published as Laravel's AI package does it (tests/clients/laravel_answers.py), over one connection,
without waiting for the answers. All subscribers but four are bench/load/crowd.c. The four are: one that
reads at once, one that reads ten frames a second, one that comes in the middle and gets a replay, and one that recovers
and is cut ten times. `whole` says whether the text of each is byte for byte the published one.

Without a rule the rate is a tenth, because a worker can't send 1,000,000 frames a second. `worker_us` is the processor
time of the worker for each piece, `all_us` that of all processes of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import websockets

from bench.arguments import parser_of
from bench.load.floods import Clock
from bench.report import print_table, save

# floods.py puts the folder of the tests on the path.
from clients.laravel_answers import answer_events, request
from helpers.server import Server

HERE = Path(__file__).parent
RULE = ("--keep", "10000", "--seconds", "600", "--replay", "1000")
RATE = ("--max-rate", "20", "--join", "delta", "--by", "message_id")
CUTS = 10


def pieces_of(count: int) -> list[str]:
    return [f"word {number} – " for number in range(count)]


class Reader:
    """One subscriber that shows the text, over all its connections. `frames` counts those with text."""

    def __init__(self, server: Server, channel: str, *, recovers: bool = False, slow: bool = False) -> None:
        self._server, self._channel = server, channel
        self._recovers, self._slow = recovers, slow
        self._position: dict[str, Any] | None = None
        self._offset = 0
        self.text, self.frames, self.cuts, self.ended = "", 0, 0, False

    async def connect(self, **more: Any) -> websockets.ClientConnection:
        raw = socket.socket()
        if self._slow:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        raw.connect(("127.0.0.1", self._server.port))
        url = f"ws://127.0.0.1/app/{self._server.app_key}?protocol=7{'&recover=1' if self._recovers else ''}"
        client = await websockets.connect(url, sock=raw, compression=None, ping_interval=None, max_queue=1)
        await client.send(json.dumps({"event": "pusher:subscribe", "data": {"channel": self._channel, **more}}))
        while (frame := json.loads(await client.recv()))["event"] != "pusher_internal:subscription_succeeded":
            pass
        if self._recovers and self._position is None:
            self._position = json.loads(frame["data"])
            self._offset = self._position["offset"]
        return client

    async def read(self, cuts: int, length: int) -> None:
        """Reads to the end of the answer; `cuts` connections end on the way, after equal parts of the text."""
        client = await self.connect()
        while not self.ended:
            frame = json.loads(await client.recv())
            if frame.get("channel") != self._channel:
                continue
            self._offset = frame.get("offset", self._offset)
            if frame["event"] == "text_delta":
                self.frames += 1
                self.text += json.loads(frame["data"])["delta"]
            self.ended = frame["event"] == "stream_end"
            if self.cuts < cuts and len(self.text) > length * (self.cuts + 1) / (cuts + 1):
                self.cuts += 1
                client.transport.abort()
                assert self._position is not None
                client = await self.connect(since={"epoch": self._position["epoch"], "offset": self._offset})
            if self._slow:
                await asyncio.sleep(0.1)
        client.transport.abort()


async def publish(server: Server, channel: str, pieces: list[str], per_s: float) -> float:
    """The whole answer at this rate. Returns the seconds that it took until the last one was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    events = list(answer_events(pieces))
    began = time.monotonic()

    async def read_answers() -> None:
        for _ in events:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await reader.readexactly(2)

    reading = asyncio.create_task(read_answers())
    for number, (name, payload) in enumerate(events):
        writer.write(request(server, channel, name, payload))
        await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
    await reading
    writer.close()
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def crowd(server: Server, program: Path, channel: str, count: int) -> AsyncIterator[Any]:
    """`count` subscribers in a process of their own. Yields a function that returns the last line of their figures."""
    words = [program, "127.0.0.1", server.port, server.app_key, 0, count, 64, channel, "127.0.0.1"]
    process = await asyncio.create_subprocess_exec(
        *map(str, words), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    assert process.stdin is not None
    assert process.stdout is not None
    last: dict[str, Any] = {}

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            last.update(json.loads(line))

    reading = asyncio.create_task(read())
    process.stdin.write(b"come\n")
    try:
        async with asyncio.timeout(60):
            while last.get("ready") != count:
                await asyncio.sleep(0.05)
        yield lambda: dict(last)
    finally:
        process.stdin.close()
        await process.wait()
        await reading


async def measure(
    server: Server, program: Path, channel: str, options: argparse.Namespace, per_s: float
) -> dict[str, Any]:
    count = int(per_s * options.seconds)
    pieces = pieces_of(count)
    text = "".join(pieces)
    worker = [Clock(pid) for pid in server.worker_pids()]
    everything = [Clock(pid) for pid in (server.pid, server.control_pid, server.redis_pid)]
    readers = {
        "at once": Reader(server, channel),
        "from the middle": Reader(server, channel),
        f"cut {CUTS} times": Reader(server, channel, recovers=True),
    }
    if channel.startswith("growing-"):
        # Ten frames a second: each piece would take it too long.
        readers["slowly"] = Reader(server, channel, slow=True)
    async with crowd(server, program, channel, options.subscribers) as figures:
        tasks = [
            asyncio.create_task(reader.read(CUTS if name.startswith("cut") else 0, len(text)))
            for name, reader in readers.items()
            if name != "from the middle"
        ]
        await asyncio.sleep(0.5)
        before, all_before = sum(clock() for clock in worker), sum(clock() for clock in everything)
        publishing = asyncio.create_task(publish(server, channel, pieces, per_s))
        await asyncio.sleep(options.seconds / 2)
        tasks.append(asyncio.create_task(readers["from the middle"].read(0, len(text))))
        took_s = await publishing
        await asyncio.sleep(1.0)
        spent = sum(clock() for clock in worker) - before
        all_spent = spent + sum(clock() for clock in everything) - all_before
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        lost = figures()["lost"]
    return {
        "pieces": count,
        "pieces_per_s": round(count / took_s, 1),
        "frames_per_s": round(readers["at once"].frames / took_s, 1),
        "worker_us": round(spent / count * 1e6, 1),
        "all_us": round(all_spent / count * 1e6, 1),
        "closed": lost,
        "readers": {
            name: {"frames": reader.frames, "cuts": reader.cuts, "whole": reader.text == text}
            for name, reader in readers.items()
        },
    }


async def measure_all(server: Server, program: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "without a rule": await measure(server, program, "plain-1", options, options.per_s / 10),
        "with a rule, at the same rate": await measure(server, program, "growing-1", options, options.per_s / 10),
        "with a rule": await measure(server, program, "growing-2", options, options.per_s),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rpgrowing") as folder, Server(workers=1) as server:
        program = Path(folder) / "crowd"
        subprocess.run(["cc", "-O2", "-o", str(program), str(HERE / "crowd.c"), "-lm"], check=True)
        for prefix, rate in (("plain-", ()), ("growing-", RATE)):
            words = ["history", "rule", "add", server.app_id, "--prefix", prefix, *RULE, *rate]
            command = [sys.executable, "-m", "redpoll", *words, "--data-dir", str(server.folder / "data")]
            subprocess.run(command, check=True, capture_output=True)
        return asyncio.run(measure_all(server, program, options))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--subscribers", type=int, default=1_000)
    parser.add_argument("--per-s", type=float, default=1_000.0, help="pieces a second, with a rule")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    figures = run(options)
    heads = [name for name in next(iter(figures.values())) if name != "readers"]
    print_table(["", *heads], ([what, *(row[name] for name in heads)] for what, row in figures.items()))
    for what, row in figures.items():
        for name, reader in row["readers"].items():
            print(f"{what}, {name}: {reader}")
    if options.json is not None:
        save(options.json, "growing", figures)
    if not all(reader["whole"] for row in figures.values() for reader in row["readers"].values()):
        raise SystemExit("a text was not whole")


if __name__ == "__main__":
    main()
