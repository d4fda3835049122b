"""Memory per idle connection of several engines: growth of resident memory divided by the number of connections.

`python -m bench.parts.memory [--connections N] [--kinds uvloop redpoll transports picows picows-small]` measures each
kind in a server process of its own, with the clients in another process. `uvloop` is its transport with the smallest
protocol. `redpoll` is an open WebSocket in one Audience, as a worker has it, without session and app. `transports` is
the same on uvloop's transport instead of a plain socket. `picows` has its defaults, `picows-small` the smallest read
buffer, 2 kB, on uvloop's transport. Kernel memory isn't counted. connections.py measures a whole worker, with session
and subscription. `--tls` is the same over TLS: `redpoll` on the worker's TLS sockets, the others on uvloop's, which
use Python's module ssl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop
from picows import WSListener, ws_create_server

from bench.arguments import parser_of
from bench.driver import tls_settings
from bench.report import save
from redpoll import _engine, _http, _memory
from redpoll._fanout import Audience, Flusher
from redpoll._sockets import Listener, Poller
from redpoll.worker.ingress.tls import Certificates

HEAD = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
# A first few connections grow pools and dictionaries that later ones share.
WARM_UP = 500
KINDS = ("uvloop", "redpoll", "transports", "picows-small", "picows")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Least:
    """A buffered protocol that answers the upgrade and keeps nothing but its transport."""

    __slots__ = ("transport",)
    buffer = bytearray(65536)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    @classmethod
    def get_buffer(cls, size_hint: int) -> bytearray:
        return cls.buffer

    def buffer_updated(self, size: int) -> None:
        self.transport.write(b"HTTP/1.1 101 \r\n\r\n")

    def connection_lost(self, fault: Exception | None) -> None:
        pass

    def eof_received(self) -> bool:
        return False


@_memory.untracked
class Connection(_engine.WebSocket):
    """As worker/hub/connection.py: no fields of its own."""

    __slots__ = ()

    def __init__(self, flusher: Flusher, audience: Audience) -> None:
        super().__init__(flusher, 65536)
        self.gate = audience
        self.session = None

    def head_received(self, head: bytes) -> None:
        self.accept(_http.parse_head(head).headers[b"sec-websocket-key"])
        self.gate.add(self)


def accept_tls(listening: socket.socket, poller: Poller, pair: tuple[str, str], make: Callable[[], Connection]) -> None:
    """Accept as worker/ingress/listeners.py does."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(Path(pair[1]).read_bytes() + Path(pair[0]).read_bytes())
        file.flush()
        certificate = Certificates(file.name)
    listening.setblocking(False)

    def accept() -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = listening.accept()
                sock.setblocking(False)
                poller.adopt(sock.detach(), certificate.socket_for(poller, make(), lambda tls, fault: None))

    poller.loop.add_reader(listening, accept)


async def serve(kind: str, count: int, pair: tuple[str, str] | None) -> None:
    """Prints the bytes per connection, once `count` of them have been there and were idle. `pair`: paths of a
    certificate and its key, for TLS."""
    loop = asyncio.get_running_loop()
    context = None
    if pair is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*pair)
    poller = Poller(loop)
    flusher = Flusher(lambda: loop.call_soon(flusher.flush), poller=poller)
    audience = Audience(flusher)

    if kind.startswith("picows"):
        # Listeners are held by their transports, as in picows' own examples.
        small = {"read_buffer_init_size": 2048, "use_aiofastnet": False} if kind == "picows-small" else {}
        server = await ws_create_server(
            lambda request: WSListener(), "127.0.0.1", 0, backlog=4096, ssl=context, **small
        )
    elif kind == "uvloop":
        server = await loop.create_server(Least, "127.0.0.1", 0, backlog=4096, ssl=context)
    elif kind == "redpoll":
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        port = listening.getsockname()[1]
        if pair is None:
            server = Listener(poller, listening.detach(), lambda: Connection(flusher, audience), print)
        else:
            server = listening
            accept_tls(listening, poller, pair, lambda: Connection(flusher, audience))
    else:
        server = await loop.create_server(
            lambda: Connection(flusher, audience), "127.0.0.1", 0, backlog=4096, ssl=context
        )
    if kind != "redpoll":
        port = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", __spec__.name, "--client", str(port), *["--tls"] * (pair is not None)]
    clients = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )

    async def open_more(number: int) -> int:
        clients.stdin.write(b"%d\n" % number)
        assert await clients.stdout.readline() == b"done\n"
        gc.collect()
        return resident_bytes()

    before = await open_more(WARM_UP)
    after = await open_more(count)
    assert kind not in ("redpoll", "transports") or len(audience) == WARM_UP + count
    print((after - before) / count)
    clients.stdin.close()
    await clients.wait()
    server.close()


def hold_connections(port: int, tls: bool) -> None:
    """The clients' process: opens as many as each line of stdin says."""
    sockets = []
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for line in sys.stdin:
        for _ in range(int(line)):
            client = socket.create_connection(("127.0.0.1", port))
            if tls:
                client = context.wrap_socket(client)
            client.sendall(HEAD)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                answer += client.recv(4096)
            sockets.append(client)
        print("done", flush=True)


def main() -> None:
    parser = parser_of(__doc__, tls=True)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.client is not None:
        hold_connections(arguments.client, arguments.tls)
    elif arguments.kind is not None:
        uvloop.run(serve(arguments.kind, arguments.connections, arguments.pair and tuple(arguments.pair)))
    else:
        print(f"{arguments.connections} idle connections, bytes of resident memory each{', TLS' * arguments.tls}")
        results = {}
        with tls_settings(arguments.tls) as settings:
            pair = ["--pair", settings["tls_cert"], settings["tls_key"]] if settings else []
            for kind in arguments.kinds:
                words = ["--kind", kind, "--connections", arguments.connections, *pair]
                command = [sys.executable, "-m", __spec__.name, *map(str, words)]
                figure = float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
                results[kind] = round(figure)
                print(f"{kind:>12}: {figure:8,.0f}", flush=True)
        if arguments.json is not None:
            save(arguments.json, "memory", {"connections": arguments.connections, **results})


if __name__ == "__main__":
    main()
