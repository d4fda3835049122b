"""A fake control plane for tests of a worker's HTTP side. Tests choose its answers to the worker's messages."""

import asyncio

import pytest

from helpers.messages import unpack_request
from redpoll._http import pack_answer
from redpoll.http.messages import (
    AUTHENTICATED,
    CLOSES,
    CONTINUE,
    HEAD_ONLY,
    LAST,
    SIZE_BYTES,
    size_of,
)


class FakeControl:
    """Listens at a worker's `requests_path`. `requests` holds all requests that came. `answer(request)` returns the
    response, or None if the test calls `send` later. `on_head` decides about heads; by default it allows the body.
    It sends heartbeats as control does, unless `beats` is False."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.requests = []
        self.answer = self.echo
        self.on_head = lambda request: CONTINUE
        self.writers = []
        self.server = None
        self.beats = True
        self._timer = None

    @staticmethod
    def echo(request) -> bytes:
        body = f"{request.method} {request.target} {len(request.body)} {request.client}".encode()
        return ok(body, request)

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        self._beat_again()

    def _beat_again(self) -> None:
        # More often than the worker ticks, so that of a slow loop's ticks no six come without a heartbeat.
        self._timer = asyncio.get_running_loop().call_later(0.1, self._beat_again)
        if self.beats:
            self.beat()

    async def _serve(self, reader, writer) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readexactly(SIZE_BYTES)
                message = head + await reader.readexactly(size_of(head, 0) - SIZE_BYTES)
                request = unpack_request(message)
                self.requests.append(request)
                if request.flags & HEAD_ONLY and not request.refusal:
                    verdict = self.on_head(request)
                    if verdict is CONTINUE:
                        writer.write(pack_answer(request.number, CONTINUE | AUTHENTICATED, b""))
                        continue
                    writer.write(pack_answer(request.number, LAST, verdict))
                    continue
                response = self.answer(request)
                if response is not None:
                    self.send(request, response, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def send(self, request, response: bytes, writer=None) -> None:
        flags = LAST if request.flags & CLOSES else 0
        (writer or self.writers[-1]).write(pack_answer(request.number, flags, response))

    def beat(self) -> None:
        for writer in self.writers:
            if not writer.is_closing():
                writer.write(pack_answer(0, 0, b""))

    def kill(self) -> None:
        """Everything closes at once, as when the process dies."""
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.server is not None:
            self.server.close()
        for writer in self.writers:
            writer.close()


def ok(body: bytes, request=None) -> bytes:
    closes = b"Connection: close\r\n" if request is not None and request.flags & CLOSES else b""
    if request is not None and request.method == "HEAD":
        return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n" % (closes, len(body))
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (closes, len(body), body)


@pytest.fixture
async def control(tmp_path):
    """A FakeControl that listens."""
    control = FakeControl(str(tmp_path / "requests.sock"))
    await control.start()
    yield control
    control.close()
