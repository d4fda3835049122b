"""The HTTP client of deliveries: aiohttp, which resolves names and opens sockets through the guard.

sender.py imports this module with the first attempt. aiohttp and its CA certificates take a seventh of the time in
which the control plane starts, and most servers have no webhooks.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

from aiohttp import (
    ClientError,
    ClientOSError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
    TraceConfig,
)
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import StreamReader
from yarl import URL

from redpoll import __version__
from redpoll.control.webhooks import pin as pins
from redpoll.control.webhooks.guard import Guard, Lookup
from redpoll.control.webhooks.outcomes import NotShown, Progress, Stage, of_error
from redpoll.protocol.limits import BoundedTable

__all__ = ["MAX_LOOKUPS", "MAX_SLOW_LOOKUPS", "Client", "Resolver"]

# The status decides the outcome. The body is only shown to the operator, so it gets little time.
_BODY_WITHIN_S: Final = 1.0
_KEPT_BYTES: Final = 1024
# A body up to this size is read to its end, so that the connection can be reused. After a longer one it is closed.
_READ_BYTES: Final = 65_536
# Less than the 5 s after which Node's server and others close idle connections.
_IDLE_S: Final = 4.0
_MAX_HEAD_BYTES: Final = 8_192
_MAX_HEADERS: Final = 100
# What may come before the head of an answer is complete: bytes, and informational answers (1xx).
_MAX_BYTES_TO_HEAD: Final = 65_536
_MAX_INFORMATIONAL: Final = 16
# aiohttp parses a piece at a time, so that a receiver is stopped soon after it has sent too much.
_PIECE_BYTES: Final = 8_192
# Tries per attempt: a receiver may close a pooled connection at the moment it is used.
_TRIES: Final = 3
# A lookup occupies a thread until the system's resolver gives up: half a minute if the name servers don't answer.
MAX_LOOKUPS: Final = 64
MAX_SLOW_LOOKUPS: Final = 16
_MAX_SLOW_NAMES: Final = 10_000
_SLOW_AFTER_S: Final = 3.0


class Client:
    """Sends requests, to addresses that the guard allows. Create it inside a running loop; end it with `close()`."""

    def __init__(self, guard: Guard, resolve: Lookup) -> None:
        connector = TCPConnector(
            resolver=Resolver(guard, resolve),
            socket_factory=guard.open_socket,
            use_dns_cache=False,
            # The schedule limits connections per endpoint. With a common limit, slow receivers would block the others.
            limit=0,
            keepalive_timeout=_IDLE_S,
        )
        # aiohttp has no public way to bound what comes before an answer. test_sender.py fails if this one ends.
        connector._factory = cast(partial[ResponseHandler], partial(BoundedHandler, loop=asyncio.get_running_loop()))
        self._session = ClientSession(
            connector=connector,
            cookie_jar=DummyCookieJar(),
            # The sender's own timeout covers everything, lookups and bodies included.
            timeout=ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            # Use no proxy and no passwords from the environment.
            trust_env=False,
            # Keep answers as they are: decompressing a small one could fill the memory.
            auto_decompress=False,
            headers={"User-Agent": f"redpoll/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"},
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_BYTES // 4,
            trace_configs=[_tracing()],
        )

    async def close(self) -> None:
        """Closes all connections. Running requests fail."""
        await self._session.close()

    async def post(
        self, url: URL, body: bytes, headers: Mapping[str, str], context: ssl.SSLContext, progress: Progress
    ) -> ClientResponse:
        """Sends the request and returns the answer, with its head read; `read` has its body. Raises what aiohttp
        raises.

        If a reused connection closes before the first byte of an answer, the receiver had closed it as idle. The
        request is then sent again under the same delivery id (RFC 9110 section 9.2.2).
        """
        for last in (*(False,) * (_TRIES - 1), True):
            progress.reused = False
            try:
                return await self._session.post(
                    url, data=body, headers=headers, ssl=context, allow_redirects=False, trace_request_ctx=progress
                )
            except (ServerDisconnectedError, ClientOSError):
                if last or not progress.reused:
                    raise
        raise AssertionError("unreachable")

    @staticmethod
    async def read(answer: ClientResponse) -> tuple[bytes, bool]:
        """The first KiB of the body, and whether there is more. An error in the body doesn't change the outcome."""
        beginning, read = b"", 0
        try:
            async with asyncio.timeout(_BODY_WITHIN_S):
                while read <= _READ_BYTES:
                    piece = await answer.content.readany()
                    if not piece:
                        break
                    beginning += piece[: _KEPT_BYTES - len(beginning)]
                    read += len(piece)
        except Exception:
            # aiohttp raises a RuntimeError for some bodies that are cut off.
            read += 1
        finally:
            # The connection goes back to the pool if the body was read to its end. Otherwise it is closed.
            answer.close()
        return beginning, read > len(beginning)

    async def shown_certificate(self, url: URL, context: ssl.SSLContext) -> str:
        """The SHA-256 (64 hex digits) of the certificate that a server shows to `context`. Sends no request. Raises
        NotShown."""
        try:
            await self._session.post(url, ssl=pins.PinnedContext(context, pins.MATCHES_NONE), allow_redirects=False)
        except (OSError, ClientError) as error:
            if isinstance(error.__cause__, pins.CertificateChanged):
                return error.__cause__.shown
            raise NotShown(*of_error(error, url)) from error
        raise AssertionError("a certificate matched MATCHES_NONE")


