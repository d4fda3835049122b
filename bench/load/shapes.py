"""Processor time of a publish for each shape of request that libraries and proxies send, beside the usual shape.

    python -m bench.load.shapes [--seconds 0.4] [--rounds 3] [--connections 64]       three minutes
    python -m bench.load.shapes --only php rust nginx --rate 4000

Starts a redpoll with one worker, all of its processes on one core, which trusts this machine as a proxy. hammer.c sends
each shape of tests/helpers/library_requests.py from the other core, in turns with the usual one, over as many
connections: as fast as answers come, or --rate a second. Packets of a shape follow each other at once, as libraries
send them (1 µs between two calls of send(2)), or after 100 Continue. A shape whose connection ends after the answer is
compared with the usual shape and a connection each.

`us` is processor time of all of redpoll (worker, control, Redis) for each publish, `ratio` the median of the rounds'
ratios to the usual shape; `!` marks one beyond its goal. `more` is what the shape costs more than the usual one, and
`bare` what it costs a bare C server more (bare_http.c, on the same core), where it comes in several packets: the
kernel's share. The last line has the share of all requests that the worker read in one step, and that control answered
by its fast path, as /metrics counts them. Traced calls, a few a second, take the other way. Not measured: wall times.
"""

from __future__ import annotations

import os
import platform
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.arguments import parser_of
from bench.driver import compiled
from bench.load.publish import Measured, Target, pids_of, reference, run
from bench.report import save
from helpers.leading import command
from helpers.library_requests import LIBRARY_REQUESTS, USUAL, USUAL_EACH, LibraryRequest
from helpers.server import Server

GOAL, GOAL_EACH = 1.3, 1.15
# Workers write their counters every 5 s.
COUNTED_WITHIN_S = 30.0


class Row(NamedTuple):
    """One shape in one round: its own run, and that of the usual shape."""

    own: Measured
    usual: Measured


def us(measured: Measured) -> float:
    return sum(measured.us.values())


class Bench:
    """The client's side. Requests are those of an app of `server`, and sent to `target`. `token` is for the shape with
    one."""

    def __init__(
        self, server: Server, target: Target, folder: Path, options: tuple[int, float, int], token: str
    ) -> None:
        self._server, self._target, self._folder, self._token = server, target, folder, token
        self._connections, self._seconds, self._rate = options
        self._client = compiled("hammer.c", folder / "hammer")

    def measure(self, shape: LibraryRequest) -> Measured:
        requests, server = self._folder / "requests", self._server
        packets = shape.signed(server.app_id, server.app_key, server.app_secret, self._token)
        request = b"".join(packets)
        requests.write_bytes(struct.pack("<I", len(request)) + request)
        words = ["each"] * shape.closes + ["split"] * (len(packets) > 1)
        core = max(os.sched_getaffinity(0))
        return run(self._client, self._target, requests, self._connections, self._seconds, self._rate, words, core)

    def compare(self, shape: LibraryRequest, turn: int) -> Row:
        """Each goes first in every other turn."""
        usual = USUAL_EACH if shape.closes else USUAL
        if turn % 2:
            return Row(self.measure(shape), self.measure(usual))
        reference = self.measure(usual)
        return Row(self.measure(shape), reference)


def comes_in_packets(shape: LibraryRequest) -> bool:
    """In several, at once: the bare server reads these, but sends no 100 Continue."""
    return len(shape.packets) > 1 and not shape.closes and b"100-continue" not in shape.packets[0].lower()


def more_us(rows: list[Row]) -> float:
    return statistics.median(us(row.own) - us(row.usual) for row in rows)


def counted(server: Server) -> tuple[float, float, float]:
    """HTTP requests that the worker sent on; of these, usual ones; publishes by control's fast path."""
    counters = dict.fromkeys(
        ("redpoll_http_forwarded_total", "redpoll_http_usual_total", "redpoll_publishes_fast_total"), 0.0
    )
    for (name, _), value in server.metrics().items():
        if name in counters:
            counters[name] += value
    forwarded, usual, fast = counters.values()
    return forwarded, usual, fast


