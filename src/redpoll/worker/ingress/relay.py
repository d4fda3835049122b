"""A connection of the TLS port that is no WebSocket: decrypted bytes, pumped to the control plane and back.

The TLS lives in this process, so the descriptor alone is no use to another: control gets one end of a socket pair in
its place, and this pumps between the client and the other end. Knows bytes; nothing of HTTP. Neither end can
fill our memory: who isn't read from is not read for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

__all__ = ["Relay"]

# What either end may leave unread of the other before we stop reading there.
_MOST_WAITING_BYTES = 64 * 1024


class _End(asyncio.Protocol):
    """One of the two ends. `other` is where its bytes go; None before that is there."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_MOST_WAITING_BYTES)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        to = self.other.transport
        if to is not None and not to.is_closing():
            to.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, fault: Exception | None) -> None:
        self.transport = None
        self._lost()

    def close(self) -> None:
        """End behind what is still to be written."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Relay:
    """Pumps from its making until either end is gone. `ended` is called once, when both are.

    `client` is the TLS transport, taken from its connection; `inner` our end of the socket pair. `carries_websocket`
    is set where control handed an Upgrade back: this relay then ends with that WebSocket and not before.
    """

    def __init__(self, client: asyncio.Transport, inner: socket.socket, ended: Callable[[Relay], None]) -> None:
        self.carries_websocket = False
        self._ended = ended
        self._inner_socket = inner
        self._ending = False
        self._gone = 0
        self._client = _End(self._client_lost)
        self._inner = _End(self._inner_lost)
        self._client.other, self._inner.other = self._inner, self._client
        # Nothing is read before there is somewhere to write it.
        client.pause_reading()
        client.set_protocol(self._client)
        self._client.connection_made(client)

    async def open(self) -> None:
        """Begin to pump."""
        inner = self._inner
        await asyncio.get_running_loop().connect_accepted_socket(lambda: inner, self._inner_socket)
        if self._client.transport is None:
            # Gone meanwhile, before there was anything to close.
            inner.close()
            return
        self._client.transport.resume_reading()
        if self._ending:
            self.end()

    def end(self) -> None:
        """Let control answer what it has been asked, and close then: it reads end of file, the client our close."""
        self._ending = True
        if self._inner.transport is not None and not self._inner.transport.is_closing():
            if self._client.transport is not None:
                self._client.transport.pause_reading()
            self._inner.transport.write_eof()

    def abort(self) -> None:
        """End now, whatever is under way."""
        self._client.abort()
        self._inner.abort()

    def _client_lost(self) -> None:
        self._inner.close()
        self._end_gone()

    def _inner_lost(self) -> None:
        self._client.close()
        self._end_gone()

    def _end_gone(self) -> None:
        self._gone += 1
        if self._gone == 2:
            self._ended(self)
