"""The control plane's end of the hand-over: connections that workers accepted arrive here as descriptors.

Listens on a Unix socket for the workers; what goes over it is redpoll.handover's business, what becomes of a
connection is control.connections'. An Upgrade that comes late goes back to the worker that the connection came
from, or to any other where that one is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

import structlog

from redpoll.control.connections import Connections
from redpoll.handover import Passage

__all__ = ["Handover"]

log = structlog.get_logger(__name__)

_BACKLOG: Final = 128


class Handover:
    """Takes connections from workers at `path` into `connections`."""

    def __init__(self, path: str, connections: Connections) -> None:
        self.received_total = 0
        self.handed_back_total = 0
        self._path = path
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._passages: list[Passage] = []
        self._taking: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> int:
        """How many workers have come by; one comes with the first connection that it hands over."""
        return len(self._passages)

    def start(self) -> None:
        """Listen. What a killed predecessor left at the path is replaced."""
        if os.path.exists(self._path):
            os.unlink(self._path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(self._path)
        os.chmod(self._path, 0o600)
        self._listener.listen(_BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Take nothing more; connections that are here stay."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            os.unlink(self._path)
        for passage in self._passages:
            passage.close()
        self._passages.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        self.join(sock)

    def join(self, sock: socket.socket) -> None:
        """A worker is at the other end of `sock`."""
        passage: Passage

        def received(descriptor: int, peer: tuple[str, int], data: bytes, secure: bool) -> None:
            self.received_total += 1
            taking = self._loop.create_task(self._take(passage, descriptor, peer, data, secure))
            self._taking.add(taking)
            taking.add_done_callback(self._taking.discard)

        def lost() -> None:
            self._passages.remove(passage)

        passage = Passage(sock, received, lost)
        self._passages.append(passage)

    async def _take(self, passage: Passage, descriptor: int, peer: tuple[str, int], data: bytes, secure: bool) -> None:
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)

        def hand_back(descriptor: int, peer: tuple[str, int], data: bytes) -> bool:
            return self._hand_back(passage, descriptor, peer, data, secure)

        try:
            await self._connections.take(sock, peer, data, hand_back)
        except OSError as error:
            # The client went away on the way here.
            log.debug("handed-over connection lost", reason=str(error))
            sock.close()

    def _hand_back(self, came_from: Passage, descriptor: int, peer: tuple[str, int], data: bytes, secure: bool) -> bool:
        if came_from in self._passages:
            passage = came_from
        elif self._passages:
            passage = self._passages[-1]
        else:
            os.close(descriptor)
            return False
        self.handed_back_total += 1
        return passage.send(descriptor, peer, data, secure)
