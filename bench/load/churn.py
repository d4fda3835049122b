"""Whether memory stays flat while clients come and go: 100,000 connections, in rounds of 5,000.

    python -m bench.load.churn [--total 100000] [--round 5000] [--json FILE]

One redpoll with one worker. In each round the clients of bench/load/crowd.c connect, subscribe to a channel of their
own and are reset all at once. After each round, once Redis has no channel of them, the resident memory of worker,
control and Redis is noted, and the worker's descriptors. The first rounds fill pools. From the third on, the memory of
a process must not grow by more than 5 % or 2 MB, whichever is more; otherwise the exit code is 1. Every wait is
bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from bench.driver import Address, compiled
from bench.load.million import Driver
from bench.report import print_table, save
from helpers.server import Server, open_files, rss_bytes
from redpoll.cluster.redis.keys import SHARDS, Keys

WARM_ROUNDS = 3
MAX_GROWTH = 1.05
MAX_GROWTH_BYTES = 2_000_000
ROUND_WITHIN_S = 60.0


async def churn(server: Server, program: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    address = Address.parse(server.pusher_url)
    pids = {"worker": server.worker_pids()[0], "control": server.control_pid, "redis": server.redis_pid}
    files = open_files(pids["worker"])
    driver = Driver()
    words = [address.host, address.port, address.app_key, 0, options.round, options.at_once, "own-*", "127.0.0.2"]
    await driver.begin([str(program), *map(str, words)])
    rounds = []
    try:
        for number in range(1, -(-options.total // options.round) + 1):
            began = time.monotonic()
            driver.say("come")
            await until(lambda: driver.last["ready"] >= options.round, f"all connected in round {number}")
            came_s = time.monotonic() - began
            driver.say("leave")
            await until(lambda: driver.last["ready"] == 0, "all reset")
            await until(lambda: open_files(pids["worker"]) <= files + 5, "their descriptors closed")
            await until(lambda: channels(server) == 0, "their channels vacated")
            rounds.append(
                {
                    "round": number,
                    "connected_per_s": round(options.round / came_s),
                    **{f"{name}_bytes": rss_bytes(pid) for name, pid in pids.items()},
                    "worker_files": open_files(pids["worker"]),
                }
            )
            print(json.dumps(rounds[-1]), flush=True)
    finally:
        await driver.end()
    return rounds


async def until(goal: Any, what: str) -> None:
    deadline = time.monotonic() + ROUND_WITHIN_S
    while not goal():
        if time.monotonic() > deadline:
            sys.exit(f"not within {ROUND_WITHIN_S:g} s: {what}")
        await asyncio.sleep(0.05)


def channels(server: Server) -> int:
    with server.redis() as redis:
        pipeline = redis.pipeline(transaction=False)
        for shard in range(SHARDS):
            pipeline.scard(Keys().occupied(shard, server.app_id))
        return sum(pipeline.execute())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--total", type=int, default=100_000)
    parser.add_argument("--round", type=int, default=5_000, help="connections at a time")
    parser.add_argument("--at-once", type=int, default=200, help="handshakes under way at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rpchurn") as folder:
        program = compiled("crowd.c", Path(folder) / "crowd", "-lm")
        with Server(workers=1, webhook_debounce_s=0) as server:
            rounds = asyncio.run(churn(server, program, options))
    print_table(rounds[0], (entry.values() for entry in rounds))
    if options.json is not None:
        save(options.json, "churn", {"total": len(rounds) * options.round, "rounds": rounds})
    grown = []
    for name in ("worker", "control", "redis"):
        sizes = [entry[f"{name}_bytes"] for entry in rounds[WARM_ROUNDS - 1 :]]
        if sizes and max(sizes) > max(sizes[0] * MAX_GROWTH, sizes[0] + MAX_GROWTH_BYTES):
            grown.append(f"{name}: {sizes[0]:,} to {max(sizes):,} B")
    if grown:
        sys.exit(f"memory grew: {'; '.join(grown)}")


if __name__ == "__main__":
    main()
