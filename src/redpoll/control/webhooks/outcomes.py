"""What became of an attempt, in a word for the metrics and a sentence for the operator.

The words are ours alone: nothing that a receiver sent stands in a sentence but its status.
"""

from __future__ import annotations

import os
import socket
import ssl
from enum import Enum, StrEnum
from http import HTTPStatus
from typing import Final, NamedTuple

from aiohttp import ClientConnectorError, ClientError, ClientPayloadError, ClientResponseError, ServerDisconnectedError
from yarl import URL

from redpoll.control.webhooks.guard import AddressRefused
from redpoll.control.webhooks.pin import CertificateChanged

__all__ = ["Attempt", "Outcome", "Stage", "of_error", "of_status"]

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class Outcome(StrEnum):
    """Every way that an attempt ends. All but `DELIVERED` are failures, and tried again alike."""

    DELIVERED = "delivered"
    # Answered, with a status that isn't 2xx; `REDIRECT` is a 3xx.
    STATUS = "status"
    REDIRECT = "redirect"
    TIMEOUT = "timeout"
    # By us: the address isn't public, or the URL isn't good under today's settings.
    REFUSED = "refused"
    # Another certificate than the pinned one; `TLS`: none that is accepted, or no TLS.
    PIN = "pin"
    TLS = "tls"
    # No address for the name; `CONNECT`: none that answers; `BROKEN`: closed, or not HTTP.
    RESOLVE = "resolve"
    CONNECT = "connect"
    BROKEN = "broken"
    # A fault of this server.
    INTERNAL = "internal"


class Attempt(NamedTuple):
    """`status` is None where there was no answer. `reason`: a sentence, after a success too. `response`: the first KiB
    of the answer's body as it came, which nobody may interpret."""

    ok: bool
    status: int | None
    reason: str
    duration_ms: int
    response: bytes
    outcome: Outcome


class Stage(Enum):
    """How far a request has come."""

    START = 0
    RESOLVE = 1
    CONNECT = 2
    ANSWER = 3

    def late(self, url: URL, within_s: float) -> str:
        """The sentence of a time-out at this stage."""
        if self is Stage.ANSWER:
            return f"no answer within {within_s:g} s"
        if self is Stage.RESOLVE:
            return f"no address of {url.host} was found within {within_s:g} s"
        return f"no connection to {_place(url)} within {within_s:g} s"


def of_status(status: int, cut: bool) -> tuple[Outcome, str]:
    """The outcome of an answer. `cut`: only the beginning of its body was kept."""
    told = f"{status} {_PHRASES.get(status, '')}".rstrip()
    if 200 <= status < 300:
        return Outcome.DELIVERED, f"{told}; the beginning of its body was kept" if cut else told
    if 300 <= status < 400:
        return Outcome.REDIRECT, f"answered {told}: redirects are not followed"
    return Outcome.STATUS, f"answered {told}"


def of_error(error: Exception, url: URL) -> tuple[Outcome, str]:
    """The outcome of a request that got no answer, from what aiohttp or the sockets raised."""
    cause = error.__cause__ if isinstance(error, ClientConnectorError) else error
    if isinstance(cause, AddressRefused):
        return Outcome.REFUSED, str(cause)
    if isinstance(cause, CertificateChanged):
        return Outcome.PIN, f"{cause}; nothing was sent"
    if isinstance(cause, ssl.SSLCertVerificationError):
        said = cause.verify_message.rstrip(".")
        return Outcome.TLS, f"the certificate of {url.host} is not accepted: {said}; nothing was sent"
    if isinstance(cause, socket.gaierror):
        return Outcome.RESOLVE, f"no address of {url.host} is known: {cause.strerror}"
    if isinstance(error, ClientConnectorError):
        if isinstance(cause, ssl.SSLError):
            said = (cause.reason or "failed").replace("_", " ").lower()
            return Outcome.TLS, f"no TLS connection to {_place(url)}: {said}; nothing was sent"
        return Outcome.CONNECT, f"no connection to {_place(url)}: {_said(cause)}"
    if isinstance(error, ClientResponseError):
        return Outcome.BROKEN, "what it answered is not HTTP, or has a head longer than 8 KiB"
    if isinstance(error, (ServerDisconnectedError, ClientPayloadError)):
        return Outcome.BROKEN, "it closed the connection without an answer"
    if isinstance(error, (OSError, ClientError)):
        return Outcome.BROKEN, f"the connection broke before an answer: {_said(error)}"
    return Outcome.INTERNAL, "an error of this server, which its log tells"


def _place(url: URL) -> str:
    return f"{url.host}:{url.port}"


def _said(error: BaseException | None) -> str:
    """What the system says of an error, without what a library puts around it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else type(error).__name__
