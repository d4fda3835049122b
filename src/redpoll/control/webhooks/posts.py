"""One attempt as a POST: the body and the headers of one delivery, or of several of an endpoint with `batch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from redpoll.control.tracing.spans import Attempted, Spans
from redpoll.control.webhooks.outcomes import Attempt
from redpoll.control.webhooks.payloads import BATCH, batch_id, format_of, headers, join
from redpoll.control.webhooks.sender import Sender, Target
from redpoll.protocol.apps import Key
from redpoll.store.deliveries import Waiting
from redpoll.store.webhooks import Endpoint

__all__ = ["Posts"]


class _Content(NamedTuple):
    """What a receiver sees as one delivery. `trace` is the trace id of a client event."""

    id: str
    event: str
    body: bytes
    attempt: int
    trace: str | None


class Posts:
    """`signing_key(app_id)` returns the app's key, `clock()` Unix seconds. `spans`: None unless OpenTelemetry is on."""

    def __init__(
        self, sender: Sender, signing_key: Callable[[str], Key | None], clock: Callable[[], float], spans: Spans | None
    ) -> None:
        self._sender = sender
        self._signing_key = signing_key
        self._clock = clock
        self._spans = spans

    async def post(self, endpoint: Endpoint, items: Sequence[Waiting]) -> tuple[float, Attempt]:
        """Sends these deliveries in one POST. Returns the Unix time when it began, and the outcome."""
        begun_s = self._clock()
        content = _content(items)
        signed = headers(
            format_of(content.body),
            content.event,
            content.body,
            delivery_id=content.id,
            attempt=content.attempt,
            now_s=begun_s,
            secret=endpoint.secret,
            previous_secret=endpoint.previous_secret if begun_s < endpoint.previous_until else "",
            key=self._signing_key(endpoint.app_id),
        )
        target = Target(endpoint.url, endpoint.pin)
        if self._spans is None:
            return begun_s, await self._sender.attempt(target, content.body, signed)
        attempted = self._spans.begin_attempt(content.trace)
        signed["traceparent"] = attempted.traceparent
        attempt = await self._sender.attempt(target, content.body, signed)
        self._note_spans(self._spans, attempted, endpoint, content, items, begun_s, attempt)
        return begun_s, attempt

    @staticmethod
    def _note_spans(
        spans: Spans,
        attempted: Attempted,
        endpoint: Endpoint,
        content: _Content,
        items: Sequence[Waiting],
        begun_s: float,
        attempt: Attempt,
    ) -> None:
        """The span of the POST. The receiver continues one trace: of several events it is one of the POST's own, and
        the traces of client events get a span each, which names it."""
        ended = partial(
            spans.ended_attempt,
            began_us=int(begun_s * 1_000_000),
            duration_ms=attempt.duration_ms,
            status=attempt.status,
            error="" if attempt.ok else attempt.reason,
            app=endpoint.app_id,
            endpoint=endpoint.id,
        )
        if len(items) == 1:
            (one,) = items
            ended(attempted, event=one.event, channel=one.channel, delivery=one.id, attempt=content.attempt)
            return
        ended(attempted, event=BATCH, events=len(items), delivery=content.id, attempt=content.attempt)
        for item in items:
            if item.trace is not None:
                own: dict[str, Any] = {
                    "event": item.event,
                    "channel": item.channel,
                    "delivery": item.id,
                    "attempt": item.attempts + 1,
                }
                ended(spans.begin_attempt(item.trace), **own, batch=attempted.trace_id)


def _content(items: Sequence[Waiting]) -> _Content:
    if len(items) == 1:
        (one,) = items
        return _Content(one.id, one.event, one.body, one.attempts + 1, one.trace)
    body = join(item.body for item in items)
    return _Content(batch_id(item.id for item in items), BATCH, body, max(item.attempts for item in items) + 1, None)
