"""What the engine's tests share: a fake transport, a connection that records its callbacks, and clients.

In a debug build every test must leave as many live objects as it found (REDPOLL_DEBUG, setup.py).
"""

import asyncio
import gc
import importlib.util
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from redpoll import _engine
from redpoll._engine import WebSocket
from redpoll._fanout import Flusher
from redpoll._sockets import Listener, Poller

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
HEAD = (
    b"GET /app/key HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY + b"\r\n\r\n"
)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"redpoll_{name}", Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow counterparts in reference.py."""
    return _load("reference")


@pytest.fixture(scope="session")
def http_reference() -> ModuleType:
    """The slow counterparts in http_reference.py."""
    return _load("http_reference")


@pytest.fixture(autouse=True)
def nothing_stays_alive():
    if not _engine.live():
        # A release build counts nothing.
        assert not os.environ.get("REDPOLL_DEBUG"), f"{_engine.__file__} is no debug build: see setup.py"
        yield
        return
    gc.collect()
    before = _engine.live()
    yield
    # The garbage collector doesn't visit sinks, so it can't break their cycles with transports.
    for transport in FakeTransport.made:
        transport.protocol = None
    FakeTransport.made.clear()
    gc.collect()
    assert _engine.live() == before


class FakeTransport:
    """A transport for the engine that only records writes in `written`.

    It has no descriptor, as with TLS. `full` keeps what is written and pauses the writer.
    """

    made: ClassVar[list["FakeTransport"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.written = bytearray()
        self.protocol = None
        self.full = False
        self.reading = True
        self.aborted = self.eof_written = self.closed = False

    def get_extra_info(self, name, default=None):
        return ("192.0.2.1", 1234) if name == "peername" else default

    def write(self, data: bytes) -> None:
        assert not self.eof_written
        assert not self.aborted
        self.written += data
        if self.full:
            self.protocol.pause_writing()

    def drain(self) -> None:
        self.full = False
        self.protocol.resume_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_written = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def take(self) -> bytes:
        taken = bytes(self.written)
        self.written.clear()
        return taken


class Recorder(WebSocket):
    """Accepts every head, and records each callback. `on[name]` is called instead of recording."""

    __slots__ = ("heard", "on")

    def __init__(self, flusher: Flusher, max_message_bytes: int = 65536) -> None:
        super().__init__(flusher, max_message_bytes)
        self.heard: list[tuple] = []
        self.on: dict[str, Callable] = {}

    def _note(self, name: str, *arguments) -> None:
        if name in self.on:
            self.on[name](*arguments)
        else:
            self.heard.append((name, *arguments))

    def connected(self) -> None:
        if "connected" in self.on:
            self.on["connected"]()

    def head_received(self, head: bytes) -> None:
        if "head" in self.on:
            self.on["head"](head)
        else:
            self.accept(KEY)

    def head_too_large(self) -> None:
        self._note("head_too_large")

    def message_received(self, message: bytes) -> None:
        self._note("text", message)

    def binary_message_received(self, message: bytes) -> None:
        self._note("binary", message)

    def http_began(self, data: bytes) -> bool:
        if "post" not in self.on:
            return super().http_began(data)
        return self.on["post"](data)

    def http_received(self, data: bytes) -> None:
        self._note("data", data)

    def http_ended(self) -> bool:
        self._note("end")
        return True

    def closing(self) -> None:
        if "closing" in self.on:
            self.on["closing"]()

    def closed(self, code: int, reason: str) -> None:
        self._note("closed", code, reason)

    def gone(self) -> None:
        self._note("gone")

    def released(self) -> None:
        if "released" in self.on:
            self.on["released"]()

    def hear(self, data: bytes) -> None:
        """Does what the loop does when bytes arrive."""
        buffer = self.get_buffer(65536)
        # Never fill the whole buffer: the engine would then ask the loop for the rest, and there is no loop.
        step = len(buffer) - 1
        for start in range(0, len(data), step):
            part = data[start : start + step]
            buffer[: len(part)] = part
            self.buffer_updated(len(part))


@pytest.fixture
def flusher() -> Iterator[Flusher]:
    """A flusher that only the test calls."""
    flusher = Flusher(lambda: None)
    yield flusher
    # The flusher owns the sinks that wait for it.
    flusher.flush()


@pytest.fixture(scope="session")
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture(scope="session")
def fake_transport() -> type[FakeTransport]:
    return FakeTransport


@pytest.fixture(scope="session")
def head() -> bytes:
    """A request head that may be accepted."""
    return HEAD


@pytest.fixture
def connect(flusher: Flusher):
    """`ws, transport = connect()`: an open connection on a fake transport, the 101 written and taken."""

    def make(max_message_bytes: int = 65536, its_flusher: Flusher = flusher) -> tuple[Recorder, FakeTransport]:
        ws, transport = Recorder(its_flusher, max_message_bytes), FakeTransport()
        transport.protocol = ws
        ws.connection_made(transport)
        ws.hear(HEAD)
        its_flusher.flush()
        assert transport.take().startswith(b"HTTP/1.1 101 ")
        made.append(ws)
        return ws, transport

    made: list[Recorder] = []
    yield make
    while made:
        ws = made.pop()
        ws.on.clear()
        ws.connection_lost(None)


class Served:
    """A real server on a real loop: `connections` in order of arrival, and raw clients to it."""

    def __init__(self, flusher: Flusher) -> None:
        self.flusher = flusher
        self.connections: list[Recorder] = []
        self.lost = 0
        self.clients: list[socket.socket] = []
        self.port = 0
        # Called for each connection before it has a transport.
        self.prepare: Callable[[Recorder], None] = lambda connection: None

    async def client(self, receive_buffer_bytes: int = 0, upgrade: bool = True) -> socket.socket:
        """An upgraded client. `receive_buffer_bytes` limits what its kernel takes before it reads."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.clients.append(sock)
        await loop.sock_connect(sock, ("127.0.0.1", self.port))
        if upgrade:
            await loop.sock_sendall(sock, HEAD)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                answer += await loop.sock_recv(sock, 1)
        return sock

    async def read(self, sock: socket.socket, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size:
            got = await asyncio.wait_for(loop.sock_recv(sock, min(65536, size - len(data))), 60)
            assert got, f"end of stream after {len(data)} of {size} bytes"
            data += got
        return bytes(data)

    async def read_to_end(self, sock: socket.socket) -> bytes:
        """Everything until the end of the stream, or until a reset."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        try:
            while got := await asyncio.wait_for(loop.sock_recv(sock, 65536), 60):
                data += got
        except ConnectionResetError:
            pass
        return bytes(data)

    def reset(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


@pytest.fixture(params=["sockets", "transport"])
async def served(request, wait_until):
    """The engine on a real port, flushed by the loop as in a worker, on plain sockets and on the loop's transports."""
    loop = asyncio.get_running_loop()
    poller = Poller(loop) if request.param == "sockets" else None
    flusher = Flusher(lambda: loop.call_soon(flusher.flush), poller=poller)
    it = Served(flusher)
    errors: list[int] = []

    class Counted(Recorder):
        __slots__ = ()

        def __init__(self) -> None:
            super().__init__(flusher)
            it.connections.append(self)
            it.prepare(self)

        def connection_lost(self, fault) -> None:
            super().connection_lost(fault)
            it.lost += 1

    if poller is None:
        server = await loop.create_server(Counted, "127.0.0.1", 0, backlog=1024)
        it.port = server.sockets[0].getsockname()[1]
    else:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        it.port = listening.getsockname()[1]
        server = Listener(poller, listening.detach(), Counted, errors.append)
    yield it
    server.close()
    assert not errors
    for client in it.clients:
        client.close()
    for connection in it.connections:
        connection.on.clear()
        connection.abort()
    await wait_until(lambda: it.lost == len(it.connections), what="all connections lost")
    it.connections.clear()
    if poller is not None:
        assert poller.sockets == 0
        poller.close()
