"""Runs Django's outbox at full size: every committed event arrives once and in order, whatever is killed.

    python -m bench.soak.outbox                           SQLite and PostgreSQL, about ten minutes
    python -m bench.soak.outbox --database sqlite --transactions 2000 --sender-kills 4 --redpoll-kills 1

Two senders publish 10,000 transactions, a third of which are rolled back. Twenty times a sender is killed with -9 and
another one started; five times redpoll is killed with -9, with all its processes and its embedded Redis, and started
again on its data folder. What a subscriber with recovery gets is compared with what was committed. Before that, without
kills, transactions come at a steady rate: the time from each commit to its receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from helpers.outbox_run import Result, Site, run_outbox
from helpers.postgres import PostgresServer
from helpers.server import Server
from helpers.walk import command

LEASE_S = 10.0


class Killable(Server):
    """A server that can be killed whole, and started again on its ports."""

    def kill(self) -> None:
        self.public_port = self.port
        os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@contextlib.contextmanager
def empty_database(kind: str) -> Iterator[str]:
    """`OUTBOX_DATABASE` of an empty database."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="rpoutbox") as folder:
            yield str(Path(folder) / "outbox.sqlite3")
        return
    server = PostgresServer()
    try:
        server.start()
        yield f"postgres:{server.folder}:{server.create_database(empty=True)}"
    finally:
        server.close()


async def soak(server: Killable, site: Site, transactions: int, sender_kills: int, redpoll_kills: int) -> Result:
    async def kill_redpoll() -> None:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    kills = [kill_redpoll] * redpoll_kills
    return await run_outbox(site, server.pusher_url, transactions, seed=2, sender_kills=sender_kills, kills=kills)


def differences(result: Result) -> list[str]:
    """What is wrong, in words, by channel."""
    faults = []
    for channel, committed in result.committed.items():
        received = result.received[channel]
        lost, more = set(committed) - set(received), set(received) - set(committed)
        repeated = len(received) - len(set(received))
        if received != committed:
            faults.append(f"{channel}: {len(lost)} lost, {len(more)} rolled back, {repeated} repeated, or out of order")
    return faults


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--transactions", type=int, default=10_000)
    parser.add_argument("--sender-kills", type=int, default=20)
    parser.add_argument("--redpoll-kills", type=int, default=5)
    parser.add_argument("--rate", type=float, default=20.0, help="transactions a second of the run without kills")
    parser.add_argument("--steady", type=int, default=600, help="transactions of the run without kills")
    options = parser.parse_args()
    rows: list[list[object]] = []
    faults: list[str] = []
    with Killable(workers=2) as server:
        command(server, "app", "set", server.app_id, "idempotency=true")
        rule = ("--prefix", "kept-", "--keep", "10000", "--seconds", "3600")
        command(server, "history", "rule", "add", server.app_id, *rule)
        for kind in ("sqlite", "postgres") if options.database == "both" else (options.database,):
            with empty_database(kind) as database:
                site = Site(database, server.pusher_url, LEASE_S)
                steady = asyncio.run(run_outbox(site, server.pusher_url, options.steady, seed=1, rate=options.rate))
                killed = asyncio.run(
                    soak(server, site, options.transactions, options.sender_kills, options.redpoll_kills)
                )
            for name, result in (("steady", steady), ("killed", killed)):
                faults += [f"{kind}, {name}: {text}" for text in differences(result)]
                events = sum(map(len, result.received.values()))
                times = [f"{result.percentile_s(share) * 1000:.0f} ms" for share in (0.5, 0.99)]
                rows.append([kind, name, events, *times])
    print_table(["database", "run", "events", "p50", "p99"], rows)
    for fault in faults:
        print(fault)
    if options.json is not None:
        save(options.json, "outbox", {"machine": machine(), "rows": rows, "faults": faults})
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
