"""How long other clients wait after a worker was killed with -9: for each `member_removed`, for right counts, for
service.

    python -m bench.load.worker_killed [--repeat 20] [--members 50] [--json FILE]

Four workers; the members are on one of them, observers on the others. The time counts from just before the signal.
Goal: all removals seen and counts right within a second.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import uvloop

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from helpers.server import Server
from helpers.wire import Api, Socket, eventually, sockets_by_worker

CHANNEL = "presence-killed"


async def one_kill(server: Server, members: int) -> dict[str, float]:
    held = await sockets_by_worker(server, members)
    victim = max(held, key=lambda pid: len(held[pid]))
    observers = [sockets[0] for pid, sockets in held.items() if pid != victim]
    for number, socket in enumerate(held[victim][:members]):
        await socket.subscribe(CHANNEL, f"member-{number}")
    for number, observer in enumerate(observers):
        await observer.subscribe(CHANNEL, f"observer-{number}")
    left = sorted(f"observer-{number}" for number in range(len(observers)))
    async with Api(server) as api:
        assert len(await api.users(CHANNEL)) == members + len(observers)
        began = time.monotonic()
        server.kill_worker(server.worker_pids().index(victim))

        async def removed(observer: Socket) -> float:
            def all_there() -> bool:
                return len(observer.all("pusher_internal:member_removed", CHANNEL)) >= members

            await observer.until(all_there, 60, "every member_removed")
            return time.monotonic() - began

        async def counted() -> float:
            await eventually(lambda: api.users(CHANNEL), left)
            await eventually(lambda: api.subscription_count(CHANNEL), len(left))
            return time.monotonic() - began

        async def restarted() -> float:
            async def processes() -> int:
                return len(server.worker_pids())

            await eventually(processes, server.workers)
            return time.monotonic() - began

        removals, counts, restart = await asyncio.gather(
            asyncio.gather(*map(removed, observers)), counted(), restarted()
        )
    heard = [len(observer.all("pusher_internal:member_removed", CHANNEL)) for observer in observers]
    assert heard == [members] * len(observers), f"not removed once each: {heard}"
    await asyncio.gather(*(socket.close() for pid, sockets in held.items() if pid != victim for socket in sockets))
    return {"member_removed_s": max(removals), "counts_right_s": counts, "process_back_s": restart}


async def measure(repeat: int, members: int) -> list[dict[str, float]]:
    with Server(workers=4) as server:
        return [await one_kill(server, members) for _ in range(repeat)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--members", type=int, default=50)
    options = parser.parse_args()
    about = machine()
    print(json.dumps(about))
    rows = uvloop.run(measure(options.repeat, options.members))
    print()
    print_table(
        ["after kill -9, seconds", "least", "median", "greatest"],
        (
            [
                name.removesuffix("_s").replace("_", " "),
                *(f"{of(row[name] for row in rows):.3f}" for of in (min, statistics.median, max)),
            ]
            for name in rows[0]
        ),
    )
    if options.json is not None:
        figures = {
            name: {of.__name__: round(of(row[name] for row in rows), 3) for of in (statistics.median, max)}
            for name in rows[0]
        }
        save(options.json, "worker_killed", figures, runs=rows)


if __name__ == "__main__":
    main()
