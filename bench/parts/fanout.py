"""Fan-out of one process: redpoll's engine, picows and bare uvloop, each compared with a bare C send() loop in the same
run.

`python -m bench.parts.fanout [--engines redpoll transports picows uvloop] [--connections N] [--frame-bytes N] [--rounds
N]`: real WebSocket connections get 1 and then 10 frames a tick; the loop (send_loop.c) writes the same bytes to the
same sockets, ten frames already joined. After both have written, the clients read everything, which isn't measured. The
ratio is the loop's time divided by the engine's, a median of pairs, so that other load affects both. Goals of redpoll:
0.95 at one frame, 0.9 at ten; exit code 1 below. `transports` is redpoll's engine on uvloop's transports instead of
plain sockets.

picows and uvloop have no fan-out, so a Python loop calls `send_reuse_external_bytearray` (picows' function for a frame
that is made once) or `transport.write` for every frame and connection. Redis, JSON and the clients' reading aren't
included; end_to_end.py measures them.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvloop
from picows import WSListener, WSMsgType, WSTransport, ws_create_server

from bench.arguments import parser_of
from bench.report import save
from redpoll import _engine, _frame, _http
from redpoll._fanout import Audience, Flusher
from redpoll._sockets import Poller

ROOT = Path(__file__).parents[2]
GOALS = {1: 0.95, 10: 0.9}
HEAD = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def build_loop() -> ctypes.CDLL:
    """send_loop.c as a shared library in build/, with the flags that the extensions are built with."""
    library = ROOT / "build" / "send_loop.so"
    library.parent.mkdir(exist_ok=True)
    source = Path(__file__).with_name("send_loop.c")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    loop = ctypes.CDLL(str(library))
    loop.send_to_all.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    loop.drain_all.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loop.drain_all.restype = ctypes.c_long
    return loop


class Connection(_engine.WebSocket):
    __slots__ = ()

    def head_received(self, head: bytes) -> None:
        self.accept(_http.parse_head(head).headers[b"sec-websocket-key"])


class Server(NamedTuple):
    address: tuple[str, int]
    close: Callable[[], object]


async def transport_server(make: Callable[[], asyncio.BaseProtocol]) -> Server:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, backlog=4096)
    return Server(server.sockets[0].getsockname(), server.close)


def event_frames(payloads: list[bytes]) -> list[bytes]:
    return [_frame.event_frame(b"event", b"channel", payload) for payload in payloads]


class Redpoll:
    """Our engine: an Audience, flushed once a tick."""

    def __init__(self) -> None:
        self.flusher = Flusher(lambda: None, poller=Poller(asyncio.get_running_loop()))
        self.audience = Audience(self.flusher)

    async def serve(self, made: list, server_fds: array.array) -> Server:
        """Accepts here instead of by a Listener, which doesn't say which descriptors it has."""
        poller = self.flusher.poller
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        loop = asyncio.get_running_loop()

        def accept() -> None:
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self.flusher, 65536)
            server_fds.append(accepted.fileno())
            made.append(connection)
            poller.adopt(accepted.detach(), connection)

        def close() -> None:
            loop.remove_reader(listening)
            listening.close()

        loop.add_reader(listening, accept)
        return Server(listening.getsockname(), close)

    def is_open(self, connection: Connection) -> bool:
        return connection.state == _engine.OPEN

    def ready(self, made: list) -> None:
        while self.flusher.flush():
            pass
        for connection in made:
            self.audience.add(connection)

    def frames(self, payloads: list[bytes]) -> list[bytes]:
        return event_frames(payloads)

    def write(self, frames: list[bytes]) -> None:
        post, flush = self.audience.post, self.flusher.flush
        for frame in frames:
            post(frame)
        while flush():
            pass


class Transports(Redpoll):
    """Our engine on uvloop's transports, without TLS. No server does that: TLS has its own sockets (_tls.pyx)."""

    def __init__(self) -> None:
        self.flusher = Flusher(lambda: None)
        self.audience = Audience(self.flusher)

    async def serve(self, made: list, server_fds: array.array) -> Server:
        flusher = self.flusher

        class Served(Connection):
            __slots__ = ()

            def connection_made(self, transport: asyncio.Transport) -> None:
                server_fds.append(transport.get_extra_info("socket").fileno())
                super().connection_made(transport)
                made.append(self)

        return await transport_server(lambda: Served(flusher, 65536))


