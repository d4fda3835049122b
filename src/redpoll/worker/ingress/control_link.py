"""A worker's way to the control plane: HTTP requests go out as messages, answers come back by their numbers.

The socket is made with the first request and again after a break. All requests of one loop pass leave in one write.
Each request ends in exactly one of three ways: with control's answer, as unsent, or as unconfirmed because control went
away or fell silent before it answered. No request is sent twice. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from typing import Final, Protocol

import structlog

from redpoll._http import pack_request, read_answers
from redpoll.http.messages import LAST, number_of

__all__ = ["ControlLink", "Requester"]

log = structlog.get_logger()

_READ_BYTES: Final = 256 * 1024
# Control sends a heartbeat twice a second. After this long without a byte from it, requests count as unconfirmed, so
# that each client has an answer within 2 s.
_SILENT_BEATS: Final = 6
# Requests that end without an answer get their error for this long at a time: there may be thousands.
_ENDING_SLICE_S: Final = 0.002
# While control isn't there, the log says so every ten seconds, if there are requests.
_UNREACHED_BEATS: Final = 40
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

    `ready`: requests can be sent now. `awaited` are the requests without an answer yet. `beat()` is to be called
    four times a second.
    """

    def __init__(self, path: str) -> None:
        self.ready = False
        # By number, in the order sent: the requester, and the beat in which it was sent.
        self.awaited: dict[int, tuple[Requester, int]] = {}
        self.requests_total = 0
        # Of these, those that were packed in one step (http_requests.py).
        self.usual_total = 0
        self.unconfirmed_total = 0
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        # Of the next request. 0 is never one: control's heartbeats have it.
        self.next_number = 1
        self._queued: list[bytes] = []
        self._unsent = bytearray()
        self._received = bytearray()
        self._leaving = False
        # Requests that end without an answer, and whether control has seen them.
        self._ending: dict[int, tuple[Requester, bool]] = {}
        # Time is counted in beats of this process, so that a stall of its own doesn't look like a silence of control.
        self._beat = 0
        self._heard_beat = 0
        # When the log may say again that control isn't there.
        self._unreached_beat = 0

    def is_open(self) -> bool:
        """Whether requests can be sent now; connects if there is no connection."""
        if self._socket is None:
            self._connect()
        return self.ready

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
        """Queue a request; call it only while `ready`. Returns its number, for `forget`."""
        number = self.next_number
        message = pack_request(number, flags, method, client, target, fields, body, announced, refusal)
        return self.send_packed(requester, message)

    def send_packed(self, requester: Requester, message: bytes) -> int:
        """As `send`, with the whole message of a request whose number is `next_number`."""
        number = self.next_number
        self.next_number = number + 1 if number < 0xFFFF_FFFF else 1
        queued = self._queued
        if not queued:
            self._loop.call_soon(self._flush)
        queued.append(message)
        self.awaited[number] = (requester, self._beat)
        self.requests_total += 1
        return number

    def forget(self, number: int) -> None:
        """The requester is gone: drop the answer when it comes."""
        self.awaited.pop(number, None)
        self._ending.pop(number, None)

    def beat(self) -> None:
        """Count time: control that has been silent for too long confirms nothing."""
        self._beat = beat = self._beat + 1
        if beat - self._heard_beat < _SILENT_BEATS:
            return
        self._update_ready()
        silent = [number for number, (_, sent) in self.awaited.items() if beat - sent >= _SILENT_BEATS]
        if silent:
            log.warning("control plane silent", requests=len(silent))
        self._end({number: (self.awaited.pop(number)[0], True) for number in silent})

    def _update_ready(self) -> None:
        self.ready = (
            self._socket is not None
            and not self._leaving
            and self._beat - self._heard_beat < _SILENT_BEATS
            and len(self._unsent) < _MAX_UNSENT_BYTES
        )

    def close(self) -> None:
        self._drop("closed by us")

    # -- the socket

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._path)
            _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            # Who made the socket's folder again after it was removed would get all requests, with their secrets.
            if user != os.geteuid():
                raise PermissionError(f"the socket is of another user, with the uid {user}; remove it")
        except OSError as error:
            sock.close()
            if self._beat >= self._unreached_beat:
                self._unreached_beat = self._beat + _UNREACHED_BEATS
                log.warning("control plane not reached", path=self._path, reason=str(error))
            return
        self._socket = sock
        self._leaving = False
        self._heard_beat = self._beat
        self._loop.add_reader(sock, self._readable)
        self._update_ready()

    def _flush(self) -> None:
        if self._socket is None:
            return
        data = b"".join(self._queued)
        self._queued.clear()
        if self._unsent:
            self._unsent += data
            self._update_ready()
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
            self._update_ready()
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
        self._update_ready()
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
        if self._heard_beat != self._beat:
            self._heard_beat = self._beat
            self._update_ready()
        if self._received:
            self._received += data
            data = bytes(self._received)
            self._received.clear()
        try:
            answers, used = read_answers(data)
        except ValueError as error:
            self._drop(str(error))
            return
        awaited = self.awaited
        for number, flags, response in answers:
            request = awaited.pop(number, None)
            if request is not None:
                try:
                    request[0].answered(flags, response)
                except Exception as error:
                    self._report(error)
            elif number == 0 and flags & LAST:
                self._leave()
        if used < len(data):
            self._received += memoryview(data)[used:]

    def _leave(self) -> None:
        """Control is stopping: send what is queued and nothing after it, and read the answers until control closes."""
        self._leaving = True
        self._update_ready()
        if self._socket is not None and not self._queued and not self._unsent:
            self._socket.shutdown(socket.SHUT_WR)

    def _drop(self, reason: str) -> None:
        """The connection is over: every request ends now."""
        sock, self._socket = self._socket, None
        if sock is None:
            return
        self.ready = False
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        sock.close()
        unsent = {number_of(message) for message in self._queued}
        self._queued.clear()
        self._unsent.clear()
        self._received.clear()
        awaited, self.awaited = self.awaited, {}
        log.warning("control plane lost", reason=reason, requests=len(awaited))
        self._end({number: (requester, number not in unsent) for number, (requester, _) in awaited.items()})

    def _end(self, requests: dict[int, tuple[Requester, bool]]) -> None:
        """Tell requesters that there will be no answer, in the order in which they sent."""
        waiting = bool(self._ending)
        self._ending |= requests
        if not waiting:
            self._end_some()

    def _end_some(self) -> None:
        until = time.monotonic() + _ENDING_SLICE_S
        while self._ending:
            requester, sent = self._ending.pop(next(iter(self._ending)))
            self.unconfirmed_total += sent
            try:
                requester.unanswered(sent)
            except Exception as error:
                self._report(error)
            if self._ending and time.monotonic() > until:
                self._loop.call_soon(self._end_some)
                return

    def _report(self, error: Exception) -> None:
        """An error of one requester must not keep the outcome from the others."""
        self._loop.call_exception_handler({"message": "a request's outcome was not taken", "exception": error})
