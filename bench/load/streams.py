"""Readers by HTTP in one worker, beside WebSockets: memory of each, and processor time of each event sent to one.

    python -m bench.load.streams [--readers 9000] [--events 200] [--rounds 3]         two minutes

Starts a redpoll with one worker for each measurement, and lets as many clients follow a channel with history: as
readers of the Durable Streams protocol (`live=sse`), as EventSources, or as subscribers over WebSockets, in turns. HTTP
may have half of a worker's connections, so 20,000 open files allow 9,400 readers. The clients are sockets that read and
drop what comes, in a process of their own. Events of 100 bytes are published one by one; each is confirmed before the
next.

`kB` is how much the worker's resident memory grew for each client. `us` is the worker's processor time for each event
sent to one client, with what it takes to get it from Redis; `ratio` compares it with a WebSocket of the same round.
Streams end after a minute, so a round takes less; where it doesn't, it says how many clients were left.
"""

from __future__ import annotations

import multiprocessing
import resource
import selectors
import socket
import statistics
import sys
import time
import urllib.request
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.arguments import parser_of
from bench.report import save
from helpers.leading import command
from helpers.server import Server, cpu_s, rss_bytes
from helpers.wire import signed_path

CHANNEL = "kept-bench"
KINDS = ("sse", "event-source", "websocket")
# A character that nothing else has, so that what arrives in pieces can be counted.
DATA = "~" * 100
# How long clients may take to come, and events to arrive.
WITHIN_S = 60.0


class Row(NamedTuple):
    kind: str
    clients: int
    kb: float
    us: float
    left: int


def request_of(server: Server, token: str, kind: str) -> bytes:
    """What a client sends first."""
    path = f"/apps/{server.app_id}/channels/{CHANNEL}/stream"
    if kind == "websocket":
        return (
            f"GET /app/{server.app_key}?protocol=7 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
    query, accept = ("?live=sse&offset=now", "*/*") if kind == "sse" else ("?offset=now", "text/event-stream")
    return (
        f"GET {path}{query} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nAccept: {accept}\r\n\r\n".encode()
    )


def subscribe() -> bytes:
    text = b'{"event":"pusher:subscribe","data":{"channel":"%b"}}' % CHANNEL.encode()
    return b"\x81" + bytes([0x80 | len(text)]) + bytes(4) + text


def crowd(pipe: Connection, port: int, request: bytes, websockets: bool, count: int) -> None:
    """The clients' process. Connects `count` clients, says how many are ready, and then how many characters of data
    they got and how many were closed: each time it is asked, until the pipe is closed."""
    selector = selectors.DefaultSelector()
    waiting: dict[int, bytes] = {}
    ready = gone = characters = 0
    # The last thing that a client gets before events.
    last = b"subscription_succeeded" if websockets else b"upToDate" if b"live=sse" in request else b"retry: "

    def pump(timeout_s: float) -> None:
        nonlocal ready, gone, characters
        for key, _ in selector.select(timeout_s):
            client: Any = key.fileobj
            try:
                data = client.recv(65_536)
            except OSError:
                data = b""
            if not data:
                selector.unregister(client)
                gone += 1
            elif key.fd in waiting:
                text = waiting[key.fd] = waiting[key.fd] + data
                if b"connection_established" in text and last not in text:
                    client.send(subscribe())
                    waiting[key.fd] = b""
                elif last in text:
                    del waiting[key.fd]
                    ready += 1
            else:
                characters += data.count(b"~")

    for number in range(count):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
        waiting[client.fileno()] = b""
        if number % 50 == 0:
            pump(0)
    until = time.monotonic() + WITHIN_S
    while ready < count and time.monotonic() < until:
        pump(0.1)
    pipe.send(ready)
    while True:
        pump(0.02)
        if pipe.poll():
            if pipe.recv() is None:
                return
            pipe.send((characters, gone))


def publish(server: Server, count: int) -> None:
    body = b'{"name":"n","channels":["%b"],"data":"%b"}' % (CHANNEL.encode(), DATA.encode())
    for _ in range(count):
        target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(server.public_url + target, body, headers)).close()


def measure(server: Server, token: str, kind: str, clients: int, events: int) -> Row:
    (worker,) = server.worker_pids()
    before = rss_bytes(worker)
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, server.port, request_of(server, token, kind), kind == "websocket", clients)
    process = multiprocessing.Process(target=crowd, args=arguments, daemon=True)
    process.start()
    ready = ours.recv()
    grown = rss_bytes(worker) - before
    began = cpu_s(worker)
    publish(server, events)
    until = time.monotonic() + WITHIN_S
    got = gone = 0
    while got + gone * events < ready * events and time.monotonic() < until:
        ours.send("how many?")
        characters, gone = ours.recv()
        got = characters // len(DATA)
    used = cpu_s(worker) - began
    ours.send(None)
    process.join()
    return Row(kind, ready, grown / 1000 / max(1, ready), used * 1e6 / max(1, got), ready - gone)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--readers", type=int, default=9_000)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[Row] = []
    for turn in range(options.rounds):
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            # A server of its own: memory that an earlier crowd has left would be used again.
            with Server(
                workers=1, files=(hard, hard), max_connections_per_address=0, max_pending_per_address=0
            ) as server:
                rule = ("--prefix", "kept-", "--keep", "1000", "--seconds", "600")
                command(server, "history", "rule", "add", server.app_id, *rule)
                token = command(server, "token", "create", server.app_id, "--name", "bench", "--scope", "read")["token"]
                rows.append(measure(server, token, kind, options.readers, options.events))
            print(f"  {rows[-1]}", file=sys.stderr)
    figures: dict[str, object] = {}
    reference = [row for row in rows if row.kind == "websocket"]
    for kind in KINDS:
        own = [row for row in rows if row.kind == kind]
        us, kb = statistics.median(row.us for row in own), max(row.kb for row in own)
        ratio = statistics.median(a.us / b.us for a, b in zip(own, reference, strict=True))
        left = min(row.left for row in own)
        print(
            f"{kind:14}{own[0].clients:7} clients, {left} left{kb:8.1f} kB each{us:8.2f} us per event and client"
            f"{1e6 / us:12,.0f} events/s   ratio {ratio:.2f}"
        )
        figures[kind] = {"clients": own[0].clients, "kb": round(kb, 2), "us": round(us, 3), "ratio": round(ratio, 2)}
    if options.json:
        save(options.json, "streams", figures)


if __name__ == "__main__":
    main()
