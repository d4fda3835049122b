"""GET webhooks/stream and POST webhooks/ack: webhooks that a back end pulls (protocol/README.md "Webhooks by pull").

Control answers at once. A worker that has such a request waits for it, and asks again when deliveries may be due
(worker/streams/pulls.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from redpoll.control.http.response import header_line
from redpoll.control.http.schemas import AcknowledgedResponse, PulledDelivery, PulledResponse
from redpoll.control.records.checks import RecordError
from redpoll.control.webhooks.pulls import MAX_IDS, MAX_LIMIT
from redpoll.http.messages import PULL_LIMIT, PULL_TERMS, STREAM, STREAM_APP, PullTerms
from redpoll.protocol.errors import ApiError, fault_of

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response
    from redpoll.control.webhooks.pulls import Handed, Pulls

__all__ = ["DEFAULT_WAIT_S", "MAX_WAIT_S", "Acknowledgement", "PullRequests"]

_DEFAULT_LIMIT: Final = 10
DEFAULT_WAIT_S: Final = 30
MAX_WAIT_S: Final = 60
_NOT_STORED: Final = header_line("Cache-Control", "no-store")
_encode: Final = msgspec.json.Encoder().encode


class Acknowledgement(msgspec.Struct, gc=False):
    """What a back end has done."""

    ids: Annotated[
        list[Annotated[str, Meta(max_length=36)]],
        Meta(max_length=MAX_IDS, description="The `id` of each delivery that needs no further attempt."),
    ]


_decoder: Final = msgspec.json.Decoder(Acknowledgement)


class PullRequests:
    """The handlers."""

    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls

    async def stream(self, request: Request) -> Response:
        """Hands out due deliveries; `endpoint`, `limit`, `wait`. A worker whose client waits or gets a stream also gets
        the app and PullTerms, in header fields."""
        limit = _number(request, "limit", _DEFAULT_LIMIT, 0, MAX_LIMIT)
        wait_s = _number(request, "wait", DEFAULT_WAIT_S, 0, MAX_WAIT_S)
        endpoint_id = request.param("endpoint") or None
        room = request.headers.get(PULL_LIMIT) if request.flags & STREAM else None
        takes = limit if room is None else min(limit, int(room))
        if request.method == "HEAD":
            # What is handed out must reach somebody.
            takes = 0
        try:
            handed, next_s = await self._pulls.hand_out(request.app.id, endpoint_id, takes)
        except RecordError as error:
            raise ApiError("not_found", str(error)) from None
        lines = _NOT_STORED
        if request.flags & STREAM and (room is not None or not handed):
            next_s = math.inf if next_s is None else max(0.0, next_s)
            terms = PullTerms(wait_s, limit, self._pulls.lease_s, next_s)
            lines += header_line(STREAM_APP, request.app.id) + header_line(PULL_TERMS, terms.packed())
        return request.ok(_encode(PulledResponse([_shape(delivery) for delivery in handed])), lines)

    async def acknowledge(self, request: Request) -> Response:
        """Ends deliveries. It answers when that is stored."""
        try:
            asked = _decoder.decode(request.body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            raise ApiError("bad_request", f"the body is not what this endpoint takes: {fault_of(fault)}") from None
        count = await self._pulls.acknowledge(request.app.id, asked.ids)
        return request.ok(_encode(AcknowledgedResponse(count)))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.param(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and least <= int(text) <= most):
        raise ApiError("bad_request", f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _shape(handed: Handed) -> PulledDelivery:
    return PulledDelivery(
        id=handed.id,
        endpoint_id=handed.endpoint_id,
        event=handed.event,
        channel=handed.channel,
        attempt=handed.attempt,
        headers=handed.headers,
        body=handed.body.decode(),
    )
