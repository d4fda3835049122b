"""As many connections as this machine carries: how fast they come, what they cost, and what happens to all at once.

    python -m bench.load.million --dry-run
    python -m bench.load.million --connections 100000 --json build/million.json --png build/million.png
    python -m bench.load.million                           up to a million, as descriptors and memory allow

Starts a redpoll with as many workers as the limit of descriptors demands, and driver processes in C
(bench/load/crowd.c) that connect from several loopback addresses. All clients subscribe to one channel (`--each`: one
each; `--tls`: over TLS, from the second time on with a session ticket). Then, one after the other: a broadcast to all;
all connections are reset at once; all connect at once; Redis is killed under them; all are reset and come back a second
later. Meanwhile a caller publishes 20 times a second to a channel without subscribers: `api` has its answer times in
each phase. Real clients are on other machines, so the drivers run at a lower priority, and while all are connected they
read every 10 ms: latencies are up to that much longer, and the server's processes are interrupted less.

The kernel looks for the connection of each packet in a table of 262,144 entries or so, and here it holds both ends. As
root, the run can have a network namespace with a larger one:

    sysctl net.ipv4.tcp_child_ehash_entries=4194304
    unshare --net sh -c 'ip link set lo up && python -m bench.load.million'
    sysctl net.ipv4.tcp_child_ehash_entries=0

First it prints what it needs of the machine, and stops with exit code 2 if something is missing. It ends by itself
(`--bound`), ends its processes on SIGINT and SIGTERM, and has exit code 1 if a worker was fenced or restarted, or if
not all clients came, came back, or got a broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from rich.console import Console

# load.py has put the folder of the tests on the path.
import helpers.server
from bench.arguments import end_on_signal, parser_of
from bench.driver import Address, client_environment, compiled, tls_settings
from bench.load import swarm
from bench.report import save
from helpers.server import Server
from helpers.wire import signed_path

MAX_CONNECTIONS = 1_000_000
# Of a connection, both ends, in user space and kernel; of a worker and of a driver without connections. Estimates for
# what fits; a run measures its own.
BYTES_PER_CONNECTION = 10_000
BYTES_PER_TLS_CONNECTION = 50_000
BYTES_PER_PROCESS = 60_000_000
# Of the descriptors that a worker allows itself (worker/main.py); the kernel spreads connections evenly to about 1 %.
FILL = 0.96
CHANNEL = "million"
ASK_EVERY_S = 0.05
ASK_TIMEOUT_S = 30.0


# -- what it needs -------------------------------------------------------------------------------------------------


def per_worker() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return int((int(files * 0.95) - 64) * FILL)


def available_bytes() -> int:
    """What processes may still take: of the machine, or of the control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        available = min(
            available, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    return available


def fitting(wanted: int, each_bytes: int) -> int:
    """How many connections of this size fit into the memory, at most `wanted`."""
    processes = 2 * math.ceil(wanted / per_worker())
    room = int((0.8 * available_bytes() - processes * BYTES_PER_PROCESS) / each_bytes)
    return max(0, min(wanted, room))


def prepare(options: argparse.Namespace) -> swarm.Plan:
    """Prints what the run needs, and ends the program where something is missing."""
    each_bytes = BYTES_PER_TLS_CONNECTION if options.tls else BYTES_PER_CONNECTION
    fits = fitting(options.connections or MAX_CONNECTIONS, each_bytes)
    count = options.connections = options.connections or fits // 1000 * 1000
    options.workers = options.workers or math.ceil(count / per_worker())
    options.bound = options.bound or 240 + count / 1000
    address = Address.parse("http://key:secret@127.0.0.1:6001/apps/1")
    plan = swarm.plan_for(address, count, options.processes, [])
    plan.needs.append(f"{options.workers} workers with at most {per_worker():,} connections each")
    size = count * each_bytes + (options.workers + plan.processes) * BYTES_PER_PROCESS
    plan.needs.append(f"about {size / 1e9:.1f} GB of memory ({available_bytes() / 1e9:.1f} GB available)")
    if entries := table_entries():
        plan.needs.append(
            f"{2 * count:,} sockets in the kernel's table of {entries:,} entries (better at least as many)"
        )
    plan.needs.append(f"at most {options.bound:,.0f} s")
    if count > fits:
        plan.faults.append(f"memory: {fits:,} connections fit")
    if options.workers * per_worker() < count:
        plan.faults.append(f"{options.workers} workers hold {options.workers * per_worker():,} connections")
    print(f"{count:,} connections")
    plan.print_or_exit(options.dry_run)
    return plan


def table_entries() -> int:
    """Of the table in which the kernel looks for the connection of each packet; 0 if unknown (before Linux 6.2).
    The kernel writes a minus before it where a network namespace shares the machine's table."""
    try:
        return abs(int(Path("/proc/sys/net/ipv4/tcp_ehash_entries").read_text()))
    except OSError:
        return 0


# -- the kernel's memory -------------------------------------------------------------------------------------------


def kernel_bytes() -> int:
    """Memory of the kernel that connections take: its objects, and the buffers of TCP."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    objects = sum(int(fields[name].split()[0]) * 1024 for name in ("Slab", "PageTables"))
    match = re.search(r"^TCP:.* mem (\d+)", Path("/proc/net/sockstat").read_text(), re.MULTILINE)
    return objects + (int(match[1]) * resource.getpagesize() if match else 0)


def machine_s() -> tuple[float, float]:
    """Seconds in which processors had nothing to do, and those that other virtual machines took, since the start of
    this one, summed over the processors."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(words[3]) + int(words[4])) / ticks, int(words[7]) / ticks


def open_files(pids: list[int]) -> int:
    """The descriptors of some processes. The size of the folder is their number since Linux 6.2."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))
    return total


# -- drivers -------------------------------------------------------------------------------------------------------


class Driver(swarm.Child):
    """One process of crowd.c."""

    async def begin(self, command: list[str], *, tls: bool = False) -> None:
        self.process = await asyncio.create_subprocess_exec(
            "nice",
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            env=client_environment(tls),
        )
        assert self.process.stdout is not None
        self.last = self.idle = msgspec.json.decode(await self.process.stdout.readline())
        self._reading = asyncio.create_task(self._read())

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self._reading


class Crowd:
    """All drivers: their sums, and a sample of everything each second."""

    def __init__(self, options: argparse.Namespace, plan: swarm.Plan, server: Server) -> None:
        self.options, self.plan, self.server = options, plan, server
        self.address = Address.of(server)
        self.drivers: list[Driver] = []
        self.pids = [server.pid, server.control_pid, server.redis_pid, *server.worker_pids()]
        self.workers = server.worker_pids()
        self.samples: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []
        self.phase = "starting"
        self.answers: dict[str, list[float]] = {}
        self.failed_answers: Counter[str] = Counter()
        self._recent: list[float] = []
        self._before: dict[str, float] = {}
        self.began = self._sampled_at = time.monotonic()
        self.files_before = open_files(self.workers)

    async def start(self, program: Path) -> None:
        count, processes = self.options.connections, self.plan.processes
        channel = f"{CHANNEL}-*" if self.options.each else CHANNEL
        firsts = [count * index // processes for index in range(processes + 1)]
        at_once = max(1, self.options.at_once // processes)
        for first, end in itertools.pairwise(firsts):
            driver = Driver()
            words = [
                self.address.host,
                self.address.client_port,
                self.address.app_key,
                first,
                end - first,
                at_once,
                channel,
            ]
            await driver.begin([str(program), *map(str, words), *self.plan.addresses], tls=self.options.tls)
            self.drivers.append(driver)

    def say(self, word: str) -> None:
        for driver in self.drivers:
            driver.say(word)

    def total(self, name: str) -> int:
        return sum(driver.last.get(name, 0) for driver in self.drivers)

    def histogram(self, name: str) -> Counter[int]:
        total: Counter[int] = Counter()
        for driver in self.drivers:
            total.update(driver.histograms[name])
        return total

    def errors(self) -> list[str]:
        return sorted({error for driver in self.drivers for error in driver.last.get("errors", {})})

    def sample(self) -> dict[str, Any]:
        """What happened since the last sample. The percentiles are the API's."""
        now = time.monotonic()
        passed_s = max(now - self._sampled_at, 1e-3)
        sums = {name: float(self.total(name)) for name in ("ready", "messages", "failed", "lost")}
        recent, self._recent = sorted(self._recent), []
        figures = {
            "at_s": round(now - self.began, 2),
            "phase": self.phase,
            "open": self.total("open"),
            "ready": int(sums["ready"]),
            **{f"{name}_per_s": round((sums[name] - self._before.get(name, 0)) / passed_s, 1) for name in sums},
            "published_per_s": 0,
            **({"p50_ms": milliseconds(recent, 0.5), "p99_ms": milliseconds(recent, 0.99)} if recent else {}),
            "server_bytes": swarm.rss_of(self.pids),
            "swarm_bytes": self.total("rss"),
            "kernel_bytes": kernel_bytes(),
        }
        self._before, self._sampled_at = sums, now
        self.samples.append(figures)
        return figures

    async def until(self, screen: swarm.Screen, goal: Any, limit_s: float) -> bool:
        """Samples every second until `goal()`; False after `limit_s` without a new connection or message."""
        seen, moved = (-1, -1), time.monotonic()
        while not goal():
            await asyncio.sleep(0.02)
            now = time.monotonic()
            if now - self._sampled_at >= swarm.SAMPLE_EVERY_S:
                screen.show(self.sample(), self.total("ready"), self.options.connections)
            if (at := (self.total("ready"), self.total("messages"))) != seen:
                seen, moved = at, now
            elif now - moved > limit_s:
                return False
        return True

    @contextlib.asynccontextmanager
    async def during(self, phase: str) -> AsyncIterator[dict[str, Any]]:
        """One phase: its figures, with its length, processor time and API latency. `idle_s` and `stolen_s` are sums
        over the processors (`machine_s`)."""
        self.phase = phase
        figures: dict[str, Any] = {"phase": phase}
        began, cpu_s, failed, lost = time.monotonic(), swarm.cpu_of(self.pids), self.total("failed"), self.total("lost")
        drivers_cpu_s, (idle_s, stolen_s) = self.drivers_cpu_s(), machine_s()
        yield figures
        idle_until_s, stolen_until_s = machine_s()
        figures |= {
            "seconds": round(time.monotonic() - began, 2),
            "server_cpu_s": round(swarm.cpu_of(self.pids) - cpu_s, 2),
            "drivers_cpu_s": round(self.drivers_cpu_s() - drivers_cpu_s, 2),
            "idle_s": round(idle_until_s - idle_s, 2),
            "stolen_s": round(stolen_until_s - stolen_s, 2),
            "failed_attempts": self.total("failed") - failed,
            "lost_connections": self.total("lost") - lost,
            "api": self.api(phase),
        }
        self.phases.append(figures)
        print(json.dumps(figures), flush=True)

    def drivers_cpu_s(self) -> float:
        return swarm.cpu_of([driver.process.pid for driver in self.drivers if driver.process.returncode is None])

    def api(self, phase: str) -> dict[str, Any]:
        waited = sorted(self.answers.get(phase, []))
        return {
            "calls": len(waited),
            "not_200": self.failed_answers[phase],
            **({f"{name}_ms": milliseconds(waited, share) for name, share in SHARES.items()} if waited else {}),
        }

    # The API.

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """Publishes 20 times a second, whatever the answers take."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(self._ask_once(session, self.phase))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask_once(self, session: aiohttp.ClientSession, phase: str) -> None:
        began = time.monotonic()
        status = await self.publish(session, "nobody", "x")
        waited = time.monotonic() - began
        self.answers.setdefault(phase, []).append(waited)
        self._recent.append(waited)
        self.failed_answers[phase] += status != 200

    async def publish(self, session: aiohttp.ClientSession, channel: str, data: str) -> int:
        body = json.dumps({"name": "event", "channels": [channel], "data": data}).encode()
        path = signed_path(self.address, "POST", f"/apps/{self.address.app_id}/events", body)
        url = f"http://{self.address.host}:{self.address.port}{path}"
        try:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                await answer.read()
                return answer.status
        except (OSError, TimeoutError, aiohttp.ClientError):
            return 0

    async def is_occupied(self, session: aiohttp.ClientSession) -> bool:
        path = signed_path(self.address, "GET", f"/apps/{self.address.app_id}/channels/{CHANNEL}", b"")
        async with session.get(f"http://{self.address.host}:{self.address.port}{path}") as answer:
            return b'"occupied":true' in await answer.read()


SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}


def milliseconds(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 1)


# -- the run -------------------------------------------------------------------------------------------------------


async def measure(crowd: Crowd, screen: swarm.Screen, program: Path) -> None:
    count = crowd.options.connections

    def everybody() -> bool:
        return crowd.total("ready") >= count

    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=64)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        asking = tasks.create_task(crowd.ask(session))
        async with crowd.during("quiet"):
            await asyncio.sleep(2)
        user, kernel = swarm.rss_of(crowd.pids), kernel_bytes()
        await crowd.start(program)
        async with crowd.during("connect") as figures:
            began = time.monotonic()
            crowd.say("come")
            figures["all_ready"] = await crowd.until(screen, everybody, 20)
            crowd.sample()
            came = [sample for sample in crowd.samples if sample["phase"] == "connect"]
            ready = max(crowd.total("ready"), 1)
            took_s = max(driver.last["ready_at"] for driver in crowd.drivers) - began
            figures |= {
                "connected": ready,
                "per_s": round(ready / took_s),
                "per_s_by_tenth": by_tenth(came, began - crowd.began, count),
                "connect": swarm.percentiles(crowd.histogram("connect")),
            }
        figures["server_us_per_connection"] = round(figures["server_cpu_s"] / ready * 1e6, 1)
        async with crowd.during("hold") as figures:
            await asyncio.sleep(5)
            figures |= {
                "user_bytes_per_connection": round((swarm.rss_of(crowd.pids) - user) / ready),
                "kernel_bytes_per_connection_both_ends": round((kernel_bytes() - kernel) / ready),
            }
        if not crowd.options.each:
            async with crowd.during("broadcast") as figures:
                figures |= await broadcast(crowd, screen, session)
        async with crowd.during("all leave at once") as figures:
            figures |= await leave(crowd, screen, session)
        # The drivers say so up to 0.25 s later.
        await crowd.until(screen, lambda: crowd.total("ready") == 0, 20)
        async with crowd.during("all come at once") as figures:
            began = time.monotonic()
            crowd.say("come")
            figures["all_ready"] = await crowd.until(screen, everybody, 20)
            figures["per_s"] = round(crowd.total("ready") / (time.monotonic() - began))
        async with crowd.during("Redis killed") as figures:
            figures |= await kill_redis(crowd, screen, session)
        async with crowd.during("all cut, back after 1 s") as figures:
            seen = crowd.histogram("back")
            crowd.say("cut")
            await crowd.until(screen, lambda: crowd.total("ready") < count / 2, 20)
            figures["all_ready"] = await crowd.until(screen, everybody, 20)
            figures["back"] = swarm.percentiles(crowd.histogram("back") - seen)
        if not crowd.options.each:
            async with crowd.during("broadcast again") as figures:
                figures |= await broadcast(crowd, screen, session)
        asking.cancel()


def by_tenth(samples: list[dict[str, Any]], began_s: float, count: int) -> list[int]:
    """Connections per second while each tenth of `count` came, between samples that are a second apart."""
    points = [(began_s, 0)] + [(sample["at_s"], sample["ready"]) for sample in samples]
    rates, first = [], 0
    for tenth in range(1, 11):
        last = next((at for at, point in enumerate(points) if point[1] >= count * tenth / 10), len(points) - 1)
        first = min(first, last - 1)
        if first < 0:
            break
        passed_s = points[last][0] - points[first][0]
        rates.append(round((points[last][1] - points[first][1]) / max(passed_s, 1e-3)))
        first = last
    return rates


async def broadcast(crowd: Crowd, screen: swarm.Screen, session: aiohttp.ClientSession) -> dict[str, Any]:
    """One event to all."""
    before, seen = crowd.total("messages"), crowd.histogram("latency")
    ready = crowd.total("ready")
    status = await crowd.publish(session, CHANNEL, f"#{CHANNEL}|1|{time.monotonic():.6f}|{'x' * 60}")
    if status == 200:
        await crowd.until(screen, lambda: crowd.total("messages") - before >= ready, 5)
    # The drivers report four times a second, so the latencies are exact and this moment isn't.
    await asyncio.sleep(0.3)
    latency = swarm.percentiles(crowd.histogram("latency") - seen)
    return {"status": status, "subscribers": ready, "received": crowd.total("messages") - before, "latency": latency}


async def leave(crowd: Crowd, screen: swarm.Screen, session: aiohttp.ClientSession) -> dict[str, Any]:
    began = time.monotonic()
    crowd.say("leave")
    # A few are those of the API.
    closed = await crowd.until(screen, lambda: open_files(crowd.workers) - crowd.files_before < 200, 60)
    closed_s = time.monotonic() - began
    occupied = True
    while occupied and time.monotonic() - began < 120:
        with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError):
            occupied = await crowd.is_occupied(session)
        await asyncio.sleep(0.05)
    return {
        "all_closed": closed,
        "closed_s": round(closed_s, 2),
        "vacated_s": round(time.monotonic() - began, 2),
        "user_bytes_left": swarm.rss_of(crowd.pids),
    }


async def kill_redis(crowd: Crowd, screen: swarm.Screen, session: aiohttp.ClientSession) -> dict[str, Any]:
    """Until an event is taken again, and until one has reached everybody."""
    await asyncio.sleep(3)
    os.kill(crowd.server.redis_pid, signal.SIGKILL)
    began = time.monotonic()
    taken_s = 0.0
    attempts = 0
    result: dict[str, Any] = {}
    while time.monotonic() - began < 120:
        attempts += 1
        if crowd.options.each:
            result = {"status": await crowd.publish(session, "nobody", "x")}
        else:
            result = await broadcast(crowd, screen, session)
        if result["status"] == 200 and not taken_s:
            taken_s = time.monotonic() - began
        if result["status"] == 200 and result.get("received", 0) >= result.get("subscribers", 0):
            break
        await asyncio.sleep(0.1)
    # The workers assert everything to the new Redis, in the background.
    await asyncio.sleep(3)
    crowd.pids[2] = crowd.server.redis_pid
    return {
        "taken_s": round(taken_s, 2),
        "reached_all_s": round(time.monotonic() - began - 3, 2),
        "broadcasts": attempts,
        **result,
    }


async def run(options: argparse.Namespace, plan: swarm.Plan, server: Server, program: Path) -> Crowd:
    crowd = Crowd(options, plan, server)
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with swarm.Screen(Console(), options.connections) as screen:
        try:
            async with asyncio.timeout(options.bound):
                await measure(crowd, screen, program)
        except TimeoutError:
            print(f"not complete within {options.bound:,.0f} s", file=sys.stderr)
            crowd.phases.append({"phase": crowd.phase, "complete": False})
        finally:
            for driver in crowd.drivers:
                await driver.end()
    return crowd


def figures_of(crowd: Crowd, log: str) -> dict[str, Any]:
    options = crowd.options
    waited = sorted(itertools.chain.from_iterable(crowd.answers.values()))
    return {
        "connections": options.connections,
        "workers": options.workers,
        "drivers": crowd.plan.processes,
        "table_entries": table_entries(),
        "channels": "one each" if options.each else "one for all",
        "tls": options.tls,
        "complete": all(phase.get("complete", True) for phase in crowd.phases),
        "fenced": log.count("worker fenced"),
        "reaped": log.count("worker reaped"),
        "workers_restarted": len(set(crowd.workers) - set(crowd.server.worker_pids())),
        "api_calls": len(waited),
        "api_not_200": sum(crowd.failed_answers.values()),
        **{f"api_{name}_ms": milliseconds(waited, share) for name, share in SHARES.items() if waited},
        "errors": crowd.errors(),
        "phases": crowd.phases,
    }


def main() -> None:
    parser = parser_of(__doc__, tls=True)
    parser.add_argument("--connections", type=int, default=0, help="0: as many as fit, at most a million")
    parser.add_argument("--workers", type=int, default=0, help="0: as many as the descriptors demand")
    parser.add_argument("--processes", type=int, default=0, help="drivers; 0: as many as the descriptors demand")
    parser.add_argument("--at-once", type=int, default=500, help="handshakes under way at a time, in all")
    parser.add_argument("--each", action="store_true", help="a channel each, not one for all")
    parser.add_argument("--bound", type=float, default=0.0, help="most seconds; 0: by the number of connections")
    parser.add_argument("--png", type=Path, help="write a chart here (needs matplotlib)")
    parser.add_argument("--dry-run", action="store_true", help="only say what it needs of the machine")
    options = parser.parse_args()
    plan = prepare(options)
    # 50 workers on two cores take their time.
    helpers.server.READY_WITHIN_S = 30.0 + 4 * options.workers
    helpers.server.STOPPED_WITHIN_S = 20.0 + 2 * options.workers
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with tempfile.TemporaryDirectory(prefix="rpcrowd") as folder, tls_settings(options.tls) as settings:
        program = compiled("crowd.c", Path(folder) / "crowd", "-lm", tls=options.tls)
        settings |= {"activity_timeout_s": 1_000, "max_connections_per_address": 0}
        with Server(workers=options.workers, files=(files, files), **settings) as server:
            crowd = uvloop.run(run(options, plan, server, program))
            # uvloop has removed `run`'s handler, and set the system's.
            signal.signal(signal.SIGTERM, end_on_signal)
            figures = figures_of(crowd, (server.folder / "err").read_text(errors="replace"))
    title = f"redpoll, {options.workers} workers: {options.connections:,} connections; latency of the API"
    swarm.print_figures(Console(), title, {name: value for name, value in figures.items() if name != "phases"})
    if options.json is not None:
        save(options.json, "million", figures, samples=crowd.samples)
    if options.png is not None:
        swarm.draw(options.png, title, crowd.samples)
    phases = figures["phases"]
    incomplete = [
        phase["phase"]
        for phase in phases
        if not phase.get("all_ready", True) or phase.get("received", 0) < phase.get("subscribers", 0)
    ]
    if figures["fenced"] or figures["workers_restarted"] or not figures["complete"] or incomplete:
        sys.exit(f"fenced: {figures['fenced']}; incomplete: {', '.join(incomplete) or 'none'}")


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        main()
