"""What traces cost Redis: its traffic for each publish at two nodes, with traces and without.

    python -m bench.parts.trace_traffic [--seconds 20] [--rate 80] [--bytes 200]

Two servers with one worker each, and a subscriber of the channel at both. One of them gets `--rate` publishes a second,
so few that all are traced (`trace_calls_per_second` is 100); a second pair of servers has that at 0. The traffic is
Redis' own count. What both pairs send by a clock, such as heartbeats, is measured before and subtracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from bench.parts.nodes import node
from bench.report import machine, print_table, save
from conftest import RedisServer
from helpers.server import Server
from helpers.wire import Api, connect_many


def traffic(server: Server) -> tuple[int, int]:
    """The bytes that Redis has received and sent."""
    with server.redis() as redis:
        stats = redis.info("stats")
    return int(stats["total_net_input_bytes"]), int(stats["total_net_output_bytes"])


async def publish(server: Server, count: int, per_s: float, data: str) -> None:
    loop = asyncio.get_running_loop()
    async with Api(server) as api:
        began = loop.time()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / per_s - loop.time()))
            await api.publish("room", "event", data)
        await asyncio.sleep(max(0.0, began + count / per_s - loop.time()))


async def measure(servers: list[Server], seconds: float, per_s: float, data: str) -> tuple[float, float]:
    """The bytes in and out for each publish."""
    sockets = [(await connect_many(server, 1))[0] for server in servers]
    for socket in sockets:
        await socket.subscribe("room")
    # What the first publishes cause once.
    await publish(servers[0], int(per_s), per_s, data)
    await asyncio.sleep(2.0)
    idle = traffic(servers[0])
    await asyncio.sleep(seconds)
    before = traffic(servers[0])
    await publish(servers[0], int(per_s * seconds), per_s, data)
    # The last spans are on their way.
    after = traffic(servers[0])
    for socket in sockets:
        await socket.close()
    count = int(per_s * seconds)
    return tuple((after[at] - before[at] - (before[at] - idle[at])) / count for at in (0, 1))  # type: ignore[return-value]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="a multiple of 5: some is sent every 5 s")
    parser.add_argument("--rate", type=float, default=80.0, help="publishes a second")
    parser.add_argument("--bytes", type=int, default=200, help="of an event's data")
    options = parser.parse_args()
    print(json.dumps(machine()))
    figures: dict[str, tuple[float, float]] = {}
    for what, settings in (("without", {"trace_calls_per_second": 0}), ("with", {})):
        with contextlib.ExitStack() as stack:
            redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpbench"))))
            redis.start()
            stack.callback(redis.kill)
            servers: list[Server] = []
            for number in (1, 2):
                server = node(redis.url, f"node-{number}", servers[0] if servers else None, **settings)
                servers.append(stack.enter_context(server))
            figures[what] = asyncio.run(measure(servers, options.seconds, options.rate, "x" * options.bytes))
    ratios = [figures["with"][at] / figures["without"][at] for at in (0, 1)]
    rows: list[list[Any]] = [[what, *(round(value) for value in values)] for what, values in figures.items()]
    print_table(["traces", "B into Redis per publish", "B out"], [*rows, ["ratio", *(f"{x:.2f}" for x in ratios)]])
    if options.json is not None:
        save(options.json, "trace_traffic", {**figures, "ratio_in": ratios[0], "ratio_out": ratios[1]})


if __name__ == "__main__":
    main()
