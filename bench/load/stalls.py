"""How long a worker's event loop stands still in situations that concern many channels or connections at once.

    python -m bench.load.stalls [--connections 6000] [--channels 30] [--only NAME ...] [--json FILE]

One redpoll with one worker and the embedded Redis. A crowd in a process of its own connects, and subscribes each of its
connections to that many channels of its own and to one that all share. Then one situation after the other happens.
Meanwhile three probes, each a process with a connection of its own, measure what other clients see:

- stall: the longest wait for the answer to a WebSocket ping, one after the other. A pass of the loop that takes long
  makes the ping wait just as long. It contains the probe's own wait for a processor: compare with the row "quiet".
- subscribe: the longest time in which a new client connected and got `subscription_succeeded` for a new channel.
- publish: the longest answer time of `POST /events` for a channel without subscribers.

The probes notice whatever else this machine does. These figures don't:

- stall cpu, subscribe cpu: the most processor time that the worker used while a probe waited once. It is what the probe
  waits if the worker has a core for itself.
- worker, control: the longest pass of the process' event loop by its own processor time (bench/load/passes.py).

A situation ends when its action is done and the crowd has received nothing for 2 s. Every situation is bounded
(`--bound`). Ends with exit code 1 if a connection of the crowd was lost or refused where it should not have been.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import parser_of
from bench.driver import Address, socket_from
from bench.load.passes import Passes, ProfiledServer
from bench.report import machine, print_table, save

# load.py has put the folder of the tests on the path.
from helpers.server import cpu_s
from helpers.wire import signed_path, upgrade_request
from redpoll.cluster.redis.keys import SHARDS, Keys

SHARED = "all"
QUIET_S = 2.0
FIGURES = ("worker_ms", "control_ms", "stall_cpu_ms", "subscribe_cpu_ms", "stall_ms", "subscribe_ms", "publish_ms")
# Connections of the crowd under way at a time, and subscribes of one of them.
AT_ONCE = 100
# Clients of one source address (`socket_from`).
CLIENTS_PER_ADDRESS = 5_000
PING = b"\x89\x80\0\0\0\0"
PONG = b"\x8a\0"
WORD = b'subscription_succeeded"'
ESTABLISHED = b"connection_established"
SETTINGS = {"activity_timeout_s": 600, "webhook_allow_addresses": "127.0.0.1"}


def text(payload: bytes) -> bytes:
    """A client's frame, masked with zeros: nothing has to be computed."""
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return b"\x81" + size + b"\0\0\0\0" + payload


def subscribe(channel: str) -> bytes:
    return text(b'{"event":"pusher:subscribe","data":{"channel":"%s"}}' % channel.encode())


# -- the crowd ---------------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One connection of the crowd. `done` is set when all its subscribes were answered, or the connection ended."""

    __slots__ = ("answers", "channels", "crowd", "done", "leaving", "tail", "transport")

    def __init__(self, crowd: Crowd, channels: list[str]) -> None:
        self.crowd = crowd
        self.channels = channels
        self.answers = 0
        self.tail = b""
        self.leaving = False
        self.done = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.crowd.upgrade)

    def data_received(self, data: bytes) -> None:
        self.crowd.heard_at = time.monotonic()
        self.crowd.bytes += len(data)
        if self.done.done():
            return
        data = self.tail + data
        if ESTABLISHED in data:
            self.transport.write(b"".join(map(subscribe, self.channels)))
        self.answers += data.count(WORD)
        # A word that is cut in two is counted with the next bytes, and a whole one not again.
        end = data.rfind(WORD)
        self.tail = data[max(end + 1, len(data) - len(WORD) + 1) :]
        if self.answers >= len(self.channels):
            self.tail = b""
            self.done.set_result(True)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.leaving:
            self.crowd.lost += 1
        if not self.done.done():
            self.done.set_result(False)


