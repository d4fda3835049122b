"""Stands between clients and a real server: notes what is published, and makes requests and connections fail.

Bytes pass unchanged. A request is forwarded once all of it has come, so that it can be failed instead. An answer is
forwarded as it comes, because it may be a stream. Frames are only looked at: to know which messages clients send, and
where a close frame may be put between two frames of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import h11
from websockets.frames import Close, Frame, Opcode

from redpoll.control.http.response import Response
from redpoll.protocol import frames
from redpoll.protocol.errors import close_reason
from redpoll.protocol.handshake import key_of, split_target
from redpoll.testing.port import request_of
from redpoll.testing.request import Request

__all__ = ["Relay", "RelayedSocket", "take_frames"]

_READ_BYTES: Final = 65_536
_MAX_HEAD_BYTES: Final = 16 * 1024
# What `_read_request` returns.
_Wanted = tuple[h11.Request | None, bytes, bytes, bytes]


class Relay:
    """`before` gets each request before it is forwarded, and returns the answer instead, or None. `after` gets it with
    the status of its answer. `message` gets each text message of a client, with its connection.

    The server sends an event to subscribers while it answers the publish. So what it sends waits for the answers of
    requests that `publishes`: a client that has an event finds it noted by `after`.
    """

    def __init__(
        self,
        before: Callable[[Request], Response | None],
        after: Callable[[Request, int], None],
        message: Callable[[bytes, RelayedSocket], None],
        publishes: Callable[[Request], bool],
    ) -> None:
        self.upstream: tuple[str, int] = ("127.0.0.1", 0)
        self.sockets: set[RelayedSocket] = set()
        self._before = before
        self._after = after
        self._message = message
        self._publishes = publishes
        # Of each publish that the server hasn't answered.
        self._answers: set[asyncio.Event] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, until either side ends it."""
        upstream: asyncio.StreamWriter | None = None
        try:
            up_reader, upstream = await asyncio.open_connection(*self.upstream)
            await self._requests(reader, writer, up_reader, upstream)
        except (ConnectionError, h11.RemoteProtocolError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            # The loop ends. CPython 3.11 would print a traceback of a cancelled `serve`.
            pass
        finally:
            for side in (writer, upstream):
                if side is not None:
                    side.close()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> None:
        wanted = await _read_request(reader, b"")
        while True:
            head, body, raw, rest = wanted
            if head is None:
                return
            if b"websocket" in dict(head.headers).get(b"upgrade", b"").lower():
                upstream.write(raw)
                key = key_of(split_target(head.target.decode("latin-1"))[0]) or ""
                await self._socket(RelayedSocket(writer, upstream, key), reader, up_reader)
                return
            request = request_of(head, body)
            answer = self._before(request)
            if answer is not None:
                writer.write(answer.render(request.method))
                if not answer.keep_alive:
                    return
                wanted = await _read_request(reader, rest)
                continue
            with self._answering(request) as began:
                upstream.write(raw)
                following = asyncio.ensure_future(_read_following(reader, rest, upstream))
                try:
                    noted = None if self._publishes(request) else self._noted
                    if not await _pass_response(head, up_reader, writer, began, noted):
                        return
                    wanted = await following
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)

    @contextmanager
    def _answering(self, request: Request) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called with the status of the answer."""
        answered = asyncio.Event()
        if self._publishes(request):
            self._answers.add(answered)

        def end() -> None:
            self._answers.discard(answered)
            answered.set()

        def began(status: int) -> None:
            self._after(request, status)
            end()

        try:
            yield began
        finally:
            end()

    async def _noted(self) -> None:
        """Returns when the publishes that are under way now are answered."""
        for answered in tuple(self._answers):
            await answered.wait()

    async def _socket(
        self, socket: RelayedSocket, reader: asyncio.StreamReader, up_reader: asyncio.StreamReader
    ) -> None:
        self.sockets.add(socket)
        down = asyncio.ensure_future(_pump(up_reader, socket.from_server, self._noted))
        up = asyncio.ensure_future(_pump(reader, lambda data: self._from_client(socket, data)))
        try:
            await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.sockets.discard(socket)
            for task in (down, up):
                task.cancel()
            await asyncio.gather(down, up, return_exceptions=True)

    def _from_client(self, socket: RelayedSocket, data: bytes) -> None:
        for message in socket.from_client(data):
            self._message(message, socket)


class RelayedSocket:
    """One WebSocket, seen from between its ends. `socket_id` is "" until the server has greeted the client."""

    def __init__(self, writer: asyncio.StreamWriter, upstream: asyncio.StreamWriter, app_key: str) -> None:
        self.app_key = app_key
        self.socket_id = ""
        self._writer = writer
        self._upstream = upstream
        # What came of the next frame of each side. The server's begins with its answer to the upgrade.
        self._server = bytearray()
        self._client = bytearray()
        self._is_open = False
        self._shut: bytes | None = None

    def from_server(self, data: bytes) -> None:
        self._server += data
        if not self._is_open:
            head, end, rest = bytes(self._server).partition(b"\r\n\r\n")
            if not end:
                return
            self._is_open = True
            self._writer.write(head + end)
            self._server = bytearray(rest)
        for whole, opcode, payload in take_frames(self._server):
            if self._shut is not None:
                return
            self._writer.write(whole)
            if opcode == Opcode.TEXT and not self.socket_id and b"connection_established" in payload:
                self.socket_id = payload.partition(b'socket_id\\":\\"')[2].partition(b"\\")[0].decode()

    def from_client(self, data: bytes) -> Iterator[bytes]:
        """The text messages; the bytes are forwarded."""
        if self._shut is not None:
            # Its close frame is the answer to ours, and not for the server.
            self._writer.close()
            return
        self._upstream.write(data)
        self._client += data
        for _, opcode, payload in take_frames(self._client):
            if opcode == Opcode.TEXT:
                yield payload

    def shut(self, code: int | None, message: str) -> None:
        """Closes the client's connection with this code, and the server's without one; None: both without."""
        if code is None:
            self._writer.transport.abort()
        else:
            error = Frame(Opcode.TEXT, frames.error(code, message)).serialize(mask=False)
            close = Frame(Opcode.CLOSE, Close(code, close_reason(message)).serialize()).serialize(mask=False)
            self._shut = error + close
            self._writer.write(self._shut)
        self._upstream.transport.abort()


def take_frames(buffer: bytearray) -> Iterator[tuple[bytes, int, bytes]]:
    """The whole frames at the beginning of `buffer`, which are removed: bytes, opcode, payload without its mask."""
    while len(buffer) >= 2:
        length, at = buffer[1] & 0x7F, 2
        if length >= 126:
            at = 4 if length == 126 else 10
            if len(buffer) < at:
                return
            length = int.from_bytes(buffer[2:at], "big")
        mask = bytes(buffer[at : at + 4]) if buffer[1] & 0x80 else b""
        at += 4 if buffer[1] & 0x80 else 0
        end = at + length
        if len(buffer) < end:
            return
        whole = bytes(buffer[:end])
        payload = whole[at:]
        if mask:
            payload = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
        del buffer[:end]
        yield whole, whole[0] & 0x0F, payload


async def _pump(
    reader: asyncio.StreamReader, take: Callable[[bytes], None], noted: Callable[[], Awaitable[None]] | None = None
) -> None:
    while data := await reader.read(_READ_BYTES):
        if noted is not None:
            await noted()
        take(data)


async def _read_request(reader: asyncio.StreamReader, rest: bytes) -> _Wanted:
    """A whole request: head, body, its bytes, and what came after it. No head: the client has ended the connection."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
    raw, body, head = bytearray(), bytearray(), None
    data = rest
    while True:
        raw += data
        if data:
            parser.receive_data(data)
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                after = parser.trailing_data[0]
                return head, bytes(body), bytes(raw[: len(raw) - len(after)]), after
        data = await reader.read(_READ_BYTES)
        if not data:
            return None, b"", b"", b""


