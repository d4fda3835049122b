"""What benches of a whole server share: its address, signed requests, the clients in C, TLS.

With `--tls` (arguments.py) the server that a bench starts has a certificate made for it (`tls_settings`), the programs
in C are compiled with OpenSSL (`compiled`, load/stream.h), and clients use the other port (`Address.client_port`).
Not a bench by itself: see end_to_end.py and connections.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from helpers.certs import self_signed
from helpers.server import Server
from helpers.wire import signed_path

LOAD = Path(__file__).parent / "load"

EVENT_NAME = "event"
DATA_BYTES = 100
# Linux; Python names it from 3.12 on.
_IP_BIND_ADDRESS_NO_PORT = 24


def socket_from(address: str) -> socket.socket:
    """A non-blocking socket that connects from `address`. The port is chosen in connect(), by the whole pair of
    addresses. When half of an address' ports are taken, that takes the kernel long: use several addresses."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    sock.bind((address, 0))
    sock.setblocking(False)
    return sock


def processor_s(pid: int) -> float:
    """The processor time of all threads of a process, exact to a tick of the kernel's scheduler."""
    used_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            used_ns += int((thread / "schedstat").read_text().split()[0])
    return used_ns / 1e9


@contextlib.contextmanager
def tls_settings(wanted: bool) -> Iterator[dict[str, object]]:
    """Settings of a Server that has a port with TLS as well, and a certificate (ECDSA P-256); none where not wanted."""
    if not wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="rpcert") as folder:
        cert, key = self_signed(Path(folder))
        # All handshakes come from this machine.
        yield {"tls_port": 0, "tls_cert": cert, "tls_key": key, "max_pending_per_address": 4096}


def compiled(source: str, to: Path, *flags: str, tls: bool = False) -> Path:
    """A C program of load/. `tls`: it can speak TLS, and does so in the environment of `client_environment`."""
    openssl = ["-DTLS", "-lssl", "-lcrypto"] if tls else []
    subprocess.run(["cc", "-O2", "-Wall", "-D_GNU_SOURCE", "-o", to, LOAD / source, *openssl, *flags], check=True)
    return to


def client_environment(tls: bool) -> dict[str, str]:
    """Of a program in C: whether it speaks TLS (load/stream.h)."""
    return {**os.environ, "BENCH_TLS": "1" if tls else ""}


@dataclass(frozen=True)
class Address:
    """A Pusher-compatible server, from `http://KEY:SECRET@HOST:PORT/apps/ID`, or a Centrifugo, from
    `centrifugo://API_KEY@HOST:PORT`, for benches whose clients speak its protocol, too."""

    host: str
    port: int
    app_id: str
    app_key: str
    app_secret: str
    dialect: str = "pusher"
    # Of clients that use TLS; 0: without. Publishes go to `port`.
    tls_port: int = 0

    @property
    def client_port(self) -> int:
        return self.tls_port or self.port

    @classmethod
    def of(cls, server: Server) -> Self:
        """The first app of a server, with its port for TLS if it has one."""
        tls_port = int(server.tls_url.rpartition(":")[2]) if server.tls_url else 0
        return replace(cls.parse(server.pusher_url), tls_port=tls_port)

    @classmethod
    def parse(cls, url: str) -> Self:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "centrifugo" and parts.hostname and parts.port and parts.username:
            return cls(parts.hostname, parts.port, "-", "-", parts.username, "centrifugo")
        app_id = parts.path.rpartition("/")[2]
        if not (parts.hostname and parts.username and parts.password and app_id):
            raise SystemExit(f"not http://KEY:SECRET@HOST:PORT/apps/ID: {url}")
        return cls(parts.hostname, parts.port or 80, app_id, parts.username, parts.password)


def data_of(publisher: int, number: int) -> str:
    """100 bytes that begin with the mark by which the client knows the event."""
    return f"#{publisher:02d}{number:08d}".ljust(DATA_BYTES, "x")


