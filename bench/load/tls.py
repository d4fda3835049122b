"""What TLS costs: connections, handshakes, deliveries, beside a server in C that only calls OpenSSL.

    python -m bench.load.tls [--connections 5000] [--handshakes 3000] [--rounds 200] [--only memory] [--json FILE]

One worker, and bench/load/bare_tls.c with the same certificate (ECDSA P-256); clients are bench/load/tls_crowd.c. Both
are measured in turns, by the processor time of the worker and of the C server. Not measured: wall times.

- idle: growth of the resident set for a subscribed connection; traffic: after 20 events and a ping.
- begun, half: the same for a connection that has sent half of its first message, or all of it, and doesn't go on. Each
  row of memory has servers of its own, because a process uses what earlier connections left.
- full, resumed: connect, handshake, upgrade and subscribe.
- single, batch: deliveries to 1,000 clients, one event at a time, and ten in one SSL_write.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from bench.arguments import parser_of
from bench.driver import Address, compiled, data_of, frame_bytes, publish_request, tls_settings
from bench.load.stalls import ran_s
from bench.report import machine, print_table, save
from helpers.server import Server, rss_bytes

CHANNEL = "tls"
SUBSCRIBERS = 1000
WARM = 100
AT_ONCE = 64
HALF = 500
PARTS = ("memory", "handshakes", "deliveries")
# Smallest shares of the C server's speed, and largest of its memory.
GOALS = {"idle": 1.3, "traffic": 1.4, "full": 0.75, "resumed": 0.75, "single": 0.85, "batch": 0.85}


class Process:
    """A program that answers each line on stdin by one on stdout."""

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a program in C has ended: {self._process.args} {self._process.wait(10)}")
        return [int(word) for word in line.split() if word.isdigit()]

    def ask(self, *words: object) -> list[int]:
        self.say(*words)
        return self.hear()


class Side:
    """One of the two servers: its process, its port, and how to send `frames` events to all clients at once."""

    def __init__(self, pid: int, port: int, key: str, send: Callable[[int], None], program: Path) -> None:
        self.pid, self.port, self.key, self.send, self.program = pid, port, key, send, program

    @contextmanager
    def crowd(self) -> Iterator[Process]:
        with Process(self.program, "127.0.0.1", self.port, self.key, CHANNEL) as crowd:
            yield crowd

    def deliver(self, crowd: Process, frames: int, clients: int) -> None:
        """Until all have got it."""
        crowd.ask("expect", frames * clients * frame_bytes(CHANNEL))
        self.send(frames)
        if crowd.hear() != [0]:
            raise SystemExit("a client was lost")

    def memory(self, connections: int, *, traffic: bool) -> float:
        """Bytes of each connection; with `traffic` after 20 events and a ping."""
        with self.crowd() as crowd:
            crowd.ask("open", WARM, AT_ONCE, 0)
            before = rss_bytes(self.pid)
            crowd.ask("open", connections, AT_ONCE, 0)
            if traffic:
                for _ in range(20):
                    self.deliver(crowd, 1, connections)
                crowd.ask("ping")
            time.sleep(1)
            used = rss_bytes(self.pid) - before
            crowd.ask("close")
        return used / (connections - WARM)

    def half(self, *, whole: bool) -> float:
        """Bytes of each connection that has sent its first message; with `whole` false, half of it."""
        with self.crowd() as crowd:
            # A process's first handshake costs more than the others.
            crowd.ask("open", 1, 1, 0)
            before = rss_bytes(self.pid)
            if crowd.ask("hello", HALF, int(whole)) != [0]:
                raise SystemExit("a half handshake was lost")
            time.sleep(1)
            held = rss_bytes(self.pid) - before
            crowd.ask("close")
        return held / HALF

    def handshakes(self, count: int, *, resumed: bool) -> float:
        """Microseconds of the processor for each."""
        with self.crowd() as crowd:
            crowd.ask("open", WARM, 1, 0)
            before = ran_s(self.pid)
            _, were_resumed, lost = crowd.ask("open", WARM + count, AT_ONCE, int(resumed))
            took_s = ran_s(self.pid) - before
            if lost or were_resumed != count * resumed:
                raise SystemExit(f"{lost} clients were lost, {were_resumed} of {count} resumed")
            crowd.ask("close")
        return took_s / count * 1e6

    def deliveries(self, rounds: int) -> dict[str, float]:
        costs = {}
        with self.crowd() as crowd:
            crowd.ask("open", SUBSCRIBERS, AT_ONCE, 0)
            for name, frames in (("single", 1), ("batch", 10)):
                self.deliver(crowd, frames, SUBSCRIBERS)
                before = ran_s(self.pid)
                for _ in range(rounds):
                    self.deliver(crowd, frames, SUBSCRIBERS)
                costs[name] = (ran_s(self.pid) - before) / (rounds * frames * SUBSCRIBERS) * 1e6
            crowd.ask("close")
        return costs


class Publisher:
    """Publishes through the port without TLS."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def send(self, frames: int) -> None:
        """On a connection of its own, because an idle one is closed after a while."""
        with socket.create_connection((self._address.host, self._address.port), 60.0) as connection:
            connection.sendall(publish_request(self._address, [(CHANNEL, data_of(0, 0))] * frames))
            if b" 200 " not in (answer := connection.recv(65536)):
                raise SystemExit(f"a publish was answered {answer!r}")


