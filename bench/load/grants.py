"""A reconnect of pages with forty private channels each: by signed grants, and by a signature for each channel.

    python -m bench.load.grants [--clients 1000] [--channels 40] [--workers 2] [--json FILE]

All clients are in the channels; then their connections are cut at once, and each connects again and subscribes to its
channels again. With `grants`, a client sends the grant that it has. With `signatures`, it asks a back end over HTTP for
each channel, as pusher-js does; the back end is one process of this bench, which computes an HMAC and answers, over
connections that stay open: a real one is slower. `auth_requests` is what the back end was asked during the reconnect,
`back_s` the time until all clients are in all channels, `server_us` the processor time of the workers for each
subscribe. `checks` are the microseconds of processor time that one process takes to check an `auth`: a signature, a
grant that a connection shows for the first time, and one that it remembers, with as many patterns as channels.

Client and server share this machine, so compare the two ways, not the seconds with other machines'.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import socket
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import uvloop

from bench.arguments import parser_of
from bench.load.floods import Clock, frame, upgrade
from bench.report import print_table, save
from helpers.granting import mint
from helpers.server import Server
from helpers.wire import Socket
from redpoll.ipc.command_socket import ask, socket_path
from redpoll.protocol.access import Access
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import channel_fault, sign_channel
from redpoll.protocol.grants import AppGrants

_AT_ONCE: Final = 200
_LIMIT_S: Final = 300.0
_BACKENDS_CONNECTIONS: Final = 50


# -- the back end of the pages


def back_end(listening: socket.socket, key: str, secret: str, pipe: Connection) -> None:
    """Signs `socket_id channel` for each line of a request, in a process of its own. Says how often it was asked."""
    asked = 0

    class Requests(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.rest = b""

        def data_received(self, data: bytes) -> None:
            nonlocal asked
            *requests, self.rest = (self.rest + data).split(b"\r\n\r\n")
            for request in requests:
                socket_id, _, channel = request.split(b" ")[1][1:].decode().partition("/")
                asked += 1
                body = json.dumps({"auth": f"{key}:{sign_channel(secret, socket_id, channel)}"}).encode()
                self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(Requests, sock=listening)
        loop.add_reader(pipe.fileno(), lambda: pipe.send(asked) if pipe.recv() else loop.stop())
        await loop.create_future()

    # Until the bench ends it.
    with contextlib.suppress(RuntimeError, EOFError):
        uvloop.run(serve())


class BackEnd:
    """A client of it: keep-alive connections, answers in order, as the pages' browsers together would have it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[_Asking] = []
        self._next = 0

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_BACKENDS_CONNECTIONS):
            _, asking = await loop.create_connection(_Asking, "127.0.0.1", self._port)
            self._connections.append(asking)

    def ask(self, socket_id: str, channel: str, then: Any) -> None:
        self._next = (self._next + 1) % len(self._connections)
        self._connections[self._next].ask(socket_id, channel, then)


class _Asking(asyncio.Protocol):
    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, socket_id: str, channel: str, then: Any) -> None:
        self._waiting.append(then)
        self._transport.write(f"POST /{socket_id}/{channel} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"}")) >= 0:
            answer = json.loads(self._rest[self._rest.index(b"{") : end + 1])
            self._rest = self._rest[end + 1 :]
            self._waiting.pop(0)(answer["auth"])


# -- the pages


class Page(asyncio.Protocol):
    """One page: connects and subscribes to its channels; `missing` counts those that haven't succeeded."""

    def __init__(self, number: int, channels: list[str], auth: str, back_end: BackEnd | None, run: Run) -> None:
        self.number = number
        self.channels = channels
        self.auth = auth
        self.back_end = back_end
        self.run = run
        self.missing = len(channels)
        self.received = b""
        self.greeted = False
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.greeted, self.received, self.missing = False, b"", len(self.channels)
        transport.write(upgrade(self.run.key))

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.greeted and b"socket_id" in self.received:
            self.greeted = True
            socket_id = self.received.split(b'socket_id\\":\\"')[1].split(b"\\")[0].decode()
            self._subscribe(socket_id)
        # The rest of a text that may be cut in the middle stays.
        count = self.received.count(b"subscription_succeeded")
        assert b"subscription_error" not in self.received, self.received[-400:]
        if self.greeted:
            self.received = self.received[self.received.rfind(b"subscription_succeeded") + 22 if count else 0 :][-400:]
        if count:
            self.missing -= count
            if self.missing == 0:
                self.run.back()

    def _subscribe(self, socket_id: str) -> None:
        if self.back_end is None:
            frames = [frame("pusher:subscribe", channel=name, auth=self.auth) for name in self.channels]
            self.transport.write(b"".join(frames))
            return
        for name in self.channels:
            self.back_end.ask(socket_id, name, lambda auth, name=name: self._signed(name, auth))

    def _signed(self, name: str, auth: str) -> None:
        if not self.transport.is_closing():
            self.transport.write(frame("pusher:subscribe", channel=name, auth=auth))


