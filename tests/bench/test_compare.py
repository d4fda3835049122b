"""bench/compare/compare.py starts a server of its own, reads what Locust and k6 write, and the table of loads has a
column for each server."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.compare import compare, render

ROOT = Path(__file__).parents[2]
SMALL = """
from bench.compare import compare
compare.SWARM = {"ticker": "--connections 5 --processes 1 --publish 20 --seconds 0.5"}
compare.main()
"""


def test_without_a_url_a_redpoll_is_started(tmp_path):
    command = [sys.executable, "-c", SMALL, "--name", "redpoll", "--only", "swarm", "--results", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PUSHER_URL"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    figures = json.loads((tmp_path / "swarm-ticker-redpoll.json").read_text())["figures"]
    assert (figures["server"], figures["failed"]) == ("redpoll", 0)


def test_locust_figures_have_the_percentiles_of_its_histogram():
    entry = {
        "name": "event",
        "num_requests": 200,
        "num_failures": 3,
        "response_times": {"12": 100, "3": 97, "450": 3},
    }
    assert compare.locust_figures([entry]) == {
        "event": {"requests": 200, "failures": 3, "p50_ms": 12.0, "p99_ms": 450.0}
    }


def test_locust_row_without_answers_has_no_percentiles_to_show():
    entry = {"name": "publish", "num_requests": 0, "num_failures": 0, "response_times": {}}
    assert compare.locust_figures([entry])["publish"]["p99_ms"] == 0


def test_k6_figures_name_the_thresholds_that_were_missed():
    metrics = {
        "event_latency": {"med": 2.04, "p(99)": 612.0, "max": 700.0, "thresholds": {"p(99)<500": True}},
        "reconnect_time": {"med": 0, "p(99)": 0, "max": 0, "thresholds": {"p(99)<2000": False}},
        "events": {"count": 51},
    }
    assert compare.k6_figures(metrics) == {
        "event": {"p50_ms": 2.0, "p99_ms": 612.0},
        "events": 51,
        "missed": "event_latency p(99)<500",
    }


def test_loads_of_two_servers_are_columns_of_one_table():
    def k6(server: str, p99: float, **more: object) -> dict:
        steady = {"event": {"p50_ms": 1.0, "p99_ms": p99}, "events": 10, "missed": "none"}
        return {"bench": "k6", "figures": {"server": server, "steady": steady, **more}}

    spike = {"events": 0, "missed": "checks rate>0.999"}
    results = {"k6-a": k6("a", 2.5), "k6-b": k6("b", 7.0, spike=spike), "bus": {"bench": "bus", "figures": {}}}
    assert render.load_rows(results) == [
        ["load", "figure", "a", "b"],
        ["k6", "steady: event, p50, ms", "1", "1"],
        ["k6", "steady: event, p99, ms", "2.5", "7"],
        ["k6", "steady: events", "10", "10"],
        ["k6", "steady: thresholds missed", "none", "none"],
        ["k6", "spike: events", "–", "0"],
        ["k6", "spike: thresholds missed", "–", "checks rate>0.999"],
    ]
