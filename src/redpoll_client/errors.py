"""What can go wrong, as classes. `RedpollError` is the base of all of them.

    RedpollError
    ├─ Unavailable         no usable answer; what was asked for didn't happen, or may have happened
    │  ├─ Unreachable      the request can't have reached the server: repeating it later is safe
    │  └─ Unconfirmed      a publish that may have been delivered
    ├─ Refused             the server answered and said no; nothing was published (but see BadRequest)
    │  ├─ BadRequest (400, 405, 409, 415), Unauthorized (401), Forbidden (403), NotFound (404), Gone (410),
    │  └─ TooLarge (413), RateLimited (429)
    ├─ InvalidWebhook      a webhook whose signature or body is wrong
    ├─ SubscriptionRefused, ConnectionRefused, SignInRefused, ProtocolError, Overflow: raised by `Subscriber`
    └─ DecryptionFailed    an event of an encrypted channel that its key doesn't open

A name or size that the server would refuse by its rules is a `ValueError`, raised before anything is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "BadRequest",
    "ConnectionRefused",
    "DecryptionFailed",
    "Forbidden",
    "Gone",
    "InvalidWebhook",
    "NotFound",
    "Overflow",
    "ProtocolError",
    "RateLimited",
    "RedpollError",
    "Refused",
    "SignInRefused",
    "SubscriptionRefused",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unconfirmed",
    "Unreachable",
    "refusal",
]

_MAX_EXCERPT_CHARS = 200
# The quoted string of redpoll's and Pusher's 401, whose line breaks are spelled `\n`.
_SIGNED = re.compile(r'HmacSHA256Hex\("((?:[^"\\]|\\.)*)"')


class RedpollError(Exception):
    """The base of this package's errors.

    `published` is the number of events that are published for certain: 0, except when a later part of a batch of more
    than ten events failed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.published = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take other arguments than the text, and errors travel between processes (Celery).
        return _rebuilt, (type(self), self.args), self.__dict__


class Unavailable(RedpollError):
    """The server gave no usable answer: not reachable, no answer in time, half an answer, a 5xx, or an answer that no
    Pusher server gives, such as a proxy's HTML page. Raised as such for everything but publishes: what only reads was
    repeated before, and anything else may have been carried out."""


class Unreachable(Unavailable):
    """The connection couldn't be opened: wrong address, server away, certificate not valid, or no free connection in
    time. The request wasn't sent, so the caller may repeat it whenever it likes."""


class Unconfirmed(Unavailable):
    """A publish that may have been delivered: the request was sent and no usable answer came.

    `correlation_id` is its id; that of the whole batch if a part of one failed. Where the server compares ids
    (redpoll's app setting `idempotency`), a repeat with this id within 120 s isn't published twice; elsewhere a repeat
    may arrive twice.
    """

    def __init__(self, text: str, correlation_id: str | None = None) -> None:
        super().__init__(text)
        self.correlation_id = correlation_id


class Refused(RedpollError):
    """The server refused the request. Nothing was published, with one exception (BadRequest).

    `status` is the HTTP status, `text` the server's own text, `code` redpoll's code (empty on other servers), and
    `trace_id` the id under which redpoll's event log has the request (or empty).
    """

    def __init__(self, status: int, text: str, code: str = "", trace_id: str = "") -> None:
        super().__init__(f"{status}: {text}" if text else str(status))
        self.status = status
        self.text = text
        self.code = code
        self.trace_id = trace_id


class BadRequest(Refused):
    """400, 405, 409 or 415: the server doesn't accept what was sent. 409 is a `correlation_id` that another request has
    used, or a channel whose last event was published with `end` (code `channel_ended`). That one, and
    `too_many_histories`, are about single channels: the events on other channels of the request are published, and
    `text` says how many."""


class Unauthorized(Refused):
    """401: key, secret, clock or token is wrong. `signed` is the string that the server expected to be signed, where it
    says so, with real line breaks; else empty. It contains no secret."""

    def __init__(self, status: int, text: str, code: str = "", trace_id: str = "") -> None:
        super().__init__(status, text, code, trace_id)
        match = _SIGNED.search(text)
        self.signed = _unescaped(match[1]) if match else ""


class Forbidden(Refused):
    """403: the app is disabled, or a token lacks the scope."""


class NotFound(Refused):
    """404: no such path, app or trace. Check host, port and app id."""


