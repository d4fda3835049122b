"""Webhook deliveries of 1,000 transitions per second to a fast receiver, while another endpoint never answers.

    python -m bench.load.webhooks [--rate 1000] [--seconds 30] [--no-dead] [--json FILE]

Measures the whole path: sockets join and leave channels of one server, so that each channel is occupied and, after a
second, vacated; both endpoints want all events. Latency counts from the time of the transition in the body (for leaves,
plus the debounce) until the receiver has the request. The receiver is a separate process; client, receiver and server
share the machine. Goals: every transition is delivered once (otherwise exit code 1), p99 below 250 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any, Self

import uvloop

from bench.arguments import parser_of
from bench.report import machine, percentile, print_table, save
from helpers.server import Server, cpu_s
from helpers.wire import Socket, connect_patiently

SOCKETS = 10
# A channel is held this long before it is left.
HELD_S = 1.0
# How long to wait after the last transition for deliveries under way.
PATIENCE_S = 60.0
TICK_S = 0.01
DEBOUNCE_S = 3.0
GOAL_P99_MS = 250
EVENTS = "channel.occupied,channel.vacated"


# -- the receiver, a process of its own ------------------------------------------------------------------------


class Fast(asyncio.Protocol):
    """Answers 200 at once, and notes in `heard` when it heard what."""

    def __init__(self, heard: list[tuple[float, bytes]]) -> None:
        self.heard = heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        now = time.time()
        self.buffer += data
        while True:
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if len(rest) < length:
                return
            self.heard.append((now, rest[:length]))
            self.buffer = rest[length:]
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


async def receive() -> None:
    """Tells both ports; for each line on stdin how much it has heard, and at the end of stdin all of it."""
    loop = asyncio.get_running_loop()
    heard: list[tuple[float, bytes]] = []
    fast = await loop.create_server(lambda: Fast(heard), "127.0.0.1", 0)
    dead = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    print(*(server.sockets[0].getsockname()[1] for server in (fast, dead)), flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(len(heard), flush=True)
    print(json.dumps([(at, body.decode()) for at, body in heard]))


class Receiver:
    """That process, seen from here."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", __spec__.name, "--receive"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.fast_port, self.dead_port = map(int, self._process.stdout.readline().split())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def count(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def heard(self) -> list[tuple[float, str]]:
        """Unix time and body of every delivery; the receiver ends with it."""
        out, _ = self._process.communicate()
        return [(at, body) for at, body in json.loads(out)]


# -- the transitions -------------------------------------------------------------------------------------------


async def transitions(server: Server, rate: float, seconds: float) -> int:
    """Half of `rate` joins and half of it leaves a second, each of a channel of its own; how many channels."""
    sockets: list[Socket] = [await connect_patiently(server) for _ in range(SOCKETS)]
    begun = time.monotonic()
    joined = left = 0
    count = int(rate * seconds / 2)
    while left < count:
        elapsed_s = time.monotonic() - begun
        while joined < min(count, elapsed_s * rate / 2):
            socket = sockets[joined % SOCKETS]
            socket.send(socket.subscribe_request(f"bench-{joined}"))
            joined += 1
        while left < min(count, (elapsed_s - HELD_S) * rate / 2):
            sockets[left % SOCKETS].unsubscribe(f"bench-{left}")
            left += 1
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*(socket.settle() for socket in sockets))
    await asyncio.gather(*(socket.close() for socket in sockets))
    return count


def create_endpoint(server: Server, port: int) -> None:
    # In the pusher format a transition's time is in ms.
    words = ["webhook", "create", server.app_id, f"http://127.0.0.1:{port}/", "--events", EVENTS, "--format", "pusher"]
    folder = ["--data-dir", str(server.folder / "data")]
    subprocess.run([sys.executable, "-m", "redpoll", *words, *folder], check=True, stdout=subprocess.DEVNULL)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "webhook_allow_http": 1,
        "webhook_allow_addresses": "127.0.0.0/8",
        "webhook_debounce_s": DEBOUNCE_S,
    }
    with Receiver() as receiver, Server(workers=1, **settings) as server:
        create_endpoint(server, receiver.fast_port)
        if not options.no_dead:
            create_endpoint(server, receiver.dead_port)
        # Every process knows a changed record within a second of the command's return.
        await asyncio.sleep(1)
        used_s = cpu_s(server.control_pid)
        channels = await transitions(server, options.rate, options.seconds)
        deadline = time.monotonic() + PATIENCE_S
        while receiver.count() < 2 * channels and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        used_s = cpu_s(server.control_pid) - used_s
        return figures(receiver.heard(), channels, used_s)


def figures(heard: list[tuple[float, str]], channels: int, used_s: float) -> dict[str, Any]:
    """What is printed, of the deliveries."""
    by_event: dict[str, list[float]] = {"channel_occupied": [], "channel_vacated": []}
    transitions, times = set(), []
    for at, body in heard:
        webhook = json.loads(body)
        (event,) = webhook["events"]
        happened_ms = webhook["time_ms"]
        due_ms = happened_ms + (DEBOUNCE_S * 1000 if event["name"] == "channel_vacated" else 0)
        by_event[event["name"]].append(at * 1000 - due_ms)
        transitions.add((event["name"], event["channel"]))
        times.append(happened_ms)
    return {
        "transitions": 2 * channels,
        "missing": 2 * channels - len(transitions),
        "repeated": len(heard) - len(transitions),
        # The leaves end a little after the joins.
        "per_s": round(len(transitions) / ((max(times) - min(times)) / 1000 - HELD_S)),
        "control_us_each": round(used_s / (2 * channels) * 1e6),
        "latency_ms": {name: percentiles(latencies) for name, latencies in by_event.items()},
    }


def percentiles(values: list[float]) -> dict[str, int]:
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "greatest": 1.0}
    return {name: round(percentile(Counter(values), share)) for name, share in at.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=1000.0, help="transitions a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--no-dead", action="store_true", help="without the endpoint that never answers")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        uvloop.run(receive())
        return
    about = machine()
    print(json.dumps(about))
    result = uvloop.run(measure(options))
    print(
        f"\n{result['transitions']} transitions at {result['per_s']}/s"
        f"{'' if options.no_dead else ', each to a dead endpoint too'}: {result['missing']} missing, "
        f"{result['repeated']} repeated; {result['control_us_each']} µs of the control plane's processor each\n"
    )
    print_table(
        ["latency, ms", "p50", "p90", "p99", "greatest"],
        ([event, *latencies.values()] for event, latencies in result["latency_ms"].items()),
    )
    print(f"\ngoal: none missing, none repeated; p99 < {GOAL_P99_MS} ms at 200 a second")
    if options.json is not None:
        save(options.json, "webhooks", result)
    if result["missing"] or result["repeated"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