class Crowd:
    """Runs in a process of its own. Each message over the pipe is one of its methods, and the answer its result."""

    def __init__(self, pipe: Pipe, address: Address, channels: int) -> None:
        self.pipe, self.address, self.channels = pipe, address, channels
        self.upgrade = upgrade_request(address)
        self.clients: dict[int, Client] = {}
        self.bytes = self.lost = 0
        self.heard_at = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            readable = loop.create_future()
            loop.add_reader(self.pipe.fileno(), readable.set_result, None)
            await readable
            loop.remove_reader(self.pipe.fileno())
            try:
                name, *values = self.pipe.recv()
            except EOFError:
                return
            self.pipe.send(await getattr(self, name)(*values))

    async def come(self, numbers: range, within_s: float) -> dict[str, Any]:
        """Connects and subscribes the clients of these numbers. Who is lost on the way tries again."""
        waiting, slowest, retries = iter(numbers), 0.0, 0
        began = time.monotonic()

        async def line() -> None:
            nonlocal slowest, retries
            for number in waiting:
                at = time.monotonic()
                while time.monotonic() - began < within_s:
                    if await self._connect(number):
                        break
                    retries += 1
                    await asyncio.sleep(0.1)
                slowest = max(slowest, time.monotonic() - at)

        await asyncio.gather(*(line() for _ in range(AT_ONCE)))
        return {
            "seconds": time.monotonic() - began,
            "slowest_s": slowest,
            "retries": retries,
            "connected": len(self.clients),
        }

    async def _connect(self, number: int) -> bool:
        channels = [SHARED, *(f"own-{number}-{place}" for place in range(self.channels))]
        lost = self.lost
        loop = asyncio.get_running_loop()
        sock = socket_from(f"127.0.0.{2 + number // CLIENTS_PER_ADDRESS}")
        try:
            await loop.sock_connect(sock, (self.address.host, self.address.port))
            _, client = await loop.create_connection(lambda: Client(self, channels), sock=sock)
        except OSError:
            sock.close()
            return False
        if await client.done:
            self.clients[number] = client
            return True
        # It is tried again, so it isn't lost.
        self.lost = max(lost, self.lost - 1)
        return False

    async def leave(self, numbers: range) -> None:
        for number in numbers:
            client = self.clients.pop(number, None)
            if client is not None:
                client.leaving = True
                client.transport.abort()

    async def expect_end(self) -> None:
        """The server is about to close all connections."""
        for client in self.clients.values():
            client.leaving = True
        self.clients.clear()

    async def state(self) -> dict[str, Any]:
        return {"silent_s": time.monotonic() - self.heard_at, "bytes": self.bytes, "lost": self.lost}