class Gone(Refused):
    """410: the position of a `read` is no longer stored, or the channel's history was cleared. Read from the
    beginning."""


class TooLarge(Refused):
    """413: the event or the body is larger than the server allows."""


class RateLimited(Refused):
    """429: too many requests or messages. `retry_after` is the number of seconds to wait, or None where the server
    doesn't say. It isn't retried by this package: whether an event is still worth sending then is the caller's
    decision."""

    def __init__(
        self, status: int, text: str, code: str = "", trace_id: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(status, text, code, trace_id)
        self.retry_after = retry_after


class InvalidWebhook(RedpollError):
    """A webhook that isn't from the server: no signature, a wrong one, or a signed body that is no webhook.

    `status` is the HTTP status to answer with: 401 for signatures, 413 for a body over 1 MiB, 400 for the rest.
    """

    def __init__(self, text: str, status: int = 401) -> None:
        super().__init__(text)
        self.status = status


class ConnectionRefused(RedpollError):
    """The server closed the connection with a code from 4000 to 4099, after which Pusher's protocol forbids to
    reconnect unchanged. `code` is that code, such as 4001 for an unknown key."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}" if text else str(code))
        self.code = code


class ProtocolError(RedpollError):
    """What answers isn't a Pusher server, or sent something that none sends."""


class SubscriptionRefused(RedpollError):
    """The server or the auth endpoint refused a subscription. `channel` is its name; `kind` is the server's type, such
    as `AuthError` or `LimitReached`; `status` the HTTP-like status, 0 where the server doesn't say."""

    def __init__(self, channel: str, text: str, kind: str = "", status: int = 0) -> None:
        super().__init__(f"{channel}: {text}")
        self.channel = channel
        self.text = text
        self.kind = kind
        self.status = status


class SignInRefused(RedpollError):
    """The server or the sign-in endpoint refused to sign this connection in."""


class Overflow(RedpollError):
    """The reader of a channel was too slow: its queue was full and an event was dropped.

    `channel` is the channel's name and `size` the size of its queue. What was queued before the dropped event has been
    handed out. The subscription is ended; `Channel.position` is where a new one can continue (`since=`).
    """

    def __init__(self, channel: str, size: int) -> None:
        super().__init__(f"{channel}: an event came while {size} others waited to be read; read faster or raise queue=")
        self.channel = channel
        self.size = size


class DecryptionFailed(RedpollError):
    """An event of an encrypted channel that the channel's key doesn't open, even after the key was fetched again."""


def _rebuilt(kind: type[RedpollError], args: tuple[Any, ...]) -> RedpollError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else str(match[1]), text)


_BY_STATUS: dict[int, type[Refused]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: BadRequest,
    409: BadRequest,
    410: Gone,
    413: TooLarge,
    415: BadRequest,
}


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """The error for an answer with a status from 300 to 499. Its text is the server's: the `error` of a JSON body
    (redpoll, soketi, Sockudo, Reverb), else the first 200 characters of the body."""
    text, code = _text_of(headers.get("Content-Type", ""), body)
    trace_id = headers.get("X-Service-Trace-Id", "")
    if status == 429:
        return RateLimited(status, text, code, trace_id, _seconds(headers.get("Retry-After")))
    if 300 <= status < 400:
        text = f"the server redirects to {headers.get('Location', 'nowhere')}; give its own address"
    return _BY_STATUS.get(status, Refused)(status, text, code, trace_id)


def _text_of(content_type: str, body: bytes) -> tuple[str, str]:
    """The text and the code of an error's body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        code = answer.get("code")
        return answer["error"], code if isinstance(code, str) else ""
    return excerpt(content_type, body), ""


def excerpt(content_type: str, body: bytes) -> str:
    """The beginning of a body, in one line, for an error's text. HTML loses its tags."""
    text = body[: 16 * _MAX_EXCERPT_CHARS].decode(errors="replace")
    if "html" in content_type.lower() or text.lstrip()[:1] == "<":
        text = "HTML page: " + re.sub(r"<[^>]*>", " ", re.sub(r"(?is)<(script|style).*?</\1>", " ", text))
    return " ".join(text.split())[:_MAX_EXCERPT_CHARS]


def _seconds(value: str | None) -> float | None:
    """The seconds of a Retry-After header; None for a date or nonsense."""
    if value is None or not value.strip().isdecimal():
        return None
    return float(value)
