"""Signed publishes per second through the public port, as back ends send them, compared with a bare C server.

    python -m bench.load.publish [--connections 1,16,64] [--seconds 5] [--rounds 3]       keep-alive
    python -m bench.load.publish --connection-each        a connection for each publish, as PHP does it
    python -m bench.load.publish --batch --large --tls    batches of ten; bodies of 10 KB; TLS; any of these together
    python -m bench.load.publish --rate 15000             latency at a fixed rate
    PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID python -m bench.load.publish           any Pusher-compatible server

Starts a redpoll with one worker, all of its processes on one core (--cores 2: on all), and sends 1,000 different signed
requests over and over with hammer.c, compiled here, on the other core. Each request publishes to one channel that has
no subscriber; event log and trace are on, the rate limit is off. The reference (bare_http.c, on the same core) answers
the same requests with `{}`: no server can be faster. Rounds alternate. `us` is processor time per request by
process: on a machine that has other things to do, it says more than rates.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.arguments import parser_of
from bench.driver import Address, client_environment, compiled, processor_s, publish_request, tls_settings
from bench.report import save
from helpers.server import APP_ID as SERVER_APP_ID
from helpers.server import APP_KEY as SERVER_KEY
from helpers.server import APP_SECRET as SERVER_SECRET
from helpers.server import Server, cpu_s
from redpoll.config.config import Settings
from redpoll.host import embedded
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import Lead, LivingWorkers, NodesChanged, Start, WorkersReady

APP_ID, KEY, SECRET = "1", "278d425bdf160c739803", "7ad3773142a6692b25b8"
CONTROL = (
    "import sys; from redpoll.control.main import main; from redpoll.ipc.child_pipe import ChildPipe; "
    "main(ChildPipe(int(sys.argv[1])))"
)
DISTINCT_REQUESTS = 1_000


def write_requests(
    path: Path,
    address: Address,
    *,
    events: int = 1,
    data_bytes: int = 100,
    closes: bool = False,
) -> None:
    """What hammer.c sends, each request after its length: an event, or a batch of several."""
    with path.open("wb") as out:
        for number in range(DISTINCT_REQUESTS):
            data = json.dumps({"number": number, "text": "x" * data_bytes})
            channels = [f"bench-{number}-{at}" for at in range(events)]
            request = publish_request(address, [(channel, data) for channel in channels], close=closes)
            out.write(struct.pack("<I", len(request)) + request)


class Bench:
    """The servers of a run, in one folder; `with` ends them all."""

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
            compiled("hammer.c", client)
            write_requests(requests, Address("127.0.0.1", server[1], APP_ID, KEY, SECRET))
        process, port = server
        used_s = cpu_s(process.pid)
        command = [client, "127.0.0.1", str(port), str(connections), str(seconds), requests]
        running = subprocess.Popen([*command, str(rate)] if rate else command, stdout=subprocess.PIPE)
        os.sched_setaffinity(running.pid, {self.other_core})
        out, _ = running.communicate()
        if running.returncode:
            sys.exit("the client failed")
        result: dict[str, float] = msgspec.json.decode(out)
        if result["refused"]:
            sys.exit(f"{result['refused']:.0f} requests were not answered with 200")
        return {**result, "us": (cpu_s(process.pid) - used_s) / result["requests"] * 1e6}

    def start_redis(self) -> str:
        path = self.folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(self.folder)]
        self.run([str(embedded.find_binary()), *options], self.other_core, stdout=subprocess.DEVNULL)
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
            process=0,
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
        # Stays open while the process lives.
        child_pipe = ChildPipe(ours.detach())
        self.pipes.append(child_pipe)
        child_pipe.send(start)
        child_pipe.send(LivingWorkers([], 0))
        child_pipe.send(NodesChanged([], None))
        child_pipe.send(Lead(1))
        child_pipe.send(WorkersReady())
        port = listener.getsockname()[1]
        listener.close()
        wait_ready(port, "/readyz")
        return process, port


def wait_ready(port: int, path: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            if client.recv(100).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.02)
    sys.exit("the control process isn't ready within 20 s")


# -- the whole server ----------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A server to send requests to. `pids`: its processes by role, where they are known. `tls`: whether its port
    speaks TLS."""

    port: int
    pids: dict[str, int]
    host: str = "127.0.0.1"
    tls: bool = False


class Measured(NamedTuple):
    """One run. `us`: microseconds of processor time per request, by role."""

    per_s: float
    p50_us: float
    p99_us: float
    us: dict[str, float]


def pids_of(server: Server) -> dict[str, int]:
    """The processes of a server with one worker that take part in a publish."""
    return {"worker": server.worker_pids()[0], "control": server.control_pid, "redis": server.redis_pid}


@contextlib.contextmanager
def redpoll(core: set[int], tls: bool) -> Iterator[Target]:
    everywhere = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(tls_settings(tls))
        os.sched_setaffinity(0, core)  # inherited by all processes of the server
        server = stack.enter_context(Server(workers=1, log_level="warning", **options))
        os.sched_setaffinity(0, everywhere)
        yield Target(Address.of(server).client_port, pids_of(server), tls=tls)


