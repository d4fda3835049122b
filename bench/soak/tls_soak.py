"""Whether TLS leaks memory or descriptors: many handshakes that are cut, then mixed load for a while.

    python -m bench.soak.tls_soak [--handshakes 50000] [--seconds 600] [--json FILE]

One worker, after a warm-up of the same kind. First handshakes are cut at any byte, by FIN and by RST. Then for
`--seconds`: readers that must miss nothing, events published over HTTPS on one keep-alive connection, clients that come
and go, clients that don't read (each must be closed with 4100), handshakes that are cut, and a new certificate by
SIGHUP every ten seconds. Afterwards the worker must have as many descriptors as before, and its memory to within 5 %.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket as sockets
import ssl
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP
from typing import Any, Self

import aiohttp
import uvloop

from bench.arguments import parser_of
from bench.report import machine, print_table, save
from helpers.certs import self_signed
from helpers.server import Server, open_files, rss_bytes
from helpers.wire import Socket, signed_path, upgrade_request

READERS = 50
STALLED = 10
EVENT_BYTES = 8_000
EVENTS_PER_S = 60
AT_ONCE = 100
NEW_CERTIFICATE_EVERY_S = 10.0
CLOSED_WITHIN_S = 60.0
GROWTH = 1.05


class Secure(Socket):
    """A client over wss that takes whatever certificate it is shown."""

    @classmethod
    async def open(cls, target: Target, receive_buffer_bytes: int = 0) -> Self:
        raw = sockets.socket()
        raw.setblocking(False)
        if receive_buffer_bytes:
            raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", target.port))
        _, self = await loop.create_connection(cls, sock=raw, ssl=target.context, server_hostname="localhost")
        self._target = target
        self.write(upgrade_request(target))
        established = await self.next("pusher:connection_established", timeout_s=30)
        self.socket_id = json.loads(established["data"])["socket_id"]
        return self

    def forget(self) -> None:
        """Frames that were looked at; a soak would keep them all."""
        self.frames.clear()
        self._cursor = 0


@dataclass
class Target:
    """The TLS port as wire.py's clients want a server described."""

    port: int
    app_id: str
    app_key: str
    app_secret: str
    context: ssl.SSLContext = field(default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def __post_init__(self) -> None:
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_NONE

    def hello(self) -> bytes:
        """The first bytes of a handshake."""
        outgoing = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            self.context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
        return outgoing.read()


async def cut_one(target: Target, hello: bytes) -> None:
    """A handshake that ends somewhere: in the client's first words, or before, within or after the answer."""
    loop = asyncio.get_running_loop()
    with sockets.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", target.port))
        part = random.choice((0, random.randrange(len(hello)), len(hello), len(hello)))
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, hello[:part])
            if part == len(hello) and random.random() < 0.8:
                await loop.sock_recv(client, random.choice((1, 100, 4096)))
                await loop.sock_sendall(
                    client, random.choice((b"", b"\x16\x03\x03\x00", b"\x15\x03\x03\x00\x02\x02\x2a"))
                )
        if random.random() < 0.5:
            client.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))


async def cut(target: Target, count: int) -> None:
    hello = target.hello()
    turn = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with turn:
            await cut_one(target, hello)

    for start in range(0, count, 1000):
        await asyncio.gather(*(one() for _ in range(min(1000, count - start))))


