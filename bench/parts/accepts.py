"""How many connections per second the engine accepts, idle and while it flushes to a large audience.

`python -m bench.parts.accepts [--seconds 5]` starts a server process that contains only the engine, on plain sockets
(`redpoll`) or on uvloop's server (`transports`), and a client that connects, resets and connects again, 64 at a time.
With `flushing`, each loop pass also spends 4 ms, as a flush to a large audience does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import subprocess
import sys
import time

import uvloop

from bench.arguments import parser_of
from bench.report import save
from redpoll._engine import WebSocket
from redpoll._fanout import Flusher
from redpoll._sockets import Listener, Poller

SLICE_S = 0.004
AT_ONCE = 64
_RESET = struct.pack("ii", 1, 0)


class Connection(WebSocket):
    """Counts itself."""

    __slots__ = ()
    made = 0

    def connected(self) -> None:
        Connection.made += 1


async def serve(kind: str, flushing: bool, seconds: float) -> None:
    """Prints the port, then accepts per second and CPU seconds per accept, over the last `seconds`."""
    loop = asyncio.get_running_loop()
    poller = Poller(loop)
    flusher = Flusher(lambda: loop.call_soon(flusher.flush), poller=poller)

    def make() -> Connection:
        return Connection(flusher, 65536)

    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listening.getsockname()[1], flush=True)
    if kind == "redpoll":
        server: Listener | asyncio.Server = Listener(poller, listening.detach(), make, print)
    else:
        server = await loop.create_server(make, sock=listening, backlog=4096)

    def work() -> None:
        end = time.perf_counter() + SLICE_S
        while time.perf_counter() < end:
            pass
        loop.call_soon(work)

    if flushing:
        work()
    await asyncio.sleep(0.5)
    before, cpu, started = Connection.made, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - started
    count = Connection.made - before
    print(json.dumps({"per_s": round(count / took), "cpu_us": round((time.process_time() - cpu) / count * 1e6, 1)}))
    server.close()


def storm(port: int, server: subprocess.Popen[str]) -> None:
    """Connects without waiting for the other side, until the server has ended."""
    waiting: list[socket.socket] = []
    while server.poll() is None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        try:
            client.connect(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        waiting.append(client)
        if len(waiting) > AT_ONCE:
            waiting.pop(0).close()
    for client in waiting:
        client.close()


def measure(kind: str, flushing: bool, seconds: float) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--kind",
        kind,
        "--seconds",
        str(seconds),
        *["--flushing"] * flushing,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    storm(int(server.stdout.readline()), server)
    return json.loads(server.stdout.readline())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--flushing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        uvloop.run(serve(options.kind, options.flushing, options.seconds))
        return
    figures = {}
    for kind in ("transports", "redpoll"):
        for flushing in (False, True):
            name = f"{kind}{' flushing' * flushing}"
            figures[name] = measure(kind, flushing, options.seconds)
            print(
                f"{name:>20}: {figures[name]['per_s']:7,} accepts/s, {figures[name]['cpu_us']} µs CPU each", flush=True
            )
    if options.json is not None:
        save(options.json, "accepts", figures)


if __name__ == "__main__":
    main()
