"""One anonymous client floods a server that 1,000 good clients use: what they notice, what Redis does, what is left.

    python -m bench.load.floods [--good 1000] [--seconds 8] [--workers 2] [--json FILE]

Two floods, each on a fresh redpoll whose app stores the messages of all channels. `pairs` subscribes to 500 channels
and leaves them, again and again; `names` does the same with new names each time. Both send as fast as the server reads,
at the lowest priority of this machine, and connect again at once when they are closed. The good clients are in a
channel each: every one sends a ping a second, some subscribe again, and events are published to them. Their times are
measured first alone, then during the flood. `server_p99_ms` is the processor time that the server used while a client
waited: the client's worker, for subscribes also Redis, for events also control. It is about what the client waits on a
machine with a core for each of them, whatever else this one does. Redis' figures are those of the flood;
`longest_pass_ms` is the longest pass of a worker's loop by its own processor time (bench/load/passes.py); `left` are
Redis' keys afterwards, beyond those from before.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import aiohttp
import uvloop

from bench.arguments import parser_of
from bench.driver import Address
from bench.load.passes import Passes, ProfiledServer
from bench.report import save
from helpers.server import cpu_s
from helpers.wire import signed_path

RULE_SECONDS = 3_600
_PUBLISHES_PER_S = 50
_SUBSCRIBES_PER_S = 20
_PAIRS_A_PIECE = 500


def frame(event: str, **data: object) -> bytes:
    """A client's text frame, with a mask of zeros."""
    payload = json.dumps({"event": event, "data": data}).encode()
    if len(payload) < 126:
        return bytes((0x81, 0x80 | len(payload), 0, 0, 0, 0)) + payload
    return bytes((0x81, 0xFE)) + len(payload).to_bytes(2, "big") + bytes(4) + payload


def upgrade(key: str) -> bytes:
    nonce = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET /app/{key}?protocol=7&client=bench HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {nonce}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


PING = frame("pusher:ping")


class Clock:
    """The processor time that a process has used, in seconds, exact to a tick of the kernel."""

    def __init__(self, pid: int) -> None:
        self._file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)

    def __call__(self) -> float:
        return int(os.pread(self._file, 32, 0).split()[0]) / 1e9


