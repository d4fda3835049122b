"""The same loads by swarm, storm, Locust and k6 against one server; run it for two servers to compare them.

    python -m bench.compare.compare --name redpoll                      starts a redpoll with one worker
    PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID python -m bench.compare.compare --name soketi

Writes a result for each tool into `--results` (build/compare), a chart for each run of swarm and storm into `--charts`,
and prints a table of all results that are in `--results`, with a column for each server. Takes three and a half
minutes; `--only` runs some of the tools. Needs k6 on the PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.arguments import parser_of
from bench.compare.render import load_rows
from bench.driver import Address
from bench.load.swarm import cpu_of, redpoll, rss_of, server_processes
from bench.report import percentile, save

ROOT = Path(__file__).parents[2]
SWARM = {
    "ticker": "--connections 1000 --rate 500 --publish 20 --seconds 10",
    "chat": "--connections 1000 --rate 500 --profile chat --publish 100 --seconds 10",
}
STORM = "--connections 1000 --rate 500 --repeat 3"
LOCUST = "--headless -u 50 -r 25 -t 15s"
K6 = ("steady", "ramp", "spike", "storm")
# The trend metrics of bench/load/k6 that tell something, and what a result calls them.
TRENDS = {
    "subscribe_time": "subscribe",
    "event_latency": "event",
    "http_req_duration{name:publish}": "publish",
    "reconnect_time": "reconnect",
}


class Used:
    """Processor time and memory of the server, where it runs on this machine."""

    def __init__(self, address: Address) -> None:
        self.pids = server_processes(address.port)
        self.cpu_s = cpu_of(self.pids)

    def figures(self) -> dict[str, float]:
        if not self.pids:
            return {}
        return {"server_cpu_s": round(cpu_of(self.pids) - self.cpu_s, 2), "server_bytes": rss_of(self.pids)}


def run_ours(script: str, words: str, result: str, options: argparse.Namespace) -> bool:
    """swarm or storm, which write their own results."""
    command = [sys.executable, "-m", f"bench.load.{script}", *words.split(), "--name", options.name]
    command += ["--json", options.results / f"{result}-{options.name}.json"]
    if options.charts is not None:
        command += ["--png", options.charts / f"{result}-{options.name}.png"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PUSHER_URL": options.url}, check=False).returncode == 0


def save_for(tool: str, figures: dict[str, Any], options: argparse.Namespace, used: Used) -> None:
    """The result of a tool that doesn't write one."""
    command = f"PUSHER_URL=… python -m bench.compare.compare --name {options.name} --only {tool}"
    path = options.results / f"{tool}-{options.name}.json"
    save(path, tool, {"server": options.name, **figures, **used.figures()}, command)


def run_locust(options: argparse.Namespace, used: Used) -> bool:
    command = [sys.executable, "-m", "locust", "-f", "bench/load/locustfile.py", *LOCUST.split()]
    ran = subprocess.run(
        [*command, "--json", "--only-summary"],
        env=os.environ | {"PUSHER_URL": options.url},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    save_for("locust", locust_figures(json.loads(ran.stdout)), options, used)
    return ran.returncode == 0


def locust_figures(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests, failures, p50 and p99 in ms of each row of Locust's statistics."""
    figures: dict[str, Any] = {}
    for entry in entries:
        times = {float(ms): count for ms, count in entry["response_times"].items()}
        figures[entry["name"]] = {
            "requests": entry["num_requests"],
            "failures": entry["num_failures"],
            **{f"p{share}_ms": percentile(times, share / 100) for share in (50, 99)},
        }
    return figures


def run_k6(options: argparse.Namespace, used: Used) -> bool:
    figures: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for script in K6:
            path = Path(folder) / f"{script}.json"
            ran = subprocess.run(
                [
                    *("k6", "run", "--quiet", "--summary-trend-stats", "med,p(95),p(99),max"),
                    *("--summary-export", path, ROOT / "bench" / "load" / "k6" / f"{script}.js"),
                ],
                env=os.environ | {"PUSHER_URL": options.url},
                check=False,
            )
            # 99 says that a threshold was missed, which is a figure like others.
            good &= ran.returncode in (0, 99)
            figures[script] = k6_figures(json.loads(path.read_text())["metrics"])
    save_for("k6", figures, options, used)
    return good


def k6_figures(metrics: dict[str, Any]) -> dict[str, Any]:
    """p50 and p99 in ms of each time, the events, and the thresholds that were missed."""
    figures: dict[str, Any] = {}
    for metric, name in TRENDS.items():
        if metric in metrics and metrics[metric]["max"]:
            figures[name] = {"p50_ms": round(metrics[metric]["med"], 1), "p99_ms": round(metrics[metric]["p(99)"], 1)}
    figures["events"] = metrics.get("events", {}).get("count", 0)
    missed = [
        f"{metric} {threshold}"
        for metric, values in metrics.items()
        for threshold, crossed in values.get("thresholds", {}).items()
        if crossed
    ]
    figures["missed"] = ", ".join(missed) or "none"
    return figures


def main() -> None:
    parser = parser_of(__doc__, saves=False)
    parser.add_argument("--name", required=True, help="what the results call the server")
    parser.add_argument("--url", default=os.environ.get("PUSHER_URL"), help="http://KEY:SECRET@HOST:PORT/apps/ID")
    parser.add_argument("--only", nargs="+", choices=["swarm", "storm", "locust", "k6"])
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "compare")
    parser.add_argument("--charts", type=Path, help="write a PNG of each run of swarm and storm into this folder")
    options = parser.parse_args()
    chosen = options.only or ["swarm", "storm", "locust", "k6"]
    good = True
    with contextlib.ExitStack() as stack:
        if not options.url:
            options.url, _ = stack.enter_context(redpoll(workers=1, tls=False))
        address = Address.parse(options.url)
        for profile, words in SWARM.items() if "swarm" in chosen else ():
            good &= run_ours("swarm", words, f"swarm-{profile}", options)
        if "storm" in chosen:
            good &= run_ours("storm", STORM, "storm", options)
        if "locust" in chosen:
            good &= run_locust(options, Used(address))
        if "k6" in chosen:
            good &= run_k6(options, Used(address))
    results = {path.stem: json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))}
    heads, *rows = load_rows(results)
    table = Table(*heads, show_lines=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if not good:
        sys.exit("a tool failed: see above")


if __name__ == "__main__":
    main()
