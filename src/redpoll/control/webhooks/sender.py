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
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from redpoll.control.webhooks import pin as pins
from redpoll.control.webhooks.guard import Guard, Lookup, literal_address, look_up
from redpoll.control.webhooks.outcomes import Attempt, NotShown, Outcome, Progress, Stage, of_error, of_status

if TYPE_CHECKING:
    from yarl import URL

    from redpoll.control.webhooks.client import Client

__all__ = ["MAX_URL_CHARS", "PinUnavailable", "Sender", "Target"]

MAX_URL_CHARS: Final = 2048
# The time limit of an attempt, from the lookup of the name to the answer.
_TIMEOUT_S: Final = 10.0
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
        self._resolve = resolve
        # A bad file shows now. The system's CAs are read with the first attempt, because that takes 30 ms.
        self._trusted = pins.trusted_context(ca_file) if ca_file else None
        self._pinned = lru_cache(maxsize=_MAX_PINS)(pins.PinnedContext)
        self._client: Client | None = None
        self._opening = asyncio.Lock()

    async def _open(self) -> tuple[Client, ssl.SSLContext]:
        """The client and the context without a pin, made with the first attempt. What they need is imported and read in
        a thread, so that publishes don't wait for it."""
        async with self._opening:
            if self._trusted is None:
                self._trusted = await asyncio.to_thread(pins.trusted_context)
            if self._client is None:
                client_class = await asyncio.to_thread(_import_client)
                self._client = client_class(self._guard, self._resolve)
            return self._client, self._trusted

    async def close(self) -> None:
        """Closes all connections. Running attempts fail."""
        if self._client is not None:
            await self._client.close()

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
        fault = self.check_url(target.url)
        if fault is not None:
            # The URL was saved under other settings.
            return Attempt(False, None, fault, 0, b"", Outcome.REFUSED)
        url = _parse(target.url)
        client, trusted = await self._open()
        context = self._pinned(trusted, target.pin) if target.pin else trusted
        begun = time.monotonic()
        progress = Progress()
        status, response, cut = None, b"", False
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    answer = await client.post(url, body, headers, context, progress)
                except Exception as error:
                    outcome, reason = of_error(error, url)
                    if outcome is Outcome.INTERNAL:
                        log.exception("webhook attempt failed")
                    elif outcome is Outcome.TLS and target.pin:
                        outcome, reason = await self._explain(url, target.pin, outcome, reason)
                else:
                    status = answer.status
                    response, cut = await client.read(answer)
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
        client, trusted = await self._open()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await client.shown_certificate(parsed, trusted)
        except TimeoutError as error:
            raise PinUnavailable(Stage.CONNECT.timeout_reason(parsed, self._timeout_s)) from error
        except NotShown as error:
            raise PinUnavailable(str(error)) from error

    async def _explain(self, url: URL, pin: str, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
        """The outcome after a failed TLS handshake. Reads the certificate to see whether it still is the pinned one."""
        client, _ = await self._open()
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):
                shown = await client.shown_certificate(url, pins.unchecked_context())
        except (TimeoutError, NotShown):
            return outcome, reason
        return (
            (outcome, reason) if shown == pin else (Outcome.PIN, f"{pins.CertificateChanged(pin, shown)}; and {reason}")
        )


@lru_cache(maxsize=4096)
def _parse(url: str) -> URL:
    """Keeps an ASCII URL exactly as it was given, because some receivers sign theirs. Raises ValueError."""
    # With the first webhook: most servers have none.
    from yarl import URL

    return URL(url, encoded=url.isascii())


def _import_client() -> type[Client]:
    from redpoll.control.webhooks.client import Client

    return Client