def crowd(pipe: Pipe, address: Address, channels: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(Crowd(pipe, address, channels).run())


# -- probes ------------------------------------------------------------------------------------------------------


class Peer:
    """A blocking WebSocket connection."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.socket = socket.create_connection((address.host, address.port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        try:
            self.socket.sendall(upgrade_request(address))
            self.read_until(ESTABLISHED)
        except OSError:
            self.socket.close()
            raise

    def read_until(self, word: bytes) -> None:
        while word not in self.received:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self.received += data
        self.received = self.received[self.received.index(word) + len(word) :]


def ping_probe(address: Address) -> Callable[[], None]:
    """Asks again at once: the worker is never observed less than every ms."""
    peer: list[Peer] = []

    def ask() -> None:
        if not peer:
            peer.append(Peer(address, 60.0))
        try:
            peer[0].socket.sendall(PING)
            peer[0].read_until(PONG)
        except OSError:
            peer.clear()
        time.sleep(0.001)

    return ask


def subscribe_probe(address: Address) -> Callable[[], None]:
    number = iter(range(1 << 30))

    def ask() -> None:
        # A refused or closed connection is tried again at once, as clients do: the time counts on.
        until = time.monotonic() + 60.0
        channel = f"new-{os.getpid()}-{next(number)}"
        while time.monotonic() < until:
            try:
                peer = Peer(address, 60.0)
            except OSError:
                time.sleep(0.01)
                continue
            with peer.socket:
                try:
                    peer.socket.sendall(subscribe(channel))
                    peer.read_until(WORD)
                    return
                except OSError:
                    time.sleep(0.01)

    def ask_and_wait() -> None:
        ask()
        time.sleep(0.05)

    return ask_and_wait


def publish_probe(address: Address) -> Callable[[], None]:
    body = json.dumps({"name": "event", "channel": "nobody", "data": "{}"}).encode()
    headers = {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(address.host, address.port, timeout=60.0)

    def ask() -> None:
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            path = signed_path(address, "POST", f"/apps/{address.app_id}/events", body)
            try:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    break
            except (OSError, http.client.HTTPException):
                connection.close()
            time.sleep(0.01)
        time.sleep(0.02)

    return ask


PROBES = {"stall": ping_probe, "subscribe": subscribe_probe, "publish": publish_probe}


def probe(pipe: Pipe, address: Address, name: str, worker_pid: int) -> None:
    """Asks in a loop. For each message over the pipe answers with the longest time since the message before, and the
    most processor time that the worker used during one ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ask = PROBES[name](address)
    # The sleep at the end of an ask is none of the server's.
    pause = {"stall": 0.001, "subscribe": 0.05, "publish": 0.02}[name]
    longest = longest_cpu = 0.0
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            began, cpu = time.monotonic(), ran_s(worker_pid)
            ask()
            longest = max(longest, time.monotonic() - began - pause)
            longest_cpu = max(longest_cpu, ran_s(worker_pid) - cpu)
            if pipe.poll():
                pipe.recv()
                pipe.send((longest, longest_cpu))
                longest = longest_cpu = 0.0


def ran_s(pid: int) -> float:
    """The processor time of a process' first thread, exact to a tick of the kernel."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


# -- situations --------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, server: ProfiledServer, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.address = Address.parse(server.pusher_url)
        self.crowd_lost = 0
        self.rows: list[dict[str, Any]] = []
        self.webhook_id: Any = None
        self.passes = Passes(server)
        self._processes: list[multiprocessing.Process] = []
        self._crowd = self._child(crowd, self.address, options.channels)
        self._probes: dict[str, Pipe] = {}

    def _child(self, work: Callable[..., None], *values: Any) -> Pipe:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=work, args=(theirs, *values), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10)

    def tell(self, name: str, *values: Any) -> Any:
        self._crowd.send((name, *values))
        return self._crowd.recv()

    def start_probes(self) -> None:
        # Clients of another app: they must notice nothing of what happens to this one.
        made = json.loads(self.command("app", "create", "probes", "--json"))
        self.probed = Address(self.address.host, self.address.port, made["id"], made["key"], made["secret"])
        pid = self.server.worker_pids()[0]
        self._probes = {name: self._child(probe, self.probed, name, pid) for name in PROBES}

    def longest(self) -> dict[str, tuple[float, float]]:
        for pipe in self._probes.values():
            pipe.send(None)
        return {name: pipe.recv() for name, pipe in self._probes.items()}

    def settle(self) -> None:
        until = time.monotonic() + self.options.bound
        while time.monotonic() < until and self.tell("state")["silent_s"] < QUIET_S:
            time.sleep(0.1)

    def measure(self, name: str, what: str, act: Callable[[], str | None], *, settles: bool = True) -> None:
        if self.options.only and name not in self.options.only:
            return
        self.longest()
        began = time.monotonic()
        note = act() or ""
        if settles:
            self.settle()
        until = time.monotonic()
        figures = self.longest()
        lost = self.tell("state")["lost"]
        row = {
            "situation": name,
            "what": what,
            "seconds": round(until - began, 1),
            **{f"{probe}_ms": round(wall * 1000, 1) for probe, (wall, _) in figures.items()},
            **{f"{probe}_cpu_ms": round(cpu * 1000, 1) for probe, (_, cpu) in figures.items()},
            "lost": lost - self.crowd_lost,
            "note": note,
        }
        # The processes write their lines four times a second.
        time.sleep(0.4)
        for name, pid in (("worker", self.server.worker_pids()[0]), ("control", self.server.control_pid)):
            passes = self.passes.longest(pid, began, until)
            row |= {f"{name}_ms": passes["ms"], f"{name}_over_20_ms": passes["over_20_ms"]}
            row[f"{name}_parts"] = passes["parts"]
        self.crowd_lost = lost
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    # What happens.

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "redpoll", *words, "--data-dir", str(self.server.folder / "data")],
            env=self.server.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"redpoll {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def setting(self, assignment: str) -> None:
        self.command("app", "set", self.server.app_id, assignment)

    def other_app(self) -> None:
        self.command("app", "create", "another")

    def webhook(self) -> None:
        # Nothing listens there: the deliveries are control's business.
        words = ("webhook", "create", self.server.app_id, "https://127.0.0.1:9/", "--events", "channel.occupied")
        self.webhook_id = json.loads(self.command(*words, "--json"))["id"]

    def no_webhook(self) -> None:
        self.command("webhook", "delete", str(self.webhook_id))

    def request(self, method: str, path: str, body: bytes = b"") -> str:
        target = signed_path(self.address, method, f"/apps/{self.address.app_id}{path}", body)
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=60.0)
        began = time.monotonic()
        connection.request(method, target, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        size = len(answer.read())
        connection.close()
        return f"{answer.status}, {size:,} B in {(time.monotonic() - began) * 1000:.0f} ms"

    def list_connections(self) -> None:
        """As the dashboard's page of connections does, with a search that finds nothing."""
        # Servers before `type` read `ask`.
        question = {"type": "ListConnections", "ask": "connections", "id": "0" * 16, "app": "", "find": "nothing here"}
        with self.server.redis() as redis:
            topic = next(name for name in redis.pubsub_channels() if name.endswith(b":sys"))
            for _ in range(3):
                redis.publish(topic, json.dumps(question))
                time.sleep(0.5)

    def event_to_all(self) -> str:
        body = json.dumps(
            {"batch": [{"name": "event", "channel": SHARED, "data": "x" * 100} for _ in range(10)]}
        ).encode()
        return self.request("POST", "/batch_events", body)

    def leave_and_return(self, share: float) -> str:
        numbers = range(math.ceil(self.options.connections * share))
        self.tell("leave", numbers)
        back = self.tell("come", numbers, self.options.bound)
        return (
            f"back in {back['seconds']:.1f} s, slowest {back['slowest_s']:.2f} s, {back['retries']} attempts repeated, "
            f"{back['connected']:,} connected"
        )

    def leave(self) -> None:
        self.tell("leave", range(self.options.connections))
        self.until_channels(lambda count: count < 10)

    def until_channels(self, enough: Callable[[int], bool]) -> None:
        until = time.monotonic() + self.options.bound
        keys = [Keys().occupied(at, self.server.app_id) for at in range(SHARDS)]
        with self.server.redis() as redis:
            while time.monotonic() < until:
                pipeline = redis.pipeline(transaction=False)
                for key in keys:
                    pipeline.scard(key)
                if enough(sum(pipeline.execute())):
                    return
                time.sleep(0.2)

    def restart_redis(self) -> str:
        opened = self.times_open()
        os.kill(self.server.redis_pid, signal.SIGKILL)
        began = time.monotonic()
        answers = 0.0
        while time.monotonic() - began < self.options.bound:
            with contextlib.suppress(Exception), self.server.redis() as redis:
                redis.ping()
                answers = time.monotonic() - began
                break
            time.sleep(0.02)
        while self.times_open() == opened and time.monotonic() - began < self.options.bound:
            time.sleep(0.05)
        whole = time.monotonic() - began
        return f"Redis answers again after {answers:.1f} s, everything is asserted after {whole:.1f} s"

    def times_open(self) -> int:
        """How often the worker has said that Redis knows all it holds."""
        return (self.server.folder / "err").read_text(errors="replace").count("state changed state=open")

    def disable(self) -> str:
        self.tell("expect_end")
        self.setting("enabled=false")
        return "all connections are closed with 4003"


def situations(bench: Bench) -> None:
    measure, share = bench.measure, 0.4
    measure("quiet", "nothing happens for 12 s", lambda: time.sleep(12), settles=False)
    measure("other-app", "another app is created", bench.other_app)
    measure("webhook", "the first webhook of the app is created", bench.webhook)
    measure("webhook-off", "it is deleted", bench.no_webhook)
    measure("count-on", "subscription_count is turned on", lambda: bench.setting("subscription_count=true"))
    measure("count-off", "subscription_count is turned off", lambda: bench.setting("subscription_count=false"))
    measure("channels", "GET /channels", lambda: bench.request("GET", "/channels"))
    measure("connections", "connections are searched, 3 times", bench.list_connections)
    measure("event", "10 events in one request to a channel that all have", bench.event_to_all)
    measure("40-percent", "40 % of the connections leave and come back", lambda: bench.leave_and_return(share))
    measure("redis", "Redis is killed and restarted", bench.restart_redis)
    measure("all-leave", "all connections leave at once", bench.leave)
    measure("all-return", "all connections come back", lambda: bench.leave_and_return(1.0))
    measure("disabled", "the app is disabled", bench.disable, settles=False)
    time.sleep(1.0)


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Bench]:
    with ProfiledServer(workers=1, **SETTINGS) as server:
        bench = Bench(server, options)
        try:
            yield bench
        finally:
            bench.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--connections", type=int, default=6000)
    parser.add_argument("--channels", type=int, default=30, help="channels of its own that each connection subscribes")
    parser.add_argument("--only", nargs="*", default=[], help="names of situations")
    parser.add_argument("--bound", type=float, default=90.0, help="most seconds of one situation")
    options = parser.parse_args()
    with running(options) as bench:
        about = machine()
        print(json.dumps(about), flush=True)
        pid = bench.server.worker_pids()[0]
        before = cpu_s(pid)
        came = bench.tell("come", range(options.connections), 300.0)
        worker_us = (cpu_s(pid) - before) * 1e6
        joins = options.connections * (options.channels + 1)
        print(
            f"{came['connected']:,} connections with {joins:,} subscriptions in {came['seconds']:.1f} s: "
            f"{joins / came['seconds']:,.0f} subscribes/s, {worker_us / joins:.0f} µs of the worker each; "
            f"{came['retries']} attempts repeated",
            flush=True,
        )
        bench.start_probes()
        bench.settle()
        situations(bench)
    heads = ("situation", "what", "seconds", *FIGURES, "lost", "note")
    print_table(heads, ([row[head] for head in heads] for row in bench.rows))
    if options.json is not None:
        save(options.json, "stalls", {"connections": options.connections, "joins": joins, "rows": bench.rows})
    if any(row["lost"] for row in bench.rows):
        sys.exit("connections of the crowd were lost")


if __name__ == "__main__":
    main()
