"""Shapes of ext/redpoll/_tls.pyx."""

import ssl
from collections.abc import Callable
from typing import Any

from redpoll._engine import WebSocket
from redpoll._openssl import Context
from redpoll._sockets import Polled, Poller

CLOSE_WITHIN_S: float

class TlsSocket(Polled):
    @property
    def poller(self) -> Poller: ...
    @property
    def context(self) -> ssl.SSLContext | Context | None: ...
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def set_write_buffer_limits(self, high: int, low: int) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...

class PythonTlsSocket(TlsSocket):
    def __init__(
        self,
        poller: Poller,
        context_of: Callable[[], ssl.SSLContext],
        connection: WebSocket,
        settled: Callable[[TlsSocket, str | None], None],
    ) -> None: ...

class OpenSslSocket(TlsSocket):
    def __init__(
        self,
        poller: Poller,
        context_of: Callable[[], Context],
        connection: WebSocket,
        settled: Callable[[TlsSocket, str | None], None],
    ) -> None: ...
    @property
    def resumed(self) -> bool: ...
