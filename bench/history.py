"""What storing messages costs: publishes per second with and without a history rule, and Redis' memory per message.

    python bench/history.py [--seconds 5] [--rounds 3] [--keep 1000]

One control process on one core; the client and Redis share another. Signed requests on keep-alive connections publish
to 1,000 channels in turn. The rule is added and removed between rounds, as an operator's command does it. The memory is
Redis' own figure, divided by the stored messages; the size of a message is printed. No worker listens.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import redis

from publish import APP_ID, Bench
from redpoll.command_socket import ask, socket_path
from results import save


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="write the figures here")
    arguments.add_argument("--keep", type=int, default=1_000)
    given = arguments.parse_args()
    with Bench() as bench:
        redis_url = bench.start_redis()
        server = redis.Redis.from_url(redis_url)
        control = bench.start_control(redis_url)

        def command(verb: str, **args: Any) -> Any:
            # What `redpoll` types at a running server; there is no supervisor here whose lock would tell it so.
            return ask(socket_path(bench.folder / "rp"), verb, {"app": APP_ID, **args})

        command("app set", id=APP_ID, settings={"max_history_channels": "100000"})
        found: dict[str, list[dict[str, float]]] = {"kept": [], "not kept": []}
        per_message = 0.0
        for _ in range(given.rounds):
            found["not kept"].append(bench.hammer(control, given.connections, given.seconds))
            rule = command("history rule add", name="bench-", prefix=True, keep=given.keep, seconds=3600)
            before = server.info("memory")["used_memory"]
            found["kept"].append(bench.hammer(control, given.connections, given.seconds))
            streams = list(server.scan_iter("rp:*:h:*", count=1_000))
            stored = sum(server.xlen(stream) for stream in streams)
            per_message = (server.info("memory")["used_memory"] - before) / max(stored, 1)
            command("history rule remove", rule=rule["id"])
            for key in (*streams, *server.scan_iter("rp:*:hm:*"), *server.scan_iter("rp:*:ha:*")):
                server.delete(key)
        rates = {}
        for name, rounds in found.items():
            rates[name] = statistics.median(round_["requests"] / round_["seconds"] for round_ in rounds)
            us = statistics.median(round_["us"] for round_ in rounds)
            print(f"{name:9} {rates[name]:9,.0f} publishes/s, {us:6.1f} us of the control plane's processor each")
        print(f"ratio {rates['kept'] / rates['not kept']:.3f}, medians of {given.rounds} rounds of {given.seconds:g} s")
        if given.json is not None:
            figures = {"kept_per_s": round(rates["kept"]), "not_kept_per_s": round(rates["not kept"])}
            figures |= {"ratio": round(rates["kept"] / rates["not kept"], 3), "redis_bytes": round(per_message)}
            save(given.json, "history", figures)
        print(f"Redis: {per_message:,.0f} B a kept message, streams and keys of {len(streams):,} channels included")


if __name__ == "__main__":
    main()
