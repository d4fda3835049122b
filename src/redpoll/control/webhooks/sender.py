"""One attempt at a delivery: an HTTP POST, and what became of it in one sentence (spec 3.2, 6.3, 6.4).

Whatever the receiver does, an attempt ends within its time, holds a few KiB, and goes to no address that the guard
refuses and no certificate but the pinned one. When to try, how often, and how many at once is the schedule's.
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
# A receiver answers within this, or the attempt has failed (spec 8).
_TIMEOUT_S: Final = 10.0
# The status decides; what comes behind it is a courtesy to the operator and gets this long.
_BODY_WITHIN_S: Final = 1.0
_KEPT_BYTES: Final = 1024
# An answer is read to its end up to here, so that its connection can be used again; a longer one costs it.
_READ_BYTES: Final = 65_536
# Below the 5 s after which Node's server, and others, close an idle connection: few are used as they go.
_IDLE_S: Final = 4.0
_MAX_HEAD_BYTES: Final = 8_192
_MAX_HEADERS: Final = 100
# For a pooled connection that its receiver closed in the moment it was used.
_TRIES: Final = 3
_MAX_PINS: Final = 1024
# For a second look at a certificate that was not accepted.
_LOOK_WITHIN_S: Final = 2.0
# What yarl makes of an internationalised name, too (RFC 5891); underscores are for intranets.
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?=.{{1,254}}$){_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE | re.ASCII).fullmatch

log = structlog.get_logger(__name__)


class Target(NamedTuple):
    """Where a delivery goes. `pin`: 64 hex digits, or empty."""

    url: str
    pin: str = ""


class PinUnavailable(Exception):
    """No certificate could be captured; the sentence says why."""


class _Flight:
    """How far a request has come: aiohttp's tracing writes, the sentence of a time-out reads. `reused`: it goes over a
    pooled connection."""

    __slots__ = ("reused", "stage")

    def __init__(self) -> None:
        self.stage = Stage.START
        self.reused = False


class Sender:
    """AttemptSender. Made inside a running loop, and closed with `close()`.

    `allow_http`: plain http URLs are good. `allow_addresses`: networks that need not be public. `ca_file`: PEM file
    with CAs beside the system's. Raises OSError or ssl.SSLError for a bad `ca_file`, ValueError for a bad network.
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
            # How many at once is the schedule's, per endpoint: a common bound would let the slow starve the others.
            limit=0,
            keepalive_timeout=_IDLE_S,
        )
        self._session = ClientSession(
            connector=connector,
            cookie_jar=DummyCookieJar(),
            # Ours holds over everything, lookups and bodies too.
            timeout=ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            # Neither a proxy nor a password from the environment.
            trust_env=False,
            # A kept answer is what came; unpacking a small one may fill the memory.
            auto_decompress=False,
            headers={"User-Agent": f"redpoll/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"},
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
            max_headers=_MAX_HEADERS,
            read_bufsize=_READ_BYTES // 4,
            trace_configs=[_tracing()],
        )

    async def close(self) -> None:
        """Attempts under way fail. Nothing is sent from here on."""
        await self._session.close()

    def check_url(self, url: str) -> str | None:
        """What is wrong with a webhook's URL, as a sentence; None where it is good.

        Asks nobody: a name that resolves to a private address is refused at each attempt.
        """
        if len(url) > MAX_URL_CHARS:
            return f"the URL is longer than {MAX_URL_CHARS} characters"
        if not url.isprintable() or " " in url:
            return "the URL has blanks or control characters in it"
        try:
            parsed = _parse(url)
            host, port = parsed.raw_host, parsed.port
        except (ValueError, UnicodeError):
            return "that is no URL"
        if parsed.scheme not in ("http", "https"):
            return "the URL must begin with https://"
        if parsed.scheme == "http" and not self._allow_http:
            return "the URL must begin with https://; plain http is off (webhook_allow_http)"
        if not host:
            return "the URL names no host"
        if parsed.raw_user is not None or parsed.raw_password is not None:
            return "a user name or password in the URL is not used; deliveries are signed"
        if not port:
            return "the URL's port must be between 1 and 65535"
        literal = literal_address(host)
        if literal is None and _NAME(host) is None:
            return "the URL's host is neither a name nor an address"
        what = None if literal is None else self._guard.fault(literal)
        if what is not None:
            return f"{host} is {what}; deliveries go to public addresses only (webhook_allow_addresses)"
        return None

    async def attempt(self, target: Target, body: bytes, headers: Mapping[str, str]) -> Attempt:
        """One try, which raises nothing but CancelledError. A 2xx status is success, whatever comes behind it."""
        begun = time.monotonic()
        fault = self.check_url(target.url)
        if fault is not None:
            # Saved under other settings.
            return Attempt(False, None, fault, 0, b"", Outcome.REFUSED)
        url = _parse(target.url)
        context = self._pinned(target.pin) if target.pin else self._trusted
        flight = _Flight()
        status, response, cut = None, b"", False
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    answer = await self._post(url, body, headers, context, flight)
                except Exception as error:
                    outcome, reason = of_error(error, url)
                    if outcome is Outcome.INTERNAL:
                        log.exception("a webhook's attempt failed by a fault of ours")
                    elif outcome is Outcome.TLS and target.pin:
                        outcome, reason = await self._explain(url, target.pin, outcome, reason)
                else:
                    status = answer.status
                    response, cut = await _read(answer)
                    outcome, reason = of_status(status, cut)
        except TimeoutError:
            if status is None:
                outcome, reason = Outcome.TIMEOUT, flight.stage.late(url, self._timeout_s)
            else:
                outcome, reason = of_status(status, True)
        took_ms = round((time.monotonic() - begun) * 1000)
        return Attempt(outcome is Outcome.DELIVERED, status, reason, took_ms, response, outcome)

    async def fingerprint(self, url: str) -> str:
        """The SHA-256 of the certificate that is shown there now, 64 hex digits, on a connection that checked it.

        AttemptSender no request. Raises PinUnavailable.
        """
        fault = self.check_url(url)
        if fault is not None:
            raise PinUnavailable(fault)
        parsed = _parse(url)
        if parsed.scheme != "https":
            raise PinUnavailable("there is no certificate to pin on an http:// URL")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._shown(parsed, self._trusted)
        except TimeoutError as error:
            raise PinUnavailable(Stage.CONNECT.late(parsed, self._timeout_s)) from error
        except (OSError, ClientError) as error:
            raise PinUnavailable(of_error(error, parsed)[1]) from error

    async def _post(
        self, url: URL, body: bytes, headers: Mapping[str, str], context: ssl.SSLContext, flight: _Flight
    ) -> ClientResponse:
        """The answer, its head read. A connection that was idle and is closed before a byte of an answer is no
        receiver's fault: the request goes out again, under the same delivery id (RFC 9110 9.2.2)."""
        for last in (*(False,) * (_TRIES - 1), True):
            flight.reused = False
            try:
                return await self._session.post(
                    url, data=body, headers=headers, ssl=context, allow_redirects=False, trace_request_ctx=flight
                )
            except (ServerDisconnectedError, ClientOSError):
                if last or not flight.reused:
                    raise
        raise AssertionError("unreachable")

    async def _shown(self, url: URL, context: ssl.SSLContext) -> str:
        """The certificate that a server shows at a connection made with `context`. Raises what connecting raises."""
        try:
            await self._session.post(url, ssl=pins.PinnedContext(context, pins.MATCHES_NONE), allow_redirects=False)
        except ClientError as error:
            if isinstance(error.__cause__, pins.CertificateChanged):
                return error.__cause__.shown
            raise
        raise AssertionError("a certificate that fits no pin was accepted")

    async def _explain(self, url: URL, pin: str, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
        """The outcome where no certificate was accepted at all: a look at it tells whether it is the pinned one."""
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):
                shown = await self._shown(url, self._unchecked)
        except (OSError, ClientError):  # TimeoutError is an OSError.
            return outcome, reason
        return (
            (outcome, reason) if shown == pin else (Outcome.PIN, f"{pins.CertificateChanged(pin, shown)}; and {reason}")
        )


