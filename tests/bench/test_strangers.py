"""bench/load/strangers.py runs its attacks and sees what they do. A short form; times aren't judged here."""

import argparse

import pytest
import uvloop
from bench.load import strangers


@pytest.mark.parametrize("name", ["layouts", "secure-messages"])
def test_an_attack_is_seen_beside_good_clients_and_a_back_end(name):
    options = argparse.Namespace(seconds=1.0, workers=1, good=5, share=0.02)
    figures = uvloop.run(strangers.attack(name, options))
    assert figures["published"] == sum(figures["answers"].values()) == 50
    assert figures["answers"]["200"] > 0
    assert figures["during"]["pong"]["count"] > 0
    assert figures["private_channel"].startswith(("yes", "no: "))
    # The measuring begins when the attacker has begun.
    assert figures["attacker"]["connections"] > 0
    assert figures["grown_mb"].keys() == {"worker", "control", "redis", "log", "store"}


def test_missed_goals_are_named():
    figures = {
        "during": {"pong": {"p99_ms": 100.1, "max_ms": 200.0, "server_p99_ms": 3.0}},
        "published": 3,
        "refused": 1,
        "answers": {"200": 2, "503, new": 1},
        "kept_connections_cut": 2,
        "publish_p99_ms": 4.0,
        "lost": 1,
        "private_channel": "no: LimitReached",
        "grown_mb": {"worker": 101.0, "control": 1.0, "redis": 0.0, "log": 0.0, "store": 0.0},
    }
    missed = ["pings", "publishes refused", "events lost", "private channel refused", "growth"]
    assert strangers.missed(figures) == missed
    row = strangers.row_of("x", figures)
    assert row[2] == "1 of 3: 1 x 503, new; 2 connections cut"
    assert len(row) == len(strangers.HEADS)
    quiet = figures | {
        "refused": 0,
        "lost": 0,
        "private_channel": "yes",
        "grown_mb": dict.fromkeys(figures["grown_mb"], 1.0),
    }
    assert strangers.missed(quiet | {"during": {"pong": {"p99_ms": 99.9}}}) == []
