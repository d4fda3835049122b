"""How fast clients connect and subscribe to one channel, and how much memory an idle subscribed connection takes.

    python bench/connections.py [--up-to 10000] [--json FILE]

Starts a redpoll with one worker and a client in C (bench/client.c). The memory is the growth of the worker's resident
set from the 100th connection to the last, divided by their number. It doesn't include the kernel's socket buffers. The
same figures are shown for the control process and Redis, which must not grow with connections to one channel.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from load import Address, Client, print_table
from results import machine, save
from server import Server, rss_bytes

CHANNEL = "bench"
WARM = 100
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up-to", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64, help="connections under way at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Server(workers=1) as server, Client() as client:
        about = machine()
        print(json.dumps(about))
        address = Address.parse(server.pusher_url)
        pids = {"worker": server.worker_pids()[0], "control": server.control_pid, "redis": server.redis_pid}
        client.connect(address, CHANNEL, WARM, options.at_once)
        before = {name: rss_bytes(pid) for name, pid in pids.items()}
        rows = []
        for count in [count for count in (1000, 2000, 5000, 10_000, 15_000) if count <= options.up_to]:
            cpu = cpu_s(pids["worker"])
            figures = client.connect(address, CHANNEL, count, options.at_once)
            cpu = cpu_s(pids["worker"]) - cpu
            grown = {name: rss_bytes(pid) - before[name] for name, pid in pids.items()}
            rows.append(
                {
                    "subscribers": figures["subscribers"],
                    "per_s": round(figures["connected"] / figures["seconds"]),
                    "last_thousand_per_s": round(1000 / figures["last_thousand_s"])
                    if figures["last_thousand_s"]
                    else "–",
                    "worker_cpu_us": round(cpu / figures["connected"] * 1e6) if figures["connected"] else "–",
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
            "B/connection",
            "control B",
            "redis B",
            "lost",
        ],
        ([str(value) for value in row.values()] for row in rows),
    )
    print("\ngoals: ≥ 10,000/s, as many at 10,000 as at 1,000; ≤ 500 B per connection")
    if options.json is not None:
        save(options.json, "connections", {str(row["subscribers"]): row for row in rows})


if __name__ == "__main__":
    main()
