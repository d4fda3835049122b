"""The line between the supervisor and one child: a socket pair that carries lines of JSON.

Who holds an end knows when the other is dead: it reads end of file. So no child outlives its supervisor,
whatever killed it, and no pid file is needed. Knows nothing of what the messages mean.
"""

import asyncio
import ctypes
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from redpoll.settings import Settings

__all__ = ["ChildPipe", "ChildPipeClosed", "Start", "arm_child"]

_READ_BYTES = 65_536
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a child: all that it needs to know. `run`: 12 hex digits of this supervisor start.

    `number` is the worker's place, 0 to N - 1, the same for its successors; `k` counts the worker processes
    of the run from 1 on and never repeats (cluster.md rule 4); both are 0 for the control plane. `listen_fd`
    is the listening socket, inherited: the public port's for a worker, the control port's for control.
    `tls_fd` is a worker's second one, the TLS port's, where there is one; `settings.tls_cert` and `.tls_key`
    then name one PEM file of ours that holds both, found good (certificate.py). The ports in `settings` are
    those that were bound, where 0 let the system choose, too. `settings.redis_url` is as
    the operator gave it; `redis_url` here is never empty.
    """

    role: Literal["worker", "control"]
    number: int
    run: str
    k: int
    redis_url: str
    listen_fd: int
    handover_path: str
    data_dir: str
    settings: Settings
    tls_fd: int | None = None


class ChildPipeClosed(Exception):
    """The other end was gone before its first message came."""


class ChildPipe:
    """One end. Reads blocking until `attach`, then on the loop. Owns the descriptor it was made of."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._received = bytearray()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[dict[str, Any]], None] | None = None
        self._on_eof: Callable[[], None] | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_start(self) -> Start:
        """Waits for the supervisor's first message. Raises ChildPipeClosed when the supervisor is gone."""
        while b"\n" not in self._received:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ChildPipeClosed("the supervisor ended before it said what to start")
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
        """From now on `on_message` gets every message, and `on_eof` is called once: the other end is gone."""
        self._socket.setblocking(False)
        self._loop, self._on_message, self._on_eof = loop, on_message, on_eof
        loop.add_reader(self._socket, self._readable)
        # What came together with the first message must not wait for the next one.
        loop.call_soon(self._deliver)

    def tell(self, message: dict[str, Any] | Start) -> None:
        """Sends one message. Never waits once attached, never fails: a dead other end is an end of file."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        self._flush()

    def close(self) -> None:
        """Lets go of the line; the other end reads end of file. May be called twice."""
        if self._socket.fileno() < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def read_rest(self) -> None:
        """For a process that has ended: delivers what it said last, and `on_eof`. The line is closed then."""
        while self._socket.fileno() >= 0:
            self._readable()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""  # reset: the other end died with messages of ours unread
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
            self._on_message(msgspec.json.decode(line))

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
    """Runs in a child between fork and exec: it dies with its parent, and Ctrl-C and SIGHUP are left to the parent.

    The terminal sends both to the whole group; only the supervisor knows the order in which to stop, and that
    SIGHUP means a new certificate.
    Where there is no prctl, end of file on the leash does it alone.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
