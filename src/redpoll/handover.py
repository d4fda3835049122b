"""How one public port serves two kinds of process: a TCP connection travels as a descriptor.

One message is one SOCK_SEQPACKET packet: a line of JSON, the bytes read so far, and the descriptor beside it
(SCM_RIGHTS). A worker sends what isn't a WebSocket to the control plane; control sends back an Upgrade that
comes later on such a connection. A connection of the TLS port travels as one end of a socket pair, whose other
end the worker relays (worker/ingress/relay.py). Both ends use this module; it knows nothing of HTTP.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

import msgspec

__all__ = ["MAX_PACKET_BYTES", "Passage", "connect"]

# A head of 16 KiB and one read of 64 KiB behind it, with room for the line of JSON.
MAX_PACKET_BYTES = 128 * 1024
# What waits here costs a descriptor each; a peer that takes nothing for that long is as good as away.
_MAX_WAITING = 256


# (descriptor, peer, bytes read so far, whether the client came by TLS)
Received = Callable[[int, tuple[str, int], bytes, bool], None]


class _Line(msgspec.Struct, omit_defaults=True):
    """`peer` is whoever is in front of us: the client, or a proxy that carries many clients' requests."""

    peer: tuple[str, int]
    secure: bool = False


class Passage:
    """One end of the way between a worker and the control plane.

    `received(descriptor, peer, data, secure)` is called for each connection that arrives, and owns the descriptor;
    `lost()` once when the other end is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: Received,
        lost: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._received = received
        self._lost = lost
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        self._loop.add_reader(sock, self._readable)

    def send(self, descriptor: int, peer: tuple[str, int], data: bytes, secure: bool = False) -> bool:
        """Hand `descriptor` over; it is closed here in any case. False: the other end can't take it now."""
        packet = msgspec.json.encode(_Line(peer, secure)) + b"\n" + data
        if self._sock.fileno() < 0 or len(packet) > MAX_PACKET_BYTES or len(self._waiting) >= _MAX_WAITING:
            os.close(descriptor)
            return False
        self._waiting.append((descriptor, packet))
        if len(self._waiting) == 1:
            self._writable()
        return True

    def close(self) -> None:
        """Stop without a word to the owner; what still waits is closed."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._waiting:
            os.close(self._waiting.popleft()[0])

    def _writable(self) -> None:
        while self._waiting:
            descriptor, packet = self._waiting[0]
            try:
                self._sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._writable)
                return
            except OSError:
                self._end()
                return
            os.close(descriptor)
            self._waiting.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data, ancillary, _flags, _address = self._sock.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_SPACE(array.array("i").itemsize)
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._end()
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                (descriptor,) = array.array("i", content)
                text, _, rest = data.partition(b"\n")
                line = msgspec.json.decode(text, type=_Line)
                self._received(descriptor, line.peer, rest, line.secure)

    def _end(self) -> None:
        self.close()
        self._lost()


def connect(path: str, received: Received, lost: Callable[[], None]) -> Passage | None:
    """A worker's end of the way to the control plane that listens at `path`; None while nobody does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return Passage(sock, received, lost)