def settled(server: Server) -> tuple[float, float, float]:
    """`counted`, once the worker has written its counters after the last request."""
    until, before, seen = time.monotonic() + COUNTED_WITHIN_S, None, counted(server)
    while time.monotonic() < until and (seen[0] < seen[2] or seen != before):
        # Longer than between two of its reports.
        time.sleep(6)
        before, seen = seen, counted(server)
    return seen


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--seconds", type=float, default=0.4, help="of each run")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rate", type=int, default=0, help="requests a second; 0: as fast as answers come")
    arguments.add_argument("--only", nargs="+", default=[""], help="shapes whose name begins so")
    options = arguments.parse_args()
    shapes = {name: shape for name, shape in LIBRARY_REQUESTS.items() if name.startswith(tuple(options.only))}
    if not shapes:
        sys.exit(f"no shape begins so; there are: {', '.join(LIBRARY_REQUESTS)}")
    everywhere = os.sched_getaffinity(0)
    rounds: dict[str, list[Row]] = {name: [] for name in shapes}
    bare: dict[str, list[Row]] = {name: [] for name, shape in shapes.items() if comes_in_packets(shape)}
    with tempfile.TemporaryDirectory(prefix="rpshapes") as name_of_folder:
        folder, core = Path(name_of_folder), {min(everywhere)}
        os.sched_setaffinity(0, core)  # inherited by all processes of the server
        with Server(workers=1, log_level="warning", trusted_proxies="127.0.0.1") as server:
            os.sched_setaffinity(0, everywhere)
            token = command(server, "token", "create", server.app_id, "--name", "bench", "--scope", "publish")["token"]
            load = (options.connections, options.seconds, options.rate)
            bench = Bench(server, Target(server.port, pids_of(server)), folder, load, token)
            for usual in (USUAL, USUAL_EACH):
                # The first run is slower than later ones.
                bench.measure(usual)
            with reference(core, folder) as target:
                bare_bench = Bench(server, target, folder, load, token)
                for turn in range(options.rounds):
                    for name, shape in shapes.items():
                        rounds[name].append(bench.compare(shape, turn))
                        if name in bare:
                            bare[name].append(bare_bench.compare(shape, turn))
            forwarded, usual_, fast = settled(server)
    print(f"{platform.machine()}, CPython {platform.python_version()}, {options.connections} connections")
    print(f"{'':46}{'us':>8}{'usual':>8}{'ratio':>7}{'goal':>6}{'more':>7}{'bare':>6}   us by process")
    figures: dict[str, dict[str, float]] = {}
    for name, rows in rounds.items():
        own, usual_us = (statistics.median(us(one) for one in side) for side in zip(*rows, strict=True))
        ratio = statistics.median(us(row.own) / us(row.usual) for row in rows)
        goal = GOAL_EACH if shapes[name].closes else GOAL
        parts = {role: statistics.median(row.own.us[role] for row in rows) for role in rows[0].own.us}
        shown = " + ".join(f"{role} {value:.1f}" for role, value in parts.items())
        more, bare_more = more_us(rows), more_us(bare[name]) if name in bare else None
        print(
            f"{name:46}{own:8.1f}{usual_us:8.1f}{ratio:7.2f}{goal:6}{' ' if ratio <= goal else '!'}{more:6.1f}"
            f"{'' if bare_more is None else f'{bare_more:.1f}':>6}   {shown}"
        )
        figures[name] = {"us": round(own, 1), "usual_us": round(usual_us, 1), "ratio": round(ratio, 2)}
        if bare_more is not None:
            figures[name] |= {"more_us": round(more, 1), "bare_more_us": round(bare_more, 1)}
    print(
        f"of {forwarded:,.0f} requests {usual_ / forwarded:.2%} were read in one step, {fast / forwarded:.2%} were fast"
    )
    if options.json:
        save(options.json, "shapes", figures, usual=usual_ / forwarded, fast=fast / forwarded)


if __name__ == "__main__":
    main()
