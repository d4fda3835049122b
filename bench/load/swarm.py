"""Many clients of any Pusher-compatible server: connects them at a given rate, publishes, and measures what arrives.

    python -m bench.load.swarm --url http://KEY:SECRET@HOST:PORT/apps/ID --connections 5000 --rate 500 --publish 50
    python -m bench.load.swarm --own-cost                 the cost of swarm itself: the same against a server in C

Clients are picows connections in several processes; they subscribe to public, private and presence channels
(`--profile`), answer pings, and check the order of every event. It first prints what it needs of the machine, and stops
if something is missing. It shows its progress, and at the end a table; `--json` and `--png` write the figures to files.
Latency counts from the moment at which an event was due to be published.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import ipaddress
import itertools
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.arguments import parser_of
from bench.driver import Address, tls_settings
from bench.load.swarm_process import bucket_ms
from bench.report import command_line, percentile, save

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Beside its connections a process has pipes, the loop's own, and those that are closing.
SPARE_FILES = 300
# Source ports that may still be in TIME_WAIT from an earlier run.
USABLE_PORTS = 0.85
# Of one source address, Linux gives every second port first. Once these are used, each connect() searches all of them,
# and connecting becomes ten times slower.
QUICK_PORTS = 0.4
SETTLE_S = 2.0
SAMPLE_EVERY_S = 1.0
STALLED_S = 20.0


@dataclasses.dataclass
class Plan:
    """How the load is spread over processes and source addresses."""

    processes: int
    addresses: list[str]
    faults: list[str]
    needs: list[str]

    def print_or_exit(self, dry_run: bool) -> None:
        """Prints what the run needs. Ends the program if something is missing, with 2, or after a dry run."""
        for need in self.needs:
            print(f"needs {need}")
        for fault in self.faults:
            print(f"missing: {fault}", file=sys.stderr)
        if self.faults:
            sys.exit(2)
        if dry_run:
            sys.exit(0)


def plan_for(address: Address, connections: int, processes: int, addresses: list[str]) -> Plan:
    """What `connections` need of this machine, and what of it is missing."""
    faults, needs = [], []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    a_process = max(1, files - SPARE_FILES)
    fewest = math.ceil(connections / a_process)
    processes = processes or max(fewest, min(len(os.sched_getaffinity(0)), math.ceil(connections / 500)), 1)
    per_process = math.ceil(connections / processes)
    needs.append(f"{per_process + SPARE_FILES:,} descriptors in each of {processes} processes (limit {files:,})")
    if per_process > a_process:
        faults.append(f"a process may have {files:,} descriptors: use --processes {fewest}, or raise `ulimit -Hn`")
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports, quick_ports = (int((high - low + 1) * part) for part in (USABLE_PORTS, QUICK_PORTS))
    host = socket.gethostbyname(address.host)
    if not addresses and ipaddress.ip_address(host).is_loopback and connections > quick_ports:
        # Every address of 127.0.0.0/8 is this machine.
        addresses = [f"127.0.0.{number}" for number in range(2, 2 + math.ceil(connections / quick_ports))]
    sources = max(1, len(addresses))
    shown = ", ".join(addresses) if len(addresses) <= 3 else f"{addresses[0]} to {addresses[-1]}"
    used = f" from {shown}" if addresses else ""
    needs.append(f"{connections:,} ports{used} ({ports:,} usable for each source address)")
    if connections > ports * sources:
        faults.append(
            f"{sources} source address(es) have {ports * sources:,} ports: give {math.ceil(connections / ports)} with "
            "--addresses, or widen net.ipv4.ip_local_port_range"
        )
    total = Path("/proc/sys/fs/file-max").read_text().strip()
    needs.append(f"{2 * connections:,} descriptors of the machine if the server runs on it, too (limit {int(total):,})")
    if 2 * connections > int(total):
        faults.append("raise fs.file-max")
    return Plan(processes, addresses, faults, needs)


# -- the server's memory ------------------------------------------------------------------------------------------


def server_processes(port: int) -> list[int]:
    """The processes of this machine that listen on `port`, and all that belong to them; none for another machine."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    parents: dict[int, int] = {}
    listening = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if any(os.readlink(link) in inodes for link in (entry / "fd").iterdir()):
                listening.add(pid)
    pids = set(listening)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in pids} - pids
        pids |= more
        grown = bool(more)
    return sorted(pids)


