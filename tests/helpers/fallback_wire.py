"""A client of the HTTP fallback as pusher-js is one, which shares no code with src/redpoll.

`FallbackSocket` has `send` and `recv` of a WebSocket. Each request has a connection of its own, so requests reach any
worker. A stream is opened again after 256 KiB, and a poll after each response, as pusher-js does it.
"""

import asyncio
import itertools
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

OPENED_AGAIN_AFTER = 256 * 1024
PRELUDE = "h" * 2048


class FallbackClosed(Exception):
    """The session ended: `code` and `reason` of its `c` line, or 1006 and what happened."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes = b""


async def read_head(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head[:-4].split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Response(int(first.split(" ")[1]), headers)


def head_of(method: str, path: str, headers: dict[str, str], size: int, version: str = "1.1") -> bytes:
    headers = {"Host": "test", "Content-Length": str(size), **headers}
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def ask(
    host: str,
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    how: dict[str, Any] | None = None,
    **headers: str,
) -> Response:
    """One request on a connection of its own, and its whole response."""
    reader, writer = await asyncio.open_connection(host, port, **(how or {}))
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        writer.write(head_of(method, path, names, len(body)) + body)
        response = await read_head(reader)
        if "content-length" in response.headers:
            response.body = await reader.readexactly(int(response.headers["content-length"]))
        return response
    finally:
        writer.close()


class FallbackSocket:
    """`targets`: (host, port), each request goes to the next one. `kind`: xhr_streaming or xhr. `how`: options of
    asyncio.open_connection, such as `ssl`."""

    def __init__(
        self,
        targets: list[tuple[str, int]],
        key: str,
        kind: str = "xhr_streaming",
        *,
        query: str = "protocol=7&client=js&version=8.4.0",
        prefix: str = "/pusher",
        version: str = "1.1",
        headers: dict[str, str] | None = None,
        **how: Any,
    ) -> None:
        self.base = f"{prefix}/app/{key}"
        self.session = f"{secrets.randbelow(1000)}/{secrets.token_hex(4)}"
        self.kind = kind
        self.streams = 0
        self.heartbeats = 0
        self.lines: list[str] = []
        self.opened = False
        self.closed: FallbackClosed | None = None
        self.answers: list[int] = []
        self._query = query
        self._version = version
        self._headers = headers or {}
        self._how = how
        self.targets = targets
        self._turn = itertools.count()
        self._numbers = itertools.count(1)
        self._messages: asyncio.Queue = asyncio.Queue()
        self._reading: asyncio.Task | None = None
        # A stream or poll is requested, and its answer isn't read to the end. A session whose client goes between two
        # of them ends after 30 s.
        self.asked = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None

    def path(self, action: str, query: str = "") -> str:
        number = next(self._numbers)
        return (
            f"{self.base}/{self.session}/{action}?{query}{'&' if query else ''}t={int(time.time() * 1000)}&n={number}"
        )

    def _target(self) -> tuple[str, int]:
        return self.targets[next(self._turn) % len(self.targets)]

    async def open(self) -> None:
        self._reading = asyncio.create_task(self._read())

    async def send(self, text: str, *, on: tuple[str, int] | None = None) -> int:
        return await self.send_raw(json.dumps([text]).encode(), on=on)

    async def send_raw(self, body: bytes, *, path: str | None = None, on: tuple[str, int] | None = None) -> int:
        host, port = on or self._target()
        headers = {"Content-Type": "application/json", **self._headers}
        how = self._how
        response = await ask(host, port, "POST", path or self.path("xhr_send"), body, how=how, **headers)
        self.answers.append(response.status)
        return response.status

    async def recv(self) -> str:
        message = await self._messages.get()
        if isinstance(message, FallbackClosed):
            self._messages.put_nowait(message)
            raise message
        return message

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.writer is not None:
            self.writer.close()

    async def _read(self) -> None:
        try:
            while self.closed is None:
                await (self._stream() if self.kind == "xhr_streaming" else self._poll())
        except FallbackClosed as closed:
            self._end(closed)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            # ValueError: the stream ended between two chunks.
            self._end(FallbackClosed(1006, f"{type(error).__name__}: {error}"))

    def _end(self, closed: FallbackClosed) -> None:
        if self.closed is None:
            self.closed = closed
            self._messages.put_nowait(closed)

    async def _request(self, action: str) -> tuple[asyncio.StreamReader, Response]:
        host, port = self._target()
        reader, self.writer = await asyncio.open_connection(host, port, limit=16 * 1024 * 1024, **self._how)
        self.streams += 1
        headers = {"Content-Type": "application/json", **self._headers}
        self.writer.write(head_of("POST", self.path(action, self._query), headers, 0, self._version))
        self.asked.set()
        response = await read_head(reader)
        if response.status != 200:
            raise FallbackClosed(1006, f"Connection interrupted ({response.status})")
        return reader, response

    async def _stream(self) -> None:
        reader, response = await self._request("xhr_streaming")
        chunked = response.headers.get("transfer-encoding") == "chunked"
        text, seen = "", 0
        while True:
            part = await _chunk(reader) if chunked else (await reader.read(65536)).decode()
            if not part:
                raise FallbackClosed(1006, "Connection interrupted (200)")
            seen += len(part.encode("utf-16-le")) // 2
            *whole, text = (text + part).split("\n")
            for line in whole:
                await self._line(line)
            if self.closed is not None:
                return
            if not text and seen > OPENED_AGAIN_AFTER:
                self.asked.clear()
                self.writer.close()
                return

    async def _poll(self) -> None:
        reader, response = await self._request("xhr")
        body = await reader.readexactly(int(response.headers["content-length"]))
        self.asked.clear()
        for line in body.decode().split("\n")[:-1]:
            await self._line(line)
        self.writer.close()

    async def _line(self, line: str) -> None:
        self.lines.append(line)
        if line == "o":
            if self.opened:
                raise FallbackClosed(1006, "Server lost session")
            self.opened = True
        elif line.startswith("a"):
            for message in json.loads(line[1:]):
                self._messages.put_nowait(message)
        elif line.startswith("h"):
            self.heartbeats += 1
            if self.kind == "xhr_streaming" and self.opened:
                await self.send_raw(b"[]")
        elif line.startswith("c"):
            self._end(FallbackClosed(*json.loads(line[1:])))


async def _chunk(reader: asyncio.StreamReader) -> str:
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:-2].decode()
