"""A webhook receiver on loopback that records its requests and answers as the test chooses.

`async with Receiver() as receiver:` answers 200 to every request at `receiver.url`. To change this, pass a response or
a function of the request and the connection: `Receiver(answer=hang)`.
"""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Request:
    """One request. Header names are in lower case. `connection` is the number of its connection, from 1."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    def json(self) -> Any:
        return json.loads(self.body)


Answer = bytes | Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """`answer` may change at any time. `tls` is the certificate and its key; `show()` changes them.

    `connections` counts accepted connections, with TLS after the handshake. `bytes_read` counts all bytes read.
    """

    answer: Answer = OK
    tls: tuple[Path, Path] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    bytes_read: int = 0

    async def __aenter__(self) -> Self:
        self._context: ssl.SSLContext | None = None
        if self.tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.show(self.tls)
        self._open: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_off()
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def url(self) -> str:
        """The URL, with the address or, with TLS, the name `localhost`."""
        return f"http://{self.host}:{self.port}/hook" if self.tls is None else f"https://localhost:{self.port}/hook"

    def show(self, pair: tuple[Path, Path]) -> None:
        """Uses this certificate and key for new connections."""
        assert self._context is not None
        self._context.load_cert_chain(*pair)

    def break_off(self) -> None:
        """Closes all connections, also those with a request under way."""
        for task in self._open:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        number = self.connections
        try:
            while not writer.is_closing():
                request = await self._read(reader, number)
                self.requests.append(request)
                if isinstance(self.answer, bytes):
                    writer.write(self.answer)
                else:
                    await self.answer(request, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            # The client closed the connection, or the test ended.
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Request:
        head = await reader.readuntil(b"\r\n\r\n")
        self.bytes_read += len(head)
        request_line, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
        method, target, _ = request_line.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.bytes_read += len(body)
        return Request(method, target, headers, body, number)


async def hang(_request: Request, _writer: asyncio.StreamWriter) -> None:
    """Never answers."""
    await asyncio.get_running_loop().create_future()


async def reset(_request: Request, writer: asyncio.StreamWriter) -> None:
    """Resets the connection (RST) after the request."""
    writer.transport.abort()


def status(code: int, phrase: str = "", body: bytes = b"", *more_headers: str) -> bytes:
    """A complete response."""
    lines = [f"HTTP/1.1 {code} {phrase}", f"Content-Length: {len(body)}", *more_headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
