"""Processor time of a publish for each shape of request that libraries and proxies send, beside the usual shape.

    python -m bench.load.shapes [--requests 6400] [--rounds 3] [--connections 64]

Starts a redpoll with one worker, which trusts this machine as a proxy. A client sends each shape of
tests/library_requests.py, in turns with the usual one, on many connections: the first packet on each of them, then the
second on each, then it reads the answers. `us` is processor time of worker and control per publish; `ratio` is to the
usual shape, with a connection each or without, as the shape has it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import statistics
import time
from pathlib import Path

from bench.arguments import parser_of
from bench.report import save
from library_requests import BODY, LIBRARY_REQUESTS, TARGET
from server import APP_ID, APP_KEY, APP_SECRET, Server

USUAL = "usual, keep-alive"
USUAL_EACH = "usual, a connection each"
_USUAL_HEAD = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def signed(packets: tuple[bytes, ...]) -> list[bytes]:
    """The packets of a request for the app of tests/server.py, signed now."""
    path = f"/apps/{APP_ID}/events"
    stamp = int(time.time())
    query = f"auth_key={APP_KEY}&auth_timestamp={stamp}&auth_version=1.0&body_md5={hashlib.md5(BODY).hexdigest()}"
    signature = hmac.new(APP_SECRET.encode(), f"POST\n{path}\n{query}".encode(), hashlib.sha256).hexdigest()
    target = f"{path}?{query}&auth_signature={signature}".encode()
    plain = TARGET.partition(b"?")[0]
    pair = {b"X-Service-Key: key\r\n": APP_KEY, b"X-Service-Secret: secret\r\n": APP_SECRET}
    head, *rest = packets
    if b"X-Service-Key" in head:
        head = head.replace(plain, path.encode())
        for line, value in pair.items():
            head = head.replace(line, line.split(b" ")[0] + f" {value}\r\n".encode())
    return [head.replace(TARGET, target), *rest]


class Client:
    """A connection to `port`, made when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, packet: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(packet)

    def read_answer(self) -> None:
        """Ends the bench at an answer that isn't 200."""
        assert self._socket is not None
        answer = b""
        while not answer.endswith(b"{}"):
            received = self._socket.recv(4096)
            answer += received
            if not received:
                break
        if b" 200 " not in answer[:20]:
            raise SystemExit(f"not answered with 200: {answer!r}")
        if b"\r\nConnection: close\r\n" in answer:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def used_us(pid: int) -> float:
    """The processor time that a process of one busy thread has used; finer than the clock's ticks."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def publish(clients: list[Client], packets: list[bytes]) -> None:
    """One request on each connection."""
    for packet in packets:
        for client in clients:
            client.send(packet)
    for client in clients:
        client.read_answer()


def measure(server: Server, packets: tuple[bytes, ...], requests: int, connections: int) -> float:
    """Microseconds of processor time of worker and control per publish."""
    pids = (server.worker_pids()[0], server.control_pid)
    clients, ready = [Client(server.port) for _ in range(connections)], signed(packets)
    publish(clients, ready)
    before = sum(map(used_us, pids))
    turns = max(requests // connections, 1)
    for _ in range(turns):
        publish(clients, ready)
    us = sum(map(used_us, pids)) - before
    for client in clients:
        client.close()
    return us / (turns * connections)


def main() -> None:
    arguments = parser_of(__doc__)
    arguments.add_argument("--requests", type=int, default=6400, help="of each shape in each round")
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    shapes: dict[str, tuple[bytes, ...]] = {
        USUAL: (_USUAL_HEAD % (TARGET, b"", len(BODY), BODY),),
        USUAL_EACH: (_USUAL_HEAD % (TARGET, b"Connection: close\r\n", len(BODY), BODY),),
    }
    # The server of this bench has no token.
    shapes |= {name: packets for name, packets in LIBRARY_REQUESTS.items() if name != "a token"}
    everywhere = os.sched_getaffinity(0)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in shapes}
    with Server(workers=1, log_level="warning", trusted_proxies="127.0.0.1") as server:
        os.sched_setaffinity(0, {max(everywhere)})
        for _ in range(given.rounds):
            for name, packets in shapes.items():
                usual = shapes[USUAL_EACH if b"\r\nConnection: close\r\n" in packets[0] else USUAL]
                rounds[name].append(
                    (
                        measure(server, packets, given.requests, given.connections),
                        measure(server, usual, given.requests, given.connections),
                    )
                )
    print(f"{'':34}{'us':>8}{'usual':>8}{'ratio':>8}")
    figures = {}
    for name, times in rounds.items():
        us, usual_us = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(one / other for one, other in times)
        print(f"{name:34}{us:8.1f}{usual_us:8.1f}{ratio:8.2f}")
        figures[name] = {"us": us, "usual_us": usual_us, "ratio": ratio}
    if given.json:
        save(given.json, "shapes", figures)


if __name__ == "__main__":
    main()