@contextlib.contextmanager
def reference(core: set[int], folder: Path) -> Iterator[Target]:
    program = compiled("bare_http.c", folder / "bare_http")
    process = subprocess.Popen([program], stdout=subprocess.PIPE)
    os.sched_setaffinity(process.pid, core)
    assert process.stdout is not None
    try:
        yield Target(int(process.stdout.readline()), {"server": process.pid})
    finally:
        process.kill()
        process.wait()


def run(
    client: Path,
    target: Target,
    requests: Path,
    connections: int,
    seconds: float,
    rate: int,
    words: list[str],
    core: int,
) -> Measured:
    """Sends `requests` to `target`. Ends the bench at an answer that isn't 200."""
    before = {role: processor_s(pid) for role, pid in target.pids.items()}
    command = [client, target.host, str(target.port), str(connections), str(seconds), requests, str(rate), *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, env=client_environment(target.tls))
    os.sched_setaffinity(running.pid, {core})
    out, _ = running.communicate()
    if running.returncode:
        sys.exit("the client failed")
    result: dict[str, float] = msgspec.json.decode(out)
    if result["refused"]:
        sys.exit(f"{result['refused']:.0f} requests were not answered with 200")
    us = {role: (processor_s(pid) - before[role]) / result["requests"] * 1e6 for role, pid in target.pids.items()}
    return Measured(result["requests"] / result["seconds"], result["p50_us"], result["p99_us"], us)


def median(rounds: list[Measured]) -> Measured:
    roles = rounds[0].us
    return Measured(
        *(statistics.median(getattr(one, name) for one in rounds) for name in ("per_s", "p50_us", "p99_us")),
        {role: statistics.median(one.us[role] for one in rounds) for role in roles},
    )


def main() -> None:
    arguments = parser_of(__doc__, tls=True)
    arguments.add_argument("--connections", default="1,16,64")
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rate", type=int, default=0, help="requests a second; 0: as fast as answers come")
    arguments.add_argument("--cores", type=int, default=1, help="for redpoll; 1 leaves the other to the client")
    arguments.add_argument("--connection-each", action="store_true")
    arguments.add_argument("--batch", action="store_true", help="ten events a request")
    arguments.add_argument("--large", action="store_true", help="10 KB of data a request")
    options = arguments.parse_args()
    everywhere = sorted(os.sched_getaffinity(0))
    cores, client_core = set(everywhere[: options.cores]), everywhere[-1]
    url = os.environ.get("PUSHER_URL")
    events, data_bytes = 10 if options.batch else 1, 10_000 if options.large and not options.batch else 100
    words = ["each"] * options.connection_each
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = compiled("hammer.c", folder / "hammer", tls=options.tls)
        if url:
            address = Address.parse(url)
            tested = Target(address.port, {}, socket.gethostbyname(address.host), options.tls)
        else:
            tested = stack.enter_context(redpoll(cores, options.tls))
            address = Address(tested.host, tested.port, SERVER_APP_ID, SERVER_KEY, SERVER_SECRET)
        write_requests(
            folder / "requests", address, events=events, data_bytes=data_bytes, closes=options.connection_each
        )
        targets = {"server at PUSHER_URL" if url else "redpoll, signed publish": tested}
        if not options.tls:
            targets["bare C server, `{}`"] = stack.enter_context(reference({everywhere[0]}, folder))
        kind = "a connection each" if options.connection_each else "keep-alive"
        kind += ", TLS" * options.tls + f", {events} events a request" * options.batch + ", 10 KB" * options.large
        print(f"{platform.machine()}, CPython {platform.python_version()}, {kind}, {options.cores} core(s) for redpoll")
        if len(everywhere) == 1:
            print("one core only: client, Redis and server share it, and the figures say little")
        print(f"{'':26}{'connections':>12}{'requests/s':>12}{'p50 us':>9}{'p99 us':>9}   us per request, by process")
        figures: dict[str, object] = {}
        for connections in map(int, options.connections.split(",")):
            rounds: dict[str, list[Measured]] = {name: [] for name in targets}
            for _ in range(options.rounds):
                for name, target in targets.items():
                    rounds[name].append(
                        run(
                            client,
                            target,
                            folder / "requests",
                            connections,
                            options.seconds,
                            options.rate,
                            words,
                            client_core,
                        )
                    )
            medians = {name: median(measured) for name, measured in rounds.items()}
            for name, one in medians.items():
                us = " + ".join(f"{role} {value:.1f}" for role, value in one.us.items())
                row = f"{one.per_s:12,.0f}{one.p50_us:9,.0f}{one.p99_us:9,.0f}   {us}"
                print(f"{name:26}{connections:12}{row}")
            ours, *others = medians.values()
            figures[str(connections)] = {
                "per_s": round(ours.per_s),
                "events_per_s": round(ours.per_s * events),
                "p50_ms": round(ours.p50_us / 1000, 2),
                "p99_ms": round(ours.p99_us / 1000, 2),
                "us": {role: round(value, 1) for role, value in ours.us.items()},
                **({"reference_per_s": round(others[0].per_s)} if others else {}),
            }
        print(f"each figure is the median of {options.rounds} rounds")
        if options.json is not None:
            save(options.json, "publish", figures)


if __name__ == "__main__":
    main()
