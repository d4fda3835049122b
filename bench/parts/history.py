"""What storing messages costs: publishes per second with and without a history rule, and Redis' memory per message.

    python -m bench.parts.history [--seconds 5] [--rounds 3] [--keep 1000]

A redpoll with one worker on one core; the client and Redis share another. Signed requests on keep-alive connections
publish to 1,000 channels in turn. The rule is added and removed between rounds, as an operator's command does it; the
app has another for other channels all the time. The memory is Redis' own figure, divided by the stored messages; the
size of a message is printed. Nobody subscribes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import redis

from bench.arguments import parser_of
from bench.driver import Address, compiled
from bench.load.publish import Bench, Measured, Target, run, write_requests
from bench.report import save
from helpers.server import APP_ID, APP_KEY, APP_SECRET, Server
from redpoll.ipc.command_socket import ask, socket_path


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--keep", type=int, default=1_000)
    options = arguments.parse_args()
    everywhere = os.sched_getaffinity(0)
    with Bench() as bench:
        redis_url = bench.start_redis()
        os.sched_setaffinity(0, {bench.server_core})  # inherited by all processes of the server
        with Server(workers=1, redis_url=redis_url, log_level="warning") as server:
            os.sched_setaffinity(0, everywhere)
            measure(options, bench, server, redis.Redis.from_url(redis_url))


def measure(options: argparse.Namespace, bench: Bench, server: Server, store: redis.Redis) -> None:
    target = Target(server.port, {"worker": server.worker_pids()[0], "control": server.control_pid})
    client, requests = compiled("hammer.c", bench.folder / "hammer"), bench.folder / "requests"
    write_requests(requests, Address(target.host, target.port, APP_ID, APP_KEY, APP_SECRET))

    def command(verb: str, **args: Any) -> Any:
        return ask(socket_path(server.folder / "data"), verb, {"app": APP_ID, **args})

    def hammer() -> Measured:
        return run(client, target, requests, options.connections, options.seconds, 0, [], bench.other_core)

    command("app set", id=APP_ID, settings={"max_history_channels": "100000"})
    command("history rule add", name="others-", prefix=True, keep=options.keep, seconds=3600)
    measured: dict[str, list[Measured]] = {"kept": [], "not kept": []}
    per_message = 0.0
    for _ in range(options.rounds):
        measured["not kept"].append(hammer())
        rule = command("history rule add", name="bench-", prefix=True, keep=options.keep, seconds=3600)
        before = store.info("memory")["used_memory"]
        measured["kept"].append(hammer())
        streams = list(store.scan_iter("rp:*:h:*", count=1_000))
        stored = sum(store.xlen(stream) for stream in streams)
        per_message = (store.info("memory")["used_memory"] - before) / max(stored, 1)
        command("history rule remove", rule=rule["id"])
        for key in (*streams, *store.scan_iter("rp:*:hm:*"), *store.scan_iter("rp:*:ha:*")):
            store.delete(key)
    rates = {}
    for name, rounds in measured.items():
        rates[name] = statistics.median(one.per_s for one in rounds)
        us = statistics.median(sum(one.us.values()) for one in rounds)
        print(f"{name:9} {rates[name]:9,.0f} publishes/s, {us:6.1f} us of the processor for worker and control each")
    print(f"ratio {rates['kept'] / rates['not kept']:.3f}, medians of {options.rounds} rounds of {options.seconds:g} s")
    if options.json is not None:
        figures = {"kept_per_s": round(rates["kept"]), "not_kept_per_s": round(rates["not kept"])}
        figures |= {"ratio": round(rates["kept"] / rates["not kept"], 3), "redis_bytes": round(per_message)}
        save(options.json, "history", figures)
    print(f"Redis: {per_message:,.0f} B a kept message, streams and keys of {len(streams):,} channels included")


if __name__ == "__main__":
    main()
