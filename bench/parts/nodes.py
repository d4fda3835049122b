"""What a further node costs Redis and the others while it is idle, and how many Redis commands clients cause.

    python -m bench.parts.nodes                  one, two and three nodes with one worker each
    python -m bench.parts.nodes --seconds 60     counts for a minute at each number of nodes

With one node and with two, the commands per connection, subscription and publish are counted at a proxy between the
first node and Redis. While all nodes are idle: the commands that Redis executes per second, those of scripts included,
and the processor time of Redis and of the first node's supervisor, control plane and worker, in percent of a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from conftest import RedisServer
from helpers.proxy import Proxy
from helpers.server import Server, cpu_s
from helpers.wire import Api, Socket, connect_many

CLIENTS = 100
PERIODIC = (b":beat", b":stats:", b":nodes", b":dirver", b":trace")


def node(redis_url: str, name: str, first: Server | None, **settings: Any) -> Server:
    """A server, not started yet, with the records of the first one."""
    server = Server(workers=1, redis_url=redis_url, node_name=name, **settings)
    if first is not None:
        (server.folder / "data").mkdir(mode=0o700)
        (server.folder / "data" / "redpoll.sqlite").symlink_to(first.folder / "data" / "redpoll.sqlite")
    return server


def of_clients(commands: list[list[bytes]]) -> list[list[bytes]]:
    """Without what processes send by a clock: such as the script that reads the rows of webhooks."""
    return [
        command
        for command in commands
        if not any(part in word for word in command for part in PERIODIC)
        and not (command[0] == b"EVALSHA" and command[2] == b"3" and command[5].endswith(b":left"))
    ]


async def commands_per_client(server: Server, proxy: Proxy) -> dict[str, float]:
    counts: dict[str, float] = {}

    async def noted(what: str, work: Any) -> Any:
        proxy.note_commands()
        done = await work
        counts[what] = len(of_clients(list(proxy.commands))) / CLIENTS
        return done

    async def subscribe(sockets: list[Socket], prefix: str, separate: bool) -> None:
        for number, socket in enumerate(sockets):
            await socket.subscribe(f"{prefix}-{number}" if separate else prefix, f"user-{number}")

    async def publish(api: Api) -> None:
        for _ in range(CLIENTS):
            await api.publish("public", "e", "")

    sockets = await noted("connect", connect_many(server, CLIENTS))
    await noted("subscribe, channel of its own", subscribe(sockets, "own", True))
    await noted("subscribe, presence", subscribe(sockets, "presence-room", False))
    async with Api(server) as api:
        await noted("publish", publish(api))
    await asyncio.gather(*(socket.close() for socket in sockets))
    return counts


def commands_of(server: Server) -> float:
    with server.redis() as redis:
        return float(redis.info("stats")["total_commands_processed"])


def idle(redis_pid: int, first: Server, seconds: float) -> dict[str, float]:
    """Rates over some seconds. The two commands that ask for the count are subtracted."""
    pids = {"redis": redis_pid, "supervisor": first.pid, "control": first.control_pid, "worker": first.worker_pids()[0]}
    time.sleep(3.0)
    before, began = {what: cpu_s(pid) for what, pid in pids.items()}, time.monotonic()
    counted = commands_of(first)
    time.sleep(seconds)
    commands = commands_of(first) - counted - 2
    took_s = time.monotonic() - began
    percent = {what: 100 * (cpu_s(pid) - before[what]) / took_s for what, pid in pids.items()}
    return {"commands_per_s": commands / took_s, **percent}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print(json.dumps(machine()))
    per_client: dict[int, dict[str, float]] = {}
    rates: dict[int, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpbench"))))
        redis.start()
        stack.callback(redis.kill)
        assert redis.process is not None
        proxy = stack.enter_context(Proxy(redis.path))
        servers = [stack.enter_context(node(proxy.url, "node-1", None))]
        while True:
            count = len(servers)
            rates[count] = idle(redis.process.pid, servers[0], options.seconds)
            if count <= 2:
                per_client[count] = asyncio.run(commands_per_client(servers[0], proxy))
            if count == options.nodes:
                break
            servers.append(stack.enter_context(node(redis.url, f"node-{count + 1}", servers[0])))
    print()
    print_table(
        ["Redis commands per", *(f"{count} node(s)" for count in per_client)],
        [[what, *(f"{counts[what]:.2f}" for counts in per_client.values())] for what in per_client[1]],
    )
    print()
    print_table(
        ["idle nodes", "Redis commands/s", "Redis %", "supervisor %", "control %", "worker %"],
        [[count, *(f"{value:.2f}" for value in row.values())] for count, row in rates.items()],
    )
    if options.json is not None:
        save(options.json, "nodes", {"per_client": per_client, "idle": rates})


if __name__ == "__main__":
    main()
