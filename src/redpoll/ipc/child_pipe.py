"""The connection between the supervisor and one child: a socket pair that carries lines of JSON.

When one process dies, however it dies, the other reads end of file. So no child outlives its supervisor, and no pid
file is needed. This module carries messages; supervisor.py, worker/main.py and control/main.py give them their meaning.
"""

import asyncio
import ctypes
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from redpoll.config.settings import Settings

__all__ = ["ChildPipe", "ChildPipeClosed", "Start", "arm_child"]

_READ_BYTES = 65_536
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child: everything it needs to start. (To reach Redis, a worker also needs the record
    store's shard key, which the supervisor learns from control.)

    `run` identifies this start of the supervisor: 12 hex digits. `number` is the worker's position, 0 to N - 1, which
    its successors share. `k` counts the worker processes of the run from 1 and never repeats (cluster/README.md "Worker
    names and fencing"). Both are 0 for the control plane.

    `listen_fd` is the inherited listening socket, of the public port for a worker and of the control port for control.
    `tls_fd` is a worker's second one, for the TLS port if there is one; `settings.tls_cert` and `settings.tls_key` then
    both name one PEM file that the supervisor has checked and written (certificate.py). The ports in `settings` are the
    ones that were bound, never 0. `settings.redis_url` is as the operator gave it; `redis_url` here is never
    empty and names the TLS files, too (redis_url.py).
    """

    role: Literal["worker", "control"]
    number: int
    run: str
    k: int
    redis_url: str
    listen_fd: int
    requests_path: str
    data_dir: str
    settings: Settings
    tls_fd: int | None = None


class ChildPipeClosed(Exception):
    """The supervisor ended before it sent the first message."""


class ChildPipe:
    """One end of the connection. Reads block until `attach`, then the loop reads. Owns the descriptor it is given.

    An attached end answers the pings of the other end by itself, so an answer shows that the process's loop runs.
    `pong_due`: the other end hasn't answered our ping yet. `pings` counts those that it has sent.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self.pong_due = False
        self.pings = 0
        self._received = bytearray()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[dict[str, Any]], None] | None = None
        self._on_eof: Callable[[], None] | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_start(self) -> Start:
        """Waits for the supervisor's first message. Raises ChildPipeClosed when the supervisor has ended."""
        while b"\n" not in self._received:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ChildPipeClosed("the supervisor ended before it sent its first message")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return msgspec.json.decode(line, type=Start)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[dict[str, Any]], None],
        on_eof: Callable[[], None],
    ) -> None:
        """Calls `on_message` with every further message, and `on_eof` once when the other end is closed."""
        self._socket.setblocking(False)
        self._loop, self._on_message, self._on_eof = loop, on_message, on_eof
        loop.add_reader(self._socket, self._readable)
        # Messages that arrived together with the first one must not wait for the next read.
        loop.call_soon(self._deliver)

    def send(self, message: dict[str, Any] | Start) -> None:
        """Sends one message. Never blocks once attached. Never fails: a dead peer shows as end of file."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        self._flush()

    def ping(self) -> None:
        """Asks the other end for an answer, unless one is due already."""
        if not self.pong_due:
            self.pong_due = True
            self.send({"ping": True})

    def close(self) -> None:
        """Closes this end; the other end reads end of file. May be called twice."""
        if self._socket.fileno() < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def read_rest(self) -> None:
        """Delivers the last messages of a process that has ended, calls `on_eof` and closes this end."""
        while self._socket.fileno() >= 0:
            self._readable()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""  # reset: the peer died before it read all our messages
        if data:
            self._received += data
            self._deliver()
        else:
            self.close()
            assert self._on_eof is not None
            self._on_eof()

    def _deliver(self) -> None:
        assert self._on_message is not None
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            message = msgspec.json.decode(line)
            if "ping" in message:
                self.pings += 1
                self.send({"pong": True})
            elif "pong" in message:
                self.pong_due = False
            else:
                self._on_message(message)

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except (BlockingIOError, InterruptedError):
            assert self._loop is not None
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._unsent.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._socket)


def arm_child() -> None:
    """Runs in a child between fork and exec. The child dies with its parent and ignores SIGINT and SIGHUP.

    The terminal sends both signals to the whole process group. Only the supervisor knows the order in which to stop,
    and that SIGHUP means a new certificate. On systems without prctl, end of file on the pipe alone ends the child.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