class Times:
    """What good clients waited for, in seconds, by kind."""

    def __init__(self) -> None:
        self.waited: dict[str, list[float]] = {"pong": [], "subscribe": [], "event": []}
        self.ran: dict[str, list[float]] = {"pong": [], "subscribe": [], "event": []}
        self.late = 0

    def note(self, kind: str, waited_s: float, ran_s: float) -> None:
        self.waited[kind].append(waited_s)
        self.ran[kind].append(ran_s)

    def figures(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"lost": self.late}
        for kind, values in self.waited.items():
            ordered, ran = sorted(values), sorted(self.ran[kind])
            if ordered:
                p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
                summary[kind] = {
                    "p50_ms": round(p50 * 1000, 1),
                    "p99_ms": round(p99 * 1000, 1),
                    "max_ms": round(ordered[-1] * 1000, 1),
                    "server_p50_ms": round(ran[len(ran) // 2] * 1000, 1),
                    "server_p99_ms": round(ran[int(len(ran) * 0.99)] * 1000, 1),
                    "count": len(ordered),
                }
        return summary


class Good(asyncio.Protocol):
    """A good client. `times` is replaced between the phases. `clocks` are of its worker, Redis and control."""

    clocks: tuple[Clock, Clock, Clock]

    def __init__(self, key: str, number: int, times: list[Times]) -> None:
        self.channel = f"good-{number}"
        self.ready = asyncio.get_running_loop().create_future()
        self._key = key
        self._times = times
        self._received = b""
        self._upgraded = False
        self._pinged = self._subscribed = 0.0
        self._ran_at_ping = self._ran_at_subscribe = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(upgrade(self._key))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._upgraded:
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self._upgraded, self._received = True, rest
            self.subscribe()
        while (message := self._next()) is not None:
            self._message(message)

    def _next(self) -> bytes | None:
        received = self._received
        if len(received) < 2:
            return None
        size, start = received[1], 2
        if size == 126:
            size, start = int.from_bytes(received[2:4], "big"), 4
        if len(received) < start + size:
            return None
        self._received = received[start + size :]
        return received[start : start + size]

    def _message(self, message: bytes) -> None:
        now, note = time.perf_counter(), self._times[0].note
        if message.startswith(b'{"event":"pusher:pong"'):
            note("pong", now - self._pinged, self._ran(1) - self._ran_at_ping)
            self._pinged = 0.0
        elif b"subscription_succeeded" in message[:60]:
            if self.ready.done():
                note("subscribe", now - self._subscribed, self._ran(2) - self._ran_at_subscribe)
            else:
                self.ready.set_result(None)
            self._subscribed = 0.0
        elif message.startswith(b'{"event":"sent"'):
            published, ran = map(float, json.loads(message)["data"].split())
            note("event", now - published, self._ran(3) - ran)

    def _ran(self, processes: int) -> float:
        return sum(clock() for clock in self.clocks[:processes])

    def connection_lost(self, error: Exception | None) -> None:
        self._times[0].late += 1

    def ping(self) -> None:
        if not self._pinged:
            self._pinged, self._ran_at_ping = time.perf_counter(), self._ran(1)
            self.transport.write(PING)

    def subscribe(self) -> None:
        if not self._subscribed:
            self._subscribed, again = time.perf_counter(), b""
            if self.ready.done():
                self._ran_at_subscribe = self._ran(2)
                again = frame("pusher:unsubscribe", channel=self.channel)
            self.transport.write(again + frame("pusher:subscribe", channel=self.channel))

    def publish_data(self) -> str:
        """What an event's data says when it is published now."""
        return f"{time.perf_counter()!r} {self._ran(3)!r}"


async def use(goods: list[Good], address: Address, seconds: float) -> None:
    """Pings, subscribes and publishes for some seconds."""
    began, loop = time.perf_counter(), asyncio.get_running_loop()
    pings, subscribes = itertools.cycle(goods), itertools.cycle(goods)
    pinged = subscribed = published = 0
    publishes: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (passed := time.perf_counter() - began) < seconds:
            for _ in range(int(passed * len(goods)) - pinged):
                next(pings).ping()
                pinged += 1
            for _ in range(int(passed * _SUBSCRIBES_PER_S) - subscribed):
                next(subscribes).subscribe()
                subscribed += 1
            for _ in range(int(passed * _PUBLISHES_PER_S) - published):
                # Not to those that are about to subscribe again.
                good = goods[-1 - published % (len(goods) // 2)]
                publishes.add(loop.create_task(publish(session, address, good)))
                published += 1
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.5)
        for task in publishes:
            task.cancel()
        await asyncio.gather(*publishes, return_exceptions=True)


async def publish(session: aiohttp.ClientSession, address: Address, good: Good) -> None:
    body = json.dumps({"name": "sent", "channel": good.channel, "data": good.publish_data()}).encode()
    path = signed_path(address, "POST", f"/apps/{address.app_id}/events", body)
    url = f"http://{address.host}:{address.port}{path}"
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
        await answer.read()


def attack(flood: str, port: int, key: str) -> None:
    """The hostile client, in a process of its own, until it is ended."""
    # From another machine it would take no processor time of the good ones.
    os.nice(19)
    # Subscribes and unsubscribes apart: together in one read they would cancel each other before Redis hears of them.
    starts: Iterable[int] = itertools.repeat(0) if flood == "pairs" else itertools.count(0, _PAIRS_A_PIECE)
    connects = sent = 0
    print(connects, sent, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(OSError):
                connects += 1
                client.sendall(upgrade(key))
                for start in starts:
                    names = [f"flood-{number}" for number in range(start, start + _PAIRS_A_PIECE)]
                    for event in ("pusher:subscribe", "pusher:unsubscribe"):
                        client.sendall(b"".join(frame(event, channel=name) for name in names))
                        time.sleep(0.005)
                    sent += len(names)
                    print(connects, sent, flush=True)
                    if _is_closed(client):
                        break


def _is_closed(client: socket.socket) -> bool:
    """Reads what the server sent. True: it closed the connection, or sent its last frame."""
    with contextlib.suppress(BlockingIOError):
        while received := client.recv(65_536, socket.MSG_DONTWAIT):
            if b"Too many invalid messages" in received:
                return True
        return True
    return False


def keys_of(redis: Any) -> Counter[str]:
    """The number of keys by kind."""
    return Counter(key.split(b":")[2].decode() for key in redis.scan_iter(count=1_000))


def scripts_of(redis: Any) -> int:
    return sum(
        stat["calls"]
        for name, stat in redis.info("commandstats").items()
        if name in ("cmdstat_evalsha", "cmdstat_fcall", "cmdstat_evalsha_ro")
    )


async def measure(server: ProfiledServer, flood: str, options: argparse.Namespace) -> dict[str, Any]:
    address = Address.parse(server.pusher_url)
    times, passes = [Times()], Passes(server)
    loop = asyncio.get_running_loop()
    goods = []
    for number in range(options.good):
        _, good = await loop.create_connection(
            lambda number=number: Good(address.app_key, number, times), address.host, address.port
        )
        goods.append(good)
        await good.ready
    redis_clock, control_clock = Clock(server.redis_pid), Clock(server.control_pid)
    clocks = {pid: Clock(pid) for pid in server.worker_pids()}
    clock_of = {port: clocks[pid] for pid, ports in server.client_ports().items() for port in ports}
    for good in goods:
        port = good.transport.get_extra_info("sockname")[1]
        good.clocks = clock_of[port], redis_clock, control_clock
    times[0] = Times()
    await use(goods, address, options.seconds)
    alone, times[0] = times[0], Times()
    with server.redis() as redis:
        keys, memory = keys_of(redis), redis.info("memory")["used_memory"]
        before, scripts, used_s = redis.info(), scripts_of(redis), [cpu_s(pid) for pid in server.worker_pids()]
        command = [sys.executable, "-m", __spec__.name, "--attack", flood, str(address.port), address.app_key]
        attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert attacker.stdout is not None
        await attacker.stdout.readline()
        began, began_at = time.perf_counter(), time.monotonic()
        try:
            await use(goods, address, options.seconds)
        finally:
            attacker.terminate()
            output, _ = await attacker.communicate()
        took_s = time.perf_counter() - began
        until = time.monotonic()
        after = redis.info()
        workers_s = sum(cpu_s(pid) for pid in server.worker_pids()) - sum(used_s)
        redis_s = sum(after[name] - before[name] for name in ("used_cpu_sys", "used_cpu_user"))
        scripts = scripts_of(redis) - scripts
        during, times[0] = times[0], Times()
        # Leaves are carried out, and nothing is under way any more.
        await asyncio.sleep(2)
        left = keys_of(redis) - keys
        grown = redis.info("memory")["used_memory"] - memory
        longest_s = max((redis.ttl(key) for key in redis.scan_iter("*:hm:*:flood*", count=1_000)), default=0)
    for good in goods:
        good.transport.abort()
    lines = output.decode().split("\n")
    connects, sent = lines[-2].split() if len(lines) > 1 else ("0", "0")
    return {
        "good_alone": alone.figures(),
        "good_during": during.figures(),
        "attacker": {"pairs_per_s": round(int(sent) / took_s), "connects": int(connects)},
        "redis": {
            "scripts_per_s": round(scripts / took_s),
            "commands_per_s": round((after["total_commands_processed"] - before["total_commands_processed"]) / took_s),
            "cpu_percent": round(redis_s / took_s * 100, 1),
        },
        "workers_cpu_percent": round(workers_s / took_s * 100, 1),
        "longest_pass_ms": max(passes.longest(pid, began_at, until)["ms"] for pid in server.worker_pids()),
        "left": {"keys": dict(left), "bytes": grown, "longest_ttl_s": longest_s},
    }


def run_flood(flood: str, options: argparse.Namespace) -> dict[str, Any]:
    with ProfiledServer(workers=options.workers) as server:
        rule = ["history", "rule", "add", server.app_id, "--prefix", "", "--keep", "10", "--seconds", str(RULE_SECONDS)]
        command = [sys.executable, "-m", "redpoll", *rule, "--data-dir", str(server.folder / "data")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        time.sleep(1.5)
        return uvloop.run(measure(server, flood, options))


def main() -> None:
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--good", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--flood", choices=["pairs", "names"], action="append", help="only this one")
    options = parser.parse_args()
    figures = {}
    for flood in options.flood or ["pairs", "names"]:
        figures[flood] = run_flood(flood, options)
        print(flood)
        for name, value in figures[flood].items():
            print(f"  {name}: {json.dumps(value)}")
    if options.json is not None:
        save(options.json, "floods", {"good": options.good, "workers": options.workers, **figures})


if __name__ == "__main__":
    main()
