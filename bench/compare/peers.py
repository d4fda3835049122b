"""redpoll beside other servers: deliveries, latency, connects, memory and publishes, each with the same client.

    python -m bench.compare.peers --server redpoll --server soketi=http://KEY:SECRET@127.0.0.1:6101/apps/ID
    python -m bench.compare.peers --server redpoll --server centrifugo=centrifugo://API_KEY@127.0.0.1:8000

A `redpoll` without an address is started here, with one worker and all of its processes on the first core. Start the
others in the same way (`taskset -c 0 …`), without limits on rates, and on this machine, so that their memory can be
seen. The clients (client.c, hammer.c) run on the last core. The servers are measured in turns, and each figure is the
median over `--rounds` (of memory, the greatest): ratios hold on a machine that has other things to do, the figures
themselves don't.

Centrifugo is measured by its own protocol: JSON frames, and requests with an API key instead of a signature.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.arguments import parser_of
from bench.driver import Address, Client, compiled, publish_request
from bench.load.end_to_end import CHANNEL, MODES
from bench.load.publish import Target, run, write_requests
from bench.load.swarm import rss_of, server_processes
from bench.report import print_table, save
from server import Server

SUBSCRIBERS = 1_000
PACES = (20, 100)
CONNECTIONS = 10_000
WARM = 100
PUBLISHERS = 64
PARTS = ("deliveries", "latency", "connections", "publishes")


@contextlib.contextmanager
def started(names: list[str], core: int) -> Iterator[dict[str, Address]]:
    """The servers by name; those without an address are started on `core`."""
    everywhere = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        addresses = {}
        for name in names:
            label, _, url = name.partition("=")
            if not url:
                os.sched_setaffinity(0, {core})
                url = stack.enter_context(Server(workers=1)).pusher_url
                os.sched_setaffinity(0, everywhere)
            addresses[label] = Address.parse(url)
        yield addresses


class Peers:
    """The client's side of all measurements."""

    def __init__(self, client: Client, folder: Path, core: int, seconds: float, only: list[str]) -> None:
        self.client, self.folder, self.core, self.seconds, self.only = client, folder, core, seconds, only
        self.hammer = compiled("hammer.c", folder / "hammer")

    def measure(self, address: Address) -> dict[str, float]:
        parts: dict[str, Callable[[Address], dict[str, float]]] = {
            "deliveries": self.deliveries,
            "latency": self.latencies,
            "connections": self.connections,
            "publishes": self.publish_rates,
        }
        return {name: figure for part in self.only for name, figure in parts[part](address).items()}

    def latencies(self, address: Address) -> dict[str, float]:
        return {f"p99_ms_at_{rate}": self.latency(address, rate) for rate in PACES}

    def publish_rates(self, address: Address) -> dict[str, float]:
        return {
            "publishes_per_s": self.publishes(address, PUBLISHERS, close=False),
            "publishes_each_per_s": self.publishes(address, 16, close=True),
        }

    def deliveries(self, address: Address) -> dict[str, float]:
        """To 1,000 subscribers: the next request when all have the last one."""
        rates = {}
        for mode in ("serial", "batch of 10"):
            publishers, events = MODES[mode]
            self.client.connect(address, CHANNEL, SUBSCRIBERS)
            # The first runs aren't measured, because they are slower than later ones. They say how long a run lasts.
            for requests in (2, 5):
                row = self.client.publish(address, CHANNEL, publishers=publishers, requests=requests, events=events)
            requests = max(5, int(requests * self.seconds / row["seconds"]))
            row = self.client.publish(address, CHANNEL, publishers=publishers, requests=requests, events=events)
            self.client.disconnect()
            complete(address, row)
            rates[f"{mode}_per_s"] = row["deliveries"] / row["seconds"]
        return rates

    def latency(self, address: Address, rate: int) -> float:
        self.client.connect(address, CHANNEL, SUBSCRIBERS)
        self.client.paced(address, CHANNEL, rate=rate, seconds=1)
        row = self.client.paced(address, CHANNEL, rate=rate, seconds=self.seconds)
        self.client.disconnect()
        complete(address, row)
        return float(row["p99_ms"])

    def connections(self, address: Address) -> dict[str, float]:
        pids = server_processes(address.port)
        self.client.connect(address, CHANNEL, WARM)
        before = rss_of(pids)
        figures = self.client.connect(address, CHANNEL, CONNECTIONS)
        grown = rss_of(pids) - before
        self.client.disconnect()
        if figures["subscribers"] < CONNECTIONS:
            raise SystemExit(f"{address.host}:{address.port} took only {figures['subscribers']} subscribers")
        return {
            "connects_per_s": figures["connected"] / figures["seconds"],
            "bytes": grown / figures["connected"],
        }

    def publishes(self, address: Address, connections: int, *, close: bool) -> float:
        """As fast as answers come. A server that ends the connection after its answer gets a new one for each."""
        requests = self.folder / "requests"
        close = close or not keeps_alive(address)
        write_requests(requests, address, closes=close)
        words = ["each"] if close else []
        target = Target(address.port, {}, address.host)
        return run(self.hammer, target, requests, connections, self.seconds, 0, words, self.core).per_s


def keeps_alive(address: Address) -> bool:
    """Whether the server leaves the connection open after it has answered a publish."""
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(publish_request(address, [(CHANNEL, "")]))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.read()
        return not answer.will_close


def complete(address: Address, row: dict[str, float]) -> None:
    if row["missing"] or row["late"] or row["refused"]:
        raise SystemExit(f"{address.host}:{address.port} lost, overtook or refused events: {row}")


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians. Of memory the greatest: later rounds use what a server kept after the first."""
    medians = {what: statistics.median(row[what] for row in rounds) for what in rounds[0]}
    if "bytes" in medians:
        medians["bytes"] = max(row["bytes"] for row in rounds)
    return {what: round(value, 2) for what, value in medians.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--server", action="append", required=True, metavar="NAME[=URL]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run with a fixed length")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="what to measure; all without it")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        started(options.server, cores[0]) as addresses,
        Client(cores[-1], cores[0]) as client,
    ):
        peers = Peers(client, Path(folder), cores[-1], options.seconds, options.only)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in addresses}
        for _ in range(options.rounds):
            for name, address in addresses.items():
                rounds[name].append(peers.measure(address))
                print(name, {what: round(value, 2) for what, value in rounds[name][-1].items()}, flush=True)
    figures = {name: summary(rows) for name, rows in rounds.items()}
    print()
    print_table(["", *figures], ([what, *(row[what] for row in figures.values())] for what in rounds[name][0]))
    if options.json is not None:
        save(options.json, "peers", figures)


if __name__ == "__main__":
    main()
