"""Signed REST publishes a second on one core of the control plane, beside aiohttp's own server with an empty handler.

    python bench/publish.py [--seconds 5] [--connections 64] [--rounds 3]

Starts a Redis, a control process and the empty server, and sends both the same requests over keep-alive with the
same client (hammer.c, compiled here): one event to one channel each, signed in the query, 1,000 different ones.
The server under test has one core for itself, client and Redis share another; where there is only one, say so.
No worker listens: the price of delivery is not in these figures.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from redpoll.child_pipe import ChildPipe, Start
from redpoll.config import Settings
from results import save

APP_ID, KEY, SECRET = "1", "278d425bdf160c739803", "7ad3773142a6692b25b8"
CONTROL = (
    "import sys; from redpoll.control.main import main; from redpoll.child_pipe import ChildPipe; "
    "main(ChildPipe(int(sys.argv[1])))"
)
DISTINCT_REQUESTS = 1_000


def write_requests(path: Path) -> None:
    """What the client sends: each request behind its length."""
    with path.open("wb") as out:
        for number in range(DISTINCT_REQUESTS):
            data = json.dumps({"number": number, "text": "x" * 100})
            body = json.dumps({"name": "measured", "channels": [f"bench-{number}"], "data": data}).encode()
            query = (
                f"auth_key={KEY}&auth_timestamp={int(time.time())}&auth_version=1.0"
                f"&body_md5={hashlib.md5(body).hexdigest()}"
            )
            path_signed = f"/apps/{APP_ID}/events"
            signed = f"POST\n{path_signed}\n{query}".encode()
            signature = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
            request = (
                f"POST {path_signed}?{query}&auth_signature={signature} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode() + body
            out.write(struct.pack("<I", len(request)) + request)


class Bench:
    """What runs meanwhile, in one folder; `with` ends it all."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rp"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[ChildPipe] = []
        cores = sorted(os.sched_getaffinity(0))
        self.server_core, self.other_core = cores[0], cores[-1]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder)

    def run(self, command: list[str], core: int, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
        os.sched_setaffinity(process.pid, {core})
        self.processes.append(process)
        return process

    def hammer(
        self, server: tuple[subprocess.Popen[bytes], int], connections: int, seconds: float, rate: int = 0
    ) -> dict[str, float]:
        """Publishes to `server`, its process and port, as fast as answers come or `rate` a second. What hammer.c
        prints, and `us`, the server's processor time for each. Ends the bench at an answer that isn't 200."""
        client, requests = self.folder / "hammer", self.folder / "requests"
        if not client.exists():
            source = Path(__file__).parent / "hammer.c"
            subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-o", client, source], check=True)
            write_requests(requests)
        process, port = server
        used_s = cpu_s(process.pid)
        command = [client, "127.0.0.1", str(port), str(connections), str(seconds), requests]
        running = subprocess.Popen([*command, str(rate)] if rate else command, stdout=subprocess.PIPE)
        os.sched_setaffinity(running.pid, {self.other_core})
        out, _ = running.communicate()
        if running.returncode:
            sys.exit("the client failed")
        found: dict[str, float] = msgspec.json.decode(out)
        if found["refused"]:
            sys.exit(f"{found['refused']:.0f} requests were not answered with 200")
        return {**found, "us": (cpu_s(process.pid) - used_s) / found["requests"] * 1e6}

    def start_redis(self) -> str:
        path = self.folder / "redis.sock"
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            sys.exit("bench/publish.py needs redis-server or valkey-server on the PATH")
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(self.folder)]
        self.run([binary, *options], self.other_core, stdout=subprocess.DEVNULL)
        while not path.exists():
            time.sleep(0.01)
        return f"unix://{path}"

    def start_control(
        self, redis_url: str, name: str = "rp", **settings: object
    ) -> tuple[subprocess.Popen[bytes], int]:
        """The control process as the supervisor starts it, with an app and no workers; and its port. `name` tells it
        from others on the same Redis."""
        folder = self.folder / name
        folder.mkdir()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        ours, theirs = socket.socketpair()
        start = Start(
            role="control",
            number=0,
            run="0" * 12,
            k=0,
            redis_url=redis_url,
            listen_fd=listener.fileno(),
            requests_path=str(folder / "requests.sock"),
            data_dir=str(folder),
            settings=Settings(
                app_id=APP_ID,
                app_key=KEY,
                app_secret=SECRET,
                redis_prefix=name,
                trigger_rate_per_minute=0,
                log_level="warning",
                **settings,
            ),
        )
        fds = (listener.fileno(), theirs.fileno())
        process = self.run([sys.executable, "-c", CONTROL, str(theirs.fileno())], self.server_core, pass_fds=fds)
        theirs.close()
        # Kept open for as long as the process is to live.
        child_pipe = ChildPipe(ours.detach())
        self.pipes.append(child_pipe)
        child_pipe.send(start)
        child_pipe.send({"alive": [], "greatest": 0})
        child_pipe.send({"workers_ready": True})
        port = listener.getsockname()[1]
        listener.close()
        wait_ready(port, "/readyz")
        return process, port

    def start_empty(self) -> tuple[subprocess.Popen[bytes], int]:
        port_file = self.folder / "port"
        process = self.run([sys.executable, __file__, "--empty", str(port_file)], self.server_core)
        while not port_file.exists():
            time.sleep(0.01)
        return process, int(port_file.read_text())


