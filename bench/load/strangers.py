"""Strangers attack a server from one address: what good clients and a back end notice of it, and what grows.

    python -m bench.load.strangers [--only NAME …] [--seconds 10] [--workers 1] [--json FILE]

Each attack of strangers_attacks.py runs against a fresh redpoll with default settings, beside 100 good clients, each
with a channel of its own and a ping a second, and a back end that publishes 50 times a second: half of it on kept
connections, the other half on new ones, some with bodies of 9 kB in two packets. Exceptions to the defaults:

- `trigger_rate_per_minute` is 0, as for every back end that publishes more often than 300 times a minute.
- `trusted_proxies` names an address that nobody has. Then addresses of loopback are counted like public ones.
- There are a TLS port and a webhook, whose receiver accepts and never answers, on an allowed address of loopback.

The attacker comes from 127.0.0.2, all others from 127.0.0.1. Its process has a low priority, as from another machine it
would take no processor time. Times are measured alone first, then during the attack; `server` is the processor time
that the worker used while a ping waited, which says more than the wall clock on a machine that has other work. Memory
is the greatest growth of resident memory; Redis' is its own figure. The exit code is 1 if a goal is missed: pings up to
100 ms at p99, every publish accepted and delivered, 100 MB of memory.

To see another tree, run it with that tree's interpreter: it starts the redpoll that this interpreter imports.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import uvloop

from bench.arguments import parser_of
from bench.driver import Address
from bench.load.floods import Clock, Good, Times
from bench.load.strangers_attacks import ATTACKS, HISTORY_CHANNEL, VICTIM_CHANNEL, Target
from bench.report import print_table, save
from helpers.certs import self_signed
from helpers.server import Server, rss_bytes
from helpers.wire import Socket, UpgradeRefused, signed_path

GOOD: Final = 100
PUBLISHES_PER_S: Final = 50
PING_P99_MS: Final = 100
GROWTH_MB: Final = 100
_ANSWER_WITHIN_S: Final = 5.0
_LOOK_S: Final = 0.2
# An address of TEST-NET-1, which nobody has.
_NO_PROXY: Final = "192.0.2.99"


class BackEnd:
    """Publishes to the good clients' channels. `answers` counts what came back: a status, or what went wrong; `cut` the
    kept connections that the server closed between two requests."""

    def __init__(self, address: Address, goods: list[Good]) -> None:
        self.answers: Counter[str] = Counter()
        self.waited: list[float] = []
        self.cut = 0
        self._address = address
        self._goods = itertools.cycle(goods)
        self._idle: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(5):
            self._idle.put_nowait(None)

    async def run(self, seconds: float) -> None:
        began = time.perf_counter()
        for number in range(int(seconds * PUBLISHES_PER_S)):
            await asyncio.sleep(began + number / PUBLISHES_PER_S - time.perf_counter())
            task = asyncio.get_running_loop().create_task(self._publish(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)
        for _ in range(self._idle.qsize()):
            if (connection := self._idle.get_nowait()) is not None:
                connection[1].close()

    @property
    def refused(self) -> int:
        return sum(self.answers.values()) - self.answers["200"]

    async def _publish(self, number: int) -> None:
        request, is_kept = self._request(size=9_000 if number % 10 == 1 else 0), number % 2 == 0
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                status = await (self._keep(request) if is_kept else self._connect(request))
        except TimeoutError:
            status = "no answer"
        except (OSError, EOFError, RuntimeError):
            # uvloop raises RuntimeError for a write to a closed transport.
            status = "closed"
        self.waited.append(time.perf_counter() - began)
        self.answers[status if status == "200" else f"{status}, {'kept' if is_kept else 'new'}"] += 1

    def _request(self, size: int) -> bytes:
        good, address = next(self._goods), self._address
        event = {"name": "sent", "channel": good.channel, "data": good.publish_data()}
        body = json.dumps(event | ({"unread": "x" * size} if size else {})).encode()
        path = signed_path(address, "POST", f"/apps/{address.app_id}/events", body)
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    async def _keep(self, request: bytes) -> str:
        connection = await self._idle.get()
        try:
            if connection is not None and connection[0].at_eof():
                connection[1].close()
                connection, self.cut = None, self.cut + 1
            if connection is None:
                connection = await asyncio.open_connection(self._address.host, self._address.port)
            status, connection = await _ask(connection, request), connection
        except BaseException:
            connection = None
            raise
        finally:
            self._idle.put_nowait(connection)
        return status

    async def _connect(self, request: bytes) -> str:
        connection = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            return await _ask(connection, request)
        finally:
            connection[1].close()


async def _ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> str:
    """Sends a request, a large one in two packets; returns the status of its answer."""
    reader, writer = connection
    writer.write(request[:4_000])
    if len(request) > 4_000:
        await asyncio.sleep(0.01)
        writer.write(request[4_000:])
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(size)
    return head[9:12].decode()


class Sizes:
    """What grows: resident memory of the processes, Redis, the log and the record store, in bytes."""

    def __init__(self, server: Server, redis: Any) -> None:
        self._server, self._redis = server, redis
        self._pids = {"worker": server.worker_pids(), "control": [server.control_pid]}
        self.first = self.greatest = self.now()

    def now(self) -> dict[str, int]:
        folder = self._server.folder
        sizes = {name: sum(map(rss_bytes, pids)) for name, pids in self._pids.items()}
        sizes["redis"] = self._redis.info("memory")["used_memory"]
        sizes["log"] = (folder / "err").stat().st_size
        sizes["store"] = sum(path.stat().st_size for path in (folder / "data").glob("redpoll.sqlite*"))
        return sizes

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        now = self.now()
        self.greatest = {name: max(size, now[name]) for name, size in self.greatest.items()}

    def grown_mb(self) -> dict[str, float]:
        return {name: round((size - self.first[name]) / 1e6, 2) for name, size in self.greatest.items()}


async def ping(goods: list[Good], seconds: float) -> None:
    """A ping of each client a second, spread evenly."""
    began = time.perf_counter()
    turns = itertools.cycle(goods)
    for number in range(int(seconds * len(goods))):
        await asyncio.sleep(began + number / len(goods) - time.perf_counter())
        next(turns).ping()


async def use(
    goods: list[Good], address: Address, seconds: float, times: list[Times]
) -> tuple[dict[str, Any], BackEnd]:
    """What the good clients and the back end see within some seconds."""
    times[0], back_end = Times(), BackEnd(address, goods)
    await asyncio.gather(ping(goods, seconds), back_end.run(seconds))
    # Answers and events that are late; then those that are missing.
    until = time.perf_counter() + _ANSWER_WITHIN_S
    while time.perf_counter() < until and (
        any(good._pinged for good in goods) or len(times[0].waited["event"]) < back_end.answers["200"]
    ):
        await asyncio.sleep(0.01)
    for good in goods:
        if good._pinged:
            times[0].note("pong", time.perf_counter() - good._pinged, 0.0)
            good._pinged = 0.0
    return times[0].figures(), back_end


@contextlib.asynccontextmanager
async def good_clients(server: Server, address: Address, times: list[Times], count: int) -> Any:
    loop, goods = asyncio.get_running_loop(), []
    for number in range(count):
        _, good = await loop.create_connection(
            lambda number=number: Good(address.app_key, number, times), address.host, address.port
        )
        goods.append(good)
        await good.ready
    redis, control = Clock(server.redis_pid), Clock(server.control_pid)
    clocks = {pid: Clock(pid) for pid in server.worker_pids()}
    of_port = {port: clocks[pid] for pid, ports in server.client_ports().items() for port in ports}
    for good in goods:
        good.clocks = of_port[good.transport.get_extra_info("sockname")[1]], redis, control
    yield goods
    for good in goods:
        good.transport.abort()
    # The loop stands while the server stops, and only the next pass closes them.
    await asyncio.sleep(0.05)


async def victim(server: Server) -> str:
    """Whether a new client from another address still gets its private channel."""
    try:
        client = await Socket.connect(server, timeout_s=_ANSWER_WITHIN_S)
        client.send(client.subscribe_request(VICTIM_CHANNEL))
        answer = await client.next(channel=VICTIM_CHANNEL, timeout_s=_ANSWER_WITHIN_S)
        client.abort()
    except (OSError, TimeoutError, UpgradeRefused) as error:
        return f"no: {type(error).__name__} {error}"[:60]
    return "yes" if answer["event"].endswith("subscription_succeeded") else f"no: {answer['data']}"[:60]


async def measure(server: Server, name: str, options: argparse.Namespace) -> dict[str, Any]:
    address = Address.parse(server.pusher_url)
    target = Target(
        address.host,
        address.port,
        int(server.tls_url.rpartition(":")[2]),
        address.app_id,
        address.app_key,
        options.share,
    )
    times = [Times()]
    with server.redis() as redis:
        async with good_clients(server, address, times, options.good) as goods:
            alone, _ = await use(goods, address, min(2.0, options.seconds), times)
            sizes = Sizes(server, redis)
            command = [sys.executable, "-m", "bench.load.strangers_attacks", name, target.text()]
            attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert attacker.stdout is not None
            watching = asyncio.ensure_future(sizes.watch())
            try:
                await attacker.stdout.readline()
                during, back_end = await use(goods, address, options.seconds, times)
                subscribed = await victim(server)
            finally:
                watching.cancel()
                with contextlib.suppress(ProcessLookupError):
                    attacker.terminate()
                output, _ = await asyncio.wait_for(attacker.communicate(), 30)
            sizes.look()
            # An event may arrive whose publish had no answer in time.
            lost = max(0, back_end.answers["200"] - during.get("event", {}).get("count", 0))
    return {
        "alone": alone,
        "during": during,
        "published": sum(back_end.answers.values()),
        "refused": back_end.refused,
        "answers": dict(back_end.answers),
        "kept_connections_cut": back_end.cut,
        "publish_p99_ms": round(sorted(back_end.waited)[int(len(back_end.waited) * 0.99)] * 1000, 1),
        "lost": lost,
        "private_channel": subscribed,
        "grown_mb": sizes.grown_mb(),
        "attacker": json.loads(output.splitlines()[-1]) if output else {},
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """The goals that were missed."""
    goals = []
    if figures["during"].get("pong", {"p99_ms": 0.0})["p99_ms"] > PING_P99_MS:
        goals.append("pings")
    if figures["refused"]:
        goals.append("publishes refused")
    if figures["lost"]:
        goals.append("events lost")
    if figures["private_channel"] != "yes":
        goals.append("private channel refused")
    if any(figures["grown_mb"][name] > GROWTH_MB for name in ("worker", "control", "redis", "store", "log")):
        goals.append("growth")
    return goals


@contextlib.contextmanager
def attacked_server(name: str, workers: int) -> Iterator[Server]:
    """A server with the webhook and the stored messages that attacks use."""
    files = ATTACKS[name].files
    server = Server(
        workers=workers,
        files=None if files is None else (files, files),
        tls_port=0,
        trusted_proxies=_NO_PROXY,
        webhook_allow_http=True,
        webhook_allow_addresses="127.0.0.0/8",
    )
    server.settings["tls_cert"], server.settings["tls_key"] = self_signed(server.folder)
    try:
        with server:
            yield server
    except Exception as error:
        # An attack may leave a traceback in the log, which Server reports; the figures are there.
        if not type(error).__name__ == "ServerFailed":
            raise
        print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)


def prepare(server: Server, name: str, receiver_port: int) -> None:
    def command(*words: str) -> None:
        where = ["--data-dir", str(server.folder / "data")]
        run = [sys.executable, "-m", "redpoll", *words, *where]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL, env=server.environment())

    if name == "webhooks":
        command("webhook", "create", server.app_id, f"http://127.0.0.1:{receiver_port}/hook")
    if name == "history":
        command(
            "history", "rule", "add", server.app_id, "--channel", HISTORY_CHANNEL, "--keep", "100", "--seconds", "3600"
        )


async def fill_history(server: Server) -> None:
    address = Address.parse(server.pusher_url)
    connection = await asyncio.open_connection(address.host, address.port)
    for _ in range(100):
        body = json.dumps({"name": "old", "channel": HISTORY_CHANNEL, "data": "x" * 10_000}).encode()
        path = signed_path(address, "POST", f"/apps/{address.app_id}/events", body)
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        assert await _ask(connection, head.encode() + body) == "200"
    connection[1].close()


async def attack(name: str, options: argparse.Namespace) -> dict[str, Any]:
    held: list[asyncio.StreamWriter] = []
    receiver = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    figures: dict[str, Any] = {}
    with attacked_server(name, options.workers) as server:
        port = receiver.sockets[0].getsockname()[1]
        await loop.run_in_executor(None, prepare, server, name, port)
        if name == "history":
            # The workers have the rule after a moment.
            await asyncio.sleep(1.5)
            await fill_history(server)
        figures = await measure(server, name, options)
    receiver.close()
    for writer in held:
        writer.close()
    return figures


def row_of(name: str, figures: dict[str, Any]) -> list[object]:
    pong, grown = figures["during"].get("pong", {}), figures["grown_mb"]
    refused = ", ".join(f"{count} x {answer}" for answer, count in figures["answers"].items() if answer != "200")
    if figures["kept_connections_cut"]:
        refused = f"{refused}; {figures['kept_connections_cut']} connections cut".removeprefix("; ")
    return [
        name,
        f"{pong.get('max_ms', '-')}, {pong.get('p99_ms', '-')} ({pong.get('server_p99_ms', '-')})",
        f"{figures['refused']} of {figures['published']}" + (f": {refused}" if refused else ""),
        figures["publish_p99_ms"],
        figures["lost"],
        f"{grown['worker']:.0f}, {grown['control']:.0f}",
        f"{grown['redis']:.1f}",
        f"{grown['log']:.2f}",
        f"{grown['store']:.1f}",
        ", ".join(missed(figures)) or "none",
    ]


HEADS: Final = [
    "attack",
    "ping ms: worst, p99 (server)",
    "publishes refused",
    "publish p99 ms",
    "lost",
    "MB: worker, control",
    "Redis",
    "log",
    "store",
    "goals missed",
]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--good", type=int, default=GOOD, help="good clients")
    parser.add_argument("--share", type=float, default=1.0, help="of each attack's connections")
    options = parser.parse_args()
    results = {}
    for name in options.only or ATTACKS:
        results[name] = uvloop.run(attack(name, options))
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    print_table(HEADS, [row_of(name, figures) for name, figures in results.items()])
    if options.json is not None:
        save(options.json, "strangers", {"workers": options.workers, "seconds": options.seconds, **results})
    sys.exit(any(missed(figures) for figures in results.values()))


if __name__ == "__main__":
    main()
