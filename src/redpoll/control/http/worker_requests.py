"""The workers' HTTP requests: they arrive as messages, and their answers leave as messages.

Listens on a Unix socket; each worker has one connection. `take` carries out usual publishes as soon as they are read.
The other requests run in slices of 2 ms, client addresses in turns, so that one client's requests delay those of
another by no more than one of its own. Answers leave in one write for each loop pass. This module knows messages
(http/messages.py); it doesn't know what a request means.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import structlog

from redpoll._http import pack_answer, pack_ok, read_requests
from redpoll.control.http.fair_queue import FairQueue
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, dateline
from redpoll.http.messages import (
    AUTHENTICATED,
    CLOSES,
    FIELDS,
    HEAD_ONLY,
    HEARTBEAT_S,
    HTTP_1_0,
    LAST,
    SIZE_BYTES,
    size_of,
)
from redpoll.loop.slices import Slices

__all__ = ["ReceivedRequest", "WorkerRequests"]

log = structlog.get_logger(__name__)

_BACKLOG: Final = 128
_READ_BYTES: Final = 256 * 1024
# While requests of this size wait, no more are read from their worker, which has bounds of its own (http_requests.py).
_MAX_WAITING_BYTES: Final = 4 * 1024 * 1024


class ReceivedRequest(Request):
    """A request that a worker sent. Its response goes back to that worker, as bytes."""

    __slots__ = ()

    from_worker = True
    link: _WorkerLink

    def respond(self, response: Response) -> None:
        if (
            response.status == 200
            and response.keep_alive
            and not self.flags & (CLOSES | HTTP_1_0 | HEAD_ONLY)
            and self.method != "HEAD"
        ):
            # Nearly every response: as below, in one piece of C.
            known = AUTHENTICATED if self.caller_known else 0
            self.link.answer_packed(pack_ok(self.number, known, dateline.line, response.headers, response.body))
            return
        super().respond(response)

    def answer(self, flags: int, response: bytes) -> None:
        self.link.answer(self.number, flags, response)


Take = Callable[
    ["_WorkerLink", type[ReceivedRequest], bytearray, int, tuple[str, ...]], tuple[list[ReceivedRequest], int, int]
]


def _decline(
    _: _WorkerLink, kind: type[ReceivedRequest], buffer: bytearray, size: int, names: tuple[str, ...]
) -> tuple[list[ReceivedRequest], int, int]:
    return (*read_requests(kind, buffer, size, names), 0)


class _WorkerLink(asyncio.BufferedProtocol):
    """The connection of one worker."""

    def __init__(self, owner: WorkerRequests) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # [0, filled) is a message that isn't whole.
        self._buffer = bytearray(_READ_BYTES)
        self._filled = 0
        self._out: list[bytes] = []
        self._waiting_bytes = 0
        self._reads = True
        self.unanswered = 0
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._owner.links[self] = None

    def connection_lost(self, fault: Exception | None) -> None:
        self._transport = None
        self.ended = True
        self._owner.links.pop(self, None)
        self._owner.idle_changed()

    def eof_received(self) -> bool:
        # After goodbye(): the worker has sent all; close when all of it is answered.
        self.ended = True
        self._owner.idle_changed()
        return True

    def get_buffer(self, size_hint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, size: int) -> None:
        buffer = self._buffer
        end = self._filled + size
        requests, used, taken = self._owner.take(self, ReceivedRequest, buffer, end, FIELDS)
        self.unanswered += len(requests) + taken
        if requests:
            began, waiting = time.perf_counter(), self._owner.waiting
            for request in requests:
                request.link, request.began = self, began
                self._waiting_bytes += _size_of(request)
                waiting.add(request.remote, request)
            self._owner.slices.start()
            if self._waiting_bytes > _MAX_WAITING_BYTES and self._transport is not None:
                self._reads = False
                self._transport.pause_reading()
        left = end - used
        wanted = _READ_BYTES
        if left >= SIZE_BYTES:
            wanted = max(wanted, size_of(buffer, used))
        if wanted != len(buffer):
            self._buffer = bytearray(wanted)
            self._buffer[:left] = memoryview(buffer)[used:end]
        elif used and left:
            buffer[:left] = buffer[used:end]
        self._filled = left

    def begins(self, request: ReceivedRequest) -> bool:
        """A request no longer waits. False: the worker is gone, and nobody waits for the answer."""
        self._waiting_bytes -= _size_of(request)
        if self._transport is None:
            return False
        if not self._reads and self._waiting_bytes <= _MAX_WAITING_BYTES // 2:
            self._reads = True
            self._transport.resume_reading()
        return True

    def answer(self, number: int, flags: int, response: bytes) -> None:
        """Queue an answer for the end of this loop pass."""
        self.answer_packed(pack_answer(number, flags, response))

    def answer_packed(self, message: bytes) -> None:
        """As `answer`, with the whole message."""
        self.unanswered -= 1
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(message)

    def beat(self) -> None:
        self._queue(pack_answer(0, 0, b""))

    def goodbye(self) -> None:
        """Ask the worker to stop sending."""
        self._queue(pack_answer(0, LAST, b""))

    def _queue(self, message: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(message)

    def answer_many(self, messages: bytes, count: int) -> None:
        """Write `count` answers now."""
        self.unanswered -= count
        self._out.append(messages)
        self._flush()

    def _flush(self) -> None:
        if self._transport is not None and self._out:
            self._transport.write(b"".join(self._out))
        self._out.clear()
        if self._owner.finishing:
            self._owner.idle_changed()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _size_of(request: ReceivedRequest) -> int:
    """About what a request takes in memory while it waits, in bytes; its head is at most 16 KiB, its body 1 MiB."""
    return 500 + len(request.path) + len(request.query) + len(request.body)


class WorkerRequests:
    """Takes requests at the Unix socket `path`; `received` is called with each and must answer it.

    `take` reads messages, as FastPublish.take; it may carry some out itself, and answers them with `answer_many`.
    """

    def __init__(self, path: str, received: Callable[[ReceivedRequest], None], take: Take | None = None) -> None:
        self.received = received
        self.take = take or _decline
        self.waiting: FairQueue[ReceivedRequest] = FairQueue()
        self.slices = Slices(self._run_one)
        self.links: dict[_WorkerLink, None] = {}
        self.finishing = False
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._server: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    async def start(self) -> None:
        """Listen. What a killed predecessor left at the path is replaced."""
        self._unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(self._path)
        os.chmod(self._path, 0o600)
        self._server = await self._loop.create_unix_server(lambda: _WorkerLink(self), sock=listener, backlog=_BACKLOG)
        self._beat()

    async def finish(self, grace_s: float) -> None:
        """Accept no more requests, and answer the received ones within `grace_s`."""
        if self._server is None:
            return
        self.finishing = True
        self._server.close()
        self._unlink()
        for link in self.links:
            link.goodbye()
        self.idle_changed()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests not answered", count=sum(link.unanswered for link in self.links))
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self.links):
            link.close()

    def _run_one(self) -> bool:
        if not self.waiting:
            return False
        request = self.waiting.pop()
        if request.link.begins(request):
            self.received(request)
        return len(self.waiting) > 0

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def idle_changed(self) -> None:
        """Something ended that finish() may wait for."""
        if self.finishing and all(link.ended and not link.unanswered for link in self.links):
            self._idle.set()

    def _beat(self) -> None:
        for link in self.links:
            link.beat()
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)