class Soak:
    """Everything at once. Counters say what was seen; a reader that misses an event raises."""

    def __init__(self, server: Server, target: Target, folder: Path) -> None:
        self.server = server
        self.target = target
        self.folder = folder
        self.published = self.delivered = self.came_and_went = self.stalled_closed = self.certificates = 0
        self.slowest_close_s = 0.0
        self._over = asyncio.Event()
        self.looks = 0
        self._open: set[int] = set()
        self._stalled_now = 0
        self._all_published = False

    async def run(self, seconds: float) -> None:
        readers = [await Secure.open(self.target) for _ in range(READERS)]
        for reader in readers:
            await reader.subscribe("news")
        works: list[Callable[[], Any]] = [self.come_and_go, self.cut_handshakes, self.change_certificates, self.look]
        works += [self.stall] * STALLED
        tasks = [asyncio.create_task(work()) for work in works]
        publishing = asyncio.create_task(self.publish())
        hearing = [asyncio.create_task(self.hear(reader)) for reader in readers]
        done, _ = await asyncio.wait(
            [*tasks, publishing, *hearing], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        self._over.set()
        for task in (*done, *tasks):
            await task
        await publishing
        await asyncio.gather(*hearing)
        for reader in readers:
            await reader.close()

    async def publish(self) -> None:
        # Until the last client that stalls has been closed for its unsent bytes.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            due = time.monotonic()
            while not self._over.is_set() or self._stalled_now:
                data = f"{self.published}:".ljust(EVENT_BYTES, "x")
                body = json.dumps({"name": "n", "channels": ["news"], "data": data}).encode()
                path = signed_path(self.target, "POST", f"/apps/{self.target.app_id}/events", body)
                url = f"https://127.0.0.1:{self.target.port}{path}"
                async with session.post(url, data=body, ssl=self.target.context) as answer:
                    assert answer.status == 200, await answer.text()
                self.published += 1
                due += 1 / EVENTS_PER_S
                await asyncio.sleep(due - time.monotonic())
        self._all_published = True

    async def hear(self, reader: Secure) -> None:
        expected = 0
        while not self._all_published or expected < self.published:
            with contextlib.suppress(TimeoutError):
                frame = await reader.next("n", timeout_s=1.0)
                number = int(frame["data"].partition(":")[0])
                assert number == expected, f"event {number} where {expected} was due"
                expected += 1
                self.delivered += 1
                if expected % 1000 == 0:
                    # A client from which nothing comes for two minutes is asked, and closed where it is silent.
                    reader.send({"event": "pusher:ping", "data": {}})
                if len(reader.frames) > 100 and reader._cursor == len(reader.frames):
                    reader.forget()

    async def come_and_go(self) -> None:
        while not self._over.is_set():
            client = await Secure.open(self.target)
            await client.subscribe(f"room-{random.randrange(100)}")
            if random.random() < 0.5:
                await client.close()
            else:
                client.abort()
            self.came_and_went += 1

    async def cut_handshakes(self) -> None:
        while not self._over.is_set():
            await cut(self.target, 20)
            await asyncio.sleep(0.2)

    async def stall(self) -> None:
        while not self._over.is_set():
            client = await Secure.open(self.target, receive_buffer_bytes=4096)
            await client.subscribe("news")
            client.pause()
            self._stalled_now += 1
            began = time.monotonic()
            try:
                async with asyncio.timeout(CLOSED_WITHIN_S):
                    looks = self.looks
                    while self.looks < looks + 2 or client.port in self._open:
                        await asyncio.sleep(0.25)
            finally:
                self._stalled_now -= 1
            self.slowest_close_s = max(self.slowest_close_s, time.monotonic() - began)
            client.resume()
            with contextlib.suppress(ConnectionError):
                await client.until(lambda client=client: client.lost, 10, "its end")
            self.stalled_closed += 1

    async def look(self) -> None:
        """Which of our ports the server has open, as the kernel sees it: a client that doesn't read can't tell."""
        while not self._over.is_set() or self._stalled_now:
            table = await asyncio.to_thread(Path("/proc/net/tcp").read_bytes)
            # Remote address and state; 01 is established.
            self._open = {int(port, 16) for port in re.findall(rb" 0100007F:(\w{4}) 01 ", table)}
            self.looks += 1
            await asyncio.sleep(0.5)

    async def change_certificates(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), NEW_CERTIFICATE_EVERY_S)
            await asyncio.to_thread(self_signed, self.folder)
            self.server.signal(SIGHUP)
            self.certificates += 1


@dataclass(frozen=True)
class HistoryPosition:
    """What the worker holds when no client is connected."""

    rss_bytes: int
    files: int


async def settled(server: Server) -> HistoryPosition:
    """Waits until no client is connected, and then for memory that is freed late."""
    (pid,) = server.worker_pids()
    least = HistoryPosition(rss_bytes(pid), open_files(pid))
    for _ in range(30):
        await asyncio.sleep(0.5)
        least = HistoryPosition(min(least.rss_bytes, rss_bytes(pid)), min(least.files, open_files(pid)))
    return least


@contextlib.asynccontextmanager
async def running(kind: type[Server] = Server) -> AsyncIterator[tuple[Server, Target, Path]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cert, key = self_signed(folder)
        options = {"tls_port": 0, "tls_cert": cert, "tls_key": key, "trigger_rate_per_minute": 0}
        with kind(workers=1, log_level="warning", **options) as server:
            match = re.search(r" tls=https://\S+:(\d+)", (server.folder / "out").read_text())
            assert match is not None, server.output()
            yield server, Target(int(match[1]), server.app_id, server.app_key, server.app_secret), folder


async def measure(handshakes: int, seconds: float) -> dict[str, Any]:
    async with running() as (server, target, folder):
        (pid,) = server.worker_pids()
        # Pools and buffers of everything that comes later are made once.
        await Soak(server, target, folder).run(min(20.0, seconds))
        await cut(target, min(5000, handshakes))
        before = await settled(server)
        began = time.monotonic()
        await cut(target, handshakes)
        took_s = time.monotonic() - began
        after_handshakes = await settled(server)
        soak = Soak(server, target, folder)
        await soak.run(seconds)
        after_soak = await settled(server)
        assert server.worker_pids() == [pid], "the worker was not the same to the end"
        assert not server._tracebacks()
        return {
            "handshakes_cut": handshakes,
            "handshakes_per_s": round(handshakes / took_s),
            "soak_s": seconds,
            "published": soak.published,
            "delivered": soak.delivered,
            "came_and_went": soak.came_and_went,
            "slow_closed": soak.stalled_closed,
            "slowest_close_s": round(soak.slowest_close_s, 1),
            "certificates": soak.certificates,
            "rss_before": before.rss_bytes,
            "rss_after_handshakes": after_handshakes.rss_bytes,
            "rss_after_soak": after_soak.rss_bytes,
            "files_before": before.files,
            "files_after_handshakes": after_handshakes.files,
            "files_after_soak": after_soak.files,
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--handshakes", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    about = machine()
    print(json.dumps(about))
    row = uvloop.run(measure(options.handshakes, options.seconds))
    print_table(["what", "seen"], ([name.replace("_", " "), f"{value:,}"] for name, value in row.items()))
    if options.json is not None:
        save(options.json, "tls_soak", row)
    grown = [
        name
        for name in ("after_handshakes", "after_soak")
        if row[f"rss_{name}"] > GROWTH * row["rss_before"] or row[f"files_{name}"] > row["files_before"]
    ]
    if grown:
        raise SystemExit(f"more is held than at the start: {', '.join(grown)}")


if __name__ == "__main__":
    main()
