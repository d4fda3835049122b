"""The fast path of publishes: connects the compiled part (_fast_publish) with the parts of the control plane.

Nearly all requests are signed publishes without anything unusual. The compiled part carries these out many at a time;
everything else takes the way of middleware.py and api.py, which alone refuse requests. Which apps and requests are
usual is decided here and in `_fast_publish`; what a publish does is described once, for both (control/README.md "A
request's way").
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from redpoll._fast_publish import FastApp, FastPublish
from redpoll._http import read_requests
from redpoll.cluster.bus import Unavailable
from redpoll.control.http.response import dateline
from redpoll.control.http.router import API_PREFIX, Route, Routes
from redpoll.control.http.worker_requests import ReceivedRequest
from redpoll.control.publish.forms import answer_form, row_form
from redpoll.http.messages import FIELDS, unpack_fields
from redpoll.protocol import auth
from redpoll.protocol.credentials import Grant, granted, has_pair, has_token
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import limits_of

if TYPE_CHECKING:
    from redpoll.cluster.redis.keys import Keys
    from redpoll.control.api.middleware import Front
    from redpoll.control.http.authentication import Credentials
    from redpoll.control.http.ratelimit import RateLimit
    from redpoll.control.publish.publisher import Publisher
    from redpoll.control.tracing.tracing import Tracer
    from redpoll.protocol.apps import App

__all__ = ["FastPath"]

_ALL_SLOW: Final = -1
# A request with any other header field that control reads takes the other way.
_CREDENTIALS: Final = frozenset(("Authorization", "X-Service-Key", "X-Service-Secret"))


class FastPath:
    """Publishes of workers by the fast path: `take` is for WorkerRequests.

    The arguments are those of Front and Api; both ways count, limit and log alike.
    """

    def __init__(
        self,
        front: Front,
        routes: Routes,
        records: Credentials,
        publisher: Publisher,
        keys: Keys,
        rate: RateLimit | None,
        tracer: Tracer | None,
    ) -> None:
        self._front = front
        self._routes = routes
        self._records = records
        self._publisher = publisher
        self._tracer = tracer
        self._events = self._route("/apps/0/events")
        self._batches = self._route("/apps/0/batch_events")
        fast = FastPublish(
            records.apps,
            _fast_app,
            auth.NO_SECRET.encode(),
            keys.publish,
            keys.shards,
            clock=front.now_s,
            timer=time.perf_counter,
            limit=None if rate is None else rate.take_room,
            caller=self._caller,
            dateline=dateline,
            ready=self._ready,
            publish=publisher.send,
            soon=asyncio.get_running_loop().call_soon,
            completed=self._completed,
            failed=self._failed,
            answers=(answer_form(closes=False), answer_form(closes=True), answer_form(closes=False, http_1_0=True)),
            row=None if tracer is None else row_form(),
            max_skew_s=auth.MAX_SKEW_S,
            api_prefix=API_PREFIX.encode(),
            is_checked=publisher.checks,
        )
        self.take = fast.take

    def _route(self, path: str) -> Route:
        by_method, _ = self._routes.find(path)
        return by_method["POST"]

    def _ready(self) -> int:
        """How many of the next publishes take the other way: those that are traced; all while Redis is away, or while
        revoked keys may be unknown here."""
        if not self._publisher.takes or not self._records.is_current():
            return _ALL_SLOW
        return 0 if self._tracer is None else self._tracer.spans_left

    def _caller(self, app_id: str, fields: bytes) -> bytes | None:
        """What the event log calls the caller of a publish with these header fields; None: the other way decides."""
        headers = unpack_fields(fields)
        grant = self._grant(headers, app_id)
        if grant is None:
            return None
        if grant.token is None:
            return f"key {headers['X-Service-Key']}".encode()
        self._records.token_used(grant.token, self._front.now_s())
        return f"token {grant.token.name}".encode()

    def _grant(self, headers: Mapping[str, str], app_id: str) -> Grant | None:
        """What a token or a pair of key and secret in `headers` opens; None: nothing, or there are other fields."""
        if not headers.keys() <= _CREDENTIALS or not (has_token(headers) or has_pair(headers)):
            return None
        try:
            return granted(self._records, headers, ("", "", "", b""), self._events.scope, app_id, self._front.now_s())
        except (ApiError, UnicodeError):
            return None

    def _completed(
        self,
        link: Any,
        answers: bytes,
        count: int,
        app: App,
        is_batch: bool,
        events: int,
        times: Sequence[tuple[int, int]],
        microseconds: int,
        rows: bytes,
        first_ms: int,
        last_ms: int,
    ) -> None:
        """Requests of one worker, app and route were published: answer, count and log them."""
        link.answer_many(answers, count)
        self._publisher.fast_requests += count
        self._publisher.count(app.id, events, is_confirmed=True)
        self._front.count(self._batches if is_batch else self._events, app, 200, count, times, microseconds)
        if self._tracer is not None:
            self._tracer.ended_encoded(app.id, rows, count, first_ms, last_ms)

    def _failed(
        self,
        link: Any,
        message: bytes,
        trace_id: str,
        lines: bytes,
        app: App,
        events: int,
        began: float,
        error: Exception,
    ) -> None:
        """Redis didn't confirm a publish: answer it as Front does."""
        self._publisher.count(app.id, events, is_confirmed=False)
        if self._tracer is not None:
            self._tracer.sampled_out += 1
        ((request,), _) = read_requests(ReceivedRequest, bytearray(message), len(message), FIELDS)
        by_method, request.parameters = self._routes.find(request.path)
        request.link = link
        request.route = by_method[request.method]
        request.app, request.caller_known = app, True
        grant = self._grant(request.headers, app.id)
        request.token = None if grant is None else grant.token
        request.found_trace_id = trace_id
        request.more_headers = lines
        request.began = began
        self._front.conclude(request, Unavailable(str(error)))


def _fast_app(app: App) -> FastApp | None:
    """What the compiled part needs of an app; None if each of its publishes needs more than a PUBLISH."""
    if not app.enabled or app.daily_limit is not None:
        return None
    keys = []
    for key in app.keys:
        if key.enabled:
            keys.append((key.key.encode(), key.secret.encode()))
    return FastApp(limits_of(app), tuple(keys), max(app.console_until, app.debug_until))
