"""An HTTP server that misbehaves in the way that a test asks for. Not a test.

`with Answering(reply(429, {"error": "slow down"}), CUT) as server:` answers the first request with a 429, cuts the
second, and every further one like the last. It records what it was asked; `came` is set by the first request.
"""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# Closes the connection instead of an answer; sends half an answer and closes; sends nothing until the test ends.
CUT = b"cut"
HALF = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
SILENCE = b"silence"


class Trickle(bytes):
    """Sends these bytes, and then one letter after the other until the client or the test ends."""


def reply(status: int, body: object = None, headers: Mapping[str, str] | None = None) -> bytes:
    """An HTTP answer. A body that is no string becomes JSON."""
    text = body if isinstance(body, str) else json.dumps({} if body is None else body)
    fields = {"Content-Type": "application/json", "Content-Length": str(len(text.encode())), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Whatever\r\n{head}\r\n{text}".encode()


@dataclass
class Asked:
    """One request that came."""

    method: str
    target: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Answering(socketserver.ThreadingTCPServer):
    """The server, on a free port of 127.0.0.1, with one thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True
    # A request queue for tests that open many connections at once.
    request_queue_size = 128

    def __init__(self, *answers: bytes, certificate: tuple[Path, Path] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self.connections = 0
        self.came = threading.Event()
        self.ending = threading.Event()
        self.port = self.server_address[1]
        self.lock = threading.Lock()
        self.context: ssl.SSLContext | None = None
        if certificate is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*certificate)

    @property
    def url(self) -> str:
        return f"http{'s' if self.context else ''}://key:secret@127.0.0.1:{self.port}/apps/1"

    def next_answer(self, asked: Asked) -> bytes:
        with self.lock:
            self.asked.append(asked)
            self.came.set()
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def __enter__(self) -> Self:
        # A short poll: `shutdown` waits for it.
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that close or refuse our certificate are part of the tests."""


class _Connection(socketserver.StreamRequestHandler):
    server: Answering

    def setup(self) -> None:
        with self.server.lock:
            self.server.connections += 1
        if self.server.context is not None:
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def handle(self) -> None:
        while (asked := self._read()) is not None:
            answer = self.server.next_answer(asked)
            if answer == SILENCE:
                self.server.ending.wait()
                return
            if answer != CUT:
                self.wfile.write(answer)
            if isinstance(answer, Trickle):
                while not self.server.ending.wait(0.05):
                    self.wfile.write(b"a")
                return
            if answer in (CUT, HALF):
                self.request.shutdown(socket.SHUT_RDWR)
                return

    def _read(self) -> Asked | None:
        start = self.rfile.readline().decode()
        if not start:
            return None
        length = 0
        while (line := self.rfile.readline().strip()) and line:
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
        method, target, _ = start.split()
        return Asked(method, target, self.rfile.read(length))