def wait_ready(port: int, path: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            if client.recv(100).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.02)
    sys.exit("the control process isn't ready within 20 s")


async def serve_empty(port_file: Path) -> None:
    """aiohttp's low-level server, answering 200 to whatever comes."""
    from aiohttp import web

    async def handler(request: web.BaseRequest) -> web.Response:
        return web.Response(text="{}", content_type="application/json")

    loop = asyncio.get_running_loop()
    server = await loop.create_server(web.Server(handler, access_log=None), "127.0.0.1", 0)
    (port_file.with_suffix(".new")).write_text(str(server.sockets[0].getsockname()[1]))
    port_file.with_suffix(".new").rename(port_file)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="write the figures here")
    arguments.add_argument("--empty", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.empty:
        uvloop.run(serve_empty(given.empty))
        return
    with Bench() as bench:
        servers = {
            "redpoll, signed publish": bench.start_control(bench.start_redis()),
            "aiohttp web.Server, empty handler": bench.start_empty(),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(given.rounds):
            for name, server in servers.items():
                found[name].append(bench.hammer(server, given.connections, given.seconds))
        figures = report(found, given.connections, bench.server_core == bench.other_core)
        if given.json is not None:
            save(given.json, "publish", figures)


def report(found: dict[str, list[dict[str, float]]], connections: int, one_core: bool) -> dict[str, float]:
    """Prints the figures and returns those that results keep."""
    print(f"{platform.machine()}, CPython {platform.python_version()}, {connections} connections, keep-alive")
    if one_core:
        print("one core only: client, Redis and server share it, and the figures say little")
    print(f"{'':36}{'requests/s':>12}{'per CPU s':>12}{'p50 us':>9}{'p99 us':>9}")
    rates, per_cpu_s, latencies = [], [], []
    for name, rounds in found.items():
        rates.append(statistics.median(each["requests"] / each["seconds"] for each in rounds))
        per_cpu_s.append(1e6 / statistics.median(each["us"] for each in rounds))
        p50, p99 = (statistics.median(each[key] for each in rounds) for key in ("p50_us", "p99_us"))
        latencies.append((p50, p99))
        print(f"{name:36}{rates[-1]:12,.0f}{per_cpu_s[-1]:12,.0f}{p50:9,.0f}{p99:9,.0f}")
    # The second is what counts on a machine that has other things to do.
    print(f"ratio {rates[0] / rates[1]:.2f}, by processor time {per_cpu_s[0] / per_cpu_s[1]:.2f}")
    print(f"each figure is the median of {len(rounds)} rounds")
    return {
        "per_s": round(rates[0]),
        "empty_per_s": round(rates[1]),
        "ratio": round(rates[0] / rates[1], 2),
        "processor_ratio": round(per_cpu_s[0] / per_cpu_s[1], 2),
        "p50_ms": round(latencies[0][0] / 1000, 1),
        "p99_ms": round(latencies[0][1] / 1000, 1),
    }


if __name__ == "__main__":
    main()