class BoundedHandler(ResponseHandler):
    """aiohttp's end of a connection, closed when a receiver sends too much before the head of an answer, or an answer
    that no request has asked for.

    aiohttp itself reads informational answers without end, and each read of them takes some ms of the event loop. While
    no request runs, it keeps all answers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._awaits_head = False
        self._bytes_to_head = 0
        self._informational = 0

    def set_response_params(self, **parameters: Any) -> None:
        """A request begins."""
        self._awaits_head = True
        self._bytes_to_head = _MAX_BYTES_TO_HEAD
        self._informational = _MAX_INFORMATIONAL
        super().set_response_params(**parameters)

    def data_received(self, data: bytes) -> None:
        # aiohttp also calls this without data, to go on with what it has.
        for at in range(0, len(data) or 1, _PIECE_BYTES):
            if self.exception() is not None:
                return
            piece = data[at : at + _PIECE_BYTES]
            super().data_received(piece)
            if self._awaits_head:
                self._bytes_to_head -= len(piece)
                if self._bytes_to_head < 0:
                    self._refuse()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        code = data[0].code
        is_final = code == 101 or not 100 <= code < 200
        self._informational -= not is_final
        if not self._awaits_head or self._informational < 0:
            self._refuse()
        else:
            self._awaits_head = not is_final
            super().feed_data(data, size)

    def _refuse(self) -> None:
        if self.exception() is None:
            self.set_exception(HttpProcessingError(message="too much before an answer"))
            if self.transport is not None:
                self.transport.abort()


class Resolver(AbstractResolver):
    """aiohttp's resolver. It is only used for names, not for URLs that contain an address."""

    def __init__(self, guard: Guard, look_up: Lookup, slow_after_s: float = _SLOW_AFTER_S) -> None:
        self._guard = guard
        self._look_up = look_up
        self._slow_after_s = slow_after_s
        self._free = asyncio.Semaphore(MAX_LOOKUPS)
        # Names whose last lookup took long have few, so that they leave the others to those that answer.
        self._free_for_slow = asyncio.Semaphore(MAX_SLOW_LOOKUPS)
        self._slow: BoundedTable[str, None] = BoundedTable(_MAX_SLOW_NAMES)
        self._running: dict[str, asyncio.Task[Sequence[str]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Requests for the same name share one lookup, which continues if one of them times out. Answers are not
        cached; connections are, and each goes to an address that was checked."""
        lookup = self._running.get(host)
        if lookup is None:
            lookup = self._running[host] = asyncio.create_task(self._limited(host), name=f"lookup {host}")
            lookup.add_done_callback(lambda task: self._done(host, task))
        addresses = await asyncio.shield(lookup)
        self._guard.check(host, addresses)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def _limited(self, host: str) -> Sequence[str]:
        async with self._free_for_slow if host in self._slow else self._free:
            began = time.monotonic()
            try:
                return await self._look_up(host)
            finally:
                if time.monotonic() - began >= self._slow_after_s:
                    self._slow.put(host, None, lambda _: False)
                else:
                    self._slow.pop(host, None)

    def _done(self, host: str, task: asyncio.Task[Sequence[str]]) -> None:
        del self._running[host]
        if not task.cancelled():
            # Marks the exception as seen: all requests for this name may have timed out.
            task.exception()

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()


def _tracing() -> TraceConfig:
    """Records the stage of each request in the Progress that it was sent with."""
    tracing = TraceConfig()

    def at(stage: Stage, *, pooled: bool = False) -> Any:
        async def note(_session: ClientSession, context: SimpleNamespace, _params: Any) -> None:
            progress: Progress | None = context.trace_request_ctx
            if progress is not None:
                progress.stage = stage
                progress.reused = progress.reused or pooled

        return note

    tracing.on_dns_resolvehost_start.append(at(Stage.RESOLVE))
    tracing.on_connection_create_start.append(at(Stage.CONNECT))
    tracing.on_dns_resolvehost_end.append(at(Stage.CONNECT))
    tracing.on_request_headers_sent.append(at(Stage.ANSWER))
    tracing.on_connection_reuseconn.append(at(Stage.ANSWER, pooled=True))
    return tracing
