"""What the event log and the trace cost the control plane: the same publishes with and without them, in turns.

    python -m bench.parts.tracing [--seconds 5] [--rounds 3] [--rate 2000]

Two control processes on one Redis, one with the default event log, one with none. Signed requests on keep-alive
connections publish one event to one channel each: first `--rate` requests per second, to compare processor time per
publish, then as fast as responses come. Processor time includes the thread that writes the log. No worker listens.
"""

from __future__ import annotations

import statistics

from bench.arguments import parser_of
from bench.load.publish import Bench
from bench.report import save


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rate", type=int, default=2_000)
    options = arguments.parse_args()
    with Bench() as bench:
        redis_url = bench.start_redis()
        servers = {
            "with": bench.start_control(redis_url, "with"),
            "without": bench.start_control(redis_url, "without", event_log_calls=0),
        }
        figures: dict[str, dict[str, float]] = {}
        for what, rate in ((f"at {options.rate:,} calls/s", options.rate), ("as fast as answers come", 0)):
            measured: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, server in servers.items():
                    measured[name].append(bench.hammer(server, options.connections, options.seconds, rate))
            medians = {
                name: (
                    statistics.median(round_["requests"] / round_["seconds"] for round_ in rounds),
                    statistics.median(round_["us"] for round_ in rounds),
                )
                for name, rounds in measured.items()
            }
            print(what)
            for name, (per_s, us) in medians.items():
                print(f"  {name:8} event log: {per_s:9,.0f} publishes/s, {us:6.1f} us of processor each")
            per_s, us = (medians["with"][at] / medians["without"][at] for at in (0, 1))
            figures["paced" if rate else "full"] = {
                "with_per_s": round(medians["with"][0]),
                "without_per_s": round(medians["without"][0]),
                "with_us": round(medians["with"][1], 1),
                "without_us": round(medians["without"][1], 1),
                "throughput_ratio": round(per_s, 3),
                "processor_ratio": round(us, 3),
            }
            print(f"  ratio: throughput {per_s:.3f}, processor time {us:.3f}")
        print(f"medians of {options.rounds} rounds of {options.seconds:g} s, {options.connections} connections")
        if options.json is not None:
            save(options.json, "tracing", {"rate": options.rate, **figures})


if __name__ == "__main__":
    main()