async def _read_following(reader: asyncio.StreamReader, rest: bytes, upstream: asyncio.StreamWriter) -> _Wanted:
    """The request after the one that is being answered. If the client leaves, the server gets the end too: it would
    write a stream on."""
    try:
        wanted = await _read_request(reader, rest)
    except ConnectionError:
        wanted = None, b"", b"", b""
    if wanted[0] is None:
        upstream.write_eof()
    return wanted


async def _pass_response(
    head: h11.Request,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    began: Callable[[int], None],
    noted: Callable[[], Awaitable[None]] | None,
) -> bool:
    """Forwards the answer as it comes; whether the connection stays open. `began` gets the status before the client has
    the answer, so that a client finds what it published; `noted` is as for `_pump`."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method=head.method, target=head.target, headers=[("Host", "relay")]))
    parser.send(h11.EndOfMessage())
    keeps, is_over = True, False
    while not is_over:
        data = await reader.read(_READ_BYTES)
        parser.receive_data(data)
        while not is_over and (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                keeps = b"close" not in dict(event.headers).get(b"connection", b"").lower()
                began(event.status_code)
            else:
                is_over = isinstance(event, h11.EndOfMessage | h11.ConnectionClosed)
        # An answer may end with its connection.
        keeps = keeps and bool(data)
        if noted is not None:
            await noted()
        writer.write(data)
        await writer.drain()
    return keeps
