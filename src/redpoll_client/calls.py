"""One request to the HTTP API and what is made of its answer, without any I/O. Both publishers use these.

Signing, paths and answers: protocol/README.md "HTTP API" and "Request signing".
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from redpoll_client.errors import Unavailable, Unconfirmed, Unreachable, excerpt, refusal
from redpoll_client.settings import Endpoint
from redpoll_client.signatures import sign_request

__all__ = ["MAX_ANSWER_BYTES", "Answer", "Attempts", "Call", "NotSent", "Retry", "target"]

# Longer answers are not read: no Pusher server sends them. redpoll's longest, a list of channels, has some MiB.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
# Seconds before the first repeat at most; doubled for each further one.
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
# The longest Retry-After of a 503 that is waited for.
_LONGEST_RETRY_AFTER_S = 5.0
# Rate limits with a longer window, such as one of a day, say nothing about the next seconds.
_LONGEST_WINDOW_S = 90.0


class Answer(dict[str, Any]):
    """A successful answer: the server's JSON object as a dict, as `pusher` returns it.

    `trace_id` is what `trace` takes (redpoll; empty elsewhere). `correlation_id` is the id of the publish or the whole
    batch, or None for a request that isn't a publish. `spacing_s` is the time between publishes with which the rest of
    the rate limit lasts until its window ends; 0 while half of it is left, and where the server has no such limit.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        trace_id: str = "",
        correlation_id: str | None = None,
        spacing_s: float = 0.0,
    ) -> None:
        super().__init__(fields)
        self.trace_id = trace_id
        self.correlation_id = correlation_id
        self.spacing_s = spacing_s


@dataclass(frozen=True)
class Call:
    """A request. `path` begins with `/apps/…` or `/users/…`, escaped. `correlation_id` is set on publishes, and only on
    them; a part of a batch has the whole batch's, and its own in the body. `stream`: the answer is a page of a stream,
    see `_page`."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    correlation_id: str | None = None
    stream: bool = False


def target(endpoint: Endpoint, call: Call) -> str:
    """The path and signed query to request. The time is part of it, so each attempt is signed again."""
    path = endpoint.prefix + call.path
    query = sign_request(endpoint.key, endpoint.secret, call.method, path, call.params, call.body, int(time.time()))
    return f"{path}?{query}"


class NotSent(Exception):
    """A transport couldn't open a connection. `permanent`: another attempt can't succeed either, such as after a
    certificate that isn't valid."""

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


