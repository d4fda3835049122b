"""The outcome of an attempt: a word for the metrics and a sentence for the operator.

The sentences are our own. Of what a receiver sent, they contain only the status code.
"""

from __future__ import annotations

import os
import socket
import ssl
from enum import Enum, StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from redpoll.control.webhooks.guard import AddressRefused
from redpoll.control.webhooks.pin import CertificateChanged

if TYPE_CHECKING:
    from yarl import URL

__all__ = ["INTERNAL_REASON", "Attempt", "NotShown", "Outcome", "Progress", "Stage", "of_error", "of_status"]

INTERNAL_REASON: Final = "an error in this server; see its log"
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class Outcome(StrEnum):
    """How an attempt ended. All outcomes but `DELIVERED` are failures and are retried in the same way."""

    DELIVERED = "delivered"
    # The answer's status is neither 2xx nor 3xx.
    STATUS = "status"
    # The answer's status is 3xx. Redirects are not followed.
    REDIRECT = "redirect"
    TIMEOUT = "timeout"
    # We refused: the address isn't public, or the URL isn't allowed by the current settings.
    REFUSED = "refused"
    # The certificate isn't the pinned one.
    PIN = "pin"
    # The certificate isn't valid, or there is no TLS.
    TLS = "tls"
    # The name has no address.
    RESOLVE = "resolve"
    # No address accepts connections.
    CONNECT = "connect"
    # The connection was closed before an answer, or the answer isn't HTTP.
    BROKEN = "broken"
    # It was handed out to a back end that pulls, which didn't acknowledge it.
    UNACKED = "unacked"
    # A bug in this server.
    INTERNAL = "internal"


class Attempt(NamedTuple):
    """`status` is None without an answer. `reason` is a sentence, also after a success. `response` is the first KiB of
    the answer's body, unchecked: only show it escaped."""

    ok: bool
    status: int | None
    reason: str
    duration_ms: int
    response: bytes
    outcome: Outcome


class Stage(Enum):
    """The stage that a request has reached."""

    START = 0
    RESOLVE = 1
    CONNECT = 2
    ANSWER = 3

    def timeout_reason(self, url: URL, within_s: float) -> str:
        """The sentence for a timeout at this stage."""
        if self is Stage.ANSWER:
            return f"no answer within {within_s:g} s"
        if self is Stage.RESOLVE:
            return f"no address of {url.host} was found within {within_s:g} s"
        return f"no connection to {_host_port(url)} within {within_s:g} s"


class NotShown(Exception):
    """The receiver showed no certificate. `outcome` and the text say why, as of_error does."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Progress:
    """The stage that a request has reached, set by the client. `reused`: it uses a pooled connection."""

    __slots__ = ("reused", "stage")

    def __init__(self) -> None:
        self.stage = Stage.START
        self.reused = False


def of_status(status: int, cut: bool) -> tuple[Outcome, str]:
    """The outcome and sentence for an answer. `cut`: only the beginning of its body was read."""
    phrase = f"{status} {_PHRASES.get(status, '')}".rstrip()
    if 200 <= status < 300:
        return Outcome.DELIVERED, f"{phrase}; the beginning of its body was kept" if cut else phrase
    if 300 <= status < 400:
        return Outcome.REDIRECT, f"answered {phrase}: redirects are not followed"
    return Outcome.STATUS, f"answered {phrase}"


def of_error(error: Exception, url: URL) -> tuple[Outcome, str]:
    """The outcome and sentence for a request without an answer, from the exception of aiohttp or the socket."""
    # Here, because metrics and the schedule need this module without ever sending (client.py).
    from aiohttp import (
        ClientConnectorError,
        ClientError,
        ClientPayloadError,
        ClientResponseError,
        ServerDisconnectedError,
    )

    cause = error.__cause__ if isinstance(error, ClientConnectorError) else error
    if isinstance(cause, AddressRefused):
        return Outcome.REFUSED, str(cause)
    if isinstance(cause, CertificateChanged):
        return Outcome.PIN, f"{cause}; nothing was sent"
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = cause.verify_message.rstrip(".")
        return Outcome.TLS, f"the certificate of {url.host} is not accepted: {text}; nothing was sent"
    if isinstance(cause, socket.gaierror):
        return Outcome.RESOLVE, f"no address of {url.host} is known: {cause.strerror}"
    if isinstance(error, ClientConnectorError):
        if isinstance(cause, ssl.SSLError):
            text = (cause.reason or "failed").replace("_", " ").lower()
            return Outcome.TLS, f"no TLS connection to {_host_port(url)}: {text}; nothing was sent"
        return Outcome.CONNECT, f"no connection to {_host_port(url)}: {_system_error(cause)}"
    if isinstance(error, ClientResponseError):
        return Outcome.BROKEN, "the answer is not HTTP, or its head is longer than 8 KiB"
    if isinstance(error, (ServerDisconnectedError, ClientPayloadError)):
        return Outcome.BROKEN, "the receiver closed the connection without an answer"
    if isinstance(error, (OSError, ClientError)):
        return Outcome.BROKEN, f"the connection broke before an answer: {_system_error(error)}"
    return Outcome.INTERNAL, INTERNAL_REASON


def _host_port(url: URL) -> str:
    return f"{url.host}:{url.port}"


def _system_error(error: BaseException | None) -> str:
    """The system's text for an error, without the library's additions."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else type(error).__name__
