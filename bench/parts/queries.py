"""How long queries of many channels hold the control plane's loop, and how long publishes wait beside them.

    python -m bench.parts.queries [--channels 200000] [--users 10000] [--repeat 3] [--json FILE]

A control plane on a Redis of its own, in this process; clients in other processes. For each query: its time, the
longest pass of the loop (in processor time of the loop's thread, so other work on this machine doesn't count), and the
longest wait of a publish that another client sent meanwhile, one after another. Goal: no pass over 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import hmac
import http.client
import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlencode

import redis as redis_py
import uvloop

from bench.arguments import parser_of
from bench.report import print_table, save
from conftest import RedisServer
from redpoll.cluster.redis.keys import Keys
from redpoll.config.config import Settings
from redpoll.control.accounts.accounts import Accounts
from redpoll.control.plane import ControlPlane
from redpoll.control.records.records import Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.ipc.messages import Lead, LivingWorkers, NodesChanged, Start, WorkersReady
from redpoll.store.eventlog import EventLog
from redpoll.store.store import Store, database_url

APP_ID, KEY, SECRET = "3", "278d425bdf160c739803", "7ad3773142a6692b25b8"
PRESENCE = "presence-bench"
PATH = f"/apps/{APP_ID}"


def signed(method: str, path: str, body: bytes = b"", **params: str) -> str:
    fields = {"auth_key": KEY, "auth_timestamp": str(int(time.time())), "auth_version": "1.0", **params}
    if body:
        fields["body_md5"] = hashlib.md5(body).hexdigest()
    text = "&".join(f"{name}={fields[name]}" for name in sorted(fields))
    fields["auth_signature"] = hmac.new(
        SECRET.encode(), f"{method}\n{path}\n{text}".encode(), hashlib.sha256
    ).hexdigest()
    return f"{path}?{urlencode(fields)}"


def publish_until(port: int, over: Event, result: Connection) -> None:
    """One publish after another; sends when each began and ended."""
    client = http.client.HTTPConnection("127.0.0.1", port)
    body = b'{"name":"e","channels":["beside"],"data":""}'
    waits: list[tuple[float, float]] = []
    while not over.is_set():
        if len(waits) == 20:
            result.send("running")
        began = time.perf_counter()
        client.request("POST", signed("POST", f"{PATH}/events", body), body)
        assert client.getresponse().read() == b"{}"
        waits.append((began, time.perf_counter()))
        time.sleep(0.0005)
    result.send(waits)


def ask(port: int, kind: str, go: Event, result: Connection) -> None:
    """One query, or all pages, once `go` is set; sends when it began and ended, and what came."""
    go.wait()
    client = http.client.HTTPConnection("127.0.0.1", port)

    def get(path: str, **params: str) -> tuple[int, bytes]:
        client.request("GET", signed("GET", path, **params))
        response = client.getresponse()
        return response.status, response.read()

    began = time.perf_counter()
    if kind == "pages of 1,000":
        params, pages, count = {"limit": "1000"}, 0, 0
        while True:
            page = json.loads(get(f"{PATH}/channels", **params)[1])
            pages, count = pages + 1, count + len(page["channels"])
            if page["next"] is None:
                break
            params["cursor"] = page["next"]
        what = f"{count} channels in {pages} pages"
    else:
        path, params = {
            "all channels": (f"{PATH}/channels", {}),
            "a quarter of the channels": (f"{PATH}/channels", {"filter_by_prefix": "channel-0"}),
            "a quarter, with counts": (
                f"{PATH}/channels",
                {"filter_by_prefix": "channel-0", "info": "subscription_count"},
            ),
            "a rare prefix": (f"{PATH}/channels", {"filter_by_prefix": "channel-000001"}),
            "users of a channel": (f"{PATH}/channels/{PRESENCE}/users", {}),
        }[kind]
        status, body = get(path, **params)
        what = f"{status}, {len(body)} bytes"
    result.send((began, time.perf_counter(), what))


class LoopProbe:
    """The longest pass of the running loop, in processor time of its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.longest_s = 0.0
        self._last = time.thread_time()
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        self._loop.call_later(0.0002, self._look)

    def take_ms(self) -> float:
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s * 1000


def occupy(redis: RedisServer, channels: int, users: int) -> None:
    """Channels of four prefixes with one subscription each, and one presence channel."""
    keys = Keys("rp")
    with redis_py.Redis(unix_socket_path=redis.path) as client:
        for start in range(0, channels, 1000):
            pipeline = client.pipeline(transaction=False)
            for number in range(start, min(channels, start + 1000)):
                name = f"channel-{number % 4}{number:08d}"
                pipeline.hset(keys.counts(APP_ID, name), "w", 1)
                pipeline.sadd(keys.occupied(keys.shard(APP_ID, name), APP_ID), name)
            pipeline.execute()
        members = {f"user-{number:06d}": "w\n" + json.dumps({"name": f"User {number}"}) for number in range(users)}
        client.hset(keys.members(APP_ID, PRESENCE), mapping=members)


