"""The attacks of bench/load/strangers.py: what a stranger sends from one address, until it is ended.

Not a bench by itself. `python -m bench.load.strangers_attacks NAME TARGET` runs one of `ATTACKS` in a process of its
own; TARGET is a Target as JSON. SIGTERM ends it, and it prints what it has done as JSON. The names in brackets are
those of the findings that an attack repeats. Attacks that keep connections open open them again when the server
closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final, Self
from zlib import crc32

import uvloop

from bench.driver import socket_from
from bench.load.floods import PING, frame, upgrade

__all__ = ["ATTACKS", "HISTORY_CHANNEL", "VICTIM_CHANNEL", "Attack", "Target"]

# All attacks come from here.
ADDRESS: Final = "127.0.0.2"
# `shard` takes the places of this channel's shard; `history` reads that one.
VICTIM_CHANNEL: Final = "private-user-42"
HISTORY_CHANNEL: Final = "hist-a"
_SHARDS: Final = 64
_PIECE: Final = b"a" * 65_536
_PAUSE_S: Final = 0.1
_READ_BYTES: Final = 262_144


@dataclass(frozen=True)
class Target:
    """The server. `share`, at most 1, makes every attack smaller; 1 is as the findings have it."""

    host: str
    port: int
    tls_port: int
    app_id: str
    app_key: str
    share: float = 1.0

    def size(self, connections: int) -> int:
        return max(1, round(connections * self.share))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))


class Stranger:
    """One attack. `counts` is what it prints at its end."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()

    # -- connections

    async def connect(self, port: int = 0) -> socket.socket:
        sock = socket_from(ADDRESS)
        try:
            await self._loop.sock_connect(sock, (self.target.host, port or self.target.port))
        except BaseException:
            sock.close()
            raise
        self.counts["connections"] += 1
        return sock

    async def send(self, sock: socket.socket, data: bytes) -> None:
        await self._loop.sock_sendall(sock, data)
        self.counts["sent bytes"] += len(data)

    async def receive(self, sock: socket.socket) -> bytes:
        """The next bytes. Raises ConnectionError at the end."""
        data = await self._loop.sock_recv(sock, _READ_BYTES)
        if not data:
            raise ConnectionResetError("closed by the server")
        return data

    async def crowd(
        self, connections: int, act: Callable[[socket.socket], Awaitable[None]], per_s: float = 5_000
    ) -> None:
        """As many connections as that. When all are open, or were refused, each acts; it is replaced when `act` ends or
        raises OSError. At first, `per_s` are opened in a second."""
        left = self.target.size(connections)
        all_open = asyncio.Event()

        async def open_one() -> socket.socket | None:
            with contextlib.suppress(OSError):
                return await self.connect()
            return None

        async def one() -> None:
            nonlocal left
            sock = await open_one()
            left -= 1
            if left == 0:
                all_open.set()
            await all_open.wait()
            while True:
                if sock is not None:
                    with contextlib.suppress(OSError), sock:
                        await act(sock)
                await asyncio.sleep(_PAUSE_S)
                sock = await open_one()

        async with asyncio.TaskGroup() as group:
            for number in range(left):
                group.create_task(one())
                if number % 50 == 49:
                    await asyncio.sleep(50 / per_s)

    async def repeat(self, connections: int, request: bytes) -> None:
        """Keep-alive connections that repeat a request, each after the answer to the last one."""

        async def act(sock: socket.socket) -> None:
            while True:
                await self.send(sock, request)
                answer = await self.receive(sock)
                self.counts[f"answers {answer[9:12].decode('latin-1')}"] += 1

        await self.crowd(connections, act)

    async def flood(self, connections: int, head: bytes, piece: bytes) -> None:
        """Connections that send a head and then pieces without end."""

        async def act(sock: socket.socket) -> None:
            await self.send(sock, head)
            while True:
                await self.send(sock, piece)

        await self.crowd(connections, act)

    async def hold(self, connections: int, data: bytes, per_s: float = 5_000) -> None:
        """Connections that send something once, and wait until they are closed."""

        async def act(sock: socket.socket) -> None:
            if data:
                await self.send(sock, data)
            while True:
                await self.receive(sock)

        await self.crowd(connections, act, per_s)

    async def websocket(self) -> socket.socket:
        sock = await self.connect()
        try:
            await self.send(sock, upgrade(self.target.app_key))
            head = await self.receive(sock)
            self.counts[f"upgrades {head[9:12].decode('latin-1')}"] += 1
            if b" 101 " not in head[:16]:
                raise ConnectionResetError("refused")
        except BaseException:
            sock.close()
            raise
        return sock

    async def subscribe(self, sock: socket.socket, names: Iterable[str]) -> None:
        """Subscribes a WebSocket to channels, and reads all answers."""
        waiting = 0
        for part in _parts(names, 100):
            await self.send(sock, b"".join(frame("pusher:subscribe", channel=name) for name in part))
            waiting += len(part)
        while waiting > 0:
            answers = await self.receive(sock)
            done = answers.count(b"subscription_succeeded")
            refused = answers.count(b"subscription_error")
            self.counts["subscribed"] += done
            self.counts["subscribes refused"] += refused
            waiting -= done + refused

    def request(self, path: str, query: str = "", method: str = "GET", lines: str = "") -> bytes:
        """The head of a request with a wrong signature of the app's key, which is public."""
        signed = (
            f"auth_key={self.target.app_key}&auth_timestamp={int(time.time())}&auth_version=1.0"
            f"&auth_signature={'0' * 64}{query}"
        )
        return f"{method} {path}?{signed} HTTP/1.1\r\nHost: bench\r\n{lines}\r\n".encode()

    # -- attacks

    async def webhooks(self) -> None:
        names = itertools.count()
        while True:
            with contextlib.suppress(OSError), await self.websocket() as sock:
                await self.subscribe(
                    sock, [f"new-{next(names)}".ljust(150, "x") for _ in range(self.target.size(1000))]
                )
            await asyncio.sleep(0)

    async def requests(self) -> None:
        layouts = "".join(f"&a{number}=" for number in range(90)) + "&b[]=+"
        await self.repeat(4_500, self.request(f"/api/v1/apps/{self.target.app_id}/channels", layouts))

    async def health(self) -> None:
        await self.repeat(4_500, b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n")

    async def layouts(self) -> None:
        arrays = "".join(f"&a{number}[]=+" for number in range(95))
        await self.repeat(1_000, self.request(f"/apps/{self.target.app_id}/channels", arrays))

    async def signatures(self) -> None:
        await self.repeat(1_000, self.request(f"/apps/{self.target.app_id}/channels"))

    async def shard(self) -> None:
        # What is known without the record store's shard key: where channels of a store without one are.
        own = f"{self.target.app_id}:"
        wanted = crc32((own + VICTIM_CHANNEL).encode()) % _SHARDS
        names = (
            name for name in map("x{}".format, itertools.count()) if crc32((own + name).encode()) % _SHARDS == wanted
        )
        # All of them now: a search while the attack runs would hold up the loop, and with it the end of the attack.
        same_shard = list(itertools.islice(names, 40 * self.target.size(1_000)))
        await self._occupy(40, itertools.cycle(same_shard))

    async def names(self) -> None:
        await self._occupy(70, (f"long-{number}".ljust(198, "x") for number in itertools.count()))

    async def _occupy(self, sockets: int, names: Iterable[str]) -> None:
        """Sockets that subscribe to a thousand channels each, and stay."""
        left = iter(names)

        async def act() -> None:
            with await self.websocket() as sock:
                await self.subscribe(sock, list(itertools.islice(left, self.target.size(1_000))))
                while True:
                    await self.receive(sock)

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    await act()
                await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(sockets):
                group.create_task(one())

    async def bodies(self) -> None:
        head = self.request(f"/apps/{self.target.app_id}/events", method="POST", lines="Content-Length: 16000\r\n")
        await self.hold(2_500, head + b"x" * 15_990)

    async def trailer(self) -> None:
        await self.flood(8, _CHUNKED + b"0\r\nX: ", _PIECE)

    async def trailers(self) -> None:
        await self.flood(8, _CHUNKED + b"0\r\n", b"X: y\r\n" * 10_000)

    async def extension(self) -> None:
        await self.flood(8, _CHUNKED + b"1;", _PIECE)

    async def large_trailers(self) -> None:
        await self.hold(150, _CHUNKED + b"0\r\nX: " + _PIECE * 64)

    async def hellos(self) -> None:
        hello, waiting = client_hello(), set()

        async def one(ready: asyncio.Event) -> None:
            with contextlib.suppress(OSError), await self.connect(self.target.tls_port) as sock:
                await ready.wait()
                await self.send(sock, hello)
                await self.receive(sock)
                self.counts["hellos answered"] += 1

        while True:
            ready = asyncio.Event()
            tasks = [asyncio.ensure_future(one(ready)) for _ in range(self.target.size(4_000))]
            waiting.update(tasks)
            # Accepted, and nothing was sent.
            await asyncio.sleep(1.5)
            ready.set()
            await asyncio.wait(tasks, timeout=6)
            for task in tasks:
                task.cancel()

    async def secure_messages(self) -> None:
        loop, messages = self._loop, PING * (16_000 // len(PING))
        context = insecure_context()
        transports: list[asyncio.WriteTransport] = []
        for _ in range(self.target.size(200)):
            with contextlib.suppress(OSError):
                sock = await self.connect(self.target.tls_port)
                transport, _ = await loop.create_connection(
                    asyncio.Protocol, sock=sock, ssl=context, server_hostname="localhost"
                )
                transport.write(upgrade(self.target.app_key))
                transports.append(transport)
        await asyncio.sleep(0.5)
        while True:
            for transport in transports:
                if not transport.is_closing():
                    transport.write(messages)
                    self.counts["messages"] += 16_000 // len(PING)
            await asyncio.sleep(0.5)

    async def upgrades(self) -> None:
        packet = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n" * 1_000

        async def act(sock: socket.socket) -> None:
            await self.send(sock, packet)
            while True:
                await self.receive(sock)

        await self.crowd(1, act)

    async def pipelined(self) -> None:
        async def act(sock: socket.socket) -> None:
            async def read() -> None:
                while True:
                    self.counts["answers"] += (await self.receive(sock)).count(b"HTTP/1.1 ")

            reading = asyncio.ensure_future(read())
            try:
                while not reading.done():
                    await self.send(sock, b"GET / HTTP/1.1\r\nHost:a\r\n\r\n" * 2_400)
            finally:
                reading.cancel()

        await self.crowd(8, act)

    async def silent(self) -> None:
        await self.hold(500, b"", per_s=400)

    async def descriptors(self) -> None:
        held: list[socket.socket] = []
        for _ in range(400):
            with contextlib.suppress(OSError, TimeoutError):
                held.append(await asyncio.wait_for(self.websocket(), 2))
        while True:
            with contextlib.suppress(OSError):
                held.append(await self.connect())
            await asyncio.sleep(0.02)

    async def history(self) -> None:
        ask = frame("pusher:history", channel=HISTORY_CHANNEL, limit=100)

        async def one() -> None:
            with await self.websocket() as sock:
                await self.subscribe(sock, [HISTORY_CHANNEL])

                async def read() -> None:
                    while True:
                        self.counts["received bytes"] += len(await self.receive(sock))

                reading = asyncio.ensure_future(read())
                try:
                    while not reading.done():
                        await self.send(sock, ask)
                        self.counts["asked"] += 1
                        await asyncio.sleep(0.05)
                finally:
                    reading.cancel()

        async def again() -> None:
            while True:
                with contextlib.suppress(OSError):
                    await one()
                await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.target.size(50)):
                group.create_task(again())


_CHUNKED: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Attack:
    """`rows` are those of the findings. `files`: the server's limit of descriptors, None for the machine's."""

    rows: str
    about: str
    run: Callable[[Stranger], Awaitable[None]]
    files: int | None = None


ATTACKS: Final = {
    "webhooks": Attack("T1", "one socket after another subscribes to 1,000 new channels", Stranger.webhooks),
    "requests": Attack("T2", "4,500 connections repeat a wrong signature of many layouts", Stranger.requests),
    "health": Attack("T2", "4,500 connections ask for /healthz", Stranger.health),
    "shard": Attack("T4", "40 sockets fill the shard of a private channel", Stranger.shard),
    "names": Attack("T4", "70 sockets subscribe to 1,000 long names each", Stranger.names),
    "bodies": Attack("T6", "2,500 connections with 16 kB of an unfinished body each", Stranger.bodies),
    "descriptors": Attack(
        "T8", "400 WebSockets, then 50 silent connections a second; 400 files", Stranger.descriptors, 400
    ),
    "layouts": Attack("T9, M1", "1,000 connections repeat a query of 95 arrays", Stranger.layouts),
    "signatures": Attack("M1", "1,000 connections repeat a wrong signature", Stranger.signatures),
    "trailer": Attack("H1", "8 clients send one trailer without end", Stranger.trailer),
    "trailers": Attack("H1", "8 clients send trailers without end", Stranger.trailers),
    "extension": Attack("H1", "8 clients send a chunk extension without end", Stranger.extension),
    "large-trailers": Attack("H1", "150 clients send 4 MB of a trailer each", Stranger.large_trailers),
    "hellos": Attack("H2", "4,000 TLS clients send their ClientHello at once", Stranger.hellos),
    "secure-messages": Attack("H2", "200 TLS clients send 16 kB of messages at once", Stranger.secure_messages),
    "upgrades": Attack("H3", "1,000 pipelined requests with an Upgrade in a packet", Stranger.upgrades),
    "silent": Attack("M5", "500 TCP connections send nothing; 400 files", Stranger.silent, 400),
    "pipelined": Attack("L2", "8 clients pipeline minimal requests", Stranger.pipelined),
    "history": Attack("T15", "50 sockets ask for 250 kB of history 20 times a second", Stranger.history),
}


def insecure_context() -> ssl.SSLContext:
    """A client's context that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def client_hello() -> bytes:
    """The first bytes of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        insecure_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _parts(names: Iterable[str], size: int) -> Iterable[list[str]]:
    left = iter(names)
    while part := list(itertools.islice(left, size)):
        yield part


async def run(attack: Attack, target: Target) -> dict[str, int]:
    """Runs until SIGTERM; returns the counts."""
    stranger, over = Stranger(target), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    running = asyncio.ensure_future(attack.run(stranger))
    while not stranger.counts and not running.done():
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    ended = asyncio.ensure_future(over.wait())
    await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    return dict(stranger.counts)


def main() -> None:
    # From another machine it would take no processor time of the server and the good clients.
    os.nice(10)
    uvloop.run(_run_and_report())


async def _run_and_report() -> None:
    counts = await run(ATTACKS[sys.argv[1]], Target.parse(sys.argv[2]))
    print(json.dumps(counts), flush=True)
    # Tasks and sockets end with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
