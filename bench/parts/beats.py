"""What the heartbeats of many workers cost Redis: a simulation with a real Redis.

    python -m bench.parts.beats                          3,200 workers, each beats once a second for 10 s
    python -m bench.parts.beats --workers 100 800 3200   several numbers, each in a Redis of its own

Each worker is the real `Incarnation` on a connection of its own; only its channels and clients are missing. The
leader's reaper reads the table of all beats once a second, as it does in a server. Printed are the size of an answer,
the processor time of Redis for a beat, and the share of a core that it makes at one beat per second and worker. If the
machine can't keep up with that, fewer beats are made, and the shares are extrapolated from their cost.

It is measured twice. `quiet`: Redis has nothing else to do, and wakes up, reads and writes for each of these
connections alone; a PING in place of the beat costs it nearly as much. `busy`: the same beats come at once over one
connection, so what is left is the beat itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import structlog

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from conftest import RedisServer
from helpers.server import cpu_s
from redpoll.cluster.directory import Directory
from redpoll.cluster.membership.incarnation import Incarnation
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import BEAT

RUN = "0123456789ab"
# At once; more would only wait for the others.
REGISTERING = 20
BUSY_S = 3.0


class Counted(NamedTuple):
    """What Redis has counted so far."""

    scripts: int
    sent_bytes: int
    spent_s: float
    at: float


async def simulate(redis: RedisServer, workers: int, seconds: float) -> dict[str, float]:
    assert redis.process is not None
    keys, pid = Keys(), redis.process.pid
    links = [Link(redis.url) for _ in range(workers + 1)]
    timings = Timings(unanswered_s=60.0)
    incarnations = [
        Incarnation(link, keys, RUN, k, Directory(link, keys), timings) for k, link in enumerate(links[1:], start=1)
    ]
    limit = asyncio.Semaphore(REGISTERING)

    async def register(link: Link, incarnation: Incarnation) -> None:
        async with limit:
            link.start()
            await link.wait_up()
            await incarnation.register()

    async def counted() -> Counted:
        text = bytes(await links[0].ask(b"INFO", b"everything")).decode()
        info = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        script = dict(part.split("=") for part in info["cmdstat_evalsha"].split(","))
        sent = int(info["total_net_output_bytes"])
        return Counted(int(script["calls"]), sent, cpu_s(pid), time.monotonic())

    async def busy_us() -> float:
        names = [incarnation.worker_id for incarnation in incarnations[:100]]
        commands = [BEAT.command((keys.beat, keys.directory_version), (w, 0)) for w in names]
        made, spent_s, until = 0, cpu_s(pid), time.monotonic() + BUSY_S
        while time.monotonic() < until:
            await links[0].ask_all(commands)
            made += len(commands)
        return 1e6 * (cpu_s(pid) - spent_s) / made

    links[0].start()
    await links[0].wait_up()
    await asyncio.gather(*(register(link, one) for link, one in zip(links[1:], incarnations, strict=True)))
    reaper = Reaper(links[0], keys, RUN)
    reaper.set_alive(set(range(1, workers + 1)), workers)
    reaping = asyncio.create_task(reaper.run())
    for at, incarnation in enumerate(incarnations):
        # Spread over the second, as those of machines that were started at different times.
        asyncio.get_running_loop().call_later(at / workers, incarnation.start)
    await asyncio.sleep(2.0)
    before = await counted()
    await asyncio.sleep(seconds)
    after = await counted()
    reaping.cancel()
    for incarnation in incarnations:
        incarnation.close()
    await asyncio.gather(reaping, *(link.close() for link in links[1:]), return_exceptions=True)
    # Redis has to close them as well.
    await asyncio.sleep(2.0)
    busy = await busy_us()
    await links[0].close()
    made, spent_s = after.scripts - before.scripts, after.spent_s - before.spent_s
    return {
        "workers": workers,
        "beats_per_s": round(made / (after.at - before.at)),
        "sent_bytes": round((after.sent_bytes - before.sent_bytes) / made),
        "quiet_us": round(1e6 * spent_s / made, 1),
        "quiet_percent": round(100 * spent_s / made * workers, 1),
        "busy_us": round(busy, 1),
        "busy_percent": round(busy * workers / 1e4, 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[3_200])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    # Each connection is logged otherwise.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    print(json.dumps(machine()))
    rows = []
    for workers in options.workers:
        with contextlib.ExitStack() as stack:
            redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpbench"))))
            redis.start()
            stack.callback(redis.kill)
            rows.append(asyncio.run(simulate(redis, workers, options.seconds)))
    print_table(
        ["workers", "beats/s made", "B sent each", "quiet µs", "quiet % of a core", "busy µs", "busy % of a core"],
        [[f"{row['workers']:,}", *(f"{value:,}" for value in list(row.values())[1:])] for row in rows],
    )
    if options.json is not None:
        save(options.json, "beats", {"rows": rows})


if __name__ == "__main__":
    main()
