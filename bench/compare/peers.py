"""redpoll beside other servers: deliveries, latency, connects, memory and publishes, each with the same client.

    python -m bench.compare.peers --server redpoll --server Sockudo --server Centrifugo --server soketi
    python -m bench.compare.peers --server redpoll --server other=http://KEY:SECRET@127.0.0.1:6101/apps/ID

A server without an address is started here, with all of its processes on the first core; redpoll with one worker, the
others as bench/peers configures them (peer_servers.py gets them). Start one with an address in the same way (`taskset
-c 0 …`), without limits on rates, and on this machine, so that its memory can be seen. The clients (client.c, hammer.c)
run on the last core. The servers are measured in turns, and each figure is the median over `--rounds` (of memory, the
greatest): ratios hold on a machine that has other things to do, the figures themselves don't.

Centrifugo is measured by its own protocol: JSON frames, and requests with an API key instead of a signature. `history`
is measured for the redpoll that is started here, and for Centrifugo, whose namespace `kept` must keep 100 messages of a
channel for a minute, as the rule does that redpoll gets. Latency of publishes at a fixed rate counts from the moment at
which each was due, so a server that is too slow for the rate shows seconds.
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
from typing import NamedTuple

from bench.arguments import parser_of
from bench.compare import peer_servers
from bench.compare.peer_servers import PEERS
from bench.driver import Address, Client, compiled, publish_request
from bench.load.end_to_end import CHANNEL, MODES
from bench.load.publish import Measured, Target, run, write_requests
from bench.load.swarm import rss_of, server_processes
from bench.report import print_table, save
from helpers.server import Server
from redpoll.ipc.command_socket import ask, socket_path

SUBSCRIBERS = 1_000
PACES = (20, 100)
CONNECTIONS = 10_000
WARM = 100
PUBLISHERS = 64
PUBLISH_RATES = (10_000, 40_000)
PARTS = ("deliveries", "history", "latency", "connections", "publishes", "rates")
# A channel that keeps its messages, by the dialect of its server; other servers aren't asked for history.
HISTORY_CHANNELS = {"redpoll": "kept-bench", "centrifugo": "kept:bench"}


class Peer(NamedTuple):
    """A server, and its channel that keeps messages; "": it isn't asked for one."""

    address: Address
    history_channel: str


def other(url: str) -> Peer:
    address = Address.parse(url)
    return Peer(address, HISTORY_CHANNELS.get(address.dialect, ""))


@contextlib.contextmanager
def redpoll() -> Iterator[Peer]:
    with Server(workers=1) as server:
        rule = {"app": server.app_id, "name": HISTORY_CHANNELS["redpoll"], "prefix": False, "keep": 100, "seconds": 60}
        ask(socket_path(server.folder / "data"), "history rule add", rule)
        yield Peer(Address.of(server), HISTORY_CHANNELS["redpoll"])


@contextlib.contextmanager
def started(names: list[str], core: int) -> Iterator[dict[str, Peer]]:
    """The servers by name; those without an address are started on `core`."""
    everywhere = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in names:
            label, _, url = name.partition("=")
            if url:
                peers[label] = other(url)
                continue
            os.sched_setaffinity(0, {core})
            try:
                if label == "redpoll":
                    peers[label] = stack.enter_context(redpoll())
                elif label in PEERS:
                    peers[f"{label} {PEERS[label].version}"] = other(stack.enter_context(peer_servers.started(label)))
                else:
                    raise SystemExit(f"no server {label}: redpoll, {', '.join(PEERS)}, or NAME=URL")
            finally:
                os.sched_setaffinity(0, everywhere)
        yield peers


class Peers:
    """The client's side of all measurements."""

    def __init__(self, client: Client, folder: Path, core: int, seconds: float, only: list[str]) -> None:
        self.client, self.folder, self.core, self.seconds, self.only = client, folder, core, seconds, only
        self.hammer = compiled("hammer.c", folder / "hammer")

    def measure(self, peer: Peer) -> dict[str, float]:
        parts: dict[str, Callable[[Address], dict[str, float]]] = {
            "deliveries": self.deliveries,
            "history": lambda address: self.history(address, peer.history_channel),
            "latency": self.latencies,
            "connections": self.connections,
            "publishes": self.publish_rates,
            "rates": self.publish_latencies,
        }
        return {name: figure for part in self.only for name, figure in parts[part](peer.address).items()}

    def latencies(self, address: Address) -> dict[str, float]:
        return {f"p99_ms_at_{rate}": self.latency(address, rate) for rate in PACES}

    def publish_rates(self, address: Address) -> dict[str, float]:
        return {
            "publishes_per_s": self.publishes(address, PUBLISHERS, close=False),
            "publishes_each_per_s": self.publishes(address, 16, close=True),
        }

    def publish_latencies(self, address: Address) -> dict[str, float]:
        """p99 of a publish, from when it was due, at fixed rates."""
        return {
            f"publish_p99_ms_at_{rate}": self.hammer_it(address, PUBLISHERS, close=False, rate=rate).p99_us / 1000
            for rate in PUBLISH_RATES
        }

    def deliveries(self, address: Address) -> dict[str, float]:
        """To 1,000 subscribers: the next request when all have the last one."""
        return {f"{mode}_per_s": self.delivery(address, CHANNEL, mode) for mode in ("serial", "batch of 10")}

    def history(self, address: Address, channel: str) -> dict[str, float]:
        """One by one, into a channel that keeps its messages; nothing for a server without one."""
        return {"kept_per_s": self.delivery(address, channel, "serial")} if channel else {}

    def delivery(self, address: Address, channel: str, mode: str) -> float:
        publishers, events = MODES[mode]
        if not self.client.connect(address, channel, SUBSCRIBERS)["subscribers"]:
            raise SystemExit(f"{address.host}:{address.port} lets nobody subscribe to {channel}")
        # The first runs aren't measured, because they are slower than later ones. They say how long a run lasts.
        for requests in (2, 5):
            row = self.client.publish(address, channel, publishers=publishers, requests=requests, events=events)
        requests = max(5, int(requests * self.seconds / row["seconds"]))
        row = self.client.publish(address, channel, publishers=publishers, requests=requests, events=events)
        self.client.disconnect()
        complete(address, row)
        return float(row["deliveries"]) / float(row["seconds"])

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
        """As fast as answers come."""
        return self.hammer_it(address, connections, close=close).per_s

    def hammer_it(self, address: Address, connections: int, *, close: bool, rate: int = 0) -> Measured:
        """A server that ends the connection after its answer gets a new one for each."""
        requests = self.folder / "requests"
        close = close or not keeps_alive(address)
        write_requests(requests, address, closes=close)
        target = Target(address.port, {}, address.host)
        return run(self.hammer, target, requests, connections, self.seconds, rate, ["each"] * close, self.core)


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
        started(options.server, cores[0]) as servers,
        Client(cores[-1], cores[0]) as client,
    ):
        peers = Peers(client, Path(folder), cores[-1], options.seconds, options.only)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, server in servers.items():
                rounds[name].append(peers.measure(server))
                print(name, {what: round(value, 2) for what, value in rounds[name][-1].items()}, flush=True)
    figures = {name: summary(rows) for name, rows in rounds.items()}
    print()
    rows = dict.fromkeys(what for row in figures.values() for what in row)
    print_table(["", *figures], ([what, *(row.get(what, "–") for row in figures.values())] for what in rows))
    if options.json is not None:
        save(options.json, "peers", figures)


if __name__ == "__main__":
    main()
