"""One attempt at a delivery: an HTTP POST, and its outcome in one sentence.

Whatever the receiver does, an attempt ends within its time limit and takes a few KiB of memory. It goes only to
addresses that the guard allows and, if a certificate is pinned, only to that one. The schedule decides when and how
often to try.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import structlog
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
from yarl import URL

from redpoll import __version__
from redpoll.control.webhooks import pin as pins
from redpoll.control.webhooks.guard import Guard, Lookup, literal_address, look_up
from redpoll.control.webhooks.outcomes import Attempt, Outcome, Stage, of_error, of_status

__all__ = ["MAX_URL_CHARS", "PinUnavailable", "Sender", "Target"]

MAX_URL_CHARS: Final = 2048
# The time limit of an attempt, from the lookup of the name to the answer.
_TIMEOUT_S: Final = 10.0
# The status decides the outcome. The body is only shown to the operator, so it gets little time.
_BODY_WITHIN_S: Final = 1.0
_KEPT_BYTES: Final = 1024
# A body up to this size is read to its end, so that the connection can be reused. After a longer one it is closed.
_READ_BYTES: Final = 65_536
# Less than the 5 s after which Node's server and others close idle connections.
_IDLE_S: Final = 4.0
_MAX_HEAD_BYTES: Final = 8_192
_MAX_HEADERS: Final = 100
# Tries per attempt: a receiver may close a pooled connection at the moment it is used.
_TRIES: Final = 3
_MAX_PINS: Final = 1024
# For reading a certificate that was not accepted.
_LOOK_WITHIN_S: Final = 2.0
# Labels as yarl encodes them (RFC 5891). Underscores occur in intranets.
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?=.{{1,254}}$){_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE | re.ASCII).fullmatch

log = structlog.get_logger(__name__)


class Target(NamedTuple):
    """The receiver of a delivery. `pin` is 64 hex digits, or empty."""

    url: str
    pin: str = ""


class PinUnavailable(Exception):
    """No certificate could be captured; the text says why."""


class _Progress:
    """The stage that a request has reached, set by aiohttp's tracing. `reused`: it uses a pooled connection."""

    __slots__ = ("reused", "stage")

    def __init__(self) -> None:
        self.stage = Stage.START
        self.reused = False


