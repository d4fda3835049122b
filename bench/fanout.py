"""Fan-out of one process beside a bare C send() loop over the same sockets, in the same run (design.md 7).

`python bench/fanout.py [--connections N] [--frame-bytes N] [--rounds N]`: an Audience of real WebSocket
connections gets 1 and then 10 frames a tick; the loop (send_loop.c) writes the same bytes, ten frames joined
beforehand. Both write, then the clients are read empty, off the clock. Ratio = time of the loop / our time, a
median of pairs, so that a neighbour's noise hits both. Goals: 0.95 at one frame, 0.9 at ten. Exit code 1 below.

What is not in it: Redis, JSON, the clients' reading. Those are in the end to end benchmark.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import ctypes
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from redpoll import _engine, _frame
from redpoll._fanout import Audience, Flusher

FOLDER = Path(__file__).parent
GOALS = {1: 0.95, 10: 0.9}
HEAD = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def build_loop() -> ctypes.CDLL:
    """send_loop.c as a shared library in build/, with the flags that the extensions are built with."""
    library = FOLDER.parent / "build" / "send_loop.so"
    library.parent.mkdir(exist_ok=True)
    source = FOLDER / "send_loop.c"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    loop = ctypes.CDLL(str(library))
    loop.send_to_all.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    loop.drain_all.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loop.drain_all.restype = ctypes.c_long
    return loop


class Connection(_engine.WebSocket):
    __slots__ = ("fd",)

    def connected(self) -> None:
        self.fd = 0

    def head_received(self, head: bytes) -> None:
        self.accept(_engine.parse_head(head).headers[b"sec-websocket-key"])


class Bench:
    """`count` connections, both ends in this process. `ours` and `bare` are seconds for one tick's writes."""

    def __init__(self, count: int, c_loop: ctypes.CDLL) -> None:
        self.count = count
        self.c_loop = c_loop
        self.flusher = Flusher(lambda: None)
        self.audience = Audience(self.flusher)
        self.clients: list[socket.socket] = []

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        flusher = self.flusher
        made: list[Connection] = []
        server_fds = array.array("i")

        class Served(Connection):
            __slots__ = ()

            def connection_made(self, transport: asyncio.Transport) -> None:
                server_fds.append(transport.get_extra_info("socket").fileno())
                super().connection_made(transport)
                made.append(self)

        server = await loop.create_server(lambda: Served(flusher, 65536), "127.0.0.1", 0, backlog=4096)
        address = server.sockets[0].getsockname()
        for _ in range(self.count):
            client = socket.create_connection(address)
            client.sendall(HEAD)
            self.clients.append(client)
            while len(self.clients) - len(made) > 100:
                await asyncio.sleep(0.001)
        while len(made) < self.count or any(each.state != _engine.OPEN for each in made):
            await asyncio.sleep(0.01)
        while flusher.flush():
            pass
        for connection in made:
            self.audience.add(connection)
        self.server_fds = server_fds
        self.client_fds = array.array("i", [client.fileno() for client in self.clients])
        server.close()
        await asyncio.sleep(0.05)
        self.drain()

    def drain(self) -> int:
        return self.c_loop.drain_all(self.client_fds.buffer_info()[0], self.count)

    def ours(self, frames: list[bytes]) -> float:
        post, flush = self.audience.post, self.flusher.flush
        began = time.perf_counter()
        for frame in frames:
            post(frame)
        while flush():
            pass
        return time.perf_counter() - began

    def bare(self, joined: bytes) -> float:
        fds = self.server_fds.buffer_info()[0]
        began = time.perf_counter()
        whole = self.c_loop.send_to_all(fds, self.count, joined, len(joined))
        took_s = time.perf_counter() - began
        assert whole == self.count, "a socket was full: fewer connections or smaller frames"
        return took_s

    def compare(self, frames_per_tick: int, frame_bytes: int, rounds: int) -> tuple[float, float, float]:
        """(median of the pairs' ratios, our best time, the loop's best time)."""
        ratios, ours_s, bare_s = [], [], []
        for number in range(rounds):
            data = b"%08d" % number + b"x" * (frame_bytes - 50)
            frames = [_frame.event_frame(b"event", b"channel", data) for _ in range(frames_per_tick)]
            joined = b"".join(frames)
            # In turn who goes first: the second finds caches and queues as the first left them.
            if number % 2:
                ours, bare = self.timed(self.ours, frames, joined), self.timed(self.bare, joined, joined)
            else:
                bare, ours = self.timed(self.bare, joined, joined), self.timed(self.ours, frames, joined)
            ours_s.append(ours)
            bare_s.append(bare)
            ratios.append(bare / ours)
        return statistics.median(ratios), min(ours_s), min(bare_s)

    def timed(self, write, what, joined: bytes) -> float:
        took_s = write(what)
        assert self.drain() == len(joined) * self.count, "not everybody got everything"
        return took_s


async def run(arguments: argparse.Namespace) -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bench = Bench(arguments.connections, build_loop())
    await bench.connect()
    python = platform.python_version()
    print(f"{bench.count} connections, frames of {arguments.frame_bytes} bytes, Python {python}, {platform.release()}")
    short = 0
    for frames_per_tick, goal in GOALS.items():
        rounds = arguments.rounds
        bench.compare(frames_per_tick, arguments.frame_bytes, max(3, rounds // 10))
        ratio, ours_s, bare_s = bench.compare(frames_per_tick, arguments.frame_bytes, rounds)
        deliveries = bench.count * frames_per_tick
        verdict = "ok" if ratio >= goal else f"below {goal}"
        short += ratio < goal
        print(
            f"{frames_per_tick:3} frames a tick: {deliveries / ours_s:12,.0f} deliveries/s,"
            f" bare loop {deliveries / bare_s:12,.0f}, ratio {ratio:.3f} ({verdict})"
        )
    return short


def main() -> None:
    parser = argparse.ArgumentParser(description="fan-out beside a bare C send() loop")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--frame-bytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=300)
    sys.exit(1 if uvloop.run(run(parser.parse_args())) else 0)


if __name__ == "__main__":
    main()