class Picows:
    """picows as its documentation has a server: a listener for each connection, and a loop over them."""

    # Room before the payload into which picows writes the frame's header.
    HEADER_BYTES = 14

    def __init__(self) -> None:
        self.transports: list[WSTransport] = []

    async def serve(self, made: list, server_fds: array.array) -> Server:
        class Served(WSListener):
            def on_ws_connected(self, transport: WSTransport) -> None:
                server_fds.append(transport.underlying_transport.get_extra_info("socket").fileno())
                made.append(transport)

        server = await ws_create_server(lambda request: Served(), "127.0.0.1", 0, backlog=4096)
        return Server(server.sockets[0].getsockname(), server.close)

    def is_open(self, connection: WSTransport) -> bool:
        return True

    def ready(self, made: list) -> None:
        self.transports = made

    def frames(self, payloads: list[bytes]) -> list[bytearray]:
        # Without the header of two or four bytes, which picows writes.
        texts = [frame[2 if frame[1] < 126 else 4 :] for frame in event_frames(payloads)]
        return [bytearray(self.HEADER_BYTES) + text for text in texts]

    def write(self, frames: list[bytearray]) -> None:
        for transport in self.transports:
            send = transport.send_reuse_external_bytearray
            for frame in frames:
                send(WSMsgType.TEXT, frame, self.HEADER_BYTES)


class Uvloop:
    """uvloop's transport alone: a protocol that answers the upgrade, and `write` for every frame."""

    def __init__(self) -> None:
        self.writes: list = []

    async def serve(self, made: list, server_fds: array.array) -> Server:
        class Served(asyncio.Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:
                self.transport = transport
                server_fds.append(transport.get_extra_info("socket").fileno())

            def data_received(self, data: bytes) -> None:
                self.transport.write(b"HTTP/1.1 101 \r\n\r\n")
                made.append(self.transport)

        return await transport_server(Served)

    def is_open(self, connection: asyncio.Transport) -> bool:
        return True

    def ready(self, made: list) -> None:
        self.writes = [transport.write for transport in made]

    def frames(self, payloads: list[bytes]) -> list[bytes]:
        return event_frames(payloads)

    def write(self, frames: list[bytes]) -> None:
        for write in self.writes:
            for frame in frames:
                write(frame)


ENGINES = {"redpoll": Redpoll, "transports": Transports, "picows": Picows, "uvloop": Uvloop}


class Bench:
    """`count` connections, both ends in this process. `engine_s` and `bare_s` are seconds for one tick's writes."""

    def __init__(self, engine: Redpoll | Picows | Uvloop, count: int, c_loop: ctypes.CDLL) -> None:
        self.engine = engine
        self.count = count
        self.c_loop = c_loop
        self.clients: list[socket.socket] = []

    async def connect(self) -> None:
        made: list = []
        server_fds = array.array("i")
        server = await self.engine.serve(made, server_fds)
        for _ in range(self.count):
            client = socket.create_connection(server.address)
            client.sendall(HEAD)
            self.clients.append(client)
            while len(self.clients) - len(made) > 100:
                await asyncio.sleep(0.001)
        while len(made) < self.count or not all(map(self.engine.is_open, made)):
            await asyncio.sleep(0.01)
        self.engine.ready(made)
        self.server_fds = server_fds
        self.client_fds = array.array("i", [client.fileno() for client in self.clients])
        server.close()
        await asyncio.sleep(0.05)
        self.drain()

    def drain(self) -> int:
        return self.c_loop.drain_all(self.client_fds.buffer_info()[0], self.count)

    def ours(self, frames: list) -> float:
        write = self.engine.write
        began = time.perf_counter()
        write(frames)
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
            data = [b"%08d" % number + b"x" * (frame_bytes - 50)] * frames_per_tick
            frames = self.engine.frames(data)
            joined = b"".join(event_frames(data))
            # They take turns to go first, because the second one finds the caches and queues of the first.
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
        assert self.drain() == len(joined) * self.count, "a client did not get everything"
        return took_s


async def measure(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    bench = Bench(ENGINES[name](), arguments.connections, build_loop())
    await bench.connect()
    results = {}
    for frames_per_tick, goal in GOALS.items():
        rounds = arguments.rounds
        bench.compare(frames_per_tick, arguments.frame_bytes, max(3, rounds // 10))
        ratio, ours_s, bare_s = bench.compare(frames_per_tick, arguments.frame_bytes, rounds)
        deliveries = bench.count * frames_per_tick
        results[str(frames_per_tick)] = {
            "per_s": round(deliveries / ours_s),
            "loop_per_s": round(deliveries / bare_s),
            "ratio": round(ratio, 3),
        }
        verdict = "" if name != "redpoll" else " (ok)" if ratio >= goal else f" (below {goal})"
        print(
            f"{name:>8}, {frames_per_tick:2} frames a tick: {deliveries / ours_s:12,.0f} deliveries/s,"
            f" bare loop {deliveries / bare_s:12,.0f}, ratio {ratio:.3f}{verdict}",
            flush=True,
        )
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--frame-bytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    python = platform.python_version()
    print(
        f"{arguments.connections} connections, frames of {arguments.frame_bytes} bytes, Python {python},"
        f" {platform.release()}"
    )
    results = {}
    for name in arguments.engines:
        results[name] = uvloop.run(measure(name, arguments))
    if arguments.json is not None:
        about = {"connections": arguments.connections, "frame_bytes": arguments.frame_bytes}
        save(arguments.json, "fanout", {**about, **results})
    ours = results.get("redpoll", {})
    sys.exit(any(figures["ratio"] < GOALS[int(frames)] for frames, figures in ours.items()))


if __name__ == "__main__":
    main()