class Sender:
    """Sends deliveries. Create it inside a running loop; end it with `close()`.

    `allow_http`: plain http URLs are allowed. `allow_addresses`: networks that are allowed though they are not public.
    `ca_file`: a PEM file with CAs in addition to the system's. Raises OSError or ssl.SSLError for a bad `ca_file`,
    ValueError for a bad network.
    """

    def __init__(
        self,
        *,
        allow_http: bool = False,
        allow_addresses: Sequence[str] = (),
        ca_file: str = "",
        resolve: Lookup = look_up,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._allow_http = allow_http
        self._timeout_s = timeout_s
        self._guard = Guard(allow_addresses)
        self._trusted = pins.trusted_context(ca_file)
        self._unchecked = pins.unchecked_context()
        self._pinned = lru_cache(maxsize=_MAX_PINS)(lambda pin: pins.PinnedContext(self._trusted, pin))
        connector = TCPConnector(
            resolver=self._guard.resolver(resolve),
            socket_factory=self._guard.open_socket,
            use_dns_cache=False,
            # The schedule limits connections per endpoint. With a common limit, slow receivers would block the others.
            limit=0,
            keepalive_timeout=_IDLE_S,
        )
        self._session = ClientSession(
            connector=connector,
            cookie_jar=DummyCookieJar(),
            # Our own timeout covers everything, lookups and bodies included.
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
        """Closes all connections. Running attempts fail."""
        await self._session.close()

    def check_url(self, url: str) -> str | None:
        """Why a webhook's URL isn't allowed, as a sentence; None if it is allowed.

        Names are not resolved here. A name that resolves to a private address is refused at each attempt.
        """
        if len(url) > MAX_URL_CHARS:
            return f"the URL is longer than {MAX_URL_CHARS} characters"
        if not url.isprintable() or " " in url:
            return "the URL contains spaces or control characters"
        try:
            parsed = _parse(url)
            host, port = parsed.raw_host, parsed.port
        except (ValueError, UnicodeError):
            return "this is not a URL"
        if parsed.scheme not in ("http", "https"):
            return "the URL must begin with https://"
        if parsed.scheme == "http" and not self._allow_http:
            return "the URL must begin with https://; plain http is off (webhook_allow_http)"
        if not host:
            return "the URL has no host"
        if parsed.raw_user is not None or parsed.raw_password is not None:
            return "the URL must not contain a user name or password; deliveries are signed"
        if not port:
            return "the URL's port must be between 1 and 65535"
        literal = literal_address(host)
        if literal is None and _NAME(host) is None:
            return "the URL's host is neither a valid name nor an address"
        what = None if literal is None else self._guard.fault(literal)
        if what is not None:
            return f"{host} is {what}; deliveries go to public addresses only (webhook_allow_addresses)"
        return None

    async def attempt(self, target: Target, body: bytes, headers: Mapping[str, str]) -> Attempt:
        """Sends once. A 2xx status is a success, whatever the body. Raises nothing but CancelledError."""
        begun = time.monotonic()
        fault = self.check_url(target.url)
        if fault is not None:
            # The URL was saved under other settings.
            return Attempt(False, None, fault, 0, b"", Outcome.REFUSED)
        url = _parse(target.url)
        context = self._pinned(target.pin) if target.pin else self._trusted
        progress = _Progress()
        status, response, cut = None, b"", False
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    answer = await self._post(url, body, headers, context, progress)
                except Exception as error:
                    outcome, reason = of_error(error, url)
                    if outcome is Outcome.INTERNAL:
                        log.exception("webhook attempt failed")
                    elif outcome is Outcome.TLS and target.pin:
                        outcome, reason = await self._explain(url, target.pin, outcome, reason)
                else:
                    status = answer.status
                    response, cut = await _read(answer)
                    outcome, reason = of_status(status, cut)
        except TimeoutError:
            if status is None:
                outcome, reason = Outcome.TIMEOUT, progress.stage.timeout_reason(url, self._timeout_s)
            else:
                outcome, reason = of_status(status, True)
        took_ms = round((time.monotonic() - begun) * 1000)
        return Attempt(outcome is Outcome.DELIVERED, status, reason, took_ms, response, outcome)

    async def fingerprint(self, url: str) -> str:
        """The SHA-256 (64 hex digits) of the certificate that the receiver shows now, which must be valid.

        Sends no request. Raises PinUnavailable.
        """
        fault = self.check_url(url)
        if fault is not None:
            raise PinUnavailable(fault)
        parsed = _parse(url)
        if parsed.scheme != "https":
            raise PinUnavailable("there is no certificate to pin on an http:// URL")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._shown_certificate(parsed, self._trusted)
        except TimeoutError as error:
            raise PinUnavailable(Stage.CONNECT.timeout_reason(parsed, self._timeout_s)) from error
        except (OSError, ClientError) as error:
            raise PinUnavailable(of_error(error, parsed)[1]) from error

    async def _post(
        self, url: URL, body: bytes, headers: Mapping[str, str], context: ssl.SSLContext, progress: _Progress
    ) -> ClientResponse:
        """Sends the request and returns the answer, with its head read.

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

    async def _shown_certificate(self, url: URL, context: ssl.SSLContext) -> str:
        """The SHA-256 of the certificate that a server shows to `context`. Raises what connecting raises."""
        try:
            await self._session.post(url, ssl=pins.PinnedContext(context, pins.MATCHES_NONE), allow_redirects=False)
        except ClientError as error:
            if isinstance(error.__cause__, pins.CertificateChanged):
                return error.__cause__.shown
            raise
        raise AssertionError("a certificate matched MATCHES_NONE")

    async def _explain(self, url: URL, pin: str, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
        """The outcome after a failed TLS handshake. Reads the certificate to see whether it still is the pinned one."""
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):
                shown = await self._shown_certificate(url, self._unchecked)
        except (OSError, ClientError):  # TimeoutError is an OSError.
            return outcome, reason
        return (
            (outcome, reason) if shown == pin else (Outcome.PIN, f"{pins.CertificateChanged(pin, shown)}; and {reason}")
        )


@lru_cache(maxsize=4096)
def _parse(url: str) -> URL:
    """Keeps an ASCII URL exactly as it was given, because some receivers sign theirs. Raises ValueError."""
    return URL(url, encoded=url.isascii())


async def _read(answer: ClientResponse) -> tuple[bytes, bool]:
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
    except (TimeoutError, OSError, ClientError):
        read += 1
    finally:
        # The connection goes back to the pool if the body was read to its end. Otherwise it is closed.
        answer.close()
    return beginning, read > len(beginning)


def _tracing() -> TraceConfig:
    """Records the stage of each request in the `_Progress` that it was sent with."""
    tracing = TraceConfig()

    def at(stage: Stage, *, pooled: bool = False) -> Any:
        async def note(_session: ClientSession, context: SimpleNamespace, _params: Any) -> None:
            progress: _Progress | None = context.trace_request_ctx
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
