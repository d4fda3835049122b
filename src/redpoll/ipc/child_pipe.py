"""The connection between the supervisor and one child: a socket pair that carries messages (messages.py).

When one process dies, however it dies, the other reads end of file. So no child outlives its supervisor, and no pid
file is needed.
"""

import asyncio
import ctypes
import signal
import socket
import sys
from collections.abc import Callable

from redpoll.ipc.messages import Inbox, M, Message, Ping, Pong, Start, decode_start, encode

__all__ = ["ChildPipe", "ChildPipeClosed", "arm_child"]

_READ_BYTES = 65_536
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


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
        self._handle: Callable[[bytes], None] | None = None
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
        return decode_start(line)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: Inbox[M],
        on_message: Callable[[M], None],
        on_eof: Callable[[], None],
    ) -> None:
        """Calls `on_message` with every further message of this inbox, and `on_eof` once when the other end is
        closed."""

        def handle(line: bytes) -> None:
            match inbox.decode(line):
                case None:
                    pass
                case Ping():
                    self.pings += 1
                    self.send(Pong())
                case Pong():
                    self.pong_due = False
                case message:
                    on_message(message)

        self._socket.setblocking(False)
        self._loop, self._handle, self._on_eof = loop, handle, on_eof
        loop.add_reader(self._socket, self._readable)
        # Messages that arrived together with the first one must not wait for the next read.
        loop.call_soon(self._deliver)

    def send(self, message: Message) -> None:
        """Sends one message. Never blocks once attached. Never fails: a dead peer shows as end of file."""
        self._unsent += encode(message)
        self._flush()

    def ping(self) -> None:
        """Asks the other end for an answer, unless one is due already."""
        if not self.pong_due:
            self.pong_due = True
            self.send(Ping())

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
        assert self._handle is not None
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._handle(line)

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