def frame_bytes(channel: str) -> int:
    """Length of one delivered WebSocket frame with its header, for the reference loop."""
    text = json.dumps({"event": EVENT_NAME, "channel": channel, "data": data_of(0, 0)}, separators=(",", ":"))
    return len(text) + (2 if len(text) < 126 else 4)


def publish_request(address: Address, events: Sequence[tuple[str, str]], *, close: bool = False) -> bytes:
    """One HTTP request that publishes `events`, each a channel and its data: an event, or a batch of several."""
    body, headers = {}, ["Content-Type: application/json", *["Connection: close"] * close]
    channel, data = events[0]
    if address.dialect == "centrifugo":
        path = "/api/publish" if len(events) == 1 else "/api/batch"
        items = [{"channel": channel, "data": data} for channel, data in events]
        body = items[0] if len(events) == 1 else {"commands": [{"publish": item} for item in items]}
        headers.append(f"X-API-Key: {address.app_secret}")
    elif len(events) == 1:
        path = f"/apps/{address.app_id}/events"
        body = {"name": EVENT_NAME, "channels": [channel], "data": data}
    else:
        path = f"/apps/{address.app_id}/batch_events"
        body = {"batch": [{"name": EVENT_NAME, "channel": channel, "data": data} for channel, data in events]}
    content = json.dumps(body, separators=(",", ":")).encode()
    if address.dialect == "pusher":
        path = signed_path(address, "POST", path, content)
    lines = [f"POST {path} HTTP/1.1", f"Host: {address.host}:{address.port}", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def write_requests(file: Path, address: Address, channel: str, *, publishers: int, requests: int, events: int) -> None:
    """Writes `requests` for each publisher, of one event each, or a batch of several, as client.c reads them."""
    with open(file, "wb") as out:
        for index in range(requests):
            for publisher in range(publishers):
                numbers = range(index * events, (index + 1) * events)
                request = publish_request(address, [(channel, data_of(publisher, number)) for number in numbers])
                out.write(f"{len(request)} {publisher} {events}\n".encode() + request)


class Client:
    """bench/load/client.c, compiled and running. Each method is one of its commands and returns its figures."""

    def __init__(self, core: int | None = None, server_core: int | None = None, *, tls: bool = False) -> None:
        self._core, self._server_core, self._tls = core, server_core, tls

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="rpbench")
        folder = Path(self._folder.name)
        self.requests = folder / "requests"
        compiled("client.c", folder / "client", tls=self._tls)
        pin = ["taskset", "-c", str(self._core)] if self._core is not None else []
        self._process = subprocess.Popen(
            [*pin, str(folder / "client")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=client_environment(self._tls),
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()

    def _ask(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the C client ended with {self._process.wait()}")
        figures = json.loads(line)
        assert isinstance(figures, dict)
        return figures

    def connect(self, address: Address, channel: str, count: int, at_once: int = 64) -> dict[str, Any]:
        """Up to `count` subscribers in all, `at_once` of them under way at a time."""
        return self._ask(
            "connect", address.dialect, address.host, address.client_port, address.app_key, channel, count, at_once
        )

    def disconnect(self) -> None:
        self._ask("disconnect")

    def publish(self, address: Address, channel: str, *, publishers: int, requests: int, events: int) -> dict[str, Any]:
        """Each publisher sends its next request when every subscriber has its last one."""
        write_requests(self.requests, address, channel, publishers=publishers, requests=requests, events=events)
        return self._ask("publish", address.host, address.port, self.requests)

    def paced(self, address: Address, channel: str, *, rate: float, seconds: float) -> dict[str, Any]:
        """Single events at a fixed rate; latency counts from when each was due."""
        connections = 4
        requests = int(rate * seconds) // connections
        write_requests(self.requests, address, channel, publishers=connections, requests=requests, events=1)
        return self._ask("paced", address.host, address.port, self.requests, rate)

    def floor(self, count: int, size_bytes: int, joined: int, rounds: int) -> dict[str, Any]:
        """The reference: a bare send() loop to as many sockets, `joined` frames in one send()."""
        core = -1 if self._server_core is None else self._server_core
        return self._ask("floor", count, size_bytes, joined, rounds, core)
