"""What a delivery says: its body in both formats, its headers, its signatures (spec 6.3, protocol.md 15.1 and 15.2).

Functions of their arguments. Which endpoint wants which transition, and how the bytes get there, is others'.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from redpoll.cluster.outbox import Transition
    from redpoll.protocol.apps import Key

__all__ = ["EVENTS", "FORMATS", "STANDARD", "headers", "render", "sign"]

FORMATS: Final = ("service", "pusher")
# Our name of each event, and Pusher's.
_PUSHER_NAMES: Final[Mapping[str, str]] = {
    "channel.occupied": "channel_occupied",
    "channel.vacated": "channel_vacated",
    "member.added": "member_added",
    "member.removed": "member_removed",
    "client_event": "client_event",
    "cache.miss": "cache_miss",
    "subscription.count": "subscription_count",
}
EVENTS: Final = tuple(_PUSHER_NAMES)
# The spec's five, which an endpoint for `all` gets (spec 6.2); the others are sent to who names them (decisions.md).
STANDARD: Final = EVENTS[:5]

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text: Final = msgspec.json.Decoder(str).decode
_QUOTE: Final = ord('"')


def render(format: str, transition: Transition) -> bytes:
    """The body, JSON: the same bytes on every attempt, so it is rendered once and kept.

    `service`: `{"event", "data", "timestamp"}`; `pusher`: `{"time_ms", "events": [one]}`. Times are the transition's.
    `seq`, which rises per channel, lies beside the channel: a receiver that drops what is lower than it has seen keeps
    the order that retries break (failures.md row 37). Raises msgspec.DecodeError where the row's detail isn't the JSON
    that its event has.
    """
    if format == "pusher":
        told = {"name": _PUSHER_NAMES[transition.event], "channel": transition.channel}
        told |= _pusher_fields(transition)
        return _encode({"time_ms": transition.time_ms, "events": [told | {"seq": transition.stamp}]})
    data = {"channel": transition.channel, **_service_fields(transition), "seq": transition.stamp}
    return _encode({"event": transition.event, "data": data, "timestamp": transition.time_ms // 1000})


def _service_fields(transition: Transition) -> dict[str, Any]:
    """What stands beside `channel` in `data` (protocol.md 15.2)."""
    event, detail = transition.event, transition.detail
    if event == "channel.occupied" or event == "subscription.count":
        return {"subscription_count": _number(detail)}
    if event == "channel.vacated":
        return {"subscription_count": 0}
    if event == "member.added":
        user: dict[str, Any] = {"user_id": transition.user}
        return user | {"user_info": msgspec.Raw(detail)} if detail else user
    if event == "member.removed":
        return {"user_id": transition.user}
    return _client_event(transition) if event == "client_event" else {}


def _pusher_fields(transition: Transition) -> dict[str, Any]:
    """What stands beside `name` and `channel` (protocol.md 15.1)."""
    event = transition.event
    if event in ("member.added", "member.removed"):
        return {"user_id": transition.user}
    if event == "subscription.count":
        return {"subscription_count": _number(transition.detail)}
    return _client_event(transition) if event == "client_event" else {}


def _client_event(transition: Transition) -> dict[str, Any]:
    """`data` is a string in both formats: JSON text where the client sent something else, since receivers with types
    expect one (protocol.md 15.1)."""
    sent = _decode(transition.detail)
    data = bytes(sent["data"]) if "data" in sent else b"null"
    told: dict[str, Any] = {
        "event": sent["event"],
        "data": _decode_text(data) if data[0] == _QUOTE else data.decode(),
        "socket_id": sent["socket_id"],
    }
    return told if transition.user is None else told | {"user_id": transition.user}


def _number(detail: bytes) -> int:
    return msgspec.json.decode(detail, type=int)


def sign(secret: str, body: bytes) -> str:
    """HMAC-SHA256 of the raw body, in lowercase hex: of an endpoint's secret the service's signature (spec 6.3), of a
    key's Pusher's."""
    return hmac.digest(secret.encode(), body, hashlib.sha256).hex()


def headers(
    format: str,
    event: str,
    body: bytes,
    *,
    delivery_id: str,
    attempt: int,
    now_s: float,
    secret: str,
    previous_secret: str = "",
    key: Key | None = None,
) -> dict[str, str]:
    """The headers of one attempt, numbered from 1; `now_s` are Unix seconds.

    Signed by `secret`, the endpoint's newest from the moment it was rotated, and in a header of its own by the one
    before while that is still good, so that no receiver has to change in that moment. In the pusher format `key`, the
    app's oldest enabled one, signs too; without any there is no such signature, and the service's still holds.
    """
    told = {
        # Pusher's libraries compare this whole string (protocol.md 15.1).
        "Content-Type": "application/json",
        "X-Service-Event": event,
        "X-Service-Timestamp": str(int(now_s)),
        "X-Service-Delivery": delivery_id,
        "X-Service-Attempt": str(attempt),
        "X-Service-Signature": sign(secret, body),
    }
    if previous_secret:
        told["X-Service-Signature-Previous"] = sign(previous_secret, body)
    if format == "pusher" and key is not None:
        told["X-Pusher-Key"] = key.key
        told["X-Pusher-Signature"] = sign(key.secret, body)
    return told