class Run:
    """All pages of a run. `wait()` returns when all are in all channels."""

    def __init__(self, port: int, key: str, count: int) -> None:
        self.port = port
        self.key = key
        self._count = count
        self._left = count
        self._done = asyncio.Event()

    def back(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    async def connect(self, pages: list[Page]) -> None:
        self._left = self._count
        self._done.clear()
        loop, permits = asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)

        async def one(page: Page) -> None:
            async with permits:
                await loop.create_connection(lambda: page, "127.0.0.1", self.port)

        await asyncio.gather(*map(one, pages))
        async with asyncio.timeout(_LIMIT_S):
            await self._done.wait()


async def measure(server: Server, way: str, options: argparse.Namespace) -> dict[str, Any]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1_000)
    ours, theirs = multiprocessing.Pipe()
    arguments = (listening, server.app_key, server.app_secret, theirs)
    process = multiprocessing.get_context("fork").Process(target=back_end, args=arguments, daemon=True)
    process.start()
    try:
        signing = BackEnd(listening.getsockname()[1]) if way == "signatures" else None
        if signing is not None:
            await signing.open()
        run = Run(server.port, server.app_key, options.clients)
        pages = [_page(server, way, number, options.channels, signing, run) for number in range(options.clients)]
        await run.connect(pages)
        before = _asked(ours)
        clocks = [Clock(pid) for pid in server.worker_pids()]
        used = sum(clock() for clock in clocks)
        for page in pages:
            page.transport.abort()
        began = time.monotonic()
        await run.connect(pages)
        back_s = time.monotonic() - began
        used = sum(clock() for clock in clocks) - used
        for page in pages:
            page.transport.abort()
        return {
            "auth_requests": _asked(ours) - before,
            "back_s": round(back_s, 2),
            "server_us": round(used / options.clients / options.channels * 1e6, 1),
        }
    finally:
        process.kill()
        process.join()
        listening.close()


def _asked(pipe: Connection) -> int:
    pipe.send(True)
    asked: int = pipe.recv()
    return asked


def _page(server: Server, way: str, number: int, count: int, signing: BackEnd | None, run: Run) -> Page:
    channels = [f"private-org-{number % 100}-{at}" for at in range(count)]
    auth = mint(server.app_key, server.app_secret, f"private-org-{number % 100}-*", sub=str(number), jti=str(number))
    return Page(number, channels, auth if way == "grants" else "", signing, run)


# -- one check


def checks(channels: int) -> dict[str, float]:
    """Microseconds of processor time for one check of each kind."""
    app = App(id="1", name="bench", keys=(Key(key="k" * 20, secret="s" * 40),), grants=True)
    grants = AppGrants(time.time)
    auths = [
        mint("k" * 20, "s" * 40, *(f"private-org-{at}-*" for at in range(channels)), sub=str(number))
        for number in range(2_000)
    ]
    name = f"private-org-{channels // 2}-news"
    signature = f"{'k' * 20}:{sign_channel('s' * 40, '1.1', name)}"
    access = Access()
    first = _us([lambda auth=auth: access.opens(app, grants, None, name, auth) for auth in auths])
    again = _us([lambda: access.opens(app, grants, None, name, auths[-1])] * len(auths))
    signed = _us([lambda: channel_fault(app, "1.1", name, signature, None)] * len(auths))
    return {"signature": signed, "grant, the first time": first, "grant, remembered": again}


def _us(calls: list[Any]) -> float:
    began = time.process_time()
    for call in calls:
        call()
    return round((time.process_time() - began) / len(calls) * 1e6, 2)


async def both(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    # Until a worker knows that the app accepts grants.
    while True:
        probe = await Socket.connect(server)
        auth = mint(server.app_key, server.app_secret, "private-probe")
        probe.send({"event": "pusher:subscribe", "data": {"channel": "private-probe", "auth": auth}})
        answer = await probe.next(None, "private-probe")
        probe.abort()
        if answer["event"] == "pusher_internal:subscription_succeeded":
            break
    # The first run warms the server up; its figures are replaced.
    return {way: await measure(server, way, options) for way in ("grants", "signatures", "grants")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--channels", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    files = options.clients + 2_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, files), hard), hard))
    limits = {"max_connections_per_address": 0, "subscribes_per_second_per_address": 0}
    with Server(workers=options.workers, files=(files, max(files, hard)), **limits) as server:
        ask(socket_path(server.folder / "data"), "app set", {"id": server.app_id, "settings": {"grants": "true"}})
        figures: dict[str, Any] = {
            "checks_us": checks(options.channels),
            "reconnect": uvloop.run(both(server, options)),
        }
    rows = [[way, *one.values()] for way, one in figures["reconnect"].items()]
    print_table(["", "auth requests", "all back, s", "server, µs a subscribe"], rows)
    print_table(["check", "µs"], [list(pair) for pair in figures["checks_us"].items()])
    if options.json is not None:
        save(options.json, "grants", {"clients": options.clients, "channels": options.channels, **figures})


if __name__ == "__main__":
    main()