@asynccontextmanager
async def control_plane(redis: RedisServer, folder: Path) -> AsyncIterator[int]:
    """A control plane; its port."""
    settings = Settings(trigger_rate_per_minute=0)
    store = await Store.open(database_url(folder))
    records = Records(store)
    await records.load()
    await records.upsert_app(APP_ID, KEY, SECRET)
    webhooks = Webhooks(store, records, settings)
    await webhooks.load()
    event_log = await EventLog.open(folder / "events.sqlite", 10_000, 3_600)
    listener = socket.create_server(("127.0.0.1", 0))
    start = Start(
        role="control",
        number=0,
        run="0123456789ab",
        process=0,
        redis_url=redis.url,
        listen_fd=listener.fileno(),
        requests_path=str(folder / "requests.sock"),
        data_dir=str(folder),
        settings=settings,
    )
    plane = ControlPlane(
        start,
        records,
        webhooks,
        listener,
        lambda message: None,
        shard_key=b"",
        accounts=Accounts(store),
        event_log=event_log,
    )
    await plane.start()
    plane.receive(LivingWorkers([], 0))
    plane.receive(NodesChanged([], None))
    plane.receive(Lead(1))
    plane.receive(WorkersReady())
    while not plane.publishing.publisher.open:
        await asyncio.sleep(0.01)
    # As in control's own process (control/main.py). Otherwise a pass would contain a collection of all modules.
    gc.collect()
    gc.freeze()
    try:
        yield listener.getsockname()[1]
    finally:
        await plane.finish()
        await records.finish()
        await event_log.close()
        await store.close()


async def measure(port: int, kinds: list[str]) -> list[dict[str, object]]:
    context = multiprocessing.get_context("fork")
    rows: list[dict[str, object]] = []
    for kind in kinds:
        over = context.Event()
        waits_end, waits_result = context.Pipe(duplex=False)
        publisher = context.Process(target=publish_until, args=(port, over, waits_result))
        publisher.start()
        while not waits_end.poll():
            await asyncio.sleep(0.01)
        waits_end.recv()
        asked_end, asked_result = context.Pipe(duplex=False)
        go = context.Event()
        asker = context.Process(target=ask, args=(port, kind, go, asked_result), daemon=True)
        if kind != "nothing":
            asker.start()
        # After a fork the first write to each page of memory costs a copy.
        await asyncio.sleep(1)
        probe = LoopProbe()
        await asyncio.sleep(0.5)
        quiet_ms = probe.take_ms()
        if kind != "nothing":
            go.set()
            while not asked_end.poll():
                await asyncio.sleep(0.01)
            began, ended, what = asked_end.recv()
            asker.join()
        else:
            began, what = time.perf_counter(), ""
            await asyncio.sleep(2)
            ended = time.perf_counter()
        pass_ms = probe.take_ms()
        over.set()
        while not waits_end.poll():
            await asyncio.sleep(0.01)
        waits = sorted(
            1000 * (answered - sent) for sent, answered in waits_end.recv() if sent < ended and answered > began
        )
        publisher.join()
        rows.append(
            {
                "query": kind,
                "answer": what,
                "ms": round(1000 * (ended - began)),
                "longest_pass_ms": round(pass_ms, 2),
                "longest_pass_before_ms": round(quiet_ms, 2),
                "publish_p50_ms": round(waits[len(waits) // 2], 2),
                "publish_max_ms": round(waits[-1], 2),
            }
        )
    return rows


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    kinds = ["nothing", "all channels", "a quarter of the channels", "a quarter, with counts", "a rare prefix"]
    kinds += ["users of a channel", *([] if options.unpaged_only else ["pages of 1,000"])]
    if options.only:
        kinds = options.only
    with tempfile.TemporaryDirectory(prefix="rp") as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            occupy(redis, options.channels, options.users)
            async with control_plane(redis, Path(folder)) as port:
                rows = [row for _ in range(options.repeat) for row in await measure(port, kinds)]
        finally:
            redis.kill()
    # Of several rounds the worst.
    worst: dict[str, dict[str, object]] = {}
    for row in rows:
        seen = worst.setdefault(str(row["query"]), row)
        if float(str(row["longest_pass_ms"])) > float(str(seen["longest_pass_ms"])):
            worst[str(row["query"])] = row
    return list(worst.values())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--channels", type=int, default=200_000)
    parser.add_argument("--users", type=int, default=10_000, help="of one presence channel")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="the queries to measure")
    parser.add_argument("--unpaged-only", action="store_true", help="for servers without pages")
    options = parser.parse_args()
    rows = uvloop.run(run(options))
    print_table(rows[0], [row.values() for row in rows])
    if options.json:
        save(options.json, "queries", {"rows": rows})


if __name__ == "__main__":
    main()