class Retry(Exception):
    """An attempt failed and may be repeated after `wait_s` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


class Attempts:
    """The attempts of one call: decides after each whether to repeat, and which error the caller gets.

    A transport calls `not_sent`, `no_answer` or `answered` once for each attempt. Each of them raises `Retry`, or the
    final error; `answered` may return. `within_s` bounds the whole call: no attempt begins later, and a transport ends
    the last one after `left_s`. `idempotent` says that the server compares correlation ids.
    """

    def __init__(self, endpoint: Endpoint, call: Call, attempts: int, within_s: float, *, idempotent: bool) -> None:
        self._endpoint = endpoint
        self._call = call
        self._left = attempts
        self._until = time.monotonic() + within_s
        self._made = 0
        # A second deletion or termination may meet what came after the first.
        self._repeatable = call.method == "GET" or (idempotent and call.correlation_id is not None)
        # Whether an earlier attempt may have been carried out.
        self._may_have_happened = False

    @property
    def left_s(self) -> float:
        """Seconds until the call must be over; never 0 or less, because that means "no limit" to some transports."""
        return max(self._until - time.monotonic(), 0.001)

    def not_sent(self, error: NotSent) -> None:
        """The connection couldn't be opened, so the request can't have reached the server."""
        self._count()
        if self._left > 0 and not error.permanent:
            self._retry(self._backoff_s())
        text = f"{self._endpoint.origin}: {error}"
        if self._may_have_happened:
            raise self._unconfirmed(text) from error
        raise Unreachable(text) from error

    def closed(self) -> NoReturn:
        """The publisher was closed before an attempt. Raises RuntimeError, or Unconfirmed after an earlier attempt."""
        if self._may_have_happened:
            raise self._unconfirmed("this publisher was closed")
        raise RuntimeError("this publisher was closed")

    def no_answer(self, error: BaseException | str) -> None:
        """The request was sent, in whole or in part, and no whole answer came."""
        text = str(error) or type(error).__name__
        self._uncertain(f"{self._endpoint.origin}: no answer: {text}", error, 0.0)

    def answered(self, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer came whole. Returns it if it is a success."""
        if 200 <= status < 300:
            fields = _page(status, headers, body) if self._call.stream else _json(body)
            if isinstance(fields, dict):
                trace_id = headers.get("X-Service-Trace-Id", "")
                return Answer(fields, trace_id, self._call.correlation_id, _spacing_s(headers))
            # Something answered that is no Pusher server. Whether it passed the request on is not known.
            self._left = 0
            self._uncertain(self._strange(status, headers, body), None, 0.0)
        if status >= 500:
            self._uncertain(self._strange(status, headers, body), None, _retry_after_s(headers))
        error = refusal(status, headers, body)
        if self._may_have_happened:
            raise self._unconfirmed(f"an earlier attempt got no answer, and a repeat got {error}") from error
        raise error

    def _strange(self, status: int, headers: Mapping[str, str], body: bytes) -> str:
        error = refusal(status, headers, body)
        text = error.text or excerpt(headers.get("Content-Type", ""), body)
        hint = "" if status >= 500 else " (is this the address of a Pusher-compatible server?)"
        return f"{self._endpoint.origin}: answered {status}{hint}: {text}"

    def _uncertain(self, text: str, error: BaseException | str | None, wait_s: float) -> None:
        cause = error if isinstance(error, BaseException) else None
        self._count()
        self._may_have_happened = self._call.correlation_id is not None
        if self._left > 0 and self._repeatable:
            self._retry(max(self._backoff_s(), wait_s))
        if self._may_have_happened:
            raise self._unconfirmed(text) from cause
        raise Unavailable(text) from cause

    def _unconfirmed(self, text: str) -> Unconfirmed:
        return Unconfirmed(f"the event may have been published, or not: {text}", self._call.correlation_id)

    def _retry(self, wait_s: float) -> None:
        """Raises Retry, if there is time for another attempt."""
        if time.monotonic() + wait_s < self._until:
            raise Retry(wait_s)

    def _count(self) -> None:
        self._left -= 1
        self._made += 1

    def _backoff_s(self) -> float:
        """Random between nothing and the limit, so that many publishers don't come back together."""
        return random.uniform(0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self._made - 1, 9)))


def _json(body: bytes) -> Any:
    """The document of a body, None if it isn't JSON."""
    if body == b"{}":
        # Nearly every answer.
        return {}
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _page(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any] | None:
    """A page of a stream, whose positions are in the headers. None if the answer is something else."""
    messages = [] if status == 204 else _json(body)
    position = headers.get("Stream-Next-Offset", "")
    if not isinstance(messages, list) or not position:
        return None
    return {
        "messages": messages,
        "next": position,
        "cursor": headers.get("Stream-Cursor", ""),
        "up_to_date": "Stream-Up-To-Date" in headers,
        "closed": headers.get("Stream-Closed", "").lower() == "true",
    }


def _retry_after_s(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "").strip()
    return min(float(value), _LONGEST_RETRY_AFTER_S) if value.isdecimal() else 0.0


def _spacing_s(headers: Mapping[str, str]) -> float:
    """As `Answer.spacing_s`."""
    limit, left = headers.get("X-RateLimit-Limit", ""), headers.get("X-RateLimit-Remaining", "")
    reset = headers.get("X-RateLimit-Reset", "")
    if not (limit.isdecimal() and left.isdecimal() and reset.isdecimal()) or 2 * int(left) >= int(limit):
        return 0.0
    try:
        # The server's clock: ours may differ.
        now_s = parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        now_s = time.time()
    left_s = int(reset) - now_s
    return left_s / max(int(left), 1) if 0 < left_s <= _LONGEST_WINDOW_S else 0.0
