"""The two ways into control: its own port, and the Unix socket to which workers forward requests."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from redpoll.control.http.control_port import ControlPort
    from redpoll.control.http.port_tls import PortTls
    from redpoll.control.http.worker_requests import WorkerRequests

__all__ = ["Entrance"]

_BACKLOG: Final = 1024
# Open requests get this long at shutdown. Each waits for Redis for at most 2 s.
_FINISH_WITHIN_S: Final = 3.0


class Entrance:
    """`listener` is the control port, `tls` its TLS if it has any."""

    def __init__(
        self, listener: socket.socket, port: ControlPort, worker_requests: WorkerRequests, tls: PortTls | None = None
    ) -> None:
        self.port = port
        self.tls = tls
        self.worker_requests = worker_requests
        self._listener = listener
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.tls or self.port, sock=self._listener, backlog=_BACKLOG)
        await self.worker_requests.start()

    async def finish(self) -> None:
        """Accept no more requests, and finish the open ones. If a worker still has one, it finds no socket and responds
        with 503 itself."""
        if self._server is not None:
            self._server.close()
        if self.tls is not None:
            self.tls.close()
        await asyncio.gather(self.worker_requests.finish(_FINISH_WITHIN_S), self.port.finish(_FINISH_WITHIN_S))
