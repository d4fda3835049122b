"""Further listeners of a running worker for tests: a plain and a TLS port, with their own settings.

The worker is the one of tests/worker/conftest.py. Its own port doesn't change.
"""

import asyncio
import os
import socket
import ssl
import struct
from pathlib import Path

import msgspec

from helpers.certs import self_signed
from redpoll.config import certificate_files
from redpoll.config.certificate import write_private
from redpoll.config.settings import Settings
from redpoll.worker.ingress.listeners import Listeners


class Edge:
    """`listeners` accept connections for `worker`; `connect` opens connections to them. Call `close()` at the end."""

    def __init__(self, worker, folder, *, tls: bool = True, **settings) -> None:
        self.worker = worker
        self.folder = folder
        self.cert, self.key = folder / "now.crt", folder / "now.key"
        # What the supervisor writes for the workers.
        self.bundle = folder / "tls.pem"
        self.certify("first")
        changed = msgspec.structs.replace(worker.start_message.settings, tls_cert=(str(self.bundle),), **settings)
        plain, encrypted = (socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(2))
        start = msgspec.structs.replace(
            worker.start_message, listen_fd=plain.detach(), tls_fd=encrypted.detach() if tls else None, settings=changed
        )
        self.listeners = Listeners(start, worker.gate)
        self.writers: list[asyncio.StreamWriter] = []

    def certify(self, name: str) -> bytes:
        """Writes a new certificate for the listeners and returns it in DER form."""
        cert, key = self_signed(self.folder, name)
        os.replace(cert, self.cert)
        os.replace(key, self.key)
        self.install(self.cert, self.key)
        return ssl.PEM_cert_to_DER_cert(self.cert.read_text())

    def install(self, *pairs: Path) -> None:
        """Writes these certificates and keys, in turns, for the listeners."""
        certs, keys = ([str(path) for path in pairs[begin::2]] for begin in (0, 1))
        found = certificate_files.find(Settings(tls_cert=tuple(certs), tls_key=tuple(keys)))
        write_private(certificate_files.bundle(found.certificates), self.bundle)

    def trusting(self) -> ssl.SSLContext:
        """A client's context that trusts only the present certificate."""
        return ssl.create_default_context(cafile=str(self.cert))

    async def connect(
        self, *, tls: bool = True, before: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection. `before` is sent without TLS, before the handshake."""
        port = self.listeners.tls_port if tls else self.listeners.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.writers.append(writer)
        writer.write(before)
        await writer.drain()
        if tls:
            await asyncio.wait_for(writer.start_tls(self.trusting(), server_hostname="localhost"), 60)
        return reader, writer

    async def ask(self, request: bytes, **how) -> bytes:
        """Sends a request and returns everything until the connection ends or is reset."""
        reader, writer = await self.connect(**how)
        writer.write(request)
        return await until_end(reader)

    def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.listeners.close()
        self.listeners.finish()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """Reads until the connection ends or is reset. The kernel resets it if the server leaves bytes unread."""
    received = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 60):
            received += piece
    except ConnectionResetError:
        pass
    return received


def reset(writer: asyncio.StreamWriter) -> None:
    """The client is gone. One that only closes its side may still read: its connection is held until it has its
    answers."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def upgrade(path: str, extra: str = "") -> bytes:
    """The head of a WebSocket upgrade. `extra` has further header lines, each with CRLF at its end."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{extra}\r\n"
    ).encode()


async def first_frame(reader: asyncio.StreamReader) -> bytes:
    """Checks that the response is 101 and returns the payload of the first frame."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 101 "), head
    start = await asyncio.wait_for(reader.readexactly(2), 60)
    size = start[1]
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2), "big")
    return await asyncio.wait_for(reader.readexactly(size), 60)