@contextmanager
def sides() -> Iterator[dict[str, Side]]:
    with tempfile.TemporaryDirectory(prefix="rptls") as name, tls_settings(True) as settings:
        folder = Path(name)
        pair = folder / "pair.pem"
        pair.write_bytes(Path(str(settings["tls_key"])).read_bytes() + Path(str(settings["tls_cert"])).read_bytes())
        for program in ("bare_tls", "tls_crowd"):
            compiled(f"{program}.c", folder / program, tls=True)
        with Server(workers=1, **settings) as server, Process(folder / "bare_tls", pair) as bare:
            address = Address.of(server)
            (port,) = bare.hear()

            def write(frames: int) -> None:
                bare.ask("write", frames, frame_bytes(CHANNEL))

            (worker,) = server.worker_pids()
            crowd = folder / "tls_crowd"
            yield {
                "redpoll": Side(worker, address.tls_port, address.app_key, Publisher(address).send, crowd),
                "bare": Side(bare.pid, port, "key", write, crowd),
            }


MEMORY: dict[str, Callable[[Side, int], float]] = {
    "begun": lambda side, _: side.half(whole=False),
    "half": lambda side, _: side.half(whole=True),
    "idle": lambda side, connections: side.memory(connections, traffic=False),
    "traffic": lambda side, connections: side.memory(connections, traffic=True),
}


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, list[float]]] = {}

    def note(row: str, name: str, value: float) -> None:
        rows.setdefault(row, {}).setdefault(name, []).append(value)

    for row, figure in MEMORY.items() if "memory" in options.only else ():
        with sides() as both:
            for name, side in both.items():
                note(row, name, figure(side, options.connections))
    with sides() as both:
        for name, side in [*both.items()] * options.repeat:
            if "handshakes" in options.only:
                note("full", name, side.handshakes(options.handshakes, resumed=False))
                note("resumed", name, side.handshakes(options.handshakes, resumed=True))
            if "deliveries" in options.only:
                for row, value in side.deliveries(options.rounds).items():
                    note(row, name, value)
    return {row: {name: min(values) for name, values in samples.items()} for row, samples in rows.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--handshakes", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure; all without it")
    options = parser.parse_args()
    print(json.dumps(machine()))
    figures = measure(options)
    rows = []
    for name, row in figures.items():
        is_memory = name in MEMORY
        ratio = row["redpoll"] / row["bare"] if is_memory else row["bare"] / row["redpoll"]
        digits = 0 if is_memory else 2
        rows.append(
            [name, *(f"{row[side]:,.{digits}f}" for side in ("redpoll", "bare")), f"{ratio:.2f}", GOALS.get(name, "–")]
        )
    print_table(["what", "redpoll, bytes or µs", "bare C, bytes or µs", "ratio", "goal"], rows)
    if options.json is not None:
        save(options.json, "tls", figures)


if __name__ == "__main__":
    main()
