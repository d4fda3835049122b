"""From an HTTP request to every subscriber: deliveries per second, latency, order and loss, compared with a bare C
loop.

    python -m bench.load.end_to_end                      starts a redpoll with one worker
    PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID python -m bench.load.end_to_end      any Pusher-compatible server

    python -m bench.load.end_to_end --nodes 2 --subscribers 1000     two nodes on one Redis, half of the subscribers
    each
    python -m bench.load.end_to_end --tls                subscribers use TLS; publishers and the reference don't

It publishes in three ways: one event at a time (the next one when all subscribers have the last), batches of ten, and
over ten connections at once; with several nodes, all to the first one. The reference runs in between, with the same
client and as many sockets. Not measured: processor time, more than one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.arguments import parser_of
from bench.driver import Address, Client, frame_bytes, tls_settings
from bench.report import machine, print_table, save
from helpers.server import Server

CHANNEL = "bench"
# Publishers, events a request. The count of requests is chosen so that a run lasts a few seconds.
MODES = {"serial": (1, 1), "batch of 10": (1, 10), "10 connections": (10, 1)}
DELIVERIES = {"serial": 400_000, "batch of 10": 2_000_000, "10 connections": 1_000_000}
GOALS = {"serial": (130_000, 0.6), "batch of 10": (700_000, 0.45)}
PACES = [(100, 100.0), (1000, 20.0), (1000, 100.0)]


@contextlib.contextmanager
def servers_under_test(
    url: str | None, nodes: int, workers: int, core: int | None, tls: bool
) -> Iterator[tuple[str, list[Address]]]:
    if url is not None:
        yield "server at PUSHER_URL", [Address.parse(url)]
        return
    everywhere = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})  # All processes of the server inherit this.
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(tls_settings(tls))
        servers = [stack.enter_context(Server(workers=workers, **settings))]
        while len(servers) < nodes:
            servers.append(stack.enter_context(second_node(servers[0], len(servers), settings)))
        os.sched_setaffinity(0, everywhere)
        name = f"redpoll, {nodes} node(s) with {workers} worker(s)" + ", TLS" * tls
        yield name, [Address.of(server) for server in servers]


def second_node(first: Server, number: int, settings: dict[str, Any]) -> Server:
    """A further node, not started yet, on the Redis and with the records of the first one."""
    server = Server(
        workers=first.workers,
        redis_url=f"unix://{first.folder}/data/redis.sock",
        node_name=f"node-{number}",
        **settings,
    )
    (server.folder / "data").mkdir(mode=0o700)
    (server.folder / "data" / "redpoll.sqlite").symlink_to(first.folder / "data" / "redpoll.sqlite")
    return server


def connect(client: Client, addresses: Sequence[Address], subscribers: int) -> None:
    """As many subscribers on each node."""
    for number, address in enumerate(addresses, 1):
        client.connect(address, CHANNEL, subscribers * number // len(addresses))


def measure(client: Client, addresses: Sequence[Address], subscribers: int, runs: int) -> list[dict[str, Any]]:
    """One row for each mode: medians over `runs`, each run beside its reference."""
    address = addresses[0]
    results = []
    size_bytes = frame_bytes(CHANNEL)
    for mode, (publishers, events) in MODES.items():
        rates, references, rows = [], [], []
        requests = max(2, DELIVERIES[mode] // (subscribers * publishers * events))
        for _ in range(runs):
            connect(client, addresses, subscribers)
            # The first run isn't measured, because it is slower than later ones.
            client.publish(address, CHANNEL, publishers=publishers, requests=2, events=events)
            row = client.publish(address, CHANNEL, publishers=publishers, requests=requests, events=events)
            rows.append(row)
            rates.append(row["deliveries"] / row["seconds"])
            client.disconnect()
            joined = events
            rounds = max(2, requests * publishers)
            reference = client.floor(subscribers, size_bytes, joined, rounds)
            references.append(reference["deliveries"] / reference["seconds"])
        ratios = [rate / reference for rate, reference in zip(rates, references, strict=True)]
        results.append(
            {
                "subscribers": subscribers,
                "mode": mode,
                "deliveries_per_s": round(statistics.median(rates)),
                "reference_per_s": round(statistics.median(references)),
                "ratio": round(statistics.median(ratios), 3),
                "p50_ms": statistics.median(row["p50_ms"] for row in rows),
                "p99_ms": statistics.median(row["p99_ms"] for row in rows),
                "missing": sum(row["missing"] for row in rows),
                "late": sum(row["late"] for row in rows),
                "refused": sum(row["refused"] for row in rows),
                "runs": [round(rate) for rate in rates],
            }
        )
    return results


def measure_latency(client: Client, addresses: Sequence[Address], seconds: float) -> list[dict[str, Any]]:
    address = addresses[0]
    results = []
    for subscribers, rate in PACES:
        connect(client, addresses, subscribers)
        client.paced(address, CHANNEL, rate=rate, seconds=1)
        row = client.paced(address, CHANNEL, rate=rate, seconds=seconds)
        client.disconnect()
        results.append({"subscribers": subscribers, "events_per_s": rate, **row})
    return results


def main() -> None:
    parser = parser_of(__doc__, tls=True)
    parser.add_argument("--subscribers", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="of the redpoll that is started here")
    parser.add_argument("--nodes", type=int, default=1, help="that are started here, on one Redis")
    parser.add_argument("--latency-seconds", type=float, default=10.0, help="0 leaves the latencies out")
    parser.add_argument("--pin", action="store_true", help="server on core 0, client on core 1")
    options = parser.parse_args()
    core = 0 if options.pin else None
    with (
        servers_under_test(os.environ.get("PUSHER_URL"), options.nodes, options.workers, core, options.tls) as (
            name,
            addresses,
        ),
        Client(1 if options.pin else None, core, tls=options.tls) as client,
    ):
        about = {**machine(), "server": name, "pinned": options.pin, "runs": options.runs}
        print(json.dumps(about))
        rows = [row for count in options.subscribers for row in measure(client, addresses, count, options.runs)]
        latencies = measure_latency(client, addresses, options.latency_seconds) if options.latency_seconds else []
    print()
    print_table(
        [
            "subscribers",
            "mode",
            "deliveries/s",
            "C loop/s",
            "ratio",
            "p50 ms",
            "p99 ms",
            "missing",
            "late",
            "runs",
        ],
        (
            [
                row["subscribers"],
                row["mode"],
                row["deliveries_per_s"],
                row["reference_per_s"],
                row["ratio"],
                row["p50_ms"],
                row["p99_ms"],
                row["missing"],
                row["late"],
                row["runs"],
            ]
            for row in rows
        ),
    )
    if latencies:
        print()
        print_table(
            ["subscribers", "events/s", "p50 ms", "p99 ms", "max ms", "missing", "late"],
            (
                [
                    row["subscribers"],
                    row["events_per_s"],
                    row["p50_ms"],
                    row["p99_ms"],
                    row["max_ms"],
                    row["missing"],
                    row["late"],
                ]
                for row in latencies
            ),
        )
    print()
    for row in rows:
        if row["subscribers"] == 1000 and row["mode"] in GOALS and len(addresses) == 1 and not options.tls:
            per_s, ratio = GOALS[row["mode"]]
            print(
                f"{row['mode']}: {row['deliveries_per_s']} of {per_s} deliveries/s; "
                f"{row['ratio']} of {ratio} × the C loop"
            )
    if options.json is not None:
        throughput: dict[str, dict[str, Any]] = {}
        for row in rows:
            throughput.setdefault(row["mode"], {})[str(row["subscribers"])] = row
        latency = {f"{row['subscribers']} at {row['events_per_s']:.0f}": row for row in latencies}
        figures = {"server": name, "pinned": options.pin, "throughput": throughput, "latency": latency}
        save(options.json, "end_to_end", figures)
    if any(row["missing"] or row["late"] or row["refused"] for row in [*rows, *latencies]):
        raise SystemExit("events were lost, overtaken or refused")


if __name__ == "__main__":
    main()
