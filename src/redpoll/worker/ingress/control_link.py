"""A worker's way to the control plane: HTTP requests go out as messages, answers come back by their numbers.

The socket is made with the first request and again after a break. All requests of one loop pass leave in one write.
Each request ends in exactly one of three ways: with control's answer, as unsent, or as unconfirmed because control went
away or fell silent before it answered. No request is sent twice. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from redpoll._http import pack_request, read_answers
from redpoll.http_messages import LAST, unpack_request

__all__ = ["ControlLink", "Requester"]

log = structlog.get_logger()

_READ_BYTES: Final = 256 * 1024
# Control sends a heartbeat twice a second. After this long without a byte from it, requests count as unconfirmed, so
# that each client has an answer within 2 s.
_SILENCE_S: Final = 1.5
# With more than this unread by control, no further requests are sent.
_MAX_UNSENT_BYTES: Final = 32 * 1024 * 1024


class Requester(Protocol):
    """The sender of a request; exactly one of its methods is called."""

    def answered(self, flags: int, response: bytes) -> None:
        """Control's answer: the whole HTTP response, or CONTINUE in `flags`."""

    def unanswered(self, sent: bool) -> None:
        """There will be no answer. `sent` False: control has not seen the request."""


class ControlLink:
    """Requests to control at the Unix socket `path`.

    `requests` counts those that await their answer. `beat()` is to be called several times a second.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests_total = 0
        self.unconfirmed_total = 0
        self._path = path
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._number = 0
        # By number, in the order sent: the requester, and when.
        self._awaited: dict[int, tuple[Requester, float]] = {}
        self._queued: list[bytes] = []
        self._unsent = bytearray()
        self._received = bytearray()
        self._heard_at = 0.0
        self._leaving = False
        self._now = clock()

    @property
    def requests(self) -> int:
        return len(self._awaited)

    def is_open(self) -> bool:
        """Whether requests can be sent now; connects where there is no connection."""
        if self._socket is None:
            return self._connect()
        heard = self._now - self._heard_at < _SILENCE_S
        return heard and not self._leaving and len(self._unsent) < _MAX_UNSENT_BYTES

    def send(
        self,
        requester: Requester,
        flags: int,
        method: bytes,
        client: bytes,
        target: bytes,
        fields: bytes,
        body: bytes,
        announced: int | None = 0,
        refusal: int = 0,
    ) -> int:
        """Queue a request; call it only while `is_open()`. Returns its number, for `forget`."""
        self._number = number = self._number % 0xFFFF_FFFF + 1
        queued = self._queued
        if not queued:
            self._loop.call_soon(self._flush)
        queued.append(pack_request(number, flags, method, client, target, fields, body, announced, refusal))
        self._awaited[number] = (requester, self._now)
        self.requests_total += 1
        return number

    def forget(self, number: int) -> None:
        """The requester is gone: drop the answer when it comes."""
        self._awaited.pop(number, None)

    def beat(self) -> None:
        """Fail the requests that have waited for too long while control was silent."""
        self._now = now = self._clock()
        if not self._awaited or now - self._heard_at < _SILENCE_S:
            return
        silent = [number for number, (_, sent_at) in self._awaited.items() if now - sent_at >= _SILENCE_S]
        if silent:
            log.warning("control plane silent", requests=len(silent))
        for number in silent:
            self._fail(self._awaited.pop(number)[0], sent=True)

    def close(self) -> None:
        self._drop("closed by us")

    # -- the socket

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return False
        self._socket = sock
        self._leaving = False
        self._now = self._heard_at = self._clock()
        self._loop.add_reader(sock, self._readable)
        return True

    def _flush(self) -> None:
        if self._socket is None:
            return
        data = b"".join(self._queued)
        self._queued.clear()
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._drop(str(error))
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket, self._writable)
        elif self._leaving:
            self._leave()

    def _writable(self) -> None:
        assert self._socket is not None
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(str(error))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            if self._leaving:
                self._leave()

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(str(error))
            return
        if not data:
            self._drop("closed by control")
            return
        self._now = self._heard_at = self._clock()
        if self._received:
            self._received += data
            data = bytes(self._received)
            self._received.clear()
        answers, used = read_answers(data)
        awaited = self._awaited
        for number, flags, response in answers:
            request = awaited.pop(number, None)
            if request is not None:
                request[0].answered(flags, response)
            elif number == 0 and flags & LAST:
                self._leave()
        if used < len(data):
            self._received += memoryview(data)[used:]

    def _leave(self) -> None:
        """Control is stopping: send what is queued and nothing after it, and read the answers until control closes."""
        self._leaving = True
        if self._socket is not None and not self._queued and not self._unsent:
            self._socket.shutdown(socket.SHUT_WR)

    def _drop(self, reason: str) -> None:
        """The connection is over: every request ends now."""
        sock, self._socket = self._socket, None
        if sock is None:
            return
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        sock.close()
        unsent = {unpack_request(message).number for message in self._queued}
        self._queued.clear()
        self._unsent.clear()
        self._received.clear()
        awaited, self._awaited = self._awaited, {}
        log.warning("control plane lost", reason=reason, requests=len(awaited))
        for number, (requester, _) in awaited.items():
            self._fail(requester, sent=number not in unsent)

    def _fail(self, requester: Requester, sent: bool) -> None:
        self.unconfirmed_total += sent
        requester.unanswered(sent)
