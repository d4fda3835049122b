"""A reconnect storm: connects many clients, cuts them all at once, and measures how they reconnect.

    python -m bench.load.storm --url http://KEY:SECRET@HOST:PORT/apps/ID --connections 5000 --rate 500 --repeat 3

Works with any Pusher-compatible server, with the clients, options and checks of `swarm.py`. The cut aborts every
connection from the client's side, as a broken network does. Clients reconnect like pusher-js: one second after the
loss, and again after a failed attempt (here after 0.1 s). A client is back when all its channels are subscribed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from typing import Any

import uvloop
from rich.console import Console

from bench.load import swarm
from bench.report import save


async def measure(options: argparse.Namespace, plan: swarm.Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = swarm.Run(options, plan, reconnects=True)
    count = options.connections
    storms: list[dict[str, Any]] = []
    with swarm.Screen(Console(), count) as screen:
        await run.start()
        try:

            def everybody() -> bool:
                return run.total("ready") >= count

            if not await swarm.wait_until(run, screen, everybody, lambda: run.total("ready"), count, swarm.STALLED_S):
                sys.exit(f"only {run.total('ready'):,} of {count:,} connected: {dict(run.counts('errors'))}")
            seen: Counter[int] = Counter()
            for number in range(options.repeat):
                await asyncio.sleep(options.seconds)
                cpu_s, failed = swarm.cpu_of(run.pids), run.total("failed")
                losses = run.total("lost")
                run.phase = f"storm {number + 1}"
                began = time.monotonic()
                for child in run.swarms:
                    child.tell({"do": "cut"})
                # First all must be gone, or the old connections would be taken for the new ones.
                while run.total("lost") - losses < count and time.monotonic() - began < swarm.STALLED_S:
                    await asyncio.sleep(0.05)
                back = await swarm.wait_until(
                    run, screen, everybody, lambda: run.total("ready"), count, swarm.STALLED_S
                )
                histogram = run.histogram("back")
                storms.append(
                    {
                        "all_back": back,
                        "back": swarm.percentiles(histogram - seen),
                        "failed_attempts": run.total("failed") - failed,
                        "server_us_per_connection": round((swarm.cpu_of(run.pids) - cpu_s) / count * 1e6, 1),
                        "server_bytes": swarm.rss_of(run.pids),
                    }
                )
                seen = histogram
                run.phase = "holding"
            figures: dict[str, Any] = {"connections": count}
            worst = max(storms, key=lambda storm: storm["back"].get("max_ms", 0.0))
            figures |= {
                "storms": len(storms),
                "all_back": all(storm["all_back"] for storm in storms),
                "back": worst["back"],
                "failed_attempts": sum(storm["failed_attempts"] for storm in storms),
                "server_us_per_connection": worst["server_us_per_connection"],
                "server_bytes": storms[-1]["server_bytes"],
                "errors": dict(run.counts("errors")),
                "runs": storms,
            }
        finally:
            await run.end()
    return figures, run.samples


def main() -> None:
    parser = swarm.arguments(__doc__ or "")
    parser.add_argument("--repeat", type=int, default=1, help="cut so many times, --seconds apart")
    parser.set_defaults(seconds=3.0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        plan = swarm.prepare(options, stack)
        figures, samples = uvloop.run(measure(options, plan))
    runs = figures.pop("runs")
    title = f"{options.name}: {options.connections:,} connections cut at once"
    swarm.print_figures(Console(), title, {**figures, **{f"storm {i + 1}": run["back"] for i, run in enumerate(runs)}})
    print("times count from the cut; the first second is the clients' own wait")
    if options.json is not None:
        about = {"server": options.name, "profile": options.profile, "processes": plan.processes}
        save(options.json, "storm", {**about, **figures}, swarm.public_command(options), runs=runs, samples=samples)
    if options.png is not None:
        swarm.draw(options.png, title, samples)
    if not figures["all_back"]:
        sys.exit("some clients did not come back")


if __name__ == "__main__":
    main()