def rss_of(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return total


def cpu_of(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


# -- figures -------------------------------------------------------------------------------------------------------


def percentiles(histogram: Counter[int]) -> dict[str, float]:
    """p50, p99, p99.9 and the greatest, in ms; empty without values."""
    counts = {bucket_ms(index): count for index, count in histogram.items() if count}
    marks = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {name: round(percentile(counts, share), 2) for name, share in marks.items()} if counts else {}


class Child:
    """One process of swarm_process.py."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self.idle: dict[str, Any] = {}
        self.histograms: dict[str, Counter[int]] = {
            name: Counter() for name in ("latency", "connect", "back", "answer")
        }
        self.done = False

    async def start(self, plan: dict[str, Any]) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.load.swarm_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        self.tell(plan)
        assert self.process.stdout is not None
        self.last = self.idle = msgspec.json.decode(await self.process.stdout.readline())
        self._reading = asyncio.create_task(self._read())

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.last = msgspec.json.decode(line)
            self.done = self.done or self.last.get("done", False)
            for name, histogram in self.histograms.items():
                for index, count in self.last.get(name, {}).items():
                    histogram[int(index)] += count
        self.done = True

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ConnectionError):
                self.tell({"do": "end"})
            try:
                async with asyncio.timeout(10):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
        await self._reading


class Run:
    """The processes of one run, what they report, and a sample of it every second."""

    def __init__(self, options: argparse.Namespace, plan: Plan, reconnects: bool) -> None:
        self.options = options
        self.plan = plan
        self.reconnects = reconnects
        self.address = Address.parse(options.url)
        self.swarms: list[Child] = []
        self.publisher: Child | None = None
        self.samples: list[dict[str, Any]] = []
        self.pids = server_processes(self.address.port)
        self.began = time.monotonic()
        self._seen: dict[str, Counter[int]] = {"latency": Counter(), "back": Counter()}
        self._before: dict[str, float] = {}
        self.sampled_at = self.began
        self.phase = "connecting"

    def total(self, name: str) -> Any:
        return sum(child.last.get(name, 0) for child in self.swarms)

    def counts(self, name: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for child in [*self.swarms, *([self.publisher] if self.publisher else [])]:
            total.update(child.last.get(name, {}))
        return total

    def histogram(self, name: str) -> Counter[int]:
        total: Counter[int] = Counter()
        for child in self.swarms:
            total.update(child.histograms[name])
        return total

    def used(self, name: str) -> float:
        """`cpu_s` or `rss` that connections and events took, without what an idle process takes."""
        return sum(child.last.get(name, 0) - child.idle[name] for child in self.swarms)

    def published(self, name: str) -> int:
        return self.publisher.last.get(name, 0) if self.publisher else 0

    async def start(self) -> None:
        count, processes = self.options.connections, self.plan.processes
        firsts = [count * index // processes for index in range(processes + 1)]
        common = {
            "url": self.options.url,
            "tls_port": self.options.tls_port,
            "profile": self.options.profile,
            "total": count,
            "addresses": self.plan.addresses,
            "rate": self.options.rate / processes,
            "reconnects": self.reconnects,
            "role": "swarm",
        }
        for first, end in itertools.pairwise(firsts):
            child = Child()
            self.swarms.append(child)
            await child.start({**common, "first": first, "count": end - first})
        self.began = self.sampled_at = time.monotonic()
        for child in self.swarms:
            child.tell({"do": "begin"})

    async def publish(self) -> None:
        self.publisher = Child()
        await self.publisher.start(
            {
                "role": "publisher",
                "url": self.options.url,
                "profile": self.options.profile,
                "total": self.options.connections,
                "publish": self.options.publish,
                "seconds": self.options.seconds,
                "data_bytes": self.options.data_bytes,
                "http_connections": self.options.http_connections,
            }
        )
        self.publisher.tell({"do": "begin"})

    def sample(self) -> dict[str, Any]:
        """What happened since the last sample."""
        now = time.monotonic()
        passed_s = max(now - self.sampled_at, 1e-3)
        latency = self.histogram("latency")
        sums = {name: float(self.total(name)) for name in ("ready", "messages", "failed", "lost")}
        sums["published"] = self.published("accepted")
        added = latency - self._seen["latency"]
        figures = {
            "at_s": round(now - self.began, 2),
            "phase": self.phase,
            "open": self.total("open"),
            "ready": int(sums["ready"]),
            **{f"{name}_per_s": round((sums[name] - self._before.get(name, 0)) / passed_s, 1) for name in sums},
            **percentiles(added),
            "server_bytes": rss_of(self.pids),
            "swarm_bytes": self.total("rss"),
        }
        self._before, self.sampled_at = sums, now
        self._seen["latency"] = latency
        self.samples.append(figures)
        return figures

    async def end(self) -> None:
        children = [*self.swarms, *([self.publisher] if self.publisher else [])]
        await asyncio.gather(*(child.end() for child in children))


class Screen:
    """The live table and the progress bar; without a terminal, a line every five seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self.task = self.progress.add_task("connecting", total=total)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._printed = -math.inf

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, sample: dict[str, Any], done: float, total: float) -> None:
        words = {
            "subscribed": f"{sample['ready']:,}",
            "new/s": f"{sample['ready_per_s']:,.0f}",
            "events/s": f"{sample['messages_per_s']:,.0f}",
            "published/s": f"{sample['published_per_s']:,.0f}",
            "p50 ms": sample.get("p50_ms", "-"),
            "p99 ms": sample.get("p99_ms", "-"),
            "p99.9 ms": sample.get("p999_ms", "-"),
            "failed/s": f"{sample['failed_per_s']:,.0f}",
            "lost/s": f"{sample['lost_per_s']:,.0f}",
            "server MB": f"{sample['server_bytes'] / 1e6:,.0f}",
            "swarm MB": f"{sample['swarm_bytes'] / 1e6:,.0f}",
        }
        if self.live:
            table = Table(*words, expand=False)
            table.add_row(*map(str, words.values()))
            self.progress.update(self.task, description=sample["phase"], completed=done, total=total)
            grid = Table.grid()
            grid.add_row(table)
            grid.add_row(self.progress)
            self.live.update(grid, refresh=True)
        elif sample["at_s"] - self._printed >= 5:
            self._printed = sample["at_s"]
            line = "  ".join(f"{name} {value}" for name, value in words.items() if value not in ("-", "0"))
            print(f"{sample['at_s']:6.1f} s  {sample['phase']}: {line}", flush=True)


async def wait_until(run: Run, screen: Screen, goal: Any, done: Any, total: float, limit_s: float) -> bool:
    """Samples every second until `goal()`; False after `limit_s` without progress in `done()`."""
    best, moved = -1.0, time.monotonic()
    while not goal():
        await asyncio.sleep(0.05)
        if time.monotonic() - run.sampled_at >= SAMPLE_EVERY_S:
            screen.show(run.sample(), done(), total)
        if (now := done()) > best:
            best, moved = now, time.monotonic()
        elif time.monotonic() - moved > limit_s:
            return False
    return True


async def measure(options: argparse.Namespace, plan: Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ramp, hold with publishing, and the figures of both."""
    run = Run(options, plan, reconnects=False)
    count = options.connections
    before_bytes, before_cpu_s = rss_of(run.pids), cpu_of(run.pids)
    figures: dict[str, Any] = {}
    with Screen(Console(), count) as screen:
        await run.start()
        try:
            ended = await wait_until(
                run,
                screen,
                lambda: run.total("ready") + run.total("failed") + run.total("lost") >= count,
                lambda: run.total("ready"),
                count,
                STALLED_S,
            )
            ramp_s = max(child.last["ready_at"] for child in run.swarms) - run.began
            ramp_cpu_s = run.used("cpu_s")
            ready = run.total("ready")
            server_bytes, server_cpu_s = rss_of(run.pids), cpu_of(run.pids)
            figures |= {
                "connections": ready,
                "failed": run.total("failed"),
                "all_within_limit": ended,
                "ramp_s": round(ramp_s, 2),
                "connected_per_s": round(ready / max(ramp_s, 1e-3), 1),
                "connect": percentiles(run.histogram("connect")),
                "server_bytes_per_connection": round((server_bytes - before_bytes) / max(ready, 1)),
                "server_us_per_connection": round((server_cpu_s - before_cpu_s) / max(ready, 1) * 1e6, 1),
                "swarm_us_per_connection": round(ramp_cpu_s / max(ready, 1) * 1e6, 1),
                "swarm_bytes_per_connection": round(run.used("rss") / max(ready, 1)),
            }
            run.phase = "holding"
            if options.publish:
                run.phase = "publishing"
                await run.publish()
                publisher = run.publisher
                assert publisher is not None
                await wait_until(
                    run,
                    screen,
                    lambda: publisher.done,
                    lambda: run.published("accepted") + run.published("refused"),
                    options.publish * options.seconds,
                    STALLED_S,
                )
                run.phase = "settling"
                await wait_until(
                    run,
                    screen,
                    lambda: run.total("messages") >= run.published("expected"),
                    lambda: run.total("messages"),
                    run.published("expected"),
                    SETTLE_S,
                )
                messages = run.total("messages")
                published_s = options.seconds
                figures |= {
                    "published": run.published("accepted"),
                    "refused": run.published("refused"),
                    "published_per_s": round(run.published("accepted") / published_s, 1),
                    "late_publishes": run.published("late"),
                    "expected": run.published("expected"),
                    "events": messages,
                    "events_per_s": round(messages / published_s, 1),
                    "lost_events": run.published("expected") - messages,
                    "gaps": run.total("missed"),
                    "overtaken": run.total("overtaken"),
                    "latency": percentiles(run.histogram("latency")),
                    "publish_answer": percentiles(publisher.histograms["answer"]),
                    "server_us_per_event": round((cpu_of(run.pids) - server_cpu_s) / max(messages, 1) * 1e6, 2),
                    "swarm_us_per_event": round((run.used("cpu_s") - ramp_cpu_s) / max(messages, 1) * 1e6, 2),
                }
            else:
                until = time.monotonic() + options.seconds
                await wait_until(
                    run,
                    screen,
                    lambda: time.monotonic() >= until,
                    lambda: time.monotonic() - run.began,
                    options.seconds,
                    STALLED_S,
                )
            figures |= {
                "lost_connections": run.total("lost"),
                "closes": dict(run.counts("closes")),
                "errors": dict(run.counts("errors")),
                "server_bytes": rss_of(run.pids),
            }
        finally:
            await run.end()
    return figures, run.samples


# -- output --------------------------------------------------------------------------------------------------------


def print_figures(console: Console, title: str, figures: dict[str, Any]) -> None:
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        if isinstance(value, dict):
            text = ", ".join(f"{key} {number}" for key, number in value.items()) or "-"
        else:
            text = f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
        table.add_row(name, text)
    console.print(table)


def draw(path: Path, title: str, samples: list[dict[str, Any]]) -> None:
    """Connections and rate, latency, and memory over time, as a PNG."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("--png needs matplotlib: pip install 'redpoll[bench]'")
    mpl.use("agg")
    from matplotlib import pyplot as plt

    at = [sample["at_s"] for sample in samples]
    chart, (rate, latency, memory) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    chart.suptitle(title, fontsize=10)
    rate.plot(at, [sample["ready"] for sample in samples], label="connections", color="tab:gray")
    rate.set_ylabel("connections")
    events = rate.twinx()
    events.plot(at, [sample["messages_per_s"] for sample in samples], label="events/s", color="tab:blue")
    events.plot(at, [sample["ready_per_s"] for sample in samples], label="subscribed/s", color="tab:green")
    events.set_ylabel("per second")
    events.legend(loc="upper left", fontsize=8)
    for name, label in (("p50_ms", "p50"), ("p99_ms", "p99"), ("p999_ms", "p99.9")):
        points = [(sample["at_s"], sample[name]) for sample in samples if name in sample]
        if points:
            latency.plot(*zip(*points, strict=True), label=label)
    if latency.lines:
        latency.set_yscale("log")
        latency.legend(loc="upper left", fontsize=8)
    latency.set_ylabel("latency, ms")
    memory.plot(at, [sample["server_bytes"] / 1e6 for sample in samples], label="server")
    memory.plot(at, [sample["swarm_bytes"] / 1e6 for sample in samples], label="swarm")
    for axes in (rate, events, memory):
        axes.set_ylim(bottom=0)
    memory.set_ylabel("memory, MB")
    memory.set_xlabel("seconds")
    memory.legend(loc="upper left", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, dpi=100)
    plt.close(chart)


# -- swarm's own cost ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """bare_server.c, compiled and running: its PUSHER_URL."""
    with tempfile.TemporaryDirectory(prefix="rpbare") as folder:
        made = Path(folder) / "bare_server"
        subprocess.run(["cc", "-O2", "-Wall", "-o", made, HERE / "bare_server.c"], check=True)
        process = subprocess.Popen([made], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield f"http://key:secret@127.0.0.1:{port}/apps/1"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextlib.contextmanager
def redpoll(workers: int, tls: bool) -> Iterator[tuple[str, int]]:
    """A redpoll of this checkout: its PUSHER_URL, and the port of clients that use TLS, or 0."""
    from helpers.server import Server

    with tls_settings(tls) as settings, Server(workers=workers, **settings) as server:
        yield server.pusher_url, Address.of(server).tls_port


# -- command line --------------------------------------------------------------------------------------------------


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that swarm and storm share."""
    parser = parser_of(description, tls=True)
    parser.add_argument(
        "--url",
        default=os.environ.get("PUSHER_URL"),
        help="http://KEY:SECRET@HOST:PORT/apps/ID of the server; without it (and PUSHER_URL) a redpoll is started",
    )
    parser.add_argument("--workers", type=int, default=1, help="of the redpoll that is started here")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=500.0, help="new connections a second, all processes together")
    parser.add_argument("--profile", choices=["chat", "ticker", "notifications"], default="ticker")
    parser.add_argument("--processes", type=int, default=0, help="0: as many as cores, or as descriptors demand")
    parser.add_argument("--addresses", default="", help="source addresses, separated by commas")
    parser.add_argument("--publish", type=float, default=0.0, help="events a second over HTTP, after the ramp")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to hold or publish")
    parser.add_argument("--data-bytes", type=int, default=100)
    parser.add_argument("--http-connections", type=int, default=10)
    parser.add_argument("--name", default="server", help="what the results call the server")
    parser.add_argument("--png", type=Path, help="write a chart here (needs matplotlib)")
    parser.add_argument("--dry-run", action="store_true", help="only say what it needs of the machine")
    return parser


def prepare(options: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Prints what the run needs, and ends the program where something is missing. Starts a redpoll without `--url`."""
    address = Address.parse(options.url or "http://key:secret@127.0.0.1:6001/apps/1")
    addresses = [word for word in options.addresses.split(",") if word]
    plan = plan_for(address, options.connections, options.processes, addresses)
    plan.print_or_exit(options.dry_run)
    options.has_url, options.tls_port = bool(options.url), 0
    if options.url and options.tls:
        sys.exit("--tls is for the redpoll that is started here: leave out --url and PUSHER_URL")
    if not options.url:
        options.url, options.tls_port = stack.enter_context(redpoll(options.workers, options.tls))
        name = f"redpoll, {options.workers} worker(s)" + ", TLS" * options.tls
        options.name = name if options.name == "server" else options.name
    return plan


def public_command(options: argparse.Namespace) -> str:
    """The command as it can be repeated, without the URL's secret."""
    command = command_line()
    if options.url in command:
        return command.replace(options.url, "$PUSHER_URL")
    return f"PUSHER_URL=… {command}" if options.has_url else command


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--own-cost", action="store_true", help="measure swarm against a bare server in C")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.own_cost:
            if options.profile != "ticker":
                sys.exit("the server in C knows only public channels: --own-cost goes with --profile ticker")
            options.url = stack.enter_context(bare_server())
            options.name = "bare C server"
            options.publish = options.publish or 20.0
        plan = prepare(options, stack)
        options.has_url = options.has_url and not options.own_cost
        figures, samples = uvloop.run(measure(options, plan))
    title = f"{options.name}: {options.connections:,} connections, {options.profile}"
    print_figures(Console(), title, figures)
    per_event = figures.get("swarm_us_per_event", "-")
    print(
        f"swarm itself: {figures['swarm_us_per_connection']} us of processor time and "
        f"{figures['swarm_bytes_per_connection']:,} B a connection, {per_event} us an event"
    )
    about = {"server": options.name, "profile": options.profile, "processes": plan.processes}
    if options.json is not None:
        save(options.json, "swarm", {**about, **figures}, public_command(options), samples=samples)
    if options.png is not None:
        draw(options.png, title, samples)
    if figures["failed"] or figures["lost_connections"] or figures.get("overtaken") or figures.get("lost_events"):
        sys.exit("connections failed, or events were lost or overtaken")


if __name__ == "__main__":
    main()
