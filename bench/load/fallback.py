"""What sessions of the HTTP fallback cost beside WebSockets: memory of each, and processor time of each delivery.

    python -m bench.load.fallback [--sessions 5000] [--events 40] [--json FILE]

Starts a redpoll with one worker for each kind of client: WebSockets and streams, with events one by one and in batches
of ten. All clients subscribe to one channel. The memory is the growth of the worker's resident set from the 100th
client to the last; a stream has a session and an HTTP connection. Then events are published one after the other, each
when the one before it has reached every client. `per_core_per_s` is deliveries by the worker's processor time, so it
depends neither on the client, which is in Python, nor on what else this machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import secrets
import time
from typing import Any

import uvloop

from bench.arguments import parser_of
from bench.driver import processor_s
from bench.load.publish import pids_of
from bench.report import machine, print_table, save
from helpers.server import Server, rss_bytes
from helpers.wire import TEXT, Api, frame, upgrade_request

CHANNEL = "bench"
WARM = 100
AT_ONCE = 50
_SUBSCRIBE = json.dumps({"event": "pusher:subscribe", "data": {"channel": CHANNEL}})
# In a line of the fallback, quotes are escaped.
_SUCCEEDED = b"pusher_internal:subscription_succeeded"
_EVENT = b"bench-event"


class Crowd:
    """All clients. `heard` counts events over all of them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.heard = 0
        self.ready = 0
        self.lost = 0
        self.changed = asyncio.Event()

    async def until(self, reached: Any) -> None:
        async with asyncio.timeout(300):
            while not reached():
                self.changed.clear()
                await self.changed.wait()
                assert not self.lost, f"{self.lost} clients were disconnected"


class Client(asyncio.Protocol):
    """A WebSocket, or a stream; subscribes when it is greeted."""

    def __init__(self, crowd: Crowd, streams: bool) -> None:
        self.crowd = crowd
        self.streams = streams
        self.greeted = self.subscribed = False
        self.session = f"{secrets.randbelow(1000)}/{secrets.token_hex(4)}"
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if not self.streams:
            transport.write(upgrade_request(self.crowd.server))
            return
        path = f"/pusher/app/{self.crowd.server.app_key}/{self.session}/xhr_streaming?protocol=7&client=js&n=1"
        transport.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        crowd = self.crowd
        # What a marker may be cut in.
        seen = self.tail + data
        if not self.greeted and b"connection_established" in seen:
            self.greeted = True
            self._subscribe()
        elif self.greeted and not self.subscribed and _SUCCEEDED in seen:
            self.subscribed = True
            crowd.ready += 1
            crowd.changed.set()
        events = seen.count(_EVENT)
        self.tail = seen[seen.rfind(_EVENT) + len(_EVENT) :] if events else seen[-300:]
        if events:
            crowd.heard += events
            crowd.changed.set()

    def _subscribe(self) -> None:
        if not self.streams:
            self.transport.write(frame(TEXT, _SUBSCRIBE.encode()))
            return
        task = asyncio.get_running_loop().create_task(self._send())
        self.sending = task

    async def _send(self) -> None:
        server = self.crowd.server
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps([_SUBSCRIBE]).encode()
        path = f"/pusher/app/{server.app_key}/{self.session}/xhr_send?n=2"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await writer.wait_closed() if writer.is_closing() else writer.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lost += 1
        self.crowd.changed.set()


async def connect(crowd: Crowd, streams: bool, count: int) -> None:
    loop = asyncio.get_running_loop()
    target = crowd.ready + count
    for first in range(0, count, AT_ONCE):
        part = min(AT_ONCE, count - first)
        made = [
            loop.create_connection(lambda: Client(crowd, streams), "127.0.0.1", crowd.server.port) for _ in range(part)
        ]
        await asyncio.gather(*made)
        await crowd.until(lambda: crowd.ready >= target - count + first + part)  # noqa: B023


async def measure(server: Server, streams: bool, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    crowd, worker = Crowd(server), pids_of(server)["worker"]
    await connect(crowd, streams, WARM)
    before, used_s = rss_bytes(worker), processor_s(worker)
    await connect(crowd, streams, options.sessions - WARM)
    opened = options.sessions - WARM
    row: dict[str, Any] = {
        "bytes": round((rss_bytes(worker) - before) / opened),
        "open_us": round((processor_s(worker) - used_s) / opened * 1e6),
    }
    async with Api(server) as api:
        began, used_s, start = time.monotonic(), processor_s(worker), crowd.heard
        for number in range(options.events // batch):
            events = [{"name": "bench-event", "channel": CHANNEL, "data": '{"n":1}'}] * batch
            status, answer = await api.ask("POST", "/batch_events", {"batch": events})
            assert status == 200, answer
            wanted = start + (number + 1) * batch * options.sessions
            await crowd.until(lambda: crowd.heard >= wanted)  # noqa: B023
        used_s, took_s = processor_s(worker) - used_s, time.monotonic() - began
    delivered = crowd.heard - start
    return row | {
        "deliveries": delivered,
        "per_s": round(delivered / took_s),
        "worker_us": round(used_s / delivered * 1e6, 2),
        "per_core_per_s": round(delivered / used_s),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--events", type=int, default=40, help="a multiple of ten")
    options = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    kinds = (
        ("websockets", False, 1),
        ("streams", True, 1),
        ("websockets, tens", False, 10),
        ("streams, tens", True, 10),
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, streams, batch in kinds:
        # Each in a server of its own: memory isn't given back to the system at once.
        with Server(workers=1) as server:
            rows[name] = uvloop.run(measure(server, streams, batch, options))
        print(json.dumps({name: rows[name]}), flush=True)
    print(json.dumps(machine()))
    print_table(["", *rows["streams"]], ([name, *row.values()] for name, row in rows.items()))
    if options.json is not None:
        save(options.json, "fallback", rows)


if __name__ == "__main__":
    main()