@lru_cache(maxsize=4096)
def _parse(url: str) -> URL:
    """The URL as it was given, where that can go over the wire: some receivers sign theirs. Raises ValueError."""
    return URL(url, encoded=url.isascii())


async def _read(answer: ClientResponse) -> tuple[bytes, bool]:
    """The first KiB of the body, and whether there is more. Whatever is wrong with a body, the status stands."""
    kept, read = b"", 0
    try:
        async with asyncio.timeout(_BODY_WITHIN_S):
            while read <= _READ_BYTES:
                piece = await answer.content.readany()
                if not piece:
                    break
                kept += piece[: _KEPT_BYTES - len(kept)]
                read += len(piece)
    except (TimeoutError, OSError, ClientError):
        read += 1
    finally:
        # Goes back to the pool where its body has been read to the end, and is closed otherwise.
        answer.close()
    return kept, read > len(kept)


def _tracing() -> TraceConfig:
    """Notes how far a request has come, in the `_Flight` that it was sent with."""
    tracing = TraceConfig()

    def at(stage: Stage, *, pooled: bool = False) -> Any:
        async def note(_session: ClientSession, context: SimpleNamespace, _told: Any) -> None:
            flight: _Flight | None = context.trace_request_ctx
            if flight is not None:
                flight.stage = stage
                flight.reused = flight.reused or pooled

        return note

    tracing.on_dns_resolvehost_start.append(at(Stage.RESOLVE))
    tracing.on_connection_create_start.append(at(Stage.CONNECT))
    tracing.on_dns_resolvehost_end.append(at(Stage.CONNECT))
    tracing.on_request_headers_sent.append(at(Stage.ANSWER))
    tracing.on_connection_reuseconn.append(at(Stage.ANSWER, pooled=True))
    return tracing
