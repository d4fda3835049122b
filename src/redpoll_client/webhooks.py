"""Webhooks in: verifies what the server posted and turns both of redpoll's formats into typed events.

The formats and headers: protocol/README.md "Webhooks". The `pusher` format is also what Pusher, soketi and Sockudo
send.
"""

from __future__ import annotations

import hmac
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redpoll_client.errors import InvalidWebhook
from redpoll_client.signatures import hex_hmac

__all__ = ["MAX_WEBHOOK_BYTES", "Delivery", "SeenDeliveries", "WebhookEvent", "verify_webhook"]

# The server's own limit of a body.
MAX_WEBHOOK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class WebhookEvent:
    """One event of a webhook. What an event doesn't have is None.

    `name` is `channel.occupied`, `channel.vacated`, `member.added`, `member.removed`, `client_event`, `cache.miss` or
    `subscription.count`, in both formats. `time` is when it happened, in Unix seconds. `seq` (redpoll only) rises per
    channel: ignore an event with a lower `seq` than one that you have seen. `event`, `data` (a string) and `socket_id`
    belong to client events.
    """

    name: str
    channel: str
    time: float
    seq: int | None = None
    user_id: str | None = None
    user_info: Any = None
    event: str | None = None
    data: str | None = None
    socket_id: str | None = None
    subscription_count: int | None = None


@dataclass(frozen=True)
class Delivery:
    """One verified request. `id` is the same on every attempt of a delivery (redpoll; empty elsewhere), so a receiver
    that remembers ids ignores repeats. Of several events in one request it is the id of their set, and a repeat may
    come in another set: compare `channel` and `seq` too. `attempt` counts from 1."""

    id: str
    attempt: int
    events: tuple[WebhookEvent, ...]


_NAMES = {
    name.replace(".", "_"): name
    for name in (
        "channel.occupied",
        "channel.vacated",
        "member.added",
        "member.removed",
        "client_event",
        "cache.miss",
        "subscription.count",
    )
}


def verify_webhook(
    body: bytes,
    headers: Mapping[str, str],
    *,
    key: str = "",
    secret: str = "",
    endpoint_secret: str | Sequence[str] = (),
    max_age_s: float | None = None,
) -> Delivery:
    """The events of a webhook that this app's server sent. Raises InvalidWebhook, whose `status` is the answer's.

    `body` is the request's body as it came, before any parsing. `headers` may be spelled in any case. `key` and
    `secret` are the app's and verify the `pusher` format; `endpoint_secret`, one or several, are those that `redpoll
    webhook create` and `rotate` printed and verify both formats. One right signature is enough; digests are compared in
    constant time.

    `max_age_s` refuses events that happened longer ago, or so far in the future, by this machine's clock; None: any
    age. Set it only where a replayed request does harm that `Delivery.id` and `seq` don't prevent: redpoll repeats a
    delivery for up to 6.5 minutes, from the dead letter queue at any time later, and each of these would be refused.
    """
    if len(body) > MAX_WEBHOOK_BYTES:
        raise InvalidWebhook(f"the body has {len(body)} bytes; at most {MAX_WEBHOOK_BYTES} are allowed", 413)
    lower = {name.lower(): value for name, value in headers.items()}
    secrets = [endpoint_secret] if isinstance(endpoint_secret, str) else list(endpoint_secret)
    secrets = [one for one in secrets if one]
    if not secrets and not (key and secret):
        raise ValueError("verify_webhook needs endpoint_secret, or key and secret")
    _check_signature(body, lower, key, secret, secrets)
    try:
        document = json.loads(body)
        events = _pusher_events(document) if "events" in document else [_service_event(document)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidWebhook("the signature is right, but the body is no webhook of redpoll or Pusher", 400) from None
    if max_age_s is not None and any(abs(time.time() - event.time) > max_age_s for event in events):
        raise InvalidWebhook(f"the webhook's events happened more than {max_age_s:g} s ago", 401)
    attempt = lower.get("x-service-attempt", "")
    number = int(attempt) if attempt.isdecimal() and len(attempt) <= 9 else 1
    return Delivery(lower.get("x-service-delivery", ""), number, tuple(events))


class SeenDeliveries:
    """The ids of the last 10,000 deliveries that this process has handled, to ignore repeats. Other processes have
    their own: a handler whose effect must not happen twice also compares `seq`, or stores the id with its effect."""

    def __init__(self, size: int = 10_000) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._size = size

    def has(self, delivery_id: str) -> bool:
        """Whether this delivery was handled. False for servers that send no ids."""
        return delivery_id in self._ids

    def add(self, delivery_id: str) -> None:
        """Remembers a delivery, once it was handled without an exception."""
        if delivery_id:
            self._ids[delivery_id] = None
            if len(self._ids) > self._size:
                self._ids.popitem(last=False)


def _check_signature(body: bytes, headers: Mapping[str, str], key: str, secret: str, secrets: Sequence[str]) -> None:
    named = ("x-service-signature", "x-service-signature-previous", "x-pusher-signature")
    if not any(headers.get(name) for name in named):
        raise InvalidWebhook("the request has no signature")
    right = False
    for one in secrets:
        digest = hex_hmac(one, body).encode()
        for name in named[:2]:
            right |= hmac.compare_digest(digest, _bytes(headers.get(name, "")))
    if key and secret and hmac.compare_digest(key.encode(), _bytes(headers.get("x-pusher-key", ""))):
        right |= hmac.compare_digest(hex_hmac(secret, body).encode(), _bytes(headers.get("x-pusher-signature", "")))
    if not right:
        raise InvalidWebhook("the signature is wrong")


def _bytes(header: str) -> bytes:
    """Headers may hold anything; a comparison needs bytes of any kind."""
    return header.encode(errors="replace")


def _service_event(document: dict[str, Any]) -> WebhookEvent:
    return _event(document["event"], float(document["timestamp"]), document["data"])


def _pusher_events(document: dict[str, Any]) -> list[WebhookEvent]:
    happened = document["time_ms"] / 1000
    return [_event(_NAMES.get(event["name"], event["name"]), happened, event) for event in document["events"]]


def _event(name: str, happened: float, fields: dict[str, Any]) -> WebhookEvent:
    """Raises TypeError for a field of the wrong type: receivers rely on them."""
    text = {field: fields.get(field) for field in ("user_id", "event", "data", "socket_id")}
    numbers = {field: fields.get(field) for field in ("seq", "subscription_count")}
    # soketi passes the data of client events on as the client sent it.
    if text["data"] is not None and not isinstance(text["data"], str):
        text["data"] = json.dumps(text["data"])
    if not isinstance(name, str) or not isinstance(fields["channel"], str):
        raise TypeError
    if not all(value is None or isinstance(value, str) for value in text.values()):
        raise TypeError
    if not all(value is None or (isinstance(value, int) and not isinstance(value, bool)) for value in numbers.values()):
        raise TypeError
    return WebhookEvent(
        name=name,
        channel=fields["channel"],
        time=happened,
        seq=numbers["seq"],
        user_id=text["user_id"],
        user_info=fields.get("user_info"),
        event=text["event"],
        data=text["data"],
        socket_id=text["socket_id"],
        subscription_count=numbers["subscription_count"],
    )
