"""How fast clients connect and subscribe to one channel, and how much memory an idle subscribed connection takes.

    python -m bench.load.connections [--up-to 10000] [--each] [--tls] [--json FILE]

Starts a redpoll with one worker and a client in C (bench/load/client.c). The memory is the growth of the worker's
resident set from the 100th connection to the last, divided by their number. It doesn't include the kernel's socket
buffers. The same figures are shown for the control process and Redis, which must not grow with connections to one
channel.

`per_core_per_s` is what one core would carry, by the processor time of worker, control and Redis together: unlike
`per_s` it depends neither on the client nor on what else this machine does. With `--each` every connection subscribes
to a channel of its own (bench/load/crowd.c).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import parser_of
from bench.driver import Address, Client, compiled, processor_s, tls_settings
from bench.load.million import Driver
from bench.load.publish import pids_of
from bench.report import machine, print_table, save
from helpers.server import Server, open_files, rss_bytes

CHANNEL = "bench"
WARM = 100


async def connect_each(server: Server, program: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Connects in three rounds, each client with a channel of its own; all leave in between."""
    address, pids, rows = Address.of(server), pids_of(server), {}
    driver = Driver()
    words = [address.host, address.client_port, address.app_key, 0, options.up_to, options.at_once, "own-*"]
    await driver.begin([str(program), *map(str, words)], tls=options.tls)
    try:
        for number in range(1, 4):
            before = {name: (processor_s(pid), rss_bytes(pid)) for name, pid in pids.items()}
            began = time.monotonic()
            driver.say("come")
            while driver.last["ready"] < options.up_to and time.monotonic() < began + 120:
                await asyncio.sleep(0.01)
            took_s = driver.last["ready_at"] - began
            # Counts that Redis gets a moment later belong to it.
            await asyncio.sleep(0.2)
            cpu = {name: processor_s(pid) - before[name][0] for name, pid in pids.items()}
            ready = max(driver.last["ready"], 1)
            rows[f"round {number}"] = {
                "connected": ready,
                "per_s": round(ready / took_s),
                "per_core_per_s": round(ready / sum(cpu.values())),
                **{f"{name}_cpu_us": round(used / ready * 1e6) for name, used in cpu.items()},
                **{f"{name}_bytes": round((rss_bytes(pid) - before[name][1]) / ready) for name, pid in pids.items()},
            }
            driver.say("leave")
            while open_files(pids["worker"]) > 200 and time.monotonic() < began + 180:
                await asyncio.sleep(0.1)
            await asyncio.sleep(2)
    finally:
        await driver.end()
    return rows


def measure_each(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rpeach") as folder, tls_settings(options.tls) as settings:
        program = compiled("crowd.c", Path(folder) / "crowd", "-lm", tls=options.tls)
        with Server(workers=1, **settings) as server:
            return uvloop.run(connect_each(server, program, options))


def main() -> None:
    parser = parser_of(__doc__, tls=True)
    parser.add_argument("--up-to", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64, help="connections under way at a time")
    parser.add_argument("--each", action="store_true", help="a channel for each connection")
    options = parser.parse_args()
    if options.each:
        rounds = measure_each(options)
        print_table(["", *rounds["round 1"]], ([name, *row.values()] for name, row in rounds.items()))
        print("\ngoal: ≥ 6,000/s of one core")
        if options.json is not None:
            save(options.json, "connections", rounds)
        return
    with (
        tls_settings(options.tls) as settings,
        Server(workers=1, **settings) as server,
        Client(tls=options.tls) as client,
    ):
        about = machine()
        print(json.dumps(about))
        address = Address.of(server)
        pids = pids_of(server)
        client.connect(address, CHANNEL, WARM, options.at_once)
        before = {name: rss_bytes(pid) for name, pid in pids.items()}
        rows = []
        for count in [count for count in (1000, 2000, 5000, 10_000, 15_000) if count <= options.up_to]:
            cpu = {name: processor_s(pid) for name, pid in pids.items()}
            figures = client.connect(address, CHANNEL, count, options.at_once)
            cpu = {name: processor_s(pid) - cpu[name] for name, pid in pids.items()}
            grown = {name: rss_bytes(pid) - before[name] for name, pid in pids.items()}
            rows.append(
                {
                    "subscribers": figures["subscribers"],
                    "per_s": round(figures["connected"] / figures["seconds"]),
                    "last_thousand_per_s": round(1000 / figures["last_thousand_s"])
                    if figures["last_thousand_s"]
                    else "–",
                    "worker_cpu_us": round(cpu["worker"] / figures["connected"] * 1e6) if figures["connected"] else "–",
                    "per_core_per_s": round(figures["connected"] / max(sum(cpu.values()), 0.01)),
                    "bytes_per_connection": round(grown["worker"] / (figures["subscribers"] - WARM)),
                    "control_grown_bytes": grown["control"],
                    "redis_grown_bytes": grown["redis"],
                    "lost": figures["lost_connections"],
                }
            )
        client.disconnect()
    print()
    print_table(
        [
            "subscribers",
            "connect+subscribe/s",
            "last 1,000 /s",
            "worker CPU µs each",
            "/s of one core",
            "B/connection",
            "control B",
            "redis B",
            "lost",
        ],
        ([str(value) for value in row.values()] for row in rows),
    )
    if not options.tls:
        print("\ngoals: ≥ 10,000/s, as many at 10,000 as at 1,000; ≤ 500 B per connection")
    if options.json is not None:
        save(options.json, "connections", {str(row["subscribers"]): row for row in rows})


if __name__ == "__main__":
    main()
